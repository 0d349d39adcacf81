"""Which elements of a parameter are in this process: all of it, or a rank's shard of a DTensor.

A layout has names and whole shapes, so processes that share a model in different ways have the same one. What a rank
holds of a tensor is one box of it, so what it holds of any slice is found by cutting the box as the whole is cut
(`algo/fragments.py` `parts`). A placement of which that is not so is refused by name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from skerry.errors import ModelError


@dataclass(frozen=True)
class Share:
    """Where a rank's part of a tensor begins in it; of parts that several ranks hold, one is the one that is read."""

    begin: tuple[int, ...]
    is_read: bool = True


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a tensor, or of a view of it, to be indexed as if all of it were here."""

    shape: tuple[int, ...]  # of the whole
    begin: tuple[int, ...]
    values: Tensor

    def __getitem__(self, at: int | slice) -> Piece:
        first, last = self.begin[0], self.begin[0] + self.values.shape[0]
        if isinstance(at, slice):
            low, high = max(first, at.start), min(last, at.stop)
            begin = (max(0, low - at.start), *self.begin[1:])
            return Piece(
                (at.stop - at.start, *self.shape[1:]), begin, self.values[low - first : max(low, high) - first]
            )
        if first <= at < last:
            return Piece(self.shape[1:], self.begin[1:], self.values[at - first])
        return Piece(self.shape[1:], self.begin[1:], self.values.new_empty((0,) * len(self.shape[1:])))

    @property
    def is_empty(self) -> bool:
        return not self.values.numel()

    def of(self, flat: Tensor) -> Tensor:
        """The same elements in a flat vector that holds the whole."""
        if self.values.shape == self.shape:
            return flat.view(self.shape)
        box = tuple(slice(begin, begin + size) for begin, size in zip(self.begin, self.values.shape, strict=True))
        return flat.view(self.shape)[box]


def is_sharded(parameter: Tensor) -> bool:
    """It is a DTensor, whatever of it is here; to import those takes half a second, and who has one has done so."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def held(parameter: Tensor) -> Tensor:
    """The memory of what is here."""
    if not is_sharded(parameter):
        return parameter.detach()
    with torch.no_grad():
        local: Tensor = parameter.to_local()  # type: ignore[attr-defined]
        return local.detach()


def whole(tensor: Tensor) -> Tensor:
    """All of it, put together where it is sharded; every rank that has a part of it takes part."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Those that `fully_shard` was called for."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def reshard(modules: Sequence[Any]) -> None:
    """Have shards in their places: after a forward pass alone FSDP leaves whole tensors in some modules."""
    for module in modules:
        module.reshard()


def shares_of(parameters: Mapping[str, Tensor], speaker: int | None) -> dict[str, Share]:
    """By name, of what is not all here, or is not here alone."""
    if speaker is None and not any(is_sharded(parameter) for parameter in parameters.values()):
        return {}
    rank = dist.get_rank()
    alone = rank if speaker is None else speaker
    return {name: share_of(name, parameter, rank, alone) for name, parameter in parameters.items()}


def share_of(name: str, parameter: Any, rank: int, speaker: int) -> Share:
    """A rank's share of a parameter in its island; of what several hold, the speaker's copy is read, or its row's."""
    if not is_sharded(parameter):
        return Share((0,) * parameter.ndim, rank == speaker)
    mesh, placements = parameter.device_mesh, parameter.placements
    here, there = _coordinates(mesh, rank), _coordinates(mesh, speaker)
    assert here is not None, f"{name}: rank {rank} is not in the mesh of its own parameter"
    try:
        begin, shape = box_of(tuple(parameter.shape), tuple(mesh.mesh.shape), here, placements)
    except ValueError as error:
        raise ModelError(f"parameter {name} is placed as {tuple(placements)}: {error}") from None
    if shape != tuple(held(parameter).shape):
        raise ModelError(
            f"parameter {name} has {tuple(held(parameter).shape)} of its {tuple(parameter.shape)} here, where "
            f"{tuple(placements)} gives {shape}: use placements as distribute_tensor() or fully_shard() make them"
        )
    copies = [at for at, placement in enumerate(placements) if _kind(placement) == "Replicate"]
    return Share(begin, there is not None and all(here[at] == there[at] for at in copies))


def box_of(
    shape: tuple[int, ...], mesh: Sequence[int], coordinates: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the part of the rank at these coordinates of a mesh begins in a tensor, and its shape.

    Mesh dimensions cut one after the other, each what those before have left; but one that is *strided*, which FSDP
    makes of a tensor that is cut for tensor parallelism already, after those behind it. Chunks are torch.chunk's.
    """
    begin, sizes = [0] * len(shape), list(shape)
    for at in _order(mesh, placements):
        dim = placements[at].dim
        chunk = -(-sizes[dim] // mesh[at])
        low = min(chunk * coordinates[at], sizes[dim])
        begin[dim], sizes[dim] = begin[dim] + low, min(chunk, sizes[dim] - low)
    return tuple(begin), tuple(sizes)


def _order(mesh: Sequence[int], placements: Sequence[Any]) -> list[int]:
    """The mesh dimensions that cut, in the order in which they do."""
    cuts: list[int] = []
    strided: list[int] = []
    for at, placement in enumerate(placements):
        kind = _kind(placement)
        if kind == "_StridedShard":
            behind = [k for k in range(at + 1, len(mesh)) if getattr(placements[k], "dim", None) == placement.dim]
            if placement.split_factor != math.prod(mesh[k] for k in behind):
                raise ValueError("its parts do not lie together, and such a tensor cannot be exchanged")
            strided.insert(0, at)
        elif kind == "Shard":
            cuts.append(at)
        elif kind != "Replicate":
            raise ValueError("only Shard and Replicate can be exchanged; redistribute() it first")
    return cuts + strided


def _kind(placement: Any) -> str:
    """By its name: strided ones have no public class, and in some versions of torch theirs is below Shard."""
    return type(placement).__name__


def _coordinates(mesh: Any, rank: int) -> tuple[int, ...] | None:
    found = (mesh.mesh == rank).nonzero()
    return tuple(found[0].tolist()) if len(found) else None
