"""The log: one piece of writing at a time, in order, and nothing is carried out before what it follows is durable."""

import queue
from functools import partial

import pytest
import xxhash

from skerry.errors import StoreError
from skerry.node import log as logs
from skerry.node.log import WAITING_MAX, Log
from skerry.node.observers import Unwatched
from skerry.shell.workers import Workers
from skerry.store import Store


class ByHand:
    """A writer that writes when a test says so."""

    def __init__(self):
        self.waiting, self._ended = [], []

    def submit(self, work, rank="long"):
        self.waiting.append(work)

    def ended(self):
        taken, self._ended = self._ended, []
        return taken

    def write(self):
        """Carry out the one piece that is under way."""
        (work,) = self.waiting
        self.waiting = []
        self._ended.append(work())


class Watch(Unwatched):
    """What was committed together, and when it was over."""

    def __init__(self):
        self.begun, self.done = [], []

    def committing(self, records):
        self.begun.append(list(records))

    def committed(self, records):
        self.done.append(list(records))


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "run") as store:
        yield store


@pytest.fixture
def watch():
    return Watch()


@pytest.fixture
def log(store, watch):
    """One whose writer is in the test's hands."""
    log = Log(store, lambda: 0.0, watch)
    log.pool = ByHand()
    return log


def entry(store, data):
    return store.place(len(data), xxhash.xxh3_128_digest(data)), data


def on_tape(store):
    return [record.body for record in store.history()]


def test_with_a_pool_that_works_at_once_everything_is_durable_on_return(store, watch):
    log, heard = Log(store, lambda: 0.0, watch), []
    for record in (b"1", b"2"):
        log.write([record])
        log.then(lambda: heard.append(len(on_tape(store))))
        assert log.is_durable
    assert heard == [1, 2] and watch.done == [[b"1"], [b"2"]]


def test_all_that_came_while_one_was_written_is_one_commit(log, store, watch):
    log.write([b"1"])
    log.write([b"2", b"3"])
    log.write([b"4"])
    assert len(log.pool.waiting) == 1, "one piece of writing is under way"
    log.pool.write()
    log.take_ended()
    assert len(log.pool.waiting) == 1 and not log.is_durable
    log.pool.write()
    log.take_ended()
    assert log.pool.waiting == []
    assert watch.done == [[b"1"], [b"2", b"3", b"4"]] and on_tape(store) == [b"1", b"2", b"3", b"4"]
    assert log.is_durable


def test_it_is_full_when_too_much_waits_and_has_room_again_once_that_is_durable(log):
    log.write([b"under way"])
    heard = []
    for number in range(WAITING_MAX - 1):
        log.then(partial(heard.append, number))
    assert not log.is_full
    log.write([b"one more"])
    assert log.is_full
    log.pool.write()
    log.take_ended()
    assert not log.is_full and heard == list(range(WAITING_MAX - 1))


def test_entries_and_files_of_a_group_are_durable_with_their_records(log, store):
    log.write([b"1"])
    pairs = [entry(store, data) for data in (b"one", b"two", b"three")]
    files = [store.put([b"a file"]), store.put([b"another"])]
    log.write([b"2"], files[:1], pairs[:1])
    log.write([b"3"], files[1:], pairs[1:])
    for _ in range(2):
        log.pool.write()
        log.take_ended()
    assert [store.entry(place) for place, _ in pairs] == [b"one", b"two", b"three"]
    assert store.collect(()) == 2, "a commit has named both files"


def test_nothing_is_carried_out_before_what_it_stands_behind_is_durable(log, store):
    heard = []

    def hear(what):
        log.then(lambda: heard.append((what, len(on_tape(store)))))

    hear("nothing is waited for")
    log.write([b"1"])
    hear("behind 1")
    log.write([b"2"])
    hear("behind 2")
    hear("behind 2 too")
    log.write([b"3"])
    hear("behind 3")
    assert heard == [("nothing is waited for", 0)]
    log.pool.write()
    assert len(heard) == 1, "it is carried out where it was ordered, not where it is written"
    log.take_ended()
    assert heard[1:] == [("behind 1", 1)]
    log.pool.write()
    log.take_ended()
    assert heard[2:] == [("behind 2", 3), ("behind 2 too", 3), ("behind 3", 3)]


