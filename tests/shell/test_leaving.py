"""How a learner leaves, wherever its node and its state are, from a syncer played by hand."""

import threading
from functools import partial

import numpy as np
import pytest

from shell.hand import KINDS, WAIT_S, Hand, at_once, is_over, learner_of
from skerry.core.messages import Done, Hello, Pull, Refused, Report, Stop
from skerry.errors import RefusedError
from skerry.wire.transport import Lost


@pytest.fixture
def hand():
    hand = Hand()
    yield hand
    hand.server.close()


@pytest.fixture(params=KINDS)
def shell(hand, request):
    shell = learner_of(request.param, "127.0.0.1", hand.server.port)
    yield shell
    shell.close(timeout_s=0.0)


def start(hand, shell):
    """Joined, with a step taken that nobody has asked for."""
    syncer = at_once(hand.take_in)
    shell.start(WAIT_S)
    assert is_over(syncer) and shell.step(10)


def closing(shell, **limit):
    """The training thread is in `close`."""
    return at_once(partial(shell.close, **limit))


def test_it_hands_over_what_is_left_and_says_that_it_left(hand, shell):
    start(hand, shell)
    close = closing(shell)
    hand.hear(Report, lambda report: report.state == "leaving")
    c = hand.pulled()
    assert (c.from_step, c.to_step) == (0, 1)
    hand.theta = hand.theta + np.float32(1.0)
    hand.publish(1, settled=c)
    assert hand.hear(Report, lambda report: report.state == "left").positions[0].mark_step == 1
    hand.hear(Lost)
    assert is_over(close) and shell.training.left.way == "settled"
    np.testing.assert_array_equal(shell.parameters.values[0], hand.theta, "it holds the last version")


def test_at_the_end_of_the_run_it_waits_for_the_last_version_behind_the_last_word(hand, shell):
    start(hand, shell)
    hand.say(Stop(1, 1))
    while shell.step(10):
        pass
    close = closing(shell)
    hand.hear(Report, lambda report: report.state == "stopped")
    c = hand.pulled()
    hand.say(Done(1, 1))
    hand.publish(1, settled=c)
    hand.hear(Report, lambda report: report.state == "left")
    assert is_over(close) and shell.training.left.way == "done" and not shell.is_running


def test_a_syncer_that_is_gone_holds_nobody_longer_than_the_run_says(shell, hand, caplog):
    hand.configure(learner={"leave_timeout_s": 0.2})
    start(hand, shell)
    hand.server.close()
    assert is_over(closing(shell)) and shell.training.left.way == "timeout"
    assert "here: left without an answer from the syncer: the work of its last 1 steps may not be" in caplog.text


def test_the_callers_limit_counts_against_a_syncer_that_does_not_answer(hand, shell):
    start(hand, shell)
    close = closing(shell, timeout_s=0.2)
    hand.hear(Report, lambda report: report.state == "leaving")
    hand.hear(Report, lambda report: report.state == "left")
    assert is_over(close) and shell.training.left.way == "timeout"
    assert str(shell.close()).startswith("0 steps merged, 1 not: it waited")
    assert "what is left, which may not be in the run" in shell.close().reason


def test_a_refusal_ends_the_loop_and_close_does_not_wait(hand, shell):
    start(hand, shell)
    hand.say(Refused("life 1 was taken over"))
    with pytest.raises(RefusedError, match="taken over"):
        while shell.step(10):
            pass
    assert is_over(closing(shell)) and shell.training.left.way == "refused"


def test_a_refusal_that_is_heard_of_between_two_steps_is_no_end_of_the_run(hand, shell):
    start(hand, shell)
    hand.say(Refused("life 1 was taken over"))
    with pytest.raises(RefusedError, match="taken over"):
        while shell.is_running:
            pass


def test_an_error_in_the_last_boundary_is_the_callers_and_the_learner_has_left(hand, shell, monkeypatch):
    start(hand, shell)

    def fail(fragment):
        raise MemoryError("no room for a snapshot")

    monkeypatch.setattr(shell.parameters, "read", fail)
    failures = []

    def close():
        with pytest.raises(MemoryError) as failure:
            shell.close()
        failures.append(str(failure.value))

    closing = at_once(close)
    hand.hear(Report, lambda report: report.state == "leaving")
    hand.say(Pull(1, 1, 0, 0, False, 0.0))
    hand.hear(Lost)
    assert is_over(closing) and failures == ["no room for a snapshot"]


def test_who_has_left_takes_no_further_step(hand, shell):
    start(hand, shell)
    shell.close(timeout_s=0.0)
    assert not shell.step(10) and not shell.step(10)


def test_two_threads_may_step_one_after_the_other_but_not_at_once(hand, shell, monkeypatch):
    start(hand, shell)
    boundary, is_within, may_go_on = shell.training.boundary, threading.Event(), threading.Event()

    def slow(*work):
        is_within.set()
        assert may_go_on.wait(WAIT_S)
        boundary(*work)

    monkeypatch.setattr(shell.training, "boundary", slow)
    other = at_once(partial(shell.step, 10))
    assert is_within.wait(WAIT_S)
    with pytest.raises(RuntimeError, match=r"^step\(\) is being called by two threads at once"):
        shell.step(10)
    may_go_on.set()
    assert is_over(other) and shell.step(10) and shell.training.step_count == 3


def test_one_refused_at_the_door_never_starts(hand, shell):
    def refuse():
        hand.hear(Hello)
        hand.say(Refused("the model differs"))

    door = at_once(refuse)
    with pytest.raises(RefusedError, match="the model differs"):
        shell.start(WAIT_S)
    assert is_over(door) and is_over(closing(shell))


def test_one_that_nobody_ever_welcomed_just_goes(hand, shell):
    hand.hear(Hello)
    assert is_over(closing(shell)) and shell.training.left.way == "settled"


def test_a_run_that_closes_before_it_is_ready_lets_it_go(hand, shell):
    def close_early():
        hand.welcome(progress=1.0)
        hand.say(Done(1, 1))

    syncer = at_once(close_early)
    shell.start(WAIT_S)
    assert is_over(syncer) and not shell.is_running
    assert is_over(closing(shell)) and shell.training.left.way == "done"


@pytest.mark.parametrize("shell", ["thread"], indirect=True)
def test_a_node_thread_that_dies_is_heard_of_and_keeps_nobody(hand, shell, monkeypatch):
    start(hand, shell)

    def die(_):
        raise KeyError("a bug")

    monkeypatch.setattr(shell.beside.loop.driver, "take", die)
    hand.say(Stop(1, 1))
    with pytest.raises(RuntimeError, match="node thread died"):
        while True:
            shell.step(10)
    assert is_over(closing(shell)) and shell.training.left is None
