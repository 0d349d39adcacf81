"""What runs beside a training loop: all kinds train alike, and what becomes of one half when the other is gone.

Real processes and sockets, against a syncer played by hand. Nothing here asserts a time.
"""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import pytest

from e2e.processes import until
from shell.hand import KINDS, WAIT_S, Hand, at_once, is_over, learner_of
from skerry.algo.fragments import Tensor, layout_of
from skerry.core.messages import Contribution, Hello, Pull, Rejected, Report
from skerry.errors import ConfigError
from skerry.shell import beside
from skerry.shell import learner as learner_shell
from skerry.shell.beside import Silence
from skerry.shell.learner import node_kind
from skerry.shell.node import Absence
from skerry.wire.server import Server
from skerry.wire.transport import Inbox, Lost

TENSORS = 6_000  # whose names and shapes are more than a socket's buffer holds


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


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_syncer_that_is_lost_and_one_that_is_back_are_told_of_once(hand, joined, kind, caplog):
    caplog.set_level(logging.INFO, "skerry")
    shell = joined(kind)
    hand.server.close()
    look_until(shell, lambda: told(caplog, "is lost: "))
    hand.inbox = Inbox()
    hand.server = Server("127.0.0.1", hand.server.port, None, hand.inbox, hand._payload_bytes)
    hand.welcome()
    look_until(shell, lambda: told(caplog, "is back after"))
    assert {record.levelno for words in ("is lost", "is back") for record in told(caplog, words)} == {logging.WARNING}
    assert len(told(caplog, "is back")) == len(told(caplog, "joined run")) == 1


def look_until(shell, condition):
    until(lambda: shell.is_running and condition(), "a word of the node's")


def told(caplog, words):
    return [record for record in caplog.records if words in record.getMessage()]


def test_that_it_stays_away_is_said_once_a_minute_and_is_one_warning(caplog):
    caplog.set_level(logging.INFO, "skerry")
    absence = Absence("sea:1")
    for now in (0.0, 59.0, 60.0, 119.0, 120.0):
        absence.look(False, "connection refused", now)
    assert caplog.messages == [
        f"syncer sea:1 is lost{since}: connection refused; it is dialled on"
        for since in ("", " for 60 s", " for 120 s")
    ]
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO, logging.INFO]


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


def test_a_node_that_stands_is_no_connection_and_is_told_of(hand, joined, caplog):
    hand.configure(wire={"heartbeat_s": 0.2, "timeout_s": 1.0})
    shell = joined("process")
    node = shell.beside.pid
    os.kill(node, signal.SIGSTOP)
    until(lambda: train(shell) and told(caplog, f"node process {node} is stopped (kill -CONT"), "a word")
    assert not shell.standing.connected and shell.standing.trouble.startswith(f"the learner's node process {node} is")
    os.kill(node, signal.SIGCONT)
    until(lambda: train(shell) and told(caplog, "node process is back after"), "another")
    assert "node process" not in shell.standing.trouble


def test_that_a_node_gives_no_sign_of_life_is_said_once_and_so_is_its_return(caplog):
    silence, node = Silence(), SimpleNamespace(heard_at=5.0, standstill="")
    for as_of in (15.0, 15.5, 40.0):
        silence.look(node, 10.0, as_of)
    node.heard_at = 41.0
    for as_of in (41.0, 42.0):
        silence.look(node, 10.0, as_of)
    assert caplog.messages == [
        "the learner's node process gives no sign of life for 10 s; training goes on, and nothing of it is shared "
        "meanwhile",
        "the learner's node process is back after 36 s",
    ]


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
        "the learner's node process was ended by SIGKILL: another takes its place; the loop stands until it has "
        "joined, and the model is the run's"
    ]


def test_a_syncer_that_is_away_when_the_node_dies_is_waited_for_and_ends_no_loop(hand, joined, caplog, monkeypatch):
    monkeypatch.setattr(learner_shell, "WAITING_SAYS_S", 0.1)
    shell = joined("process")
    shell._join_timeout_s = 0.2
    hand.server.close()
    first = shell.beside.pid
    os.kill(first, signal.SIGKILL)

    def train_on():
        while shell.beside.pid == first:
            train(shell, 1.0)

    step = at_once(train_on)
    until(lambda: len(told(caplog, "(connection refused)")) > 5, "that it waits longer than it would to join")
    hand.inbox = Inbox()
    hand.server = Server("127.0.0.1", hand.server.port, None, hand.inbox, hand._payload_bytes)
    hand.take_in()
    assert is_over(step) and shell.is_running and not shell.parameters.values[0].any()


