"""What runs beside a training loop: all kinds train alike, and what becomes of one half when the other is gone.

Real processes and sockets, against a syncer played by hand. Nothing here asserts a time.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from e2e.processes import until
from shell.hand import KINDS, WAIT_S, Hand, at_once, is_over, learner_of
from skerry.core.messages import Contribution, Hello, Pull, Rejected, Report
from skerry.errors import ConfigError
from skerry.shell import beside
from skerry.shell.learner import node_kind
from skerry.wire.transport import Lost


@pytest.fixture
def hand():
    hand = Hand()
    yield hand
    hand.server.close()


@pytest.fixture
def joined(hand):
    made = []

    def join(kind):
        shell = learner_of(kind, "127.0.0.1", hand.server.port)
        made.append(shell)
        syncer = at_once(hand.take_in)
        shell.start(WAIT_S)
        assert is_over(syncer)
        return shell

    yield join
    for shell in made:
        shell.close(timeout_s=0.0)


def train(shell, drift=0.0):
    """One step that adds so much to every parameter."""
    shell.parameters.values[0] += np.float32(drift)
    return shell.step(10)


def heard(hand, kind, is_it=lambda message: True):
    """In a thread of its own, so that the loop goes on; a list that will have it."""
    found = []
    at_once(lambda: found.append(hand.hear(kind, is_it)))
    return found


def contribution(hand, shell):
    """What it answers a pull with; it is asked once it has said that it has taken a step."""
    hand.hear(Report, lambda report: report.step > 0)
    hand.say(Pull(1, 1, 0, 0, False, 0.0))
    found = heard(hand, Contribution)
    while not found:
        train(shell)
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_it_contributes_its_drift_and_adopts_what_comes_of_it(hand, joined, kind):
    shell = joined(kind)
    train(shell, 1.0)
    c = contribution(hand, shell)
    assert (c.base_version, c.from_step) == (0, 0) and c.to_step >= 1
    hand.theta = hand.theta + np.float32(3.0)  # the others have gone further
    hand.publish(1, settled=c)
    while not (shell.parameters.values[0] == 3.0).all():  # its own is taken out, and is in the version
        train(shell)
    assert shell.is_running and shell.training.applied[0].version == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_contribution_sets_the_model_to_the_newest_version_before_the_next_step(hand, joined, kind):
    shell = joined(kind)
    train(shell, 1.0)
    c = contribution(hand, shell)
    hand.say(Rejected(1, 1, 0, c.seq, "rolled back", True))
    while shell.parameters.values[0].any():
        train(shell)
    assert shell.parameters.optimizer_resets == 1 and not shell.training.must_stand


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_while_there_is_no_syncer(hand, joined, kind):
    shell = joined(kind)
    hand.server.close()
    for _ in range(100):
        assert train(shell, 1.0)
    assert (shell.parameters.values[0] == 100.0).all()


def test_training_never_waits_for_a_node_that_stands(hand, joined):
    """It says what it does to one that reads nothing, for longer than any buffer lasts."""
    shell = joined("process")
    os.kill(shell.beside.pid, signal.SIGSTOP)
    for _ in range(20_000):
        assert train(shell)
    os.kill(shell.beside.pid, signal.SIGCONT)
    found = heard(hand, Report, lambda report: report.step == 20_000)
    while not found:
        shell.beside.wake()
        time.sleep(0.01)


def test_a_trainer_that_keeps_the_interpreter_to_itself_keeps_no_report_back(hand, joined):
    shell = joined("process")
    interval = sys.getswitchinterval()
    train(shell)
    sys.setswitchinterval(3600.0)
    try:
        before = time.monotonic()
        while time.monotonic() - before < 3.0:  # no other thread of this process runs
            pass
    finally:
        sys.setswitchinterval(interval)
    reports = [hand.hear(Report).number for _ in range(3)]  # at least one a second came meanwhile
    assert reports == sorted(reports)


# ---------------------------------------------------------------------------------------------- one half is gone


def take_in_again(hand):
    hand.hear(Lost)
    hand.take_in()


def test_a_node_process_that_is_killed_is_followed_by_another_life_on_the_runs_model(hand, joined, caplog):
    shell = joined("process")
    train(shell, 1.0)
    first = shell.beside.pid
    syncer = at_once(lambda: take_in_again(hand))
    os.kill(first, signal.SIGKILL)
    while shell.beside.pid == first:
        train(shell, 1.0)
    assert is_over(syncer) and shell.is_running
    assert not shell.parameters.values[0].any(), "steps of which nobody knows the base are given up"
    assert shell.training.step_count <= 1
    said = [line for line in caplog.messages if "another takes its place" in line]
    assert said == [
        "the learner's node process was ended by SIGKILL: another takes its place, and the model is set to the run's"
    ]


def test_one_that_dies_again_and_again_is_given_up_with_a_word(hand, joined, monkeypatch):
    shell = joined("process")
    monkeypatch.setattr(beside, "ONE_THREAD", ())
    monkeypatch.setattr(beside.sys, "executable", "/bin/false")
    os.kill(shell.beside.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="node process ended by itself with code 1, 4 times within 60 s"):
        while True:
            train(shell)


TRAINER = """
    import sys
    sys.path[:0] = sys.argv[2].split(":")
    from node.pair import NumpyParameters
    from shell.hand import LAYOUT
    from skerry.node.training import ByHand
    from skerry.shell.learner import LearnerShell
    shell = LearnerShell("here", LAYOUT, ByHand(NumpyParameters()), "127.0.0.1", int(sys.argv[1]), None, "process")
    print(shell.beside.pid, flush=True)
    shell.start(600.0)
    while True:
        shell.step(10)
