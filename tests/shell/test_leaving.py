"""How a learner leaves, wherever its node and its state are, from a syncer played by hand."""

from functools import partial

import numpy as np
import pytest

from shell.hand import KINDS, WAIT_S, Hand, at_once, is_over, learner_of
from skerry.core.messages import Done, Hello, Refused, Report, Stop
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


def test_a_refusal_ends_the_loop_and_close_does_not_wait(hand, shell):
    start(hand, shell)
    hand.say(Refused("life 1 was taken over"))
    with pytest.raises(RefusedError, match="taken over"):
        while True:
            shell.step(10)
    assert is_over(closing(shell)) and shell.training.left.way == "refused"


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