def test_a_loop_that_stands_for_another_node_leaves_when_it_is_told_to_and_names_what_is_lost(hand, joined):
    shell = joined("process")
    hand.server.close()
    os.kill(shell.beside.pid, signal.SIGKILL)
    shell._is_wanted = lambda: False
    with pytest.raises(KeyboardInterrupt):
        while True:
            train(shell)
    left = shell.close()
    assert left.steps_lost > 0 and left.reason.startswith(
        f"{left.steps_lost} were open when the learner's node process was ended by SIGKILL, and may not be in the run; "
        "after that: it left"
    )


def test_one_that_dies_again_and_again_is_given_up_with_a_word(hand, joined, monkeypatch):
    shell = joined("process")
    monkeypatch.setattr(beside, "ONE_THREAD", ())
    monkeypatch.setattr(beside.sys, "executable", "/bin/false")
    os.kill(shell.beside.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="node process ended by itself with code 1, 4 times within 60 s"):
        while True:
            train(shell)


def test_a_closing_takes_no_longer_because_the_node_is_stopped(hand, joined, caplog, monkeypatch):
    monkeypatch.setattr(learner_shell, "ANSWER_S_MAX", 100 * WAIT_S)  # it is not waited for an answer
    hand.configure(learner={"leave_timeout_s": 0.1})
    shell = joined("process")
    train(shell)
    node = shell.beside.pid
    os.kill(node, signal.SIGSTOP)
    assert is_over(at_once(shell.close)) and is_gone(node)
    assert f"here: left without an answer: the learner's node process {node} is stopped (kill -CONT" in caplog.text


def test_a_node_that_is_killed_while_it_hands_over_what_is_left_is_heard_of(hand, joined, caplog):
    shell = joined("process")
    train(shell)
    closing = at_once(shell.close)
    hand.hear(Report, lambda report: report.state == "leaving")
    os.kill(shell.beside.pid, signal.SIGKILL)
    assert is_over(closing)
    assert "here: left without an answer: the learner's node process was ended by SIGKILL; its last" in caplog.text


def test_who_waits_to_join_is_told_that_the_node_is_stopped(hand, caplog, monkeypatch):
    monkeypatch.setattr(learner_shell, "WAITING_SAYS_S", 0.1)
    shell = learner_of("process", "127.0.0.1", hand.server.port)
    joining = at_once(lambda: shell.start(WAIT_S))
    hand.welcome()
    hand.hear(Report)
    os.kill(shell.beside.pid, signal.SIGSTOP)
    until(lambda: f"node process {shell.beside.pid} is stopped" in caplog.text, "a word")
    os.kill(shell.beside.pid, signal.SIGCONT)
    hand.publish(0)
    assert is_over(joining)
    shell.close(timeout_s=0.0)


def test_a_loop_that_stands_in_a_fast_forward_is_told_that_the_node_is_stopped(hand, joined, caplog, monkeypatch):
    monkeypatch.setattr(learner_shell, "WAITING_SAYS_S", 0.1)
    shell = joined("process")
    os.kill(shell.beside.pid, signal.SIGSTOP)
    shell.training.is_forwarding = True  # one half of it was written
    step = at_once(lambda: train(shell))
    words = f"until the run's model is whole: the learner's node process {shell.beside.pid} is stopped"
    until(lambda: words in caplog.text, "a word")
    shell.training.is_forwarding = False
    os.kill(shell.beside.pid, signal.SIGCONT)
    assert is_over(step)


def test_a_model_of_more_tensors_than_a_socket_holds_joins():
    layout = layout_of([Tensor(f"layers.{number}.weight", (3,)) for number in range(TENSORS)])
    hand = Hand(layout)
    shell = learner_of("process", "127.0.0.1", hand.server.port, layout)
    syncer = at_once(hand.take_in)
    joining = at_once(lambda: shell.start(WAIT_S))
    assert is_over(syncer) and is_over(joining) and shell.step(10)
    shell.close(timeout_s=0.0)
    hand.server.close()


