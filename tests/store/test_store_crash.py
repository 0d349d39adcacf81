"""Whatever fails, wherever: what was acknowledged is there after a restart, whole, and the run goes on.

A run as the syncer keeps it, in small: every record is a merge with an entry in the journal, and every so often one is
a checkpoint, whose file holds all the merges of its fragment up to it. What must be found after a restart is a whole
number of commits, and of every fragment each merge: from its last checkpoint, and the one before, by the entries since.
Each run is broken off at one operation, restarted, broken off again at random, restarted and carried on to the end.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from skerry.errors import StoreError
from skerry.proof.sim.files import Crash, CrashFiles
from skerry.store import Store
from skerry.store import journal as journal_module
from skerry.store import tape as tape_module
from skerry.store.files import FileSystem
from skerry.store.journal import JOURNAL, Journal, Place
from skerry.store.store import RECORD

pytestmark = pytest.mark.slow  # all of them together

SEEDS = range(20)
FRAGMENTS = 3
STEPS = (
    "merge", "merges", "checkpoint", "rotate", "merge", "collect", "merges", "checkpoint first", "merges",
    "checkpoint", "collect", "merge with contributions", "rotate", "merges", "checkpoint", "collect", "merge",
)  # fmt: skip
FILE_BYTES = 60  # a few entries, so that files of the journal are left behind and collected


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some entries are long, and begin on a page behind a gap."""
    monkeypatch.setattr(journal_module, "LONG_BYTES", 20)
    monkeypatch.setattr(journal_module, "PAGE_BYTES", 16)


@dataclass(frozen=True)
class Merged:
    """A record: the so manieth merge of the run, and where its entry lies."""

    number: int
    place: Place
    recorded: str  # the file with its contributions, if any

    @property
    def fragment(self) -> int:
        return self.number % FRAGMENTS


@dataclass(frozen=True)
class Whole:
    """A record: a file has all the merges of a fragment up to that number."""

    fragment: int
    number: int
    file: str


@dataclass
class State:
    """What the records say: the files that lead to each fragment's newest version, and the merges since the first."""

    number: int = 0  # of merges
    wholes: list[list[Whole]] = field(default_factory=lambda: [[] for _ in range(FRAGMENTS)])
    since: list[list[Merged]] = field(default_factory=lambda: [[] for _ in range(FRAGMENTS)])

    def apply(self, fact: Merged | Whole) -> None:
        if isinstance(fact, Merged):
            assert fact.number == self.number + 1, "no prefix"
            self.number = fact.number
            self.since[fact.fragment].append(fact)
        else:
            p = fact.fragment
            self.wholes[p] = [*self.wholes[p], fact][-2:]
            if len(self.wholes[p]) == 2:
                self.since[p] = [merged for merged in self.since[p] if merged.number > self.wholes[p][0].number]

    @property
    def files(self) -> set[str]:
        return {whole.file for wholes in self.wholes for whole in wholes}

    @property
    def journal(self) -> set[int]:
        return {merged.place.file for since in self.since for merged in since}


def entry(number: int) -> bytes:
    return b"%d " % number * (5 + number % 7)


def contents(fragment: int, number: int) -> bytes:
    """Of a fragment after so many merges of the run."""
    return b"".join(entry(n) for n in range(1, number + 1) if n % FRAGMENTS == fragment)


def contributions(number: int) -> bytes:
    return b"what made %d" % number