def test_what_is_carried_out_may_order_more(log, store):
    heard = []
    log.write([b"1"])
    log.then(lambda: (log.write([b"3"]), log.then(lambda: heard.append(on_tape(store)))))
    log.write([b"2"])
    for _ in range(2):
        log.pool.write()
        log.take_ended()
    assert heard == [[b"1", b"2", b"3"]] and log.is_durable


def test_other_work_on_the_store_stands_in_its_place(log, store, watch):
    """A fold is of everything before it and of nothing behind it; so is what may be collected."""
    log.write([b"0"])
    seen, file = [], store.put([b"named by 2"])
    log.write([b"1"])
    log.do(lambda: seen.append(list(watch.done)))
    log.write([b"2"], [file])
    log.write([b"3"])
    log.do(lambda: store.rotate(b"fold of 0 to 3"))
    log.do(lambda: seen.append(store.collect([file])))
    log.write([b"4"])
    for _ in range(2):
        log.pool.write()
        log.take_ended()
    assert watch.done == [[b"0"], [b"1"], [b"2", b"3"], [b"4"]]
    assert seen == [[[b"0"], [b"1"]], 0]
    assert [(r.body, r.is_fold) for r in store.history() if r.is_fold] == [(b"fold of 0 to 3", True)]
    assert on_tape(store) == [b"0", b"1", b"2", b"3", b"fold of 0 to 3", b"4"]


def test_rotate_alone_counts_as_a_piece_that_is_waited_for(log, store):
    heard = []
    log.do(lambda: store.rotate(b"fold"))
    log.then(lambda: heard.append(on_tape(store)))
    assert not log.is_durable and heard == []
    log.pool.write()
    log.take_ended()
    assert log.is_durable and heard == [[b"fold"]]


def test_the_bytes_of_entries_count_until_they_are_durable(log, store):
    log.write([b"no entry"])
    assert log.waiting_bytes == 0
    log.write([b"1"], entries=[entry(store, b"x" * 100), entry(store, b"y" * 20)])
    log.write([b"no entry"])
    log.pool.write()
    log.take_ended()
    log.write([b"2"], entries=[entry(store, b"z" * 3)])
    assert log.waiting_bytes == 123
    log.pool.write()
    assert log.waiting_bytes == 123, "until it is taken in"
    log.take_ended()
    assert log.waiting_bytes == 3
    log.pool.write()
    log.take_ended()
    assert log.waiting_bytes == 0


def test_groups_are_bounded_and_nothing_that_belongs_together_is_cut(log, store, watch, monkeypatch):
    monkeypatch.setattr(logs, "GROUP_BYTES_MAX", 40)
    log.write([b"first"])
    for n in range(5):
        log.write([b"%d" % n * 6, b"%d" % n * 6])
    for _ in range(2):
        log.pool.write()
        log.take_ended()
    whole = [[b"%d" % n * 6] * 2 for n in range(5)]
    assert watch.done == [[b"first"], *whole] and log.is_durable


def test_how_long_a_commit_takes_is_measured(store, watch):
    times = iter([10.0, 12.5])
    log = Log(store, lambda: next(times), watch)
    log.write([b"1"])
    assert log.commit_s == 2.5
    log.do(lambda: store.rotate(b"fold"))
    log.take_ended()
    assert next(times, None) is None, "what is no commit is not measured"


def test_a_failed_write_raises_where_it_is_taken_in_and_nothing_behind_it_is_carried_out(store, watch, monkeypatch):
    """On a thread of its own, as in production."""
    done, heard = queue.SimpleQueue(), []
    log = Log(store, lambda: 0.0, watch)
    log.pool = Workers(1, lambda: done.put(None), "writer")

    def full(*_):
        raise OSError(28, "No space left on device", "tape/1")

    monkeypatch.setattr(store.tape, "append", full)
    log.write([b"1"])
    log.then(lambda: heard.append("1 left"))
    done.get(timeout=60)
    with pytest.raises(StoreError, match="the disk is full"):
        log.take_ended()
    log.pool.close()
    assert heard == [] and not log.is_durable and watch.done == [] and on_tape_anew(store) == []
    with pytest.raises(StoreError, match="stopped after a failed write"):
        store.commit([b"2"])


def on_tape_anew(store):
    with Store.open(store.root, readonly=True) as again:
        return on_tape(again)


def test_its_repr_says_what_waits(log):
    log.write([b"1"])
    log.then(lambda: None)
    assert repr(log) == "<log: 0 of 1 durable, 1 wait for them>"