# ---------------------------------------------------------------------------------------------- a program of somebody's

BEGIN = """
    import multiprocessing, os, sys
    sys.path[:0] = sys.argv[2].split(":")
    from node.pair import NumpyParameters
    from shell.hand import LAYOUT
    from skerry.node.training import ByHand
    from skerry.shell.learner import LearnerShell
    node = sys.argv[3]
    shell = LearnerShell("here", LAYOUT, ByHand(NumpyParameters()), "127.0.0.1", int(sys.argv[1]), None, node)
    print(shell.node_pid, flush=True)
    shell.start(600.0)
"""

SMALL = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
"""

TRAIN = """
    while True:
        shell.step(10)
"""

FORK = """
    if not (child := os.fork()):
        try:
            while shell.is_running and not shell.training.must_stand:
                shell.step(10)
        except RuntimeError as error:
            print(error, flush=True)
        shell.close()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(child, flush=True)
    print(shell.step(10), flush=True)
    shell.close()
    print(shell.training.left.way, flush=True)
"""

WORKERS = """
    def work(number):
        assert shell.is_running
        return number, shell.training.progress

    with multiprocessing.get_context("fork").Pool(2) as workers:
        for number in range(100):
            assert workers.apply(work, (number,)) == (number, 0.0)
            assert shell.step(10)
        shell.close()  # while they have what was open here
        print(shell.training.left.way, shell.beside._process.returncode, flush=True)
"""


def program(hand, body, node="process", before=""):
    """It joins, in a process of its own."""
    words = "".join(map(textwrap.dedent, (before, BEGIN, body)))
    command = [sys.executable, "-c", words, str(hand.server.port), ":".join(sys.path), node]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_node_that_cannot_begin_is_not_started_again(hand):
    with program(hand, TRAIN, before=SMALL) as process:
        hand.welcome()
        _, said = process.communicate(timeout=WAIT_S)
    assert said.count("File too large") == 1, "it has no room for its cells"
    last = said.splitlines()[-1]
    assert "the learner's node process ended by itself with code 1: what it said last" in last
    assert 'node="thread" (SKERRY_NODE=thread)' in last and process.returncode == 1


@pytest.fixture
def trainer(hand):
    with program(hand, TRAIN) as process:
        yield process
        process.kill()


def settle(hand):
    """One that leaves hands over what is left."""
    hand.hear(Report, lambda report: report.state == "leaving")
    hand.publish(1, settled=hand.pulled())


@pytest.mark.parametrize("node", ["thread", "process"])
def test_a_fork_of_the_trainer_is_no_learner_and_does_the_trainers_no_harm(hand, node):
    with program(hand, FORK, node) as process:
        hand.take_in()
        settle(hand)
        out, said = process.communicate(timeout=WAIT_S)
    _, refused, child, going, way = out.splitlines()
    whose = f"this learner is of process {process.pid}, from which this one was forked"
    assert refused == f"step() in process {child}: {whose}; step there, or attach a model here"
    assert f"close() in process {child} does nothing: {whose}" in said
    assert (going, way, process.returncode) == ("True", "settled", 0)


def test_forked_workers_do_their_work_and_keep_no_node_from_ending(hand):
    with program(hand, WORKERS) as process:
        hand.take_in()
        settle(hand)
        out, _ = process.communicate(timeout=WAIT_S)
    assert out.splitlines()[1:] == ["settled 0"], "it was not killed"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_trainer_that_is_killed_takes_its_node_with_it(hand, trainer, is_stopped):
    node = int(trainer.stdout.readline())
    hand.take_in()
    if is_stopped:
        os.kill(node, signal.SIGSTOP)
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


def test_nobody_can_take_the_memory_of_its_cells_from_under_it(hand, joined):
    shell = joined("process")
    with open(f"/proc/{shell.beside.pid}/fd/{shell.beside.lay.file}", "r+b") as file, pytest.raises(PermissionError):
        file.truncate(0)


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
