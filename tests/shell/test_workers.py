"""The threads that do the slow work: side by side, in any order, and what fails there fails on the deciding thread."""

import threading
from functools import partial

import pytest

from skerry.errors import StoreError
from skerry.node.work import Behind
from skerry.shell.workers import Workers

WAIT_S = 30.0


class Hands:
    """Workers, and a way to wait for word from them."""

    def __init__(self, count):
        self.words = threading.Semaphore(0)
        self.workers = Workers(count, self.words.release)

    def wait(self, count=1):
        for _ in range(count):
            assert self.words.acquire(timeout=WAIT_S)


def test_pieces_run_side_by_side_and_end_in_any_order():
    hands, gate = Hands(2), threading.Event()
    hands.workers.submit(lambda: gate.wait(WAIT_S) and "first")
    hands.workers.submit(lambda: "second")
    hands.wait()
    assert hands.workers.ended() == ["second"] and hands.workers.ended() == []
    gate.set()
    hands.wait()
    assert hands.workers.ended() == ["first"]
    hands.workers.close()


def test_what_is_short_goes_first():
    hands, gate = Hands(1), threading.Event()
    hands.workers.submit(lambda: gate.wait(WAIT_S) and "under way")
    hands.workers.submit(lambda: "long")
    hands.workers.submit(lambda: "short", "short")
    gate.set()
    hands.wait(3)
    assert hands.workers.ended() in (["under way", "short", "long"], ["short", "under way", "long"])
    hands.workers.close()


def test_what_goes_behind_others_is_put_off_for_so_many_of_them_and_no_longer():
    """A syncer is so busy that with each merge that ends there is another: its checkpoints are written all the same."""
    hands, gate, done = Hands(1), threading.Event(), []

    def merge(number):
        done.append(number)
        if number < 9:
            hands.workers.submit(partial(merge, number + 1))

    hands.workers.submit(lambda: gate.wait(WAIT_S))
    hands.workers.submit(lambda: done.append("checkpoint"), Behind(3))
    hands.workers.submit(partial(merge, 0))
    hands.workers.submit(lambda: done.append("in its turn"), Behind(0))
    gate.set()
    hands.wait(13)
    assert done[:6] == [0, "in its turn", 1, "checkpoint", 2, 3]
    hands.workers.close()


def test_what_fails_is_raised_where_it_is_taken_in():
    def fail():
        raise StoreError("the disk is full")

    hands = Hands(1)
    hands.workers.submit(fail)
    hands.wait()
    with pytest.raises(StoreError, match="the disk is full"):
        hands.workers.ended()
    hands.workers.close()


def test_closing_drops_what_has_not_begun_and_waits_for_what_has():
    hands, begun, gate, done = Hands(1), threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        gate.wait(WAIT_S)
        done.append("slow")

    hands.workers.submit(slow)
    hands.workers.submit(lambda: done.append("never begun"))
    assert begun.wait(WAIT_S)
    closing = threading.Thread(target=hands.workers.close)
    closing.start()
    while not hands.workers.is_closed:
        assert closing.is_alive()
    gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive() and done == ["slow"]
