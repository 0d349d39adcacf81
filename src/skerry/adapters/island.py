"""An island: several processes that train one model together, and are one learner.

Who they are is told by the model. What each does at a boundary stands in `adapters/roles.py`; here is how fragments get
between the speaker, which is rank 0, and all of them:

    down    the fragment goes from the speaker to all, over the model's process group; each takes what it holds of it
    up      where the speaker holds everything, it reads by itself; else each rank lays what it holds into a fragment of
            zeros, and the sum goes to the speaker
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from skerry.adapters.ranks import gone
from skerry.adapters.shards import is_sharded
from skerry.adapters.ways import Flat, Way, way_for
from skerry.errors import ConfigError, ModelError
from skerry.node.cells import Cell

log = logging.getLogger("skerry.learner")


@dataclass(frozen=True)
class Island:
    """The processes that are one learner, and whether any of them holds less than the whole model."""

    group: dist.ProcessGroup
    is_sharded: bool

    @property
    def speaker(self) -> int:
        """Its rank among all processes, as everywhere here but in `ranks.py`."""
        return dist.get_global_rank(self.group, 0)

    @property
    def is_speaker(self) -> bool:
        return dist.get_rank(self.group) == 0

    def way(self, device: torch.device, cell: Cell) -> Way:
        return SpeakersWay(self, way_for(device, cell)) if self.is_speaker else FollowersWay(self, device)

    def agree(self, option: str, is_given: bool, device: torch.device) -> None:
        """Refuse an option that only some ranks were given; every rank takes part, before it does what follows."""
        count = torch.tensor([int(is_given)], device=device)
        with _lost():
            dist.all_reduce(count, group=self.group)
        ranks = dist.get_world_size(self.group)
        if 0 < int(count) < ranks:
            raise ConfigError(
                f"{option} is given on {int(count)} of the {ranks} ranks of one learner: give it on all of them, or "
                "on none"
            )

    def spread(self, flat: Tensor) -> None:
        with _lost():
            dist.broadcast(flat, self.speaker, self.group)

    def collect(self, flat: Tensor) -> None:
        if self.is_sharded:
            with _lost():
                dist.reduce(flat, self.speaker, dist.ReduceOp.SUM, self.group)


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # a process group's every failure
        said = str(error).strip().splitlines() or ["no reason given"]
        raise gone("a rank", said[0]) from None


def island_of(model: nn.Module, parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> Island | None:
    """The island that this process is a rank of; None if it is a learner by itself."""
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise ConfigError("group is given, and torch.distributed is not initialised: call init_process_group first")
        return None
    sharded = [parameter for parameter in parameters if is_sharded(parameter)]
    group = group or _group_of(model, sharded)
    if group is None and dist.get_world_size() > 1:
        log.warning(
            "this is one of %d processes, and a learner by itself: where they train one model together, give group=, "
            "such as torch.distributed.group.WORLD",
            dist.get_world_size(),
        )
    if group is None or dist.get_world_size(group) == 1:
        return None
    return Island(group, bool(sharded))


def _group_of(model: nn.Module, sharded: Sequence[Any]) -> dist.ProcessGroup | None:
    """Whoever averages gradients, or has a part of the model."""
    if sharded:
        whole = _root_of(sharded[0].device_mesh)
        if whole.size() == dist.get_world_size():
            return dist.group.WORLD
        if whole.ndim == 1:
            return cast(dist.ProcessGroup, whole.get_group())
        raise ConfigError(
            f"the model's mesh has {whole.size()} of {dist.get_world_size()} ranks: give the process group of those "
            "that are one learner, as group="
        )
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return module.process_group
    return None


def _root_of(mesh: Any) -> Any:
    """The mesh that this is a part of; torch has no public name for it."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # type: ignore[attr-defined,unused-ignore]

    return _mesh_resources.get_root_mesh(mesh)


def refuse_flat(model: nn.Module) -> None:
    """FSDP of before `fully_shard`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ModelError(
            "the model is in FullyShardedDataParallel, whose parameters are parts of several tensors: shard it with "
            "torch.distributed.fsdp.fully_shard instead"
        )


# ---------------------------------------------------------------------------------------------- fragments on their way


class SpeakersWay:
    """From cells to all ranks, and from all of them into a cell."""

    def __init__(self, island: Island, way: Way) -> None:
        self._island, self._way = island, way
        self._flat: Flat | None = None

    def meet(self, cells: Sequence[Cell]) -> None:
        self._way.meet(cells)

    def room(self, cell: Cell, size: int) -> Flat:
        self._flat = self._way.room(cell, size)
        return self._flat

    def up(self, cell: Cell, size: int, mark: int) -> None:
        assert self._flat is not None
        self._island.collect(self._flat.values)
        self._way.up(cell, size, mark)

    def down(self, cell: Cell, size: int, mark: int) -> Flat:
        flat = self._way.down(cell, size, mark)
        self._island.spread(flat.values)
        return flat

    def done(self, cell: Cell, mark: int) -> None:
        self._way.done(cell, mark)


class FollowersWay:
    """To and from the speaker, through room for one fragment; there are no cells."""

    def __init__(self, island: Island, device: torch.device) -> None:
        self._island = island
        self._flat = torch.empty(0, dtype=torch.float32, device=device)

    def meet(self, cells: Sequence[Cell]) -> None:
        """They are the speaker's."""

    def room(self, cell: Cell, size: int) -> Flat:
        if self._flat.numel() < size:
            self._flat = self._flat.new_empty(size)
        return Flat(self._flat[:size])

    def up(self, cell: Cell, size: int, mark: int) -> None:
        self._island.collect(self._flat[:size])

    def down(self, cell: Cell, size: int, mark: int) -> Flat:
        flat = self.room(cell, size)
        self._island.spread(flat.values)
        return flat

    def done(self, cell: Cell, mark: int) -> None:
        """What is used of it next is so in order, on the training stream."""
