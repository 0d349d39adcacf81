"""Whatever fails, wherever: what was acknowledged is there after a restart, whole, and the run goes on.

The workload is a function of the number of records so far, so the state that must be found after a restart is
known for every number. Each run is broken off at one operation, restarted, broken off again at random,
restarted and carried on to the end.
"""

from __future__ import annotations

import errno
import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import StoreError
from skerry.proof.sim.files import Crash, CrashFiles
from skerry.store import Store
from skerry.store import tape as tape_module

pytestmark = pytest.mark.slow  # all of them together

SEEDS = range(20)
FRAGMENTS = 3
STEPS = ("one", "group", "rotate", "one", "collect", "group", "collect first", "rotate", "collect", "one")

State = dict[int, int]  # fragment -> the number of the record that last wrote it


@cache
def contents(number: int) -> bytes:
    return b"%d " % number * (5 + number % 7)


@cache
def record(number: int) -> bytes:
    return b"%d %s" % (number, hashlib.sha256(contents(number)).hexdigest().encode())


def state_after(number: int) -> State:
    return {n % FRAGMENTS: n for n in range(max(1, number - FRAGMENTS + 1), number + 1)}


def fold(number: int) -> bytes:
    return b"fold %d" % number


@cache
def live(number: int) -> frozenset[str]:
    return frozenset(hashlib.sha256(contents(n)).hexdigest() for n in state_after(number).values())


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
        self.is_open = True
        self.number = self.recovered(self.store.records)
        assert self.acked <= self.number <= self.tried, "an acknowledged commit is lost"
        assert self.number in self.ends, "half a commit"
        for n in state_after(self.number).values():
            assert self.store.get(hashlib.sha256(contents(n)).hexdigest()) == contents(n)
        # It has been seen, so it may be acted upon: from here on it must stay.
        self.acked = self.tried = self.number
        self.ends = {self.number}

    def recovered(self, records: list[bytes]) -> int:
        number = 0
        if records and records[0].startswith(b"fold "):
            number = int(records[0][5:])
            records = records[1:]
        assert records == [record(n) for n in range(number + 1, number + 1 + len(records))], "no prefix"
        return number + len(records)

    def step(self, kind: str) -> None:
        if kind == "rotate":
            self.store.rotate(fold(self.number))
        elif kind == "collect":
            self.store.collect(live(self.number))
        else:
            numbers = range(self.number + 1, self.number + (4 if kind == "group" else 2))
            files = [self.store.put([contents(n)[:3], contents(n)[3:]]) for n in numbers]
            if kind == "collect first":
                self.store.collect(live(self.number))
            self.tried = numbers[-1]
            self.ends.add(self.tried)
            self.store.commit([record(n) for n in numbers], files)
            self.number = self.acked = numbers[-1]

    def check_history(self) -> None:
        bodies = [r.body for r in self.store.history() if not r.is_fold]
        assert bodies == [record(n) for n in range(1, self.number + 1)]


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
    files = CrashFiles()
    whole_run(Run(files))
    kinds = Counter(line.split("/")[0] for line in files.log)
    for kind in ["write", "sync", "rename", "sync_dir"]:
        assert kinds[f"{kind} tape"] >= 3 and kinds[f"{kind} files"] >= 3
    assert kinds["append tape"] >= 5 and kinds["remove files"] >= 3


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


@pytest.mark.parametrize("skipped", ["sync files/", "sync_dir files", "sync tape/", "sync_dir tape"])
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
    def collect(self, keep: Collection[str]) -> int:
        held, self._uncommitted = self._uncommitted, Counter()
        count = super().collect(keep)
        self._uncommitted = held
        return count


def test_collecting_uncommitted_files_is_caught() -> None:
    assert is_caught(store_type=CollectsTooMuch)


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
