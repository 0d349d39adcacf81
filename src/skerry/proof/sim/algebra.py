"""Exact integers in place of tensors: what the nodes compute with when a simulation is to be fast and provable.

A fragment's values are one integer, a merge is a plain sum with outer step 1, a codec rounds to its grid. So "no work
lost, none counted twice" is an equation between integers. The velocity holds the version it belongs to: a state put
together from two commits shows.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import xxhash

from skerry.algo.codecs import Inspection
from skerry.algo.fragments import Fragment
from skerry.algo.merge import Held
from skerry.core.facts import Decision
from skerry.node.algebra import Adopted, Merged, Step, Values

# Of a payload: several deltas are less than the whole.
BYTES: dict[str, int] = {"fp32": 48, "bf16": 24, "int8": 20, "int4": 16, "int2": 14}
GRID: dict[str, int] = {"fp32": 1, "bf16": 4, "int8": 16, "int4": 256, "int2": 1024}
SPOILED = 1 << 100  # stands for a NaN
_NO_NORMS = np.empty(0)


def pack(value: int, codec: str = "fp32") -> bytes:
    return value.to_bytes(BYTES[codec], "little", signed=True)


def unpack(payload: Any) -> int:
    return int.from_bytes(payload, "little", signed=True)


def _round(value: int, codec: str) -> int:
    grid = GRID[codec]
    return (value + grid // 2) // grid * grid


def _is_finite(value: int) -> bool:
    return abs(value) < SPOILED // 2


class Integers:
    """An `Algebra` whose arrays are Python integers."""

    def load(self, data: bytes, fragment: Fragment) -> Values:
        size = BYTES["fp32"]
        assert len(data) == 3 * size, f"{len(data)} bytes"
        return Values(*(unpack(data[at : at + size]) for at in range(0, 3 * size, size)))

    def parts(self, values: Values) -> list[Any]:
        return [memoryview(pack(value)) for value in values]

    def inspect(self, codec: str, payload: Any, fragment: Fragment) -> Inspection:
        return Inspection(_NO_NORMS, _is_finite(unpack(payload)), 0.0)

    def hold(self, codec: str, payload: Any, weight: float, seen: Inspection) -> Held:
        return Held(codec, np.frombuffer(payload, np.uint8), weight, seen.norms)

    def merge(self, decision: Decision, fragment: Fragment, held: list[Held], threads: int = 1) -> bytes:
        return pack(sum(unpack(h.payload.tobytes()) for h in held))

    def entry(self, delta: bytes) -> bytes:
        return delta

    def advance(self, step: Step, fragment: Fragment, old: Values, delta: Any, threads: int = 1) -> Merged:
        x = old.theta + old.error + unpack(delta)
        published = _round(x - old.theta, step.codec)
        theta = old.theta + published
        values = Values(theta, step.version, x - theta)
        return Merged(values, pack(published, step.codec), self.digest(theta), self.state_digest(values))

    def whole(self, theta: int) -> memoryview:
        return memoryview(pack(theta))

    def encode(self, codec: str, drift: int, residual: int | None = None) -> memoryview | None:
        u = drift + (residual or 0)
        return memoryview(pack(_round(u, codec), codec)) if _is_finite(u) else None

    def unsaid(self, codec: str, payload: Any, drift: int, residual: int | None) -> int:
        return drift + (residual or 0) - unpack(payload)

    def decode(self, codec: str, payload: Any) -> int:
        return unpack(payload)

    def adopt(self, codec: str, payload: Any, base: int | None) -> Adopted:
        new = (base or 0) + unpack(payload)
        return Adopted(new, self.digest(new), _is_finite(new))

    def first_spoiled(self, values: int, fragment: Fragment) -> str:
        return "" if _is_finite(values) else fragment.slots[0].name

    def digest(self, theta: int) -> bytes:
        return xxhash.xxh3_128_digest(pack(theta))

    def state_digest(self, values: Values) -> bytes:
        return xxhash.xxh3_128_digest(b"".join(map(pack, values)))

    def sha256(self, theta: int) -> bytes:
        return hashlib.sha256(pack(theta)).digest()

    def checksum(self, payload: Any) -> bytes:
        return xxhash.xxh3_128_digest(payload)

    def payload_bytes(self, codec: str, fragment: Fragment) -> int:
        return BYTES[codec]
