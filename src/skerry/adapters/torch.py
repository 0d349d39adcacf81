"""PyTorch: `skerry.Learner` around a model and its optimizer.

Parameters are the model's trainable ones, once each (tied weights count once), on one device, and they are the same
ones until the end (`adapters/attached.py`). The run's values are float32; what a parameter of fewer bits cannot hold of
them is kept beside it (`adapters/precision.py`). How fragments get to and from the device stands in `adapters/ways.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import is_
from pathlib import Path
from typing import Literal, Unpack

import torch
import torch.distributed as dist
from torch import nn

from skerry.adapters.attached import Attached, a_module, named, trainable
from skerry.adapters.buffers import ChangedBuffers
from skerry.adapters.checkpoint import EVERY_S, Checkpoint, Stateful, check_options
from skerry.adapters.device import placed
from skerry.adapters.genesis import embedding_names, frozen_digests
from skerry.adapters.island import Island, island_of, refuse_flat
from skerry.adapters.learner import BaseLearner, Options
from skerry.adapters.precision import Masters, Precision, asked, check_masters
from skerry.adapters.ranks import call_roll
from skerry.adapters.roles import rank_of
from skerry.adapters.shards import Piece, fsdp_modules, reshard, shares_of
from skerry.adapters.ways import Flat, Way, way_for
from skerry.algo.fragments import Fragment, Layout, Slot, Tensor, layout_of, parts
from skerry.core.messages import Frozen
from skerry.errors import ConfigError
from skerry.node.cells import Cell, Cells
from skerry.node.training import Carrier
from skerry.shell.beside import Kind
from skerry.shell.home import Home
from skerry.shell.learner import Handover, LearnerShell, Standing

log = logging.getLogger("skerry.learner")


class Learner(BaseLearner):
    """Makes a plain training loop a learner of a shared run; without a syncer's address it does nothing.

    `optimizer` is one or several; their state is forgotten when the model is set to what it did not learn itself.
    What does not happen at a step boundary happens in a process of its own beside this one, or with `node` = "thread"
    (SKERRY_NODE) in a thread, which takes time from the loop. Its bases and what it has not handed in are on the
    host, or with `state` = "device" (SKERRY_STATE) where the model is, which takes a thread; "auto" is the device
    if it has room. `masters` says where the optimizer has float32 copies of parameters that are bfloat16 or float16: a
    table, or a function of the parameter. Parameters that are not trained must be those that the run began with, else
    the syncer refuses this learner, by their name; with `frozen` = "any" they are not compared.

    `checkpoint` is a file on this machine in which the optimizers' state, the random generators' and that of whatever
    is in `checkpoint_with` (a schedule, a GradScaler, a loader: it has a `state_dict`) is kept every
    `checkpoint_every_s` and at the end. Where it is there already, all of them go on from it, before the learner joins.

    The processes that train a model in DistributedDataParallel, or as DTensors (`fully_shard`, tensor parallelism), are
    one learner: each makes one of these, and calls `step` after each of its steps with the tokens of its own batch
    (`adapters/island.py`). A loop that averages gradients itself says with whom: `group` is their process group.

    `syncer` and the options are those of every learner: see `BaseLearner`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        syncer: str | None = None,
        *,
        node: str | None = None,
        state: str | None = None,
        masters: Masters = None,
        frozen: Literal["same", "any"] = "same",
        group: dist.ProcessGroup | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_with: Sequence[Stateful] = (),
        checkpoint_every_s: float = EVERY_S,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(syncer, **options)
        check_options(checkpoint, checkpoint_with, checkpoint_every_s)
        self._checkpoint: Checkpoint | None = None
        self._is_restored = False
        self._parameters: TorchParameters | None = None
        if not self._has_syncer:
            return
        refuse_flat(a_module(model))
        reshard(fsdp_modules(model))
        own = trainable(model)
        with self._claimed(own):
            island = island_of(model, list(own.values()), group)
            if island is not None:
                call_roll(island.group)
            if checkpoint is not None:
                kept = (optimizers_of(model, optimizer, masters), checkpoint_with, checkpoint_every_s, named(model))
                self._restore(Checkpoint(checkpoint, *kept), island)
            self._parameters = parameters = TorchParameters(model, optimizer, masters, island)
            if island is not None:  # else some would wait for shards that the others do not give
                island.agree('frozen="any"', frozen == "any", parameters.device)
            parameters.frozen = frozen_of(model, frozen)
            if island is None or island.is_speaker:
                _warn_of_untrained(own, parameters.optimizers, asked(masters))
            self._attach(parameters, layout_of_model(model), island, lambda: placed(state, node, list(own.values())))

    def _attach(
        self,
        parameters: TorchParameters,
        layout: Layout,
        island: Island | None,
        places: Callable[[], tuple[Kind, Home | None]],
    ) -> None:
        """As a learner of one process, or as a rank of one of several."""
        if island is None:
            self._join(layout, parameters, *places())
            return

        def shell_of(carrier: Carrier) -> LearnerShell:
            return self._shell(layout, carrier, *places())

        rank = rank_of(island, layout, parameters, parameters.device, lambda: self._is_told_to_leave, shell_of)
        self._take(rank, parameters)

    def _restore(self, checkpoint: Checkpoint, island: Island | None) -> None:
        if island is not None:
            raise ConfigError(
                f"checkpoint {checkpoint.path}: is for a learner of one process; of several, each has a part: save "
                "their optimizers with torch.distributed.checkpoint"
            )
        self._checkpoint, self._is_restored = checkpoint, checkpoint.restore()

    def step(self, tokens: int, loss: float = 0.0, grad_norm: float = 0.0) -> bool:
        going = super().step(tokens, loss, grad_norm)
        if self._parameters is not None:
            self._parameters.stepped()
        if self._checkpoint is not None:
            self._checkpoint.look()
        return going

    def close(self) -> Handover:
        """As of every learner; a checkpoint is written beside it."""
        is_first = not self._is_closed
        if self._checkpoint is not None and is_first:
            self._checkpoint.take()
        handover = super().close()
        if self._checkpoint is not None and is_first:
            self._checkpoint.wait(is_last=True)
        return handover

    def status(self) -> Standing:
        """As of every learner; the rate is not ramped where the optimizer goes on with the state it had."""
        where = super().status()
        return replace(where, ramp=1.0) if self._is_restored else where


