"""PyTorch: `skerry.Learner` around a model and its optimizer.

Parameters are the model's trainable ones, once each (tied weights count once), float32, on one device, and they are the
same ones until the end (`adapters/attached.py`). How fragments get to and from the device stands in `adapters/ways.py`.
"""

from __future__ import annotations

import json
import logging
import operator
import os
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from skerry import config as configs
from skerry.adapters.attached import Attached, filled, named, trainable
from skerry.adapters.device import placed
from skerry.adapters.ways import Way, way_for
from skerry.algo.fragments import Fragment, Layout, Tensor, layout_of, parts
from skerry.errors import ModelError
from skerry.node.cells import Cell
from skerry.run.genesis import METADATA
from skerry.shell.address import parse_address, read_token
from skerry.shell.learner import LearnerShell, join_timeout, learner_name

JOIN_TIMEOUT_S = 300.0  # longer than a syncer takes to come back, shorter than anyone watches a loop that stands

TOKENS_MAX = 1 << 40  # of one step: more is a slip of the pen

log = logging.getLogger("skerry.learner")


class Learner:
    """Makes a plain training loop a learner of a shared run; without a syncer's address it does nothing.

    `syncer` is "host:port" or "skerry://host:port" (default: the environment's SKERRY_SYNCER); `name` identifies
    the learner over restarts (SKERRY_NAME); the shared token is read from `token_file` (SKERRY_TOKEN_FILE).
    `optimizer` is one or several; their state is forgotten when the model is set to what it did not learn itself.
    The constructor returns once the model holds the run's current values. If no syncer takes it in for
    `join_timeout_s` (SKERRY_JOIN_TIMEOUT_S, else 300; 0 is for ever), it raises `skerry.JoinTimeout`. What does not
    happen at a step boundary happens in a process of its own beside this one, or with `node` = "thread"
    (SKERRY_NODE) in a thread, which takes time from the loop. Its bases and what it has not handed in are on the
    host, or with `state` = "device" (SKERRY_STATE) where the model is, which takes a thread; "auto" is the device
    if it has room. `is_wanted` is asked while it waits to be taken in, at first or after its node has died; where
    it says no, that ends with a `KeyboardInterrupt`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        syncer: str | None = None,
        *,
        name: str | None = None,
        token_file: str | Path | None = None,
        join_timeout_s: float | None = None,
        node: str | None = None,
        state: str | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        address = syncer if syncer is not None else os.environ.get("SKERRY_SYNCER", "")
        self._shell: LearnerShell | None = None
        self._refusal: ModelError | None = None
        if not address:
            return
        limit_s = join_timeout(join_timeout_s, JOIN_TIMEOUT_S)
        host, port = parse_address(address)
        file = token_file or os.environ.get("SKERRY_TOKEN_FILE")
        self._parameters = TorchParameters(model, optimizer)
        self._shell = LearnerShell(
            learner_name(name or os.environ.get("SKERRY_NAME")),
            layout_of_model(model),
            self._parameters,
            host,
            port,
            read_token(file) if file else None,
            *placed(state, node, list(trainable(model).values())),
            is_wanted,
        )
        try:
            self._shell.start(limit_s)
        except BaseException:
            self._shell.close(timeout_s=0.0)
            raise

    def step(self, tokens: int, loss: float = 0.0) -> bool:
        """Call after each optimizer step; never waits for the network. False once the run wants no more steps."""
        if self._shell is None:
            return True
        if self._refusal is not None:
            raise self._refusal
        count, loss = _tokens(tokens), _loss(loss)
        try:
            return self._shell.step(count, loss)
        except ModelError as error:
            self._refusal = error
            raise

    def close(self) -> None:
        """Hand over what is left and leave the run; of a model that is another since, what was learned before."""
        if self._shell is None:
            return
        change = self._parameters.let_go()
        if change and self._refusal is None:
            log.warning("%s; it does not get the run's last values", change)
        self._shell.close()

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        return True if self._shell is None else self._shell.is_running

    @property
    def progress(self) -> float:
        """Share of the run's budget that is spent, for learning-rate schedules; 0 without a syncer."""
        return self._shell.training.progress if self._shell else 0.0

    @property
    def config(self) -> configs.Config | None:
        """The run's configuration, as the syncer gave it."""
        return self._shell.training.config if self._shell else None

    @property
    def index(self) -> int:
        """This learner's number in the run, by order of first joining: picks what it draws from the data."""
        return self._shell.training.index if self._shell else 0

    @property
    def prior_steps(self) -> int:
        """Steps of this learner's earlier lives: where its data stream goes on."""
        return self._shell.training.prior_steps if self._shell else 0

    @property
    def node_pid(self) -> int | None:
        """The process beside this one, for who measures; None where its work is done in a thread."""
        return self._shell.node_pid if self._shell else None

    @property
    def state(self) -> str:
        """Where its state is, "host" or "device", for who measures."""
        return "host" if self._shell is None or self._shell.home is None else "device"

    @property
    def ramp(self) -> float:
        """Factor for the inner learning rate: rises to 1 over `join_warmup` steps after joining a run under way."""
        return self._shell.training.ramp if self._shell else 1.0


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


def _tokens(given: object) -> int:
    """Of a step; a tensor's number would have to be waited for."""
    try:
        if isinstance(given, bool | torch.Tensor):
            raise TypeError
        count = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        kind = type(given).__name__
        raise TypeError(f"tokens is a {kind}: give a whole number that the loop knows, like batch.numel()") from None
    if count < 1:
        raise ValueError(f"tokens = {count}: a step is of at least one token; it decides the weight of the work")
    if count > TOKENS_MAX:
        raise ValueError(f"tokens = {count}: no step is of more than {TOKENS_MAX}")
    return count


def _loss(given: object) -> float:
    if not isinstance(given, Real):  # like a tensor
        raise TypeError(f"loss is a {type(given).__name__}: give a number, like loss.item(), or leave it out")
    try:
        return float(given)
    except OverflowError:
        raise ValueError(
            "loss: is larger than a float can be: give a number, like loss.item(), or leave it out"
        ) from None


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
