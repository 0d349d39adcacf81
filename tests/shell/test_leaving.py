"""How a learner's process leaves: a real client, node thread and training thread against a syncer played by hand."""

import queue
import threading

import numpy as np
import pytest

from node.pair import NumpyParameters, config_of
from skerry import config as configs
from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import Tensor, layout_of, split
from skerry.core.messages import (
    FULL,
    Contribution,
    Done,
    Hello,
    Publication,
    Pull,
    Refused,
    Report,
    Stop,
    Welcome,
)
from skerry.errors import RefusedError
from skerry.node.algebra import FLOAT32
from skerry.shell.learner import LearnerShell
from skerry.wire.tcp import Server
from skerry.wire.transport import Lost, Received

WAIT_S = 60.0
LAYOUT = layout_of([Tensor("w", (300,))])


class Hand:
    """A syncer of one fragment that says what a test says."""

    def __init__(self, **tables):
        tables = {"sync": {"num_fragments": 1}} | tables
        self.config = config_of(**tables)
        (self.fragment,) = split(LAYOUT, 1)
        self.theta = np.zeros(self.fragment.size, np.float32)
        self.inbox = queue.Queue()
        self.server = Server("127.0.0.1", 0, None, self.inbox, self._payload_bytes)
        self.peer = 0

    def _payload_bytes(self, message):
        return payload_bytes(message.codec, self.fragment.size)

    def hear(self, kind, is_it=lambda message: True):
        """The next such message, or such an event of the wire."""
        while True:
            event = self.inbox.get(timeout=WAIT_S)
            heard = event.message if isinstance(event, Received) else event
            if isinstance(heard, kind) and is_it(heard):
                self.peer = event.peer
                return heard

    def say(self, message, payload=None):
        self.server.send(self.peer, message, payload)

    def welcome(self):
        self.hear(Hello)
        self.say(Welcome("run", 1, "here", 1, 0, configs.encode(self.config), 0, 0, 0.0))
        self.hear(Report)  # what is bulk may overtake a welcome
        self.publish(0)

    def publish(self, version, settled=None):
        seq, step = (settled.seq, settled.to_step) if settled else (0, 0)
        digest = FLOAT32.digest(self.theta)
        self.say(Publication(1, 1, 0, version, FULL, "fp32", digest, seq, step, 0.0), self.theta.tobytes())

    def pulled(self):
        self.say(Pull(1, 1, 0, 0, False, 0.0))
        return self.hear(Contribution)


@pytest.fixture
def hand():
    hand = Hand()
    yield hand
    hand.server.close()


@pytest.fixture
def shell(hand):
    shell = LearnerShell("here", LAYOUT, NumpyParameters(), "127.0.0.1", hand.server.port, None)
    yield shell
    shell.close(timeout_s=0.0)


def start(hand, shell, steps=1):
    """Joined, with a step taken that nobody has asked for."""
    joined = threading.Thread(target=hand.welcome)
    joined.start()
    shell.start()
    joined.join(WAIT_S)
    for _ in range(steps):
        assert shell.step(10)


def closing(shell, **limit):
    """The training thread is in `close`."""
    thread = threading.Thread(target=shell.close, kwargs=limit)
    thread.start()
    return thread


def is_over(thread):
    thread.join(WAIT_S)
    return not thread.is_alive()


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
    assert is_over(close) and shell.driver.left.way == "settled"
    np.testing.assert_array_equal(shell.node.parameters.values[0], hand.theta, "it holds the last version")


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
    assert is_over(close) and shell.driver.left.way == "done" and not shell.is_running


def test_a_syncer_that_is_gone_holds_nobody_longer_than_the_run_says(shell, hand):
    hand.config = config_of(sync={"num_fragments": 1}, learner={"leave_timeout_s": 0.2})
    start(hand, shell)
    hand.server.close()
    assert is_over(closing(shell)) and shell.driver.left.way == "timeout"


def test_the_callers_limit_counts_against_a_syncer_that_does_not_answer(hand, shell):
    start(hand, shell)
    close = closing(shell, timeout_s=0.2)
    hand.hear(Report, lambda report: report.state == "leaving")
    hand.hear(Report, lambda report: report.state == "left")
    assert is_over(close) and shell.driver.left.way == "timeout"


def test_a_refusal_ends_the_loop_and_close_does_not_wait(hand, shell):
    start(hand, shell)
    hand.say(Refused("life 1 was taken over"))
    with pytest.raises(RefusedError, match="taken over"):
        while True:
            shell.step(10)
    assert is_over(closing(shell)) and shell.driver.left.way == "refused"


def test_one_refused_at_the_door_never_starts(hand, shell):
    def refuse():
        hand.hear(Hello)
        hand.say(Refused("the model differs"))

    door = threading.Thread(target=refuse)
    door.start()
    with pytest.raises(RefusedError, match="the model differs"):
        shell.start()
    assert is_over(door) and is_over(closing(shell))


def test_one_that_nobody_ever_welcomed_just_goes(hand, shell):
    hand.hear(Hello)
    assert is_over(closing(shell)) and shell.driver.left.way == "settled"


def test_a_run_that_closes_before_it_is_ready_lets_it_go(hand, shell):
    def close_early():
        hand.hear(Hello)
        hand.say(Welcome("run", 1, "here", 1, 0, configs.encode(hand.config), 0, 0, 1.0))
        hand.say(Done(1, 1))

    syncer = threading.Thread(target=close_early)
    syncer.start()
    shell.start()
    assert is_over(syncer) and not shell.is_running
    assert is_over(closing(shell)) and shell.driver.left.way == "done"


def test_a_node_thread_that_dies_is_heard_of_and_keeps_nobody(hand, shell, monkeypatch):
    start(hand, shell)

    def die(_):
        raise KeyError("a bug")

    monkeypatch.setattr(shell.driver, "take", die)
    hand.say(Stop(1, 1))
    with pytest.raises(RuntimeError, match="node thread died"):
        while True:
            shell.step(10)
    assert is_over(closing(shell)) and shell.driver.left is None
