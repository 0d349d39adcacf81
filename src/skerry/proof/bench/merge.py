"""What a merge takes, from contributions that lie in memory to the next version, without network and disk.

A fragment goes through what a worker of the syncer does for it: each contribution is checked and looked through
(inspect), they become one encoded delta (merge), the outer step makes the next version of it with its digests
(advance), and what the journal is to have gets its checksum (hash). A pool of threads takes fragments one by one, as in
the syncer; a merge has one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash
from msgspec import Struct

from skerry import algo
from skerry.algo import codecs, outer
from skerry.algo import merge as merging
from skerry.algo.codecs import U8, Inspection
from skerry.algo.fragments import F32, Fragment, padded, split
from skerry.algo.merge import Held
from skerry.algo.outer import OuterStep
from skerry.memory import Arrays
from skerry.plan.layouts import even
from skerry.proof.bench.reference import ROUNDS, Spread, Tell, check_memory, copy_gb_s, merge_bytes, spread

STAGES = ("inspect", "merge", "advance", "hash")
DELTA_CODEC = "bf16"
STEP = OuterStep("nesterov", 0.4, 0.85)
ROUND_PARAMETERS, ROUND_FRAGMENTS = 10_800_000, 24  # of a few short merges at once most would be threads that wake
DRIFT = 1e-3  # about as far as a parameter goes in a round

T = TypeVar("T")


class Load(Struct, frozen=True):
    """What is measured: every size with every rule, codec and number of threads."""

    sizes: tuple[int, ...]  # parameters of a fragment
    rules: tuple[str, ...]
    codecs: tuple[str, ...]  # of contributions, and of what is published
    threads: tuple[int, ...]
    learners: int  # contributions to a merge

    def fragments(self, size: int) -> int:
        """A small model's, and as many for each of the most threads: the work is the same for any number of them."""
        wanted, most = min(ROUND_FRAGMENTS, ROUND_PARAMETERS // size), max(self.threads)
        return most * max(1, wanted // most)


class Row(Struct, frozen=True):
    rule: str
    codec: str
    threads: int
    parameters: int  # of a fragment
    learners: int
    fragments: int
    gb_s: float  # contributions, both versions, delta and what is published, each read or written once
    of_bandwidth: float  # gb_s over what as many threads copy
    of_bandwidth_spread: Spread
    close_ms: float  # last contribution there -> values, delta and digests of the next version there
    close_ms_spread: Spread
    parameters_per_s: float
    ns_per_parameter: dict[str, float]  # CPU time of each stage, and of all


class Taken(NamedTuple):
    """By one merge."""

    close_s: float
    cpu_s: dict[str, float]  # by stage


class Round(NamedTuple):
    """All fragments merged once."""

    wall_s: float
    copy_gb_s: float  # just before
    taken: list[Taken]


def measure(load: Load, tell: Tell) -> list[Row]:
    check_memory(max(_needed_bytes(load, size) for size in load.sizes), "--sizes")
    algo.warm_up()
    rows = []
    for size in load.sizes:
        for rule in load.rules:
            for codec in load.codecs:
                tell(f"{size} parameters, {rule}, {codec}")
                rows += _rows(load, size, rule, codec)
    return rows


def _needed_bytes(load: Load, size: int) -> float:
    """Values, what they become and a copy's target; contributions; and what they were drawn from."""
    contributions = max(load.learners * codecs.payload_bytes(codec, padded(size)) for codec in load.codecs)
    return load.fragments(size) * (28 * size + contributions) + 8 * size


def _rows(load: Load, size: int, rule: str, codec: str) -> list[Row]:
    """A row for each number of threads; they take turns, so that their ratio too is one of the same moments."""
    works = _works(load, size, rule, codec)
    rounds: dict[int, list[Round]] = {threads: [] for threads in load.threads}
    for number in range(ROUNDS + 1):
        for threads in load.threads:
            one = _round(works, threads)
            if number > 0:  # the first finds memory that was never touched
                rounds[threads].append(one)
    return [_row(works, threads, rounds[threads]) for threads in load.threads]


class _Work:
    """A fragment with the contributions to its merge, which is done again and again."""

    def __init__(self, fragment: Fragment, rule: str, codec: str, payloads: list[U8], arrays: Arrays) -> None:
        self.fragment, self.rule, self.codec, self.payloads = fragment, rule, codec, payloads
        self._arrays, self._deltas, self._published = arrays, Arrays(), Arrays()
        self.version = self._taken()
        for array in self.version:
            array[:] = 0.0
        self.spare = np.zeros(fragment.size, np.float32)  # for the reference to copy to

    def merge(self) -> Taken:
        stages = _Stages()
        seen = stages.timed("inspect", lambda: [self._look(payload) for payload in self.payloads[:-1]])
        began = time.perf_counter()
        seen.append(stages.timed("inspect", lambda: self._look(self.payloads[-1])))
        delta = stages.timed("merge", lambda: self._delta(seen))
        made = stages.timed("advance", lambda: self._advance(delta))
        stages.timed("hash", lambda: xxhash.xxh3_128_digest(delta.data))
        close_s = time.perf_counter() - began
        assert made.finite
        self.version = made[:3]
        return Taken(close_s, stages.cpu_s)

    def _look(self, payload: U8) -> Inspection:
        xxhash.xxh3_128_digest(payload.data)
        return codecs.inspect(self.codec, payload, self.fragment)

    def _delta(self, seen: Sequence[Inspection]) -> U8:
        held = [Held(self.codec, payload, 1.0, one.norms) for payload, one in zip(self.payloads, seen, strict=True)]
        scratch = self._arrays.take(self.fragment.size, np.float32)
        out = self._deltas.take(codecs.payload_bytes(DELTA_CODEC, self.fragment.size), np.uint8)
        return merging.merge(self.rule, self.fragment, held, DELTA_CODEC, scratch=scratch, out=out)

    def _advance(self, delta: U8) -> outer.Advanced:
        published = self._published.take(codecs.payload_bytes(self.codec, self.fragment.size), np.uint8)
        return outer.advance(STEP, *self.version, DELTA_CODEC, delta, self.codec, out=(*self._taken(), published))

    def _taken(self) -> tuple[F32, F32, F32]:
        theta, velocity, error = (self._arrays.take(self.fragment.size, np.float32) for _ in range(3))
        return theta, velocity, error

    @property
    def bytes_moved(self) -> int:
        read = sum(payload.size for payload in self.payloads)
        return merge_bytes(read, self.fragment.size, DELTA_CODEC, self.codec)


class _Stages:
    """CPU time of this thread by what it was for."""

    def __init__(self) -> None:
        self.cpu_s = dict.fromkeys(STAGES, 0.0)

    def timed(self, stage: str, work: Callable[[], T]) -> T:
        began = time.thread_time()
        result = work()
        self.cpu_s[stage] += time.thread_time() - began
        return result


def _works(load: Load, size: int, rule: str, codec: str) -> list[_Work]:
    """Fragments of this size; each learner's contribution is the same numbers in another place."""
    count = load.fragments(size)
    layout = even(size * count, count)
    drawn = np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(DRIFT)
    arrays = Arrays()
    works = []
    for fragment in split(layout, count):
        flat = np.zeros(fragment.size, np.float32)
        payloads = []
        for learner in range(load.learners):
            flat[:size] = np.roll(drawn, learner * (size // load.learners) + fragment.index)
            payloads.append(codecs.encode(codec, flat))
        works.append(_Work(fragment, rule, codec, payloads, arrays))
    return works


def _round(works: Sequence[_Work], threads: int) -> Round:
    with ThreadPoolExecutor(threads) as pool:
        copied = copy_gb_s(pool, [(work.version[0], work.spare) for work in works])
        began = time.perf_counter()
        taken = list(pool.map(_Work.merge, works))
        return Round(time.perf_counter() - began, copied, taken)


def _row(works: Sequence[_Work], threads: int, rounds: Sequence[Round]) -> Row:
    first = works[0]
    parameters = sum(slot.size for slot in first.fragment.slots)
    gb_s = [sum(work.bytes_moved for work in works) / one.wall_s / 1e9 for one in rounds]
    of_bandwidth = spread([rate / one.copy_gb_s for rate, one in zip(gb_s, rounds, strict=True)])
    close_ms = spread([1e3 * taken.close_s for one in rounds for taken in one.taken])
    return Row(
        rule=first.rule,
        codec=first.codec,
        threads=threads,
        parameters=parameters,
        learners=len(first.payloads),
        fragments=len(works),
        gb_s=spread(gb_s).median,
        of_bandwidth=of_bandwidth.median,
        of_bandwidth_spread=of_bandwidth,
        close_ms=close_ms.median,
        close_ms_spread=close_ms,
        parameters_per_s=spread([parameters * len(works) / one.wall_s for one in rounds]).median,
        ns_per_parameter=_ns_per_parameter(parameters, [taken for one in rounds for taken in one.taken]),
    )


def _ns_per_parameter(parameters: int, taken: Sequence[Taken]) -> dict[str, float]:
    """The median of each stage, and of their sum."""
    stages = {stage: spread([1e9 * one.cpu_s[stage] / parameters for one in taken]).median for stage in STAGES}
    return stages | {"all": spread([1e9 * sum(one.cpu_s.values()) / parameters for one in taken]).median}
