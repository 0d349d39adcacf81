"""Replay: a run's tape read again from its first record, its facts audited, its merges recomputed bit for bit.

The chain of hashes says that the tape is what was written, the audit that what was written may be, the recomputation
that the values are what it says: published values by their digest, momentum and residual with them by the digest of
the version's state. Merges can be recomputed where the run kept the contributions (store.record = "full"). A tape that
was pruned begins with a fold: its facts are audited from there, and each fragment's merges are recomputed from the
first kept version that the tape leads on from. Nothing is
written here, and a live syncer may go on meanwhile. A merge is a pure function, so any number of threads agrees.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from skerry import config as configs
from skerry.algo.fragments import F32, Fragment, decode_layout, scatter
from skerry.algo.merge import Held
from skerry.core.audit import Audit
from skerry.core.facts import Committed, Decision, Fact, Restored, RunCreated, SteppedBack
from skerry.core.ledger import MERGED
from skerry.core.state import KeptVersion, RunState, decode_fact
from skerry.errors import FileDamaged, ReplayError, TapeDamaged, TapeUnknown
from skerry.node import versions
from skerry.node.algebra import FLOAT32, Merged, Values
from skerry.node.syncer import ABS_MAX
from skerry.run.export import lineage_of, streamed
from skerry.run.facts import first_segment, fragments_of, history_of
from skerry.run.last_words import lacking, last_words, no_run
from skerry.run.sense import fact_of, place_of
from skerry.store.store import RECORD, Store
from skerry.store.tape import Record

if TYPE_CHECKING:
    from typing_extensions import Buffer

Show = Callable[[int, int], None]  # (merges done, merges on the tape when it was opened)


@dataclass
class Excluded:
    """The same run without one learner's contributions, the others' as they were recorded."""

    learner: str
    contributions: int = 0
    tokens: float = 0.0  # as people count them
    merges_changed: int = 0
    merges_skipped: int = 0  # nobody else was in them
    relative_change: float = 0.0  # norm of the difference over norm of the model
    model_sha256: str = ""

    @property
    def note(self) -> str:
        return f"the others trained on versions that held the work of {self.learner}; their deltas are as recorded"


@dataclass
class Report:
    record: str = "decisions"
    merges: int = 0
    recomputed: int = 0
    checks: int = 0
    violations: list[str] = field(default_factory=list)
    first_difference: str | None = None
    skipped: int = 0  # merges that cannot be recomputed, because nothing is kept that they could begin from
    begins: str = ""  # one line on where a pruned tape begins, and what can be done from there
    model_sha256: str | None = None  # of the recomputed model, as export writes it
    left_out: str = ""  # one line on bytes behind the last whole commit: a crash leaves such, it is no violation
    lineage: dict[str, object] | None = None  # where the run's first values came from, of a fork
    model: Callable[[], Iterable[Buffer]] | None = None  # that file's bytes; without the excluded learner where one is
    excluded: Excluded | None = None

    @property
    def identical(self) -> bool | None:
        """Whether what was recomputed is what was recorded; None if nothing was recomputed, so that nobody knows."""
        return None if self.agrees and not self.recomputed else self.agrees

    @property
    def agrees(self) -> bool:
        """Everything that could be compared agreed, also where that was the choices alone."""
        is_whole = self.recomputed + self.skipped == self.merges or self.record != "full"
        return is_whole and not self.violations and self.first_difference is None


class Different(Exception):
    """What was recomputed is not what was recorded."""


def replay(store: Store, threads: int = 1, exclude: str | None = None, show: Show = lambda done, total: None) -> Report:
    """Walk the tape once; damage is raised as the store's errors, named at its first bad record."""
    expected = last_words(store.root)  # first: a live syncer only adds to the tape
    known = _known(store)
    if exclude is not None and known is not None and exclude not in known.lives:
        raise ReplayError(f"--exclude {exclude}: this run has no such learner, but {', '.join(sorted(known.lives))}")
    kept = known.kept if known is not None else []
    report, audit, walk = Report(left_out=store.left_out), Audit(), _Walk(store, threads, exclude, kept)
    before = 0  # merges of which the tape does not tell any more
    record: Record | None = None
    for record in history_of(store):
        fact = fact_of(store.root, record)
        if audit.state is None and isinstance(fact, RunState):
            before = fact.merges
        audit.take(fact)
        if audit.violations and not report.violations:
            report.violations = [f"{place_of(store.root, record)}: {line}" for line in audit.violations]
        report.merges += isinstance(fact, Committed)
        if not report.violations and report.first_difference is None:
            try:
                report.recomputed += walk.take(fact)
            except Different as difference:
                report.first_difference = f"{place_of(store.root, record)}: {difference}"
            except FileDamaged as error:
                raise FileDamaged(f"{place_of(store.root, record)}: {error}") from None
        if isinstance(fact, Committed):
            show(report.merges, max(report.merges, known.merges - before if known else 0))
    if record is None:
        raise ReplayError(no_run(store))
    # after a violation nobody knows whether the run is closed
    is_closed = bool(report.violations) or (audit.state is not None and audit.state.phase == "closed")
    epoch = None if report.violations or audit.state is None else audit.state.epoch
    if gone := lacking(store, expected, before + report.merges, is_closed, epoch):
        raise TapeDamaged(gone)
    if audit.state is not None:
        report.lineage = lineage_of(audit.state.created)
    report.checks, report.record, report.skipped = audit.checks, walk.record, walk.skipped
    if (first := first_segment(store)) > 1:
        report.begins = _begins(store, first, before, report)
    if report.agrees and walk.is_whole:
        assert audit.state is not None
        walk.sum_up(report, audit.state)
    return report