class Run:
    """One writer over restarts: `acked` records are promised, `tried` were begun; commits end at `ends`."""

    store: Store

    def __init__(self, files: CrashFiles, store_type: type[Store] = Store) -> None:
        self.files = files
        self.store_type = store_type
        self.is_open = False
        self.acked = self.tried = 0
        self.ends = {0}

    def restart(self) -> None:
        self.is_open = False
        self.store = self.store_type.open(Path("/run"), files=self.files)
        self.store.journal.file_bytes = FILE_BYTES
        self.is_open = True
        self.state = recovered(self.store.records)
        assert self.acked <= self.number <= self.tried, "an acknowledged commit is lost"
        assert self.number in self.ends, "half a commit"
        self.check_versions()
        # It has been seen, so it may be acted upon: from here on it must stay.
        self.acked = self.tried = self.number
        self.ends = {self.number}

    @property
    def number(self) -> int:
        return self.state.number

    def check_versions(self) -> None:
        """From either checkpoint, or from nothing while there is none before it, the same."""
        for p in range(FRAGMENTS):
            wholes, since = self.state.wholes[p], self.state.since[p]
            found = [(whole.number, self.store.get(whole.file)) for whole in wholes]
            for number, data in found if len(found) == 2 else [(0, b""), *found]:
                assert data == contents(p, number)
                for merged in since:
                    if merged.number > number:
                        data += self.store.entry(merged.place)
                assert data == contents(p, self.number)
            for merged in since:
                assert not merged.recorded or self.store.get(merged.recorded, RECORD) == contributions(merged.number)

    def step(self, kind: str) -> None:
        if kind == "rotate":
            self.store.rotate(encoded(self.state))
        elif kind == "collect":
            self.store.collect(self.state.files, self.state.journal)
        elif kind.startswith("checkpoint"):
            self.checkpoint(is_collected=kind == "checkpoint first")
        else:
            self.merge(3 if kind == "merges" else 1, has_contributions="contributions" in kind)

    def merge(self, count: int, has_contributions: bool) -> None:
        """So many merges in one commit; their places were given out before."""
        facts, entries = [], []
        for number in range(self.number + 1, self.number + 1 + count):
            place = self.store.place(len(entry(number)), xxhash.xxh3_128_digest(entry(number)))
            recorded = self.store.put([contributions(number)], RECORD) if has_contributions else ""
            facts.append(Merged(number, place, recorded))
            entries.append((place, entry(number)))
        self.tried = facts[-1].number
        self.ends.add(self.tried)
        self.commit(facts, [fact.recorded for fact in facts if fact.recorded], entries)
        self.acked = self.number

    def checkpoint(self, is_collected: bool) -> None:
        """Of every fragment, each in two parts; collecting meanwhile spares what no commit has named."""
        data = [contents(p, self.number) for p in range(FRAGMENTS)]
        facts = [Whole(p, self.number, self.store.put([d[:3], d[3:]])) for p, d in enumerate(data)]
        if is_collected:
            self.store.collect(self.state.files, self.state.journal)
        self.commit(facts, [fact.file for fact in facts])

    def commit(
        self, facts: Sequence[Merged | Whole], files: list[str], entries: Sequence[tuple[Place, bytes]] = ()
    ) -> None:
        self.store.commit([encoded(fact) for fact in facts], files, entries)
        for fact in facts:
            self.state.apply(fact)

    def check_history(self) -> None:
        facts = [decoded(r.body) for r in self.store.history() if not r.is_fold]
        assert [fact.number for fact in facts if isinstance(fact, Merged)] == list(range(1, self.number + 1))


def encoded(fact: Merged | Whole | State) -> bytes:
    return msgspec.msgpack.encode({type(fact).__name__: fact})


def decoded(record: bytes) -> Any:
    ((name, body),) = msgspec.msgpack.decode(record, type=dict[str, msgspec.Raw]).items()
    return msgspec.msgpack.decode(body, type={"Merged": Merged, "Whole": Whole, "State": State}[name])


def recovered(records: list[bytes]) -> State:
    facts = [decoded(record) for record in records]
    state = facts.pop(0) if facts and isinstance(facts[0], State) else State()
    for fact in facts:
        state.apply(fact)
    return state


@cache
def count_operations() -> int:
    files = CrashFiles()
    whole_run(Run(files))
    return files.operations


def whole_run(run: Run) -> None:
    run.restart()
    for kind in STEPS:
        run.step(kind)


def broken_run(
    seed: int,
    *,
    crash_at: int = 0,
    fail_at: tuple[int, int] = (0, 0),
    power_cut: bool,
    files_type: type[CrashFiles] = CrashFiles,
    store_type: type[Store] = Store,
    skip: Callable[[str], bool] = lambda call: False,
) -> None:
    """Break off as planned, restart, break off at random, restart, go on to the end, check everything.

    The arguments are all there is to a failure: call it with those of the traceback to see it again.
    """
    files = files_type(seed)
    files.skip = skip
    run = Run(files, store_type)

    files.plan(crash_at=crash_at, fail_at=fail_at)
    try:
        whole_run(run)
    except Crash:
        assert crash_at
    except StoreError:
        assert fail_at[0]
        if run.is_open:
            check_stopped(run.store, files)
    if power_cut:
        files.power_cut()

    files.plan(crash_at=files.random.randrange(1, count_operations()))
    with suppress(Crash):
        whole_run(run)
    files.power_cut()

    files.plan()
    whole_run(run)
    run.check_history()
    files.power_cut()
    run.restart()
    run.check_history()


def check_stopped(store: Store, files: CrashFiles) -> None:
    """Every later call is refused, and touches nothing."""
    operations = files.operations
    calls: list[Callable[[], object]] = [
        lambda: store.put([b"x"]),
        lambda: store.commit([b"x"]),
        lambda: store.rotate(b"x"),
        lambda: store.collect([]),
        lambda: store.get("0" * 64),
        lambda: store.entry(Place(1, 0, 1, b"")),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="stopped after a failed"):
            call()
    assert files.operations == operations


@pytest.mark.parametrize("power_cut", [True, False], ids=["power-cut", "killed"])
def test_crash_at_every_operation(power_cut: bool) -> None:
    for crash_at in range(1, count_operations() + 2):
        for seed in SEEDS:
            broken_run(seed, crash_at=crash_at, power_cut=power_cut)