class Pieces:
    """What a fragment's slots hold of these tensors, for one use: views of them, and where each lies in it."""

    def __init__(
        self, key: tuple[str, int], full: list[torch.Tensor | None], placed: list[tuple[Piece, slice]]
    ) -> None:
        self.full = full
        self.parts = [piece.values for piece, _ in placed]
        self.size = sum(part.numel() for part in self.parts)
        self._key, self._placed = key, placed

    def views(self, flat: Flat) -> list[torch.Tensor]:
        """Of their places in the flat fragment."""
        kept = flat.views.get(self._key)
        if kept is None or kept[0] is not self:
            kept = flat.views[self._key] = (self, [piece.of(flat.values[at]) for piece, at in self._placed])
        return kept[1]


class TorchParameters:
    """Carries a model's parameters, as flat fragments, to and from cells; and its optimizer's state."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        masters: Masters = None,
        island: Island | None = None,
    ) -> None:
        self._attached = Attached(model)
        self._fsdp = fsdp_modules(model)
        self._shares = shares_of(trainable(model), island.speaker if island is not None else None)
        check_masters(masters, model.parameters())
        self._precision = Precision(self._attached, masters)
        self._expects_masters = masters is not None
        self.optimizers = optimizers_of(model, optimizer, masters)
        self._way_for = way_for if island is None else island.way
        self._ways: dict[torch.device, Way] = {}
        self._kept: dict[tuple[str, int], Pieces] = {}
        self.read_buffers = ChangedBuffers(model)
        self.frozen: Frozen = None  # what the syncer is told of the parameters that are not trained

    @property
    def device(self) -> torch.device:
        return self._attached[next(iter(self._attached))].device

    def meet(self, cells: Cells) -> None:
        """What cells need on the device is made now, while nobody trains, and not at a boundary."""
        every = (*cells.up, *cells.down)
        self._way(self.device, every[0]).meet(every)

    def stepped(self) -> None:
        """Where somebody said that there are masters, they have to be there once the optimizer has taken a step."""
        if self._expects_masters and (stepped := [name for name in self._precision.low if self._has_state(name)]):
            self._expects_masters = False
            left = [name for name in stepped if self._precision.master(name) is None]
            if left:
                log.warning(
                    "masters says none of parameter %s, and its optimizer has taken a step: if that keeps a float32 "
                    "copy, it overwrites what the run changes; look at what masters gives for the parameter",
                    _first_of(left),
                )

    def _has_state(self, name: str) -> bool:
        parameter = self._attached.parameter(name)
        return any(optimizer.state.get(parameter) for optimizer in self.optimizers)

    def prepare(self, fragments: Sequence[Fragment]) -> None:
        reshard(self._fsdp)
        self._attached.look({slot.name: None for fragment in fragments for slot in fragment.slots})

    def let_go(self) -> str:
        """The model may be changed from here on; how it was already, if it was."""
        reshard(self._fsdp)
        return self._attached.let_go()

    @torch.no_grad()
    def read(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        way = self._way(self._device_of(fragment), cell)
        flat = way.room(cell, fragment.size)
        slots = [slot for slot in fragment.slots if self._is_read(slot)]
        pieces = self._pieces_of("read", fragment, slots)
        if pieces.size < fragment.size:
            flat.values.zero_()  # what lies between tensors too, and what other ranks have
        if pieces.parts:
            torch._foreach_copy_(pieces.views(flat), pieces.parts)
        for part, rest, view in self._rounded_parts(slots, flat.values):
            torch.add(part, rest, out=view)
        way.up(cell, fragment.size, mark)

    def add(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        self._change(fragment, cell, mark, torch._foreach_add_)

    def write(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        self._change(fragment, cell, mark, torch._foreach_copy_)

    def blend(self, fragment: Fragment, cell: Cell, alpha: float, mark: int) -> None:
        self._change(fragment, cell, mark, lambda parts, views: torch._foreach_lerp_(parts, views, 1 - alpha))

    @torch.no_grad()
    def _change(
        self,
        fragment: Fragment,
        cell: Cell,
        mark: int,
        change: Callable[[list[torch.Tensor], list[torch.Tensor]], object],
    ) -> None:
        """In float32, of which each parameter gets what it can hold."""
        way = self._way(self._device_of(fragment), cell)
        flat = way.down(cell, fragment.size, mark)
        pieces = self._pieces_of("change", fragment, fragment.slots)
        if pieces.parts:
            change(pieces.parts, pieces.views(flat))
        for part, rest, view in self._rounded_parts(fragment.slots, flat.values):
            exact = part + rest
            change([exact], [view])
            part.copy_(exact)
            torch.sub(exact, part, out=rest)
        for part, master in self._mastered_parts(fragment.slots):
            part.copy_(master)
        way.done(cell, mark)

    def reset_optimizer(self) -> None:
        with self._precision.kept():
            for optimizer in self.optimizers:
                optimizer.state.clear()

    def _device_of(self, fragment: Fragment) -> torch.device:
        return self._attached[fragment.slots[0].name].device

    def _way(self, device: torch.device, cell: Cell) -> Way:
        if device not in self._ways:
            self._ways[device] = self._way_for(device, cell)
        return self._ways[device]

    def _pieces_of(self, use: str, fragment: Fragment, slots: Sequence[Slot]) -> Pieces:
        """What these slots, for one use always the same, hold of float32 parameters and masters."""
        full = [self._precision.full(slot.name) for slot in slots]
        kept = self._kept.get((use, fragment.index))
        if kept is None or len(kept.full) != len(full) or not all(map(is_, kept.full, full)):
            found = [self._pieces(slot, each) for slot, each in zip(slots, full, strict=True) if each is not None]
            kept = Pieces((use, fragment.index), full, [each for pieces in found for each in pieces])
            self._kept[use, fragment.index] = kept
        return kept

    def _rounded_parts(
        self, slots: Sequence[Slot], flat: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The same of those that are rounded, with views of their rests."""
        for slot in slots if self._precision.has_low else ():
            if self._precision.full(slot.name) is None:
                rests = self._pieces(slot, self._precision.rest(slot.name))
                for (part, at), (rest, _) in zip(self._pieces(slot, self._attached[slot.name]), rests, strict=True):
                    yield part.values, rest.values, part.of(flat[at])

    def _mastered_parts(self, slots: Sequence[Slot]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What these slots hold of parameters that have masters, and of those."""
        for slot in slots if self._precision.has_low else ():
            tensor, full = self._attached[slot.name], self._precision.full(slot.name)
            if full is not None and full is not tensor:
                for (part, _), (master, _) in zip(self._pieces(slot, tensor), self._pieces(slot, full), strict=True):
                    yield part.values, master.values

    def _pieces(self, slot: Slot, tensor: torch.Tensor) -> list[tuple[Piece, slice]]:
        """What this process has of the slot, in one of the tensors that its parameter has here."""
        share = self._shares.get(slot.name)
        begin = share.begin if share is not None else (0,) * len(slot.shape)
        return [(piece, at) for piece, at in parts(slot, Piece(slot.shape, begin, tensor)) if not piece.is_empty]

    def _is_read(self, slot: Slot) -> bool:
        share = self._shares.get(slot.name)
        return share is None or share.is_read


def frozen_of(model: nn.Module, word: str) -> Frozen:
    if word not in ("same", "any"):
        raise ConfigError(f'frozen = {word!r}: give "same", or "any" to take part with other frozen parameters')
    return "any" if word == "any" else frozen_digests(model)


def layout_of_model(model: nn.Module) -> Layout:
    embeddings = embedding_names(model)
    return layout_of(
        Tensor(name, tuple(p.shape), "embedding" if name in embeddings else "other")
        for name, p in trainable(model).items()
    )


def _warn_of_untrained(
    trained: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    master_of: Callable[[nn.Parameter], torch.Tensor | None],
) -> None:
    """Whoever forgets to freeze a base shares all of it, which nothing else would say."""
    theirs = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    left = [name for name, each in trained.items() if id(each) not in theirs and id(master_of(each)) not in theirs]
    if optimizers and left:
        log.warning(
            "no optimizer that is given trains %s, which the run shares all the same: freeze what nobody trains, "
            "with requires_grad_(False), or give every optimizer",
            _first_of(left),
        )


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")


def optimizers_of(
    model: nn.Module,
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    masters: Masters = None,
) -> tuple[torch.optim.Optimizer, ...]:
    """One, several or none; each has some of the model's parameters, or of their masters."""
    optimizers = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    master_of = asked(masters)
    known = {id(each) for parameter in model.parameters() for each in (parameter, master_of(parameter))}
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer, a list of them, or None"
            )
        if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"optimizer ({type(optimizer).__name__}) has none of the model's parameters: make it from "
                "model.parameters() of the model that is attached"
            )
    return optimizers
