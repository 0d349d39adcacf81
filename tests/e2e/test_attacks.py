"""Attacks by who holds what a learner holds, on a real syncer that an honest learner trains with all the while.

Floods are in `test_floods.py`, whatever can be said at all in `test_fuzz.py`, keys in `test_keys.py`.
"""

import contextlib
import signal
import threading

import pytest

from e2e.processes import (
    OPTIONS,
    POLL_S,
    Puppet,
    Running,
    Syncer,
    processes_naming,
    secret,
    skerry,
    status_of,
    until,
)
from e2e.test_processes import SMALL
from skerry.core.facts import COUNT_MAX

TOO_SLOW = 60.0  # seconds a step, by who lies about it


class Honest(Puppet):
    """It trains in a thread of its own until it is left; `made` are the versions that have its work."""

    def __init__(self, port, name="honest"):
        super().__init__(port, name)
        self.made, self.failure = [], None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self):
        try:
            while not self._is_over.is_set():
                self.made.append(self.merge_once())
        except BaseException as error:
            self.failure = error

    def merges(self, count):
        """Wait until so many more versions have its work."""
        before = len(self.made)
        until(lambda: self.failure or len(self.made) >= before + count, f"{count} merges of {self.name}")
        assert self.failure is None, self.failure

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join(30)
        super().__exit__()


def options(**changes):
    """Those of the small run, and these instead."""
    words = [word for word in OPTIONS if word.partition("=")[0].removeprefix("--") not in changes]
    return [*words, *(f"--{key}={value}" for key, value in changes.items())]


@pytest.mark.parametrize("steps", [10**9, COUNT_MAX // 1000], ids=["a billion steps", "as many as can be said"])
def test_claims_that_nobody_can_have_done_do_not_end_the_run(tmp_path, steps):
    with Syncer(tmp_path, options=options(**{"run.steps": 10**7})) as syncer, Honest(syncer.port) as honest:
        honest.merges(3)
        with Puppet(syncer.port, "liar") as liar:
            liar.step = steps
            liar._report()
            until(lambda: syncer.status["learners"].get("liar", {}).get("step") == steps, "its claim to be heard")
            honest.merges(5)
        status = syncer.status
        assert status["progress"] < 0.01 and status["phase"] not in ("closing", "closed")
    with Syncer(tmp_path) as syncer, Honest(syncer.port) as honest:  # the same run, by another process
        honest.merges(5)
        assert syncer.status["progress"] < 0.01 and "budget is spent" not in syncer.said


def test_who_steps_and_never_contributes_does_not_stop_the_others(tmp_path):
    """One honest learner, three that are not, and K is half of them."""
    words = options(**{"sync.quorum": 0.5, "sync.stall_s": 0.5, "run.learners": 4})
    with Syncer(tmp_path, options=words) as syncer, contextlib.ExitStack() as idle, Honest(syncer.port) as honest:
        honest.merges(3)
        idlers = [idle.enter_context(Puppet(syncer.port, name)) for name in ("w", "x", "y")]
        is_over = threading.Event()

        def step():
            while not is_over.wait(POLL_S):
                for idler in idlers:
                    idler.step += 1
                    idler._report()

        stepping = threading.Thread(target=step, daemon=True)
        stepping.start()
        until(lambda: syncer.status["quorum"] == 1 and "not counted" in syncer.status["waiting"], "their verdict")
        honest.merges(10)
        is_over.set()
        stepping.join()


def test_a_second_process_of_a_live_name_is_turned_away_and_the_first_does_not_notice(tmp_path):
    with Syncer(tmp_path) as syncer, Honest(syncer.port) as honest:
        with pytest.raises(AssertionError, match="in use"):
            Puppet(syncer.port, "honest")
        honest.merges(3)
        until(lambda: syncer.status["learners"].get("honest", {}).get("life") == honest.life == 1, "its status")


def test_a_local_process_without_its_secret_does_not_join_a_run_of_train(tmp_path):
    run = tmp_path / "run"
    endless = ["--steps", "1000000"]  # however slowly the others start
    with Running(tmp_path, "train", *SMALL, *endless, "--out", run, "--json") as train:
        until(lambda: status_of(run).get("merges", 0) > 1, "the run to train")
        port = int(status_of(run)["address"].rpartition(":")[2])
        told = skerry("status", f"127.0.0.1:{port}")
        assert told.returncode == 2 and "token" in told.stderr, told.stderr
        merges = status_of(run)["merges"]
        until(lambda: status_of(run)["merges"] > merges, "the run to go on")
        train.signal(signal.SIGINT)
        assert train.wait() == 130, "it was running until then"
    assert not processes_naming(str(run))


def test_links_that_somebody_has_put_into_a_run_directory_are_not_written_through(tmp_path):
    target = secret(tmp_path / "precious", "as it was")
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    for name in ("status.json.tmp", "status.json", "lock"):
        (run / name).symlink_to(target)
    with contextlib.suppress(AssertionError), Syncer(tmp_path) as syncer, Honest(syncer.port) as honest:
        honest.merges(2)
    assert target.read_text() == "as it was"


@pytest.mark.parametrize(
    ("content", "mode", "says"), [("x", 0o600, "at least 128"), ("0123456789abcdef" * 2, 0o666, "chmod 600")]
)
def test_a_token_that_can_be_guessed_or_read_is_refused(tmp_path, content, mode, says):
    file = secret(tmp_path / "token", content)
    file.chmod(mode)
    told = skerry("syncer", "--run", tmp_path / "run", "--port", "0", "--token-file", file)
    assert told.returncode == 2 and says in told.stderr and not (tmp_path / "run").exists()
