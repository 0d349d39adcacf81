"""PyTorch: `skerry.Learner` around a model and its optimizer.

Parameters are the model's trainable ones, once each (tied weights count once), float32, on one device, and they are the
same ones until the end (`adapters/attached.py`). How fragments get to and from the device stands in `adapters/ways.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import torch
from safetensors.torch import save_file
from torch import nn

from skerry.adapters.attached import Attached, filled, named, trainable
from skerry.adapters.checkpoint import EVERY_S, Checkpoint, Stateful
from skerry.adapters.device import placed
from skerry.adapters.learner import BaseLearner, Options
from skerry.adapters.ways import Way, way_for
from skerry.algo.fragments import Fragment, Layout, Tensor, layout_of, parts
from skerry.node.cells import Cell
from skerry.run.genesis import METADATA
from skerry.shell.learner import Handover


class Learner(BaseLearner):
    """Makes a plain training loop a learner of a shared run; without a syncer's address it does nothing.

    `optimizer` is one or several; their state is forgotten when the model is set to what it did not learn itself.
    What does not happen at a step boundary happens in a process of its own beside this one, or with `node` = "thread"
    (SKERRY_NODE) in a thread, which takes time from the loop. Its bases and what it has not handed in are on the
    host, or with `state` = "device" (SKERRY_STATE) where the model is, which takes a thread; "auto" is the device
    if it has room.

    `checkpoint` is a file on this machine in which the optimizers' state, the random generators' and that of whatever
    is in `checkpoint_with` (a schedule, a GradScaler, a loader: it has a `state_dict`) is kept every
    `checkpoint_every_s` and at the end. Where it is there already, all of them go on from it, before the learner joins.

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
        checkpoint: str | Path | None = None,
        checkpoint_with: Sequence[Stateful] = (),
        checkpoint_every_s: float = EVERY_S,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(syncer, **options)
        self._checkpoint: Checkpoint | None = None
        if checkpoint is not None and self._has_syncer:
            optimizers = optimizers_of(model, optimizer)
            self._checkpoint = Checkpoint(checkpoint, optimizers, checkpoint_with, checkpoint_every_s)
        self._is_restored = self._checkpoint is not None and self._checkpoint.restore()
        if self._has_syncer:
            parameters = TorchParameters(model, optimizer)
            self._join(layout_of_model(model), parameters, *placed(state, node, list(trainable(model).values())))

    def step(self, tokens: int, loss: float = 0.0) -> bool:
        going = super().step(tokens, loss)
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
            self._checkpoint.wait()
        return handover

    @property
    def ramp(self) -> float:
        """As of every learner; 1 where the optimizer goes on with the state it had."""
        return 1.0 if self._is_restored else super().ramp


class TorchParameters:
    """Carries a model's parameters, as flat fragments, to and from cells; and its optimizer's state."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    ) -> None:
        self._attached = Attached(model)
        self._optimizers = optimizers_of(model, optimizer)
        self._ways: dict[torch.device, Way] = {}

    def prepare(self, fragments: Sequence[Fragment]) -> None:
        self._attached.look({slot.name: None for fragment in fragments for slot in fragment.slots})

    def let_go(self) -> str:
        """The model may be changed from here on; how it was already, if it was."""
        return self._attached.let_go()

    @torch.no_grad()
    def read(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        way = self._way(fragment, cell)
        flat = way.room(cell, fragment.size)
        flat.zero_()  # what lies between tensors too
        parts, views = self._parts(fragment, flat)
        torch._foreach_copy_(views, parts)
        way.up(cell, fragment.size, mark)

    @torch.no_grad()
    def add(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        way = self._way(fragment, cell)
        parts, views = self._parts(fragment, way.down(cell, fragment.size, mark))
        torch._foreach_add_(parts, views)
        way.done(cell, mark)

    @torch.no_grad()
    def write(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        way = self._way(fragment, cell)
        parts, views = self._parts(fragment, way.down(cell, fragment.size, mark))
        torch._foreach_copy_(parts, views)
        way.done(cell, mark)

    @torch.no_grad()
    def blend(self, fragment: Fragment, cell: Cell, alpha: float, mark: int) -> None:
        way = self._way(fragment, cell)
        parts, views = self._parts(fragment, way.down(cell, fragment.size, mark))
        torch._foreach_lerp_(parts, views, 1 - alpha)
        way.done(cell, mark)

    def reset_optimizer(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def _way(self, fragment: Fragment, cell: Cell) -> Way:
        device = self._attached[fragment.slots[0].name].device
        if device not in self._ways:
            self._ways[device] = way_for(device, cell)
        return self._ways[device]

    def _parts(self, fragment: Fragment, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views of what the fragment holds of the parameters, and of their places in the flat fragment."""
        pairs = [pair for slot in fragment.slots for pair in parts(slot, self._attached[slot.name])]
        return [part for part, _ in pairs], [flat[at].view(part.shape) for part, at in pairs]


def layout_of_model(model: nn.Module) -> Layout:
    embeddings = embedding_names(model)
    return layout_of(
        Tensor(name, tuple(p.shape), "embedding" if name in embeddings else "other")
        for name, p in trainable(model).items()
    )


def embedding_names(model: nn.Module) -> set[str]:
    """Parameters of nn.Embedding modules: those are averaged, not merged by direction."""
    weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    return {name for name, p in named(model).items() if id(p) in weights}


def optimizers_of(
    model: nn.Module, given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
) -> tuple[torch.optim.Optimizer, ...]:
    """One, several or none; each has some of the model's parameters."""
    optimizers = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    known = {id(parameter) for parameter in model.parameters()}
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


def save_genesis(model: nn.Module, path: str | Path) -> None:
    """Write the model's current values as the first version of a run: `skerry syncer --genesis PATH`."""
    path = Path(path)
    arrays = {name: p.detach().cpu().contiguous() for name, p in filled(model).items()}
    for name, values in arrays.items():
        if not values.isfinite().all():
            raise ValueError(f"parameter {name} holds values that are not finite: no run begins with those")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}: make it first")
    save_file(arrays, str(path), {METADATA: json.dumps({"embeddings": sorted(embedding_names(model))})})
