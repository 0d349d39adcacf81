"""What a model's state_dict holds besides the values that are trained: a run writes it down once, at its creation.

Trained tensors are in the layout, and the run works on them in float32. Everything else that the state_dict had is
*fixed*: frozen parameters, which every learner must have alike, and buffers, which are each machine's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

FixedKind = Literal["frozen", "buffer"]


class Fixed(msgspec.Struct, frozen=True, array_like=True):
    """One tensor that no merge changes; its bytes are in the run's own file."""

    name: str
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    kind: FixedKind
    digest: bytes = b""  # xxh3-128 of its bytes


class Contents(msgspec.Struct, frozen=True):
    """A whole state_dict, but for the trained values."""

    dtypes: dict[str, str] = {}  # of trained tensors that were not float32
    aliases: dict[str, str] = {}  # other names of a tensor -> the one by which it is known
    fixed: tuple[Fixed, ...] = ()
    files: dict[str, str] = {}  # short texts that belong to the model, such as config.json -> what is in it
    is_whole: bool = True  # all that the state_dict has is known; else nobody said what it has besides

    @property
    def frozen(self) -> dict[str, bytes]:
        return {fixed.name: fixed.digest for fixed in self.fixed if fixed.kind == "frozen"}

    @property
    def has_buffers(self) -> bool:
        return any(fixed.kind == "buffer" for fixed in self.fixed)


def encode_contents(contents: Contents) -> bytes:
    return msgspec.msgpack.encode(contents)


def decode_contents(data: bytes) -> Contents:
    return msgspec.msgpack.decode(data, type=Contents) if data else Contents(is_whole=False)


def frozen_difference(learner: Mapping[str, bytes], run: Mapping[str, bytes]) -> str:
    """One phrase about the first frozen parameter, by name, on which they differ; empty if they agree."""
    for name in sorted(learner.keys() | run.keys()):
        if name not in run:
            return f"the frozen parameter {name} is not in the run's model"
        if name not in learner:
            return f"the run's frozen parameter {name} is missing"
        if learner[name] != run[name]:
            return f"the frozen parameter {name} has other values than the run's, or another dtype"
    return ""
