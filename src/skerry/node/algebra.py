"""What the nodes compute with: float32 arrays and the kernels of algo.

The nodes name every operation here and do nothing else to values but add and subtract them, so the simulator can hand
them exact integers instead and check every unit of work; production has this one.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from skerry.algo import codecs, digests, outer
from skerry.algo import drift as drifts
from skerry.algo import merge as merging
from skerry.algo.codecs import Inspection
from skerry.algo.fragments import Fragment
from skerry.algo.merge import Held
from skerry.algo.outer import OuterStep
from skerry.core.facts import Decision
from skerry.errors import FileDamaged
from skerry.memory import PAGE_BYTES, Arrays
from skerry.store.files import LONG_BYTES

Array = Any  # a flat float32 array; the simulator's integer
Payload = Any  # bytes, or what can be seen as bytes; its len() is what it weighs on the wire


class Values(NamedTuple):
    """One version of a fragment: published values, outer velocity, downstream residual (master = theta + error)."""

    theta: Array
    velocity: Array
    error: Array


class Merged(NamedTuple):
    """The next version: its values, and the delta that carries it to learners."""

    values: Values
    payload: Payload
    digest: bytes  # of the published values
    state: bytes  # of all of them


class Adopted(NamedTuple):
    """A version as it has come to a learner."""

    base: Array
    digest: bytes
    is_finite: bool


class Step(Protocol):
    """An outer step and how its result is published: a decision, or what is kept of one to do it again."""

    @property
    def version(self) -> int: ...
    @property
    def outer(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def delay(self) -> int: ...
    @property
    def restart(self) -> int: ...
    @property
    def codec(self) -> str: ...
    @property
    def delta(self) -> str: ...


class LearnerAlgebra(Protocol):
    """What a learner computes with: its arrays may be of another kind, with the same bits."""

    def encode(self, codec: str, drift: Array, residual: Array | None = None) -> Payload | None:
        """The payload of their sum, or of the drift alone; None if a value of that is not finite."""

    def unsaid(self, codec: str, payload: Payload, drift: Array, residual: Array | None) -> Array:
        """What it does not say of their sum, less what it decodes to: the next residual."""

    def decode(self, codec: str, payload: Payload) -> Array: ...
    def adopt(self, codec: str, payload: Payload, base: Array | None) -> Adopted:
        """The base and what the payload says on top of it, or what it says alone."""

    def first_spoiled(self, values: Array, fragment: Fragment) -> str: ...
    def whole(self, theta: Array) -> Payload: ...
    def digest(self, theta: Array) -> bytes: ...
    def checksum(self, payload: Payload) -> bytes: ...
    def payload_bytes(self, codec: str, fragment: Fragment) -> int: ...


class Algebra(LearnerAlgebra, Protocol):
    """What a syncer computes with, and a learner."""

    def load(self, data: bytes, fragment: Fragment) -> Values: ...
    def parts(self, values: Values) -> list[Any]: ...
    def inspect(self, codec: str, payload: Payload, fragment: Fragment) -> Inspection: ...
    def hold(self, codec: str, payload: Payload, weight: float, seen: Inspection) -> Held: ...
    def merge(self, decision: Decision, fragment: Fragment, held: list[Held], threads: int = 1) -> Payload: ...
    def entry(self, delta: Payload) -> Any: ...
    def advance(self, step: Step, fragment: Fragment, old: Values, delta: Payload, threads: int = 1) -> Merged: ...
    def state_digest(self, values: Values) -> bytes: ...
    def sha256(self, theta: Array) -> bytes: ...


class Float32:
    """The real one."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads  # for what a learner does; a syncer says it each time
        self._arrays, self._deltas, self._payloads = Arrays(), Arrays(), Arrays()  # of versions, merged, sent

    def load(self, data: bytes, fragment: Fragment) -> Values:
        """What `parts` made."""
        there, header_bytes = _WHICH.get(data[:8], ()), _header_bytes(fragment.size)
        if not there or len(data) != header_bytes + 4 * len(there) * fragment.size:
            raise FileDamaged(f"fragment {fragment.index}: its file of {len(data)} bytes is none of this fragment")
        flat = np.frombuffer(data, np.float32, offset=header_bytes).reshape(len(there), fragment.size)
        found = dict(zip(there, flat, strict=True))
        return Values(*(found.get(name, np.zeros(fragment.size, np.float32)) for name in Values._fields))

    def parts(self, values: Values) -> list[Any]:
        """A file's contents: which arrays follow, and they, as little-endian float32; what is zero is left out."""
        there = tuple(
            name
            for name, array in zip(Values._fields, values, strict=True)
            if name == "theta" or array.view(np.uint32).any()
        )
        header = _HEADER[there].ljust(_header_bytes(values.theta.size), b"\0")
        return [header, *(getattr(values, name).data.cast("B") for name in there)]

    def inspect(self, codec: str, payload: Payload, fragment: Fragment) -> Inspection:
        return codecs.inspect(codec, np.frombuffer(payload, np.uint8), fragment)

    def hold(self, codec: str, payload: Payload, weight: float, seen: Inspection) -> Held:
        return Held(codec, np.frombuffer(payload, np.uint8), weight, seen.norms)

    def merge(self, decision: Decision, fragment: Fragment, held: list[Held], threads: int = 1) -> memoryview:
        """The merged delta as it is applied: its gain taken, rounded as decided."""
        scratch = self._arrays.take(fragment.size, np.float32)
        out = self._deltas.take(self.payload_bytes(decision.delta, fragment), np.uint8)
        merged = merging.merge(decision.rule, fragment, held, decision.delta, decision.gain, threads, scratch, out)
        return merged.data

    def entry(self, delta: Payload) -> Payload:
        """What the journal keeps of a merged delta."""
        return delta

    def advance(self, step: Step, fragment: Fragment, old: Values, delta: Payload, threads: int = 1) -> Merged:
        """Outer step and published delta, from the merged delta as it is applied."""
        how = OuterStep(step.outer, step.lr, step.momentum, step.version, step.delay, step.restart)
        new = Values(*(self._arrays.take(fragment.size, np.float32) for _ in Values._fields))
        published = self._payloads.take(self.payload_bytes(step.codec, fragment), np.uint8)
        encoded = np.frombuffer(delta, np.uint8)
        advanced = outer.advance(how, *old, step.delta, encoded, step.codec, threads, (*new, published))
        assert advanced.finite, f"fragment {fragment.index} version {step.version} is not finite"
        return Merged(new, advanced.payload.data, advanced.digests[0], b"".join(advanced.digests))

    def whole(self, theta: Array) -> memoryview:
        whole: memoryview = theta.data.cast("B")
        return whole

    def encode(self, codec: str, drift: Array, residual: Array | None = None) -> memoryview | None:
        payload = self._payloads.take(codecs.payload_bytes(codec, drift.size), np.uint8)
        return payload.data if drifts.say(codec, drift, residual, payload, self._threads) else None

    def unsaid(self, codec: str, payload: Payload, drift: Array, residual: Array | None) -> Array:
        out = self._arrays.take(drift.size, np.float32)
        return drifts.unsaid(codec, np.frombuffer(payload, np.uint8), drift, residual, out, self._threads)

    def decode(self, codec: str, payload: Payload) -> Array:
        """The values that a payload says."""
        return codecs.decode(codec, np.frombuffer(payload, np.uint8), threads=self._threads)

    def adopt(self, codec: str, payload: Payload, base: Array | None) -> Adopted:
        encoded = np.frombuffer(payload, np.uint8)
        out = self._arrays.take(codecs.size_of(codec, encoded), np.float32)
        return Adopted(*outer.adopt(codec, encoded, base, self._threads, out))

    def first_spoiled(self, values: Array, fragment: Fragment) -> str:
        """The first parameter with a value that is not finite; empty if all are."""
        if np.isfinite(values).all():
            return ""
        return next(s.name for s in fragment.slots if not np.isfinite(values[s.offset : s.offset + s.size]).all())

    def digest(self, theta: Array) -> bytes:
        """What a learner checks after adopting: nobody gains by lying about it, so a quick one does."""
        return digests.digest(theta, self._threads)

    def state_digest(self, values: Values) -> bytes:
        """What a version must be that was done again: the digests of its arrays."""
        return b"".join(self.digest(array) for array in values)

    def sha256(self, theta: Array) -> bytes:
        """What a learner's copy is held against, which need not be believed."""
        return hashlib.sha256(theta.data).digest()

    def checksum(self, payload: Payload) -> bytes:
        """What a contribution carries of its payload: found at the other end, it arrived as it left."""
        return xxhash.xxh3_128_digest(payload)

    def payload_bytes(self, codec: str, fragment: Fragment) -> int:
        return codecs.payload_bytes(codec, fragment.size)


def _header(there: tuple[str, ...]) -> bytes:
    mask = sum(1 << place for place, name in enumerate(Values._fields) if name in there)
    return b"SKRYFRG" + bytes([mask])


def _header_bytes(size: int) -> int:
    """A page where the arrays behind it are long, so that they can go to the disk from where they lie."""
    return PAGE_BYTES if 4 * size >= LONG_BYTES else 8


_ARRAYS: tuple[tuple[str, ...], ...] = (
    ("theta",),
    ("theta", "velocity"),
    ("theta", "error"),
    ("theta", "velocity", "error"),
)
_HEADER = {there: _header(there) for there in _ARRAYS}
_WHICH = {header: there for there, header in _HEADER.items()}

FLOAT32 = Float32()
