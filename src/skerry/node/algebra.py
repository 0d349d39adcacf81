"""What the nodes compute with: float32 arrays and the kernels of algo.

The nodes name every operation here and do nothing else to values but add and subtract them, so the simulator can hand
them exact integers instead and check every unit of work; production has this one.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from skerry.algo import codecs, outer
from skerry.algo import merge as merging
from skerry.algo.codecs import Inspection
from skerry.algo.fragments import Fragment
from skerry.algo.memory import Arrays
from skerry.algo.merge import Held
from skerry.algo.outer import OuterStep
from skerry.core.facts import Decision
from skerry.errors import StoreError

Array = Any  # a flat float32 array; the simulator's integer
Payload = Any  # bytes, or what can be seen as bytes; its len() is what it weighs on the wire

DELTA_CODEC = "fp32"  # in which a merged delta is handed to the outer step


class Values(NamedTuple):
    """One version of a fragment: published values, outer velocity, downstream residual (master = theta + error)."""

    theta: Array
    velocity: Array
    error: Array


class Merged(NamedTuple):
    """The next version: its values, and the delta that carries it to learners."""

    values: Values
    payload: Payload
    digest: bytes


class Algebra(Protocol):
    # the syncer's
    def load(self, data: bytes, fragment: Fragment) -> Values: ...
    def parts(self, values: Values) -> list[memoryview]: ...
    def inspect(self, codec: str, payload: Payload, fragment: Fragment) -> Inspection: ...
    def hold(self, codec: str, payload: Payload, weight: float, seen: Inspection) -> Held: ...
    def merge(self, decision: Decision, fragment: Fragment, old: Values, held: list[Held], threads: int) -> Merged: ...
    def whole(self, theta: Array) -> Payload: ...

    # the learner's
    def encode(self, codec: str, values: Array) -> tuple[Payload, Array]: ...
    def decode(self, payload: Payload) -> Array: ...
    def adopt(self, codec: str, payload: Payload, base: Array) -> Array: ...
    def first_spoiled(self, values: Array, fragment: Fragment) -> str: ...

    # both
    def digest(self, theta: Array) -> bytes: ...
    def checksum(self, payload: Payload) -> bytes: ...
    def payload_bytes(self, codec: str, fragment: Fragment) -> int: ...


class Float32:
    """The real one."""

    def __init__(self) -> None:
        self._arrays = Arrays()  # of versions

    def load(self, data: bytes, fragment: Fragment) -> Values:
        if len(data) != 12 * fragment.size:
            expected = 12 * fragment.size
            raise StoreError(f"fragment {fragment.index}: its file has {len(data)} bytes, expected {expected}")
        flat = np.frombuffer(data, np.float32).reshape(3, fragment.size)
        return Values(flat[0], flat[1], flat[2])

    def parts(self, values: Values) -> list[memoryview]:
        return [array.data.cast("B") for array in values]

    def inspect(self, codec: str, payload: Payload, fragment: Fragment) -> Inspection:
        return codecs.inspect(codec, np.frombuffer(payload, np.uint8), fragment)

    def hold(self, codec: str, payload: Payload, weight: float, seen: Inspection) -> Held:
        return Held(codec, np.frombuffer(payload, np.uint8), weight, seen.norms)

    def merge(self, decision: Decision, fragment: Fragment, old: Values, held: list[Held], threads: int) -> Merged:
        """Merge, outer step, published delta."""
        scratch = self._arrays.take(fragment.size)
        delta = merging.merge(decision.rule, fragment, held, DELTA_CODEC, decision.gain, threads, scratch)
        del scratch  # for one of the three that the new version takes
        return self._advance(decision, fragment, old, delta, threads)

    def _advance(self, decision: Decision, fragment: Fragment, old: Values, delta: Payload, threads: int) -> Merged:
        """Outer step and published delta, from the merged delta as it is applied."""
        d = decision
        step = OuterStep(d.outer, d.lr, d.momentum, d.version, d.delay, d.restart)
        new = Values(*(self._arrays.take(fragment.size) for _ in Values._fields))
        advanced = outer.advance(step, *old, DELTA_CODEC, delta, d.codec, threads, out=new)
        assert advanced.finite, f"fragment {fragment.index} version {d.version} is not finite"
        return Merged(new, advanced.payload.data, self.digest(new.theta))

    def whole(self, theta: Array) -> memoryview:
        whole: memoryview = theta.data.cast("B")
        return whole

    def encode(self, codec: str, values: Array) -> tuple[memoryview, Array]:
        """The payload, and the values it says."""
        decoded = np.empty_like(values)
        return codecs.encode(codec, values, decoded).data, decoded

    def decode(self, payload: Payload) -> Array:
        return codecs.decode("fp32", np.frombuffer(payload, np.uint8))

    def adopt(self, codec: str, payload: Payload, base: Array) -> Array:
        return outer.adopt(codec, np.frombuffer(payload, np.uint8), base)

    def first_spoiled(self, values: Array, fragment: Fragment) -> str:
        """The first parameter with a value that is not finite; empty if all are."""
        if np.isfinite(values).all():
            return ""
        return next(s.name for s in fragment.slots if not np.isfinite(values[s.offset : s.offset + s.size]).all())

    def digest(self, theta: Array) -> bytes:
        """What a learner checks after adopting: sha256 of the published values."""
        return hashlib.sha256(theta.data.cast("B")).digest()

    def checksum(self, payload: Payload) -> bytes:
        """What a contribution carries of its payload: found at the other end, it arrived as it left."""
        return xxhash.xxh3_128_digest(payload)

    def payload_bytes(self, codec: str, fragment: Fragment) -> int:
        return codecs.payload_bytes(codec, fragment.size)


FLOAT32 = Float32()