@pytest.mark.parametrize("power_cut", [True, False], ids=["power-cut", "restarted"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_error_at_every_operation(code: int, power_cut: bool) -> None:
    for operation in range(1, count_operations() + 1):
        for seed in SEEDS:
            broken_run(seed, fail_at=(operation, code), power_cut=power_cut)


def test_the_workload_reaches_every_operation() -> None:
    run = Run(files := CrashFiles())
    whole_run(run)
    kinds = Counter(line.split("/")[0] for line in files.log)
    for kind in ["write", "sync", "rename", "sync_dir"]:
        assert kinds[f"{kind} tape"] >= 3 and kinds[f"{kind} files"] >= 3
    for kind in ["write", "sync", "sync_dir", "remove"]:
        assert kinds[f"{kind} journal"] >= 3
    assert kinds["append tape"] >= 5 and kinds["append journal"] >= 10 and kinds["remove files"] >= 3
    assert kinds["write record"] >= 1
    assert kinds["append journal"] > run.number, "gaps, beside an entry for every merge"


def is_caught(*, fail: bool = False, power_cut: bool = True, **bug: Any) -> bool:
    """Does any crash (or failed operation) show the planted bug?"""
    for operation in range(1, count_operations() + 1):
        where: dict[str, Any] = {"fail_at": (operation, errno.EIO)} if fail else {"crash_at": operation}
        for seed in range(4):
            try:
                broken_run(seed, power_cut=power_cut, **where, **bug)
            except (AssertionError, StoreError):
                return True
    return False


@pytest.mark.parametrize(
    "skipped",
    [
        "sync files/", "sync_dir files", "sync journal/", "sync_dir journal", "sync tape/", "sync_dir tape",
        "sync record/", "sync_dir record",
    ],
)  # fmt: skip
def test_a_skipped_sync_is_caught(skipped: str) -> None:
    assert is_caught(skip=lambda call: call.startswith(skipped))


class RetryingFiles(CrashFiles):
    """Asks again after a failed fsync, and is told that all is well."""

    def sync(self, name: str) -> None:
        with suppress(OSError):
            return super().sync(name)
        super().sync(name)


def test_a_retried_fsync_is_caught() -> None:
    assert is_caught(fail=True, files_type=RetryingFiles)


class CollectsTooMuch(Store):
    def collect(self, keep: Collection[str], keep_journal: Collection[int] = ()) -> int:
        held, self._uncommitted = self._uncommitted, Counter()
        count = super().collect(keep, keep_journal)
        self._uncommitted = held
        return count


def test_collecting_uncommitted_files_is_caught() -> None:
    assert is_caught(store_type=CollectsTooMuch)


class CollectsTheJournal(Store):
    def collect(self, keep: Collection[str], keep_journal: Collection[int] = ()) -> int:
        return super().collect(keep, sorted(keep_journal)[1:])


def test_collecting_entries_that_are_needed_is_caught() -> None:
    assert is_caught(store_type=CollectsTheJournal)


class EntriesLast(Store):
    """Names what is not there yet."""

    def commit(
        self, records: Sequence[bytes], files: Iterable[str] = (), entries: Sequence[tuple[Place, Any]] = ()
    ) -> None:
        super().commit(records, files)
        self.journal.append(entries)


def test_records_before_their_entries_are_caught() -> None:
    assert is_caught(store_type=EntriesLast)


def test_appending_to_the_file_of_another_process_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a tail that a crash has torn, an entry does not lie where its place says."""

    class GoesOn(Journal):
        def __init__(self, files: FileSystem) -> None:
            super().__init__(files)
            numbers = journal_module._numbers(files)
            if numbers:
                last = f"{JOURNAL}/{numbers[-1]:06d}.log"
                self._number = self._begun = numbers[-1]
                ends = [place.offset + place.size for place in named(files) if place.file == numbers[-1]]
                self._size = self._end = max(ends, default=0)
                assert self._size <= len(files.read(last))

    monkeypatch.setattr("skerry.store.store.Journal", GoesOn)
    assert is_caught()


def named(files: FileSystem) -> list[Place]:
    """What the tape names."""
    facts = [decoded(record.body) for record in tape_module.read_all(files) if not record.is_fold]
    return [fact.place for fact in facts if isinstance(fact, Merged)]


def test_trusting_the_cache_at_open_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed fsync and a restart without a power cut, a second sync proves nothing: rewrite."""
    place = tape_module._place

    def place_only_if_it_differs(files: CrashFiles, name: str, data: bytes) -> None:
        if name in files.cache and files.read(name) == data:
            files.sync(name)
            files.sync_dir("tape")
        else:
            place(files, name, data)

    monkeypatch.setattr(tape_module, "_place", place_only_if_it_differs)
    assert is_caught(fail=True, power_cut=False)


def test_appending_behind_a_torn_tail_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    place = tape_module._place

    def place_unless_there(files: CrashFiles, name: str, data: bytes) -> None:
        if name not in files.cache:
            place(files, name, data)

    monkeypatch.setattr(tape_module, "_place", place_unless_there)
    assert is_caught()
