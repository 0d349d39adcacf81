"""How a learner's process joins: whom it waits for and how long, and that it then keeps the run's time."""

import errno
import logging
import os
import time

import pytest

from node.pair import NumpyParameters
from shell.hand import KINDS, LAYOUT, WAIT_S, Hand, at_once, is_over, learner_of
from skerry import config as configs
from skerry.core.messages import PROTOCOL, Answer, Ask, Hello, Refused, Report
from skerry.errors import ConfigError, JoinTimeout
from skerry.node.training import ByHand
from skerry.shell import learner as learner_shell
from skerry.shell.home import OnHost
from skerry.shell.learner import LearnerShell, fetch_config, join_timeout
from skerry.shell.memory import OwnMemory
from skerry.wire.client import Client
from skerry.wire.endpoint import TIMEOUT_S
from skerry.wire.transport import Lost

NOBODY = ("127.0.0.1", 1)  # a port on which nothing listens
SHORT_S, LONG_S = 0.3, 1.0


@pytest.fixture(params=KINDS)
def shells(request):
    made = []

    def shell(host, port):
        made.append(learner_of(request.param, host, port))
        return made[-1]

    yield shell
    for each in made:
        each.close(timeout_s=0.0)


@pytest.fixture
def hands():
    made = []

    def hand(**limits):
        made.append(Hand(**limits))
        return made[-1]

    yield hand
    for each in made:
        each.server.close()


def waits_in_vain(shells, what, host, port):
    if what == "start":
        shells(host, port).start(SHORT_S)
    else:
        fetch_config(host, port, None, SHORT_S)


@pytest.mark.parametrize("what", ["start", "fetch_config"])
def test_a_wrong_address_is_said_with_what_was_tried_and_for_how_long(shells, what, caplog, monkeypatch):
    monkeypatch.setattr(learner_shell, "WAITING_SAYS_S", SHORT_S / 3)
    caplog.set_level(logging.WARNING, "skerry.learner")
    with pytest.raises(JoinTimeout) as timeout:
        waits_in_vain(shells, what, *NOBODY)
    says = str(timeout.value)
    assert "127.0.0.1:1 for 0.3 s: connection refused" in says and "join_timeout_s (SKERRY_JOIN_TIMEOUT_S" in says
    assert "\n" not in says
    assert "waiting for syncer 127.0.0.1:1 (connection refused)" in caplog.messages


@pytest.mark.parametrize("what", ["start", "fetch_config"])
def test_a_syncer_that_does_not_answer_is_none(shells, hands, what):
    with pytest.raises(JoinTimeout, match="connected, and no answer yet"):
        waits_in_vain(shells, what, "127.0.0.1", hands().server.port)


def test_a_shortage_of_this_machine_is_not_told_as_the_syncers(monkeypatch):
    def no_more(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Client, "_connect", no_more)
    with pytest.raises(JoinTimeout, match=r"this machine cannot open a socket: too many open files \(ulimit -n\)"):
        fetch_config(*NOBODY, None, SHORT_S)


class Compiling(OnHost):
    """Its kernels take longer than anybody would wait for a syncer."""

    def warm_up(self, tell, each):
        time.sleep(2 * LONG_S)


def test_the_time_that_kernels_take_is_not_the_syncers(hands):
    hand = hands()
    home = Compiling(OwnMemory())
    shell = LearnerShell("here", LAYOUT, ByHand(NumpyParameters()), "127.0.0.1", hand.server.port, None, home=home)
    syncer = at_once(hand.take_in)
    shell.start(LONG_S)
    assert is_over(syncer) and shell.is_running
    shell.close(timeout_s=0.0)


@pytest.mark.parametrize("what", ["start", "fetch_config"])
def test_a_syncer_of_another_protocol_is_waited_for_and_named(shells, hands, what, caplog, monkeypatch):
    monkeypatch.setattr(learner_shell, "WAITING_SAYS_S", SHORT_S / 3)
    hand = hands(protocol=PROTOCOL + 1)
    with pytest.raises(JoinTimeout) as timeout:
        waits_in_vain(shells, what, "127.0.0.1", hand.server.port)
    differs = f"the syncer speaks protocol {PROTOCOL + 1} and the learner {PROTOCOL}: upgrade the older"
    assert f"for 0.3 s: {differs}; " in str(timeout.value)
    assert f"waiting for syncer 127.0.0.1:{hand.server.port} ({differs})" in caplog.messages


