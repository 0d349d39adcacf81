"""The syncer's loop: real sockets, a real disk, real time; learners are puppets or a real one in this process."""

import json
import os
import resource
import socket
import threading
import time

import pytest

from e2e.processes import FRAGMENTS, SHAPES, Puppet, facts_of, status_of, until, write_genesis
from node.pair import NumpyParameters, config_of
from skerry.algo.fragments import Tensor, layout_of
from skerry.core.facts import Checkpointed, Committed, Paused, PhaseChanged
from skerry.core.state import fold
from skerry.errors import StoreError
from skerry.node.training import ByHand
from skerry.run.genesis import create_run, read_genesis
from skerry.shell.learner import LearnerShell
from skerry.shell.syncer import SyncerShell, write_json
from skerry.store import Store

WAIT_S = 60.0
LAYOUT = layout_of(Tensor(n, s, "embedding" if "emb" in n else "other") for n, s in SHAPES.items())


class Serving:
    """A syncer's shell on a thread of its own."""

    def __init__(self, root, steps=10**6, learners=1):
        self.run_dir = root / "run"
        sync = {"num_fragments": FRAGMENTS, "sync_every": 2, "fragment_sync_delay": 1}
        with Store.open(self.run_dir) as store:
            create_run(store, config_of(learners, steps, sync=sync), *read_genesis(write_genesis(root / "genesis")))
        self.store = Store.open(self.run_dir)
        self.shell = SyncerShell(self.store, "127.0.0.1", 0, None)
        self.is_wanted = threading.Event()
        self.is_wanted.set()
        self.reason = None
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self):
        self.reason = self.shell.run(self.is_wanted.is_set)

    def end(self):
        """Why it ended, once it has been told to."""
        self.is_wanted.clear()
        return self.ended()

    def ended(self):
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self.reason

    @property
    def port(self):
        return self.shell.server.port

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        self.store.close()


def train(port):
    """A learner that steps until the run wants no more of it, and leaves."""
    learner = LearnerShell("island", LAYOUT, ByHand(NumpyParameters()), "127.0.0.1", port, None)
    learner.start(join_timeout_s=WAIT_S)
    while learner.step(10):
        time.sleep(0.005)  # what a step takes
    learner.close()
    return learner.training.left.way


def test_it_serves_until_the_run_is_closed_and_lets_its_learner_hear_so(tmp_path):
    with Serving(tmp_path, steps=12) as serving:
        assert train(serving.port) == "done"
        assert serving.ended() == "closed"
        status = status_of(serving.run_dir)
    assert status["phase"] == "closed" and status["progress"] == 1.0 and status["tokens"]["pending"] == 0
    phases = [fact.phase for fact in facts_of(serving.run_dir) if isinstance(fact, PhaseChanged)]
    assert phases == ["training", "closing", "closed"]


def test_it_ends_when_it_is_not_wanted_any_more_and_the_tape_says_where(tmp_path):
    with Serving(tmp_path) as serving:
        with Puppet(serving.port) as puppet:
            puppet.merge_once()
            assert serving.end() == "interrupted"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", serving.port), timeout=WAIT_S)
    facts = facts_of(serving.run_dir)
    assert isinstance(facts[-1], Paused) and fold(facts).ledger.account("puppet", 1).step > 0


def test_its_status_says_who_it_is_and_where_things_stand(tmp_path):
    with Serving(tmp_path) as serving:
        status = until(lambda: status_of(serving.run_dir), "a status")
        assert (status["pid"], status["address"]) == (os.getpid(), f"127.0.0.1:{serving.port}")
        with Puppet(serving.port) as puppet:
            puppet.merge_once()
            status = until(lambda: (s := status_of(serving.run_dir))["merges"] and s, "a merge in the status")
        assert list(status["learners"]) == ["puppet"] and status["bytes_in"] > 0
    assert not list(serving.run_dir.glob("*.tmp"))


def test_its_status_says_that_rounds_wait_for_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("skerry.node.syncer.BEHIND_BYTES", -1)  # as if more waited than may
    with Serving(tmp_path) as serving:
        waits = until(lambda: (status_of(serving.run_dir) or {}).get("waiting"), "a status")
        assert waits == "for the disk: 0 B of merges are to be written"