"""


@pytest.fixture
def trainer(hand):
    """A program of somebody's that joins, in a process of its own."""
    words = [sys.executable, "-c", textwrap.dedent(TRAINER), str(hand.server.port), ":".join(sys.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_trainer_that_is_killed_takes_its_node_with_it(hand, trainer):
    node = int(trainer.stdout.readline())
    hand.take_in()
    trainer.kill()
    until(lambda: is_gone(node), "the node to end")
    hand.hear(Lost)


def test_one_that_is_told_to_end_while_it_waits_to_join_does_and_takes_its_node_with_it(hand, trainer):
    """It has no handler of its own, and none of ours: the signal ends it, whatever it waits for."""
    node = int(trainer.stdout.readline())
    hand.hear(Hello)
    trainer.terminate()
    assert trainer.wait(WAIT_S) == -signal.SIGTERM
    until(lambda: is_gone(node), "the node to end")
    hand.hear(Lost)


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"  # of a machine where nobody waits for orphans
    except FileNotFoundError:
        return True


def test_it_knows_no_torch_and_nothing_of_it_is_on_its_command_line(hand, joined):
    shell = joined("process")
    with open(f"/proc/{shell.beside.pid}/maps") as file:
        assert "libtorch" not in file.read()
    with open(f"/proc/{shell.beside.pid}/cmdline") as file:
        assert "here" not in file.read().split("\0")


def test_an_interrupt_is_for_the_trainer(hand, joined):
    shell = joined("process")
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(shell.beside.pid, number)
    found = heard(hand, Report, lambda report: report.step == 7)
    for _ in range(7):
        train(shell)
    until(lambda: found, "the node to report")
    assert not shell.beside.obituary


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_which_kind_it_is_may_be_said(monkeypatch, kind):
    monkeypatch.delenv("SKERRY_NODE", raising=False)
    assert node_kind(None) == "process" and node_kind(kind) == kind
    monkeypatch.setenv("SKERRY_NODE", kind)
    assert node_kind(None) == kind and node_kind("thread") == "thread"
    monkeypatch.setenv("SKERRY_NODE", "fork")
    with pytest.raises(ConfigError, match='fork: give "process" or "thread"'):
        node_kind(None)


def test_where_there_is_no_memory_to_share_it_is_a_thread(monkeypatch):
    monkeypatch.delenv("SKERRY_NODE", raising=False)
    monkeypatch.delattr(os, "memfd_create")
    assert node_kind(None) == "thread"
    with pytest.raises(ConfigError, match="memfd_create"):
        node_kind("process")