def _begins(store: Store, first: int, before: int, report: Report) -> str:
    """What can still be done with a tape that was pruned."""
    line = f"{store.root}: the tape was pruned and begins with segment {first}, after {before} merges"
    if not report.merges:
        return f"{line}, and none has followed"
    if report.record != "full":
        return line
    if report.recomputed:
        return f"{line}; of the {report.merges} since, {report.recomputed} can be recomputed, from a kept version on"
    return f"{line}; none of the {report.merges} since can be recomputed: no kept version lies between"


# ---------------------------------------------------------------------------------------------- the tape


def _known(store: Store) -> RunState | None:
    """The run at the end of the tape, as far as it can be trusted before the walk."""
    audit = Audit()
    try:
        for body in store.records:
            audit.take(decode_fact(body))
    except TapeUnknown:  # the walk will say where
        return None
    return None if audit.violations else audit.state


# ---------------------------------------------------------------------------------------------- the values


def held_of(store: Store, fact: Committed, fragment: Fragment) -> list[tuple[str, Held]]:
    """The recorded contributions of a merge with their learners, in merge order."""
    decision, file = fact.decision, fact.result.payloads
    if not file:
        raise Different("names no file with its contributions, though this run records them")
    data = store.get(file, RECORD)
    lengths = [FLOAT32.payload_bytes(part.codec, fragment) for part in decision.parts]
    if sum(lengths) != len(data):
        raise Different(f"its contributions are {sum(lengths)} bytes, {RECORD}/{file} has {len(data)}")
    merged = (row for row in decision.rows if row.fate == MERGED)
    held, start = [], 0
    for row, part, length in zip(merged, decision.parts, lengths, strict=True):
        payload = memoryview(data)[start : start + length]
        seen = FLOAT32.inspect(part.codec, payload, fragment)
        if not seen.finite or seen.max_abs > ABS_MAX:
            raise Different(f"merges values of {row.learner} that are let in nowhere (largest {seen.max_abs:.3g})")
        held.append((row.learner, FLOAT32.hold(part.codec, payload, part.weight, seen)))
        start += length
    return held