def test_a_status_that_cannot_be_written_stops_nobody_and_is_said_once(tmp_path, caplog):
    with Serving(tmp_path) as serving:
        blocked = serving.run_dir / "status.json.tmp"
        blocked.mkdir()
        with Puppet(serving.port) as puppet:
            assert puppet.merge_once() == 1
            until(lambda: "status.json cannot be written" in caplog.text, "a line about it")
            assert puppet.merge_once() >= 1
        for _ in range(3):
            serving.shell._keep_status(b"{}")
        blocked.rmdir()
        until(lambda: "status.json can be written again" in caplog.text, "a line about that")
    assert caplog.text.count("status.json") == 2


def test_a_learner_that_vanishes_is_lost_and_the_others_go_on(tmp_path):
    with Serving(tmp_path) as serving, Puppet(serving.port, "stays") as stays:
        with Puppet(serving.port, "goes"):
            pass
        until(lambda: not serving.shell.node.machine.members["goes"].connected, "the loss to be noticed")
        stays.merge_once()
        assert [name for name, _ in serving.shell.learners.links] == ["stays"]


@pytest.mark.parametrize("call", ["commit", "put"])
def test_a_disk_that_fails_under_the_writer_or_a_worker_stops_the_process(tmp_path, monkeypatch, call):
    """A merge is committed by the one, and its checkpoint put by the other."""

    def fail(*_):
        raise StoreError("the disk is full")

    with Serving(tmp_path) as serving, Puppet(serving.port) as puppet:
        fragment = puppet.pulled()
        monkeypatch.setattr(serving.store, call, fail)
        monkeypatch.setattr(threading, "excepthook", lambda failure: failures.append(failure.exc_value))
        failures = []
        puppet.contribute(fragment)
        serving.ended()
        if call == "commit":
            assert puppet.base == [0] * FRAGMENTS, "no version has left"
    assert [str(failure) for failure in failures] == ["the disk is full"]
    merged = [fact for fact in facts_of(serving.run_dir) if isinstance(fact, Committed)]
    assert merged == [] if call == "commit" else len(merged) <= 1
    assert not any(isinstance(fact, Checkpointed) for fact in facts_of(serving.run_dir))


def test_a_model_larger_than_the_window_gets_there_a_fragment_at_a_time(tmp_path):
    with Serving(tmp_path) as serving:
        window, on_way = serving.shell.node.machine.window, []
        window.bytes_max = window.streams = 1

        def watched(sending, waiting, admitted=window.admitted):
            found = admitted(sending, waiting)
            on_way.append([*sending, *found])
            return found

        window.admitted = watched
        with Puppet(serving.port) as puppet:
            assert puppet.base == [0] * FRAGMENTS and on_way == [[p] for p in range(FRAGMENTS)]
            assert puppet.merge_once() == 1


def test_no_payload_is_read_while_too_many_bytes_wait_but_reports_are(tmp_path):
    with Serving(tmp_path) as serving, Puppet(serving.port) as puppet:
        shell, fragment = serving.shell, puppet.pulled()
        shell.inbox.bytes_max = -1
        until(lambda: shell.server._bulk_paused, "reading payloads to pause")
        puppet.contribute(fragment)
        puppet.step += 100
        puppet._report()
        until(lambda: shell.node.machine.members["puppet"].report.step == puppet.step, "its report")
        assert shell.node.machine.held.bytes == 0 and shell.inbox.has_room is False
        shell.inbox.bytes_max = 1 << 20
        assert puppet.merged(fragment) >= 1


def test_it_says_that_it_has_too_few_descriptors_for_its_learners(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    monkeypatch.setattr("skerry.shell.syncer._allow_files", lambda: None)
    with Serving(tmp_path, learners=2):
        assert "64 open files are room for 1 learner, and the run is for 2: raise the hard limit" in caplog.text


def test_a_record_is_replaced_as_a_whole(tmp_path):
    for record in ({"much": "x" * 10_000}, {"little": 1}):
        write_json(tmp_path / "status.json", record)
        assert json.loads((tmp_path / "status.json").read_bytes()) == record
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