def test_one_that_comes_before_the_others_says_what_it_waits_for(shells, hands, caplog, monkeypatch):
    monkeypatch.setattr(learner_shell, "WAITING_SAYS_S", SHORT_S / 3)
    hand = hands()
    hand.configure(run={"gather_s": 10.0})
    held_back = "(the last fragment comes when the run begins, which waits for more learners)"

    def begin_when_it_has_said_so():
        hand.welcome()
        hand.hear(Report)
        while not any(line.endswith(held_back) for line in caplog.messages):
            hand.hear(Report)
        hand.publish(0)

    syncer = at_once(begin_when_it_has_said_so)
    shell = shells("127.0.0.1", hand.server.port)
    shell.start(WAIT_S)
    assert is_over(syncer) and shell.is_running


def test_one_that_is_turned_away_at_its_first_hello_waits_and_joins_when_that_is_put_right(shells, hands):
    hand = hands()

    def put_right():
        hand.hear(Hello)
        hand.say(Refused("not yet", "ahead"))
        hand.server.drop(hand.peer, "not yet")
        hand.hear(Lost)
        hand.take_in()

    syncer = at_once(put_right)
    shell = shells("127.0.0.1", hand.server.port)
    shell.start(WAIT_S)
    assert is_over(syncer) and shell.is_running and not shell.training.trouble


def test_one_that_is_turned_away_at_every_hello_says_why_when_it_gives_up(shells, hands):
    hand = hands()

    def refuse():
        hand.hear(Hello)
        hand.say(Refused("not yet", "ahead"))

    syncer = at_once(refuse)
    shell = shells("127.0.0.1", hand.server.port)
    assert is_over(syncer)
    with pytest.raises(JoinTimeout, match=r"for 0\.3 s: not yet; "):
        shell.start(SHORT_S)


def test_only_a_syncer_that_is_not_there_is_given_up(shells, hands):
    """The first version of a large model may be on its way for longer than anyone would wait for a syncer."""
    hand = hands()

    def take_its_time():
        hand.welcome()
        for _ in range(3):
            hand.hear(Report)  # a second lies between those of one that stands
        hand.publish(0)

    syncer = at_once(take_its_time)
    shell = shells("127.0.0.1", hand.server.port)
    shell.start(1.0)
    assert is_over(syncer) and shell.is_running


def test_an_answer_in_time_is_the_runs_configuration(hands):
    hand = hands()

    def answer():
        hand.hear(Ask)
        hand.say(Answer("run", configs.encode(hand.config)))

    syncer = at_once(answer)
    assert fetch_config("127.0.0.1", hand.server.port, None, WAIT_S) == hand.config and is_over(syncer)


def test_the_time_to_wait_is_what_is_given_else_what_the_environment_says(monkeypatch):
    monkeypatch.delenv("SKERRY_JOIN_TIMEOUT_S", raising=False)
    assert join_timeout(None, 300.0) == 300.0 and join_timeout(0, 300.0) == 0.0
    monkeypatch.setenv("SKERRY_JOIN_TIMEOUT_S", "7")
    assert join_timeout(None, 300.0) == 7.0 and join_timeout("2.5", 300.0) == 2.5


@pytest.mark.parametrize("words", ["soon", "-1", "nan", "inf"])
def test_a_time_that_is_none_is_refused_in_one_line(words, monkeypatch):
    monkeypatch.setenv("SKERRY_JOIN_TIMEOUT_S", words)
    with pytest.raises(ConfigError, match=f"= {words}: give seconds, or 0 to wait for ever"):
        join_timeout(None, 300.0)


# ---------------------------------------------------------------------------------------------- the run's time


def test_a_learner_speaks_as_often_as_the_run_says(shells, hands):
    """This syncer hangs up after a silence that is shorter than a client keeps by itself, or between two reports."""
    hand = hands(heartbeat_s=0.1, timeout_s=0.8)
    hand.configure(wire={"heartbeat_s": 0.1, "timeout_s": 0.8})
    syncer = at_once(hand.take_in)
    shells("127.0.0.1", hand.server.port).start(WAIT_S)
    assert is_over(syncer)
    for _ in range(3):
        hand.hear(Report)


def test_a_learner_gives_a_silent_syncer_up_as_soon_as_the_run_says(shells, hands):
    hand = hands(heartbeat_s=3600.0)
    hand.configure(wire={"heartbeat_s": 0.1, "timeout_s": 0.5})
    syncer = at_once(hand.take_in)
    shells("127.0.0.1", hand.server.port).start(WAIT_S)
    assert is_over(syncer)
    began = time.monotonic()
    hand.hear(Lost)
    assert time.monotonic() - began < TIMEOUT_S / 2