class _Line:
    """The newest values by fragment, where they are known, and those to which the run goes back later."""

    def __init__(self, threads: int, back_to: set[tuple[int, int]]) -> None:
        self.values: dict[int, Values] = {}
        self.kept: dict[tuple[int, int], Values] = {}
        self._threads, self._back_to = threads, back_to

    def merge(self, decision: Decision, fragment: Fragment, held: list[Held]) -> Merged:
        delta = FLOAT32.merge(decision, fragment, held, self._threads)
        merged = FLOAT32.advance(decision, fragment, self.values[fragment.index], delta, self._threads)
        self.put(fragment.index, decision.version, merged.values)
        return merged

    @property
    def masters(self) -> list[F32]:
        return [values.theta + values.error for _, values in sorted(self.values.items())]

    def put(self, p: int, version: int, values: Values) -> None:
        self.values[p] = values
        if (p, version) in self._back_to:
            self.kept[p, version] = values

    def repaired(self, p: int) -> dict[str, Values]:
        """What a damaged version may have been replaced by."""
        zero = np.zeros_like(self.values[p].error)
        return {"the same": self.values[p], "no velocity": Values(self.values[p].theta, zero, zero)}


class _Walk:
    """Recomputes along the tape, and beside it the same without one learner."""

    def __init__(self, store: Store, threads: int, exclude: str | None, kept: Sequence[KeptVersion]) -> None:
        self.record = "decisions"
        self.skipped = 0  # merges whose fragment is not known yet
        self._bases = {(p, c.version): c for version in kept for p, c in enumerate(version.checkpoints)}
        self._fragments: tuple[Fragment, ...] = ()
        self._lines: list[_Line] = []
        self._store, self._threads = store, threads
        self._excluded = Excluded(exclude) if exclude is not None else None
        self._tokens = 0  # of the excluded learner, in tokens x fragments
        self._back_to: set[tuple[int, int]] = set()  # fragments and versions to which the run goes back

    @property
    def is_full(self) -> bool:
        return self.record == "full"

    @property
    def is_whole(self) -> bool:
        """The values of every fragment are known, so there is a model."""
        return self.is_full and len(self._lines[0].values) == len(self._fragments)

    def take(self, fact: Fact | RunState) -> bool:
        """Whether a merge was recomputed and agreed."""
        if isinstance(fact, RunCreated):
            self._begin(fact)
            if self.is_full:
                self._begin_whole(fact)
        elif isinstance(fact, RunState) and not self._fragments:
            self._begin(fact.created)
            if self.is_full:
                self._begin_amid(fact)
        elif self.is_full and isinstance(fact, Restored):
            self._restore(fact)
        elif self.is_full and isinstance(fact, SteppedBack):
            self._step_back(fact)
        elif self.is_full and isinstance(fact, Committed):
            return self._merge(fact)
        return False

    def _begin(self, fact: RunCreated) -> None:
        self.record = configs.decode(fact.config).store.record
        if not self.is_full:
            if self._excluded is not None:
                raise ReplayError(
                    f"{self._store.root}: was run with store.record = decisions and kept no contributions to merge "
                    "again: begin one with --store.record full"
                )
            return
        try:
            self._fragments = fragments_of(fact)
        except (msgspec.DecodeError, ValueError) as error:
            raise Different(f"its layout cannot be read ({error})") from None
        self._back_to = _gone_back_to(self._store)
        self._lines = [_Line(self._threads, self._back_to) for _ in range(2 if self._excluded else 1)]

    def _begin_whole(self, fact: RunCreated) -> None:
        for fragment, file, digest in zip(self._fragments, fact.files, fact.digests, strict=True):
            values = FLOAT32.load(self._store.get(file), fragment)
            if FLOAT32.digest(values.theta) != digest:
                raise Different(f"fragment {fragment.index} version 0: its values are not those of its digest")
            for line in self._lines:
                line.put(fragment.index, 0, values)

    def _begin_amid(self, fold: RunState) -> None:
        if self._excluded is not None:
            raise ReplayError(f"{self._store.root}: its tape was pruned, and --exclude needs all of it")
        for fragment in self._fragments:
            self._enter(fragment.index, fold.fragments[fragment.index].version)

    def _enter(self, p: int, version: int) -> None:
        """The run has this version: where it is kept and nothing is known of the fragment yet, go on from it."""
        base = self._bases.get((p, version))
        if base is not None:
            self._lines[0].put(p, version, versions.whole(self._store, self._fragments[p], base))

    def _merge(self, fact: Committed) -> bool:
        decision, result = fact.decision, fact.result
        fragment = self._fragments[decision.fragment]
        if fragment.index not in self._lines[0].values:
            self.skipped += 1
            self._enter(fragment.index, decision.version)
            return False
        held = held_of(self._store, fact, fragment)
        merged = self._lines[0].merge(decision, fragment, [one for _, one in held])
        where = f"fragment {decision.fragment} version {decision.version}"
        if merged.digest != result.digest:
            raise Different(f"{where}: digest {merged.digest.hex()} recomputed, {result.digest.hex()} recorded")
        if merged.state != result.state:
            raise Different(
                f"{where}: velocity or residual differ, {merged.state.hex()} recomputed, {result.state.hex()} recorded"
            )
        if self._excluded is not None:
            self._merge_without(self._excluded, decision, fragment, held)
        return True

    def _merge_without(
        self, gone: Excluded, decision: Decision, fragment: Fragment, held: list[tuple[str, Held]]
    ) -> None:
        kept = [one for learner, one in held if learner != gone.learner]
        removed = len(held) - len(kept)
        gone.contributions += removed
        self._tokens += sum(r.tokens for r in decision.rows if r.fate == MERGED and r.learner == gone.learner)
        if kept:
            gone.merges_changed += removed
            self._lines[1].merge(decision, fragment, kept)
        else:
            gone.merges_skipped += 1
            self._lines[1].put(fragment.index, decision.version, self._lines[1].values[fragment.index])

    def _step_back(self, fact: SteppedBack) -> None:
        p = fact.fragment
        if (p, fact.to) not in self._lines[0].kept:  # it was before a pruned tape begins
            self._lines[0].values.pop(p, None)
            self._enter(p, fact.to)
        if p not in self._lines[0].values:
            return
        if FLOAT32.state_digest(self._lines[0].kept[p, fact.to]) != fact.state:
            raise Different(f"fragment {p} version {fact.version}: is not version {fact.to}")
        for line in self._lines:
            line.put(p, fact.version, line.kept[p, fact.to])

    def _restore(self, fact: Restored) -> None:
        """The digest says that the values are the same; that of the state, how much of the rest was."""
        if fact.fragment not in self._lines[0].values:
            return
        p, mine = fact.fragment, self._lines[0].repaired(fact.fragment)
        how = next((how for how, values in mine.items() if FLOAT32.state_digest(values) == fact.state), None)
        if how is None:
            raise Different(f"fragment {p} version {fact.version}: restored to something else, {fact.state.hex()}")
        for line in self._lines:
            line.values[p] = line.repaired(p)[how]

    def sum_up(self, report: Report, state: RunState) -> None:
        whole = self._lines[0].masters
        report.model = self._safetensors(whole, state)
        report.model_sha256 = _sha256(report.model())
        if self._excluded is not None:
            report.excluded = gone = self._excluded
            gone.tokens = self._tokens / len(self._fragments)
            rest = self._lines[1].masters
            gone.relative_change = _norm([b - a for a, b in zip(whole, rest, strict=True)]) / (_norm(whole) or 1.0)
            report.model = self._safetensors(rest, state, gone.learner if gone.contributions else "")
            gone.model_sha256 = _sha256(report.model())

    def _safetensors(self, masters: list[F32], state: RunState, without: str = "") -> Callable[[], Iterable[Buffer]]:
        arrays = {t.name: np.empty(t.shape, np.float32) for t in decode_layout(state.created.layout).tensors}
        for fragment, master in zip(self._fragments, masters, strict=True):
            scatter(fragment, master, arrays)
        return partial(streamed, self._store.root, state, arrays, {"without": without} if without else {})


def _sha256(pieces: Iterable[Buffer]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _gone_back_to(store: Store) -> set[tuple[int, int]]:
    """Fragments and versions that the run goes back to later; as far as the tape can be read, the walk says how far."""
    found = set()
    with contextlib.suppress(TapeUnknown, TapeDamaged):
        for record in history_of(store):
            fact = decode_fact(record.body)
            if isinstance(fact, SteppedBack):
                found.add((fact.fragment, fact.to))
    return found


def _norm(arrays: list[F32]) -> float:
    return math.sqrt(math.fsum(float(np.dot(a.astype(np.float64), a.astype(np.float64))) for a in arrays))
