"""The supervisor of a local run, over a real syncer process: it starts, watches, brings back, and leaves nobody."""

import os
import signal

import pytest

from e2e.processes import OPTIONS, write_genesis
from skerry.errors import RunFailed
from skerry.run.summary import Kill
from skerry.shell import local
from skerry.shell.local import Child, LocalRun

PATIENCE = 600  # looks at a run, a tenth of a second each


class Watched(LocalRun):
    """A local run without learners; `look` is called whenever there may be something to see."""

    def watch(self, look):
        looks = iter(range(PATIENCE))

        def show():
            assert next(looks, None) is not None, self.news
            look(self)

        self.run(show)

    def end(self):
        """Ask the syncer to end, which it does with exit code 0; once, for a second signal ends it at once."""
        if self.is_up and self.asked != self.syncer.process.pid:
            self.asked = self.syncer.process.pid
            self.syncer.process.terminate()

    asked = 0

    @property
    def is_up(self):
        """Its syncer, and no earlier one, has written the status."""
        return self.syncer.is_running and self.status.get("pid") == self.syncer.process.pid


@pytest.fixture
def run(tmp_path):
    arguments = ["--genesis", str(write_genesis(tmp_path / "genesis.safetensors")), *OPTIONS]
    return Watched(tmp_path / "run", [], [], syncer_arguments=arguments)


def test_it_ends_when_its_syncer_has(run):
    run.watch(Watched.end)
    assert run.syncer.ended and run.syncer.process.returncode == 0
    assert run.status["address"] == f"127.0.0.1:{run.port}" and not run.crashes and not run.news


def test_a_syncer_that_refuses_to_run_is_quoted_with_its_log(run, tmp_path):
    run.syncer_arguments[1] = str(tmp_path / "none.safetensors")
    with pytest.raises(RunFailed) as failed:
        run.watch(lambda _: None)
    said = str(failed.value)
    assert "none.safetensors: no such file" in said and str(run.syncer.log) in said and "\n" not in said


def test_who_is_killed_as_planned_is_back_in_its_place(run):
    """On the same port, where learners dial; a planned kill is no crash."""
    run.kills.append(Kill("syncer", 0.0))
    run.watch(lambda run: run.end() if run.kills[0].killed_at is not None else None)
    assert run.status["address"] == f"127.0.0.1:{run.port}" and run.status["epoch"] == 2
    assert [line.rpartition(" %  ")[2] for line in run.news] == ["syncer killed (SIGKILL)", "syncer started again"]
    assert not run.crashes


def test_who_crashes_is_brought_back_so_many_times_and_then_given_up(run, monkeypatch):
    monkeypatch.setattr(local, "CRASHES_MAX", 1)
    monkeypatch.setattr(local, "RESTART_S", 0.0)

    def crash(run):
        if run.is_up:
            run.syncer.process.kill()

    with pytest.raises(RunFailed, match=r"^syncer crashed 2 times: .*log: "):
        run.watch(crash)
    assert run.crashes == [f"syncer crashed (exit -9): see {run.syncer.log}"]


def test_a_run_goes_on_without_its_evaluator(run):
    """Here there is nothing that it could evaluate: it is refused, which is told once and harms nobody."""
    run.is_evaluated = True
    run.watch(lambda run: run.end() if run.news else None)
    assert run.syncer.process.returncode == 0 and not run.crashes
    assert len(run.news) == 1 and "the run goes on without its evaluator: --watch: the run has no" in run.news[0]


def test_who_was_driven_to_end_is_excused(run):
    def look(run):
        if run.is_up and not run.news:
            run.syncer.excused_s = 0.0
            run.syncer.process.kill()
        elif run.news:
            run.end()

    run.watch(look)
    assert run.syncer.crashes == 0 and not run.crashes
    assert "syncer ended (exit -9)" in run.news[0] and "started again" in run.news[1]


@pytest.mark.parametrize("how", ["error", "SIGTERM"])
def test_however_it_ends_no_process_is_left(run, how):
    def look(run):
        if how == "error":
            raise ZeroDivisionError
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError if how == "error" else KeyboardInterrupt):
        run.watch(look)
    assert run.syncer.process.returncode == 0, "asked to end, not killed"
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_does_not_end_when_asked_is_ended(run, monkeypatch):
    monkeypatch.setattr(local, "TERM_S", 0.2)

    def look(run):
        run.syncer.process.send_signal(signal.SIGSTOP)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.watch(look)
    assert run.syncer.process.returncode == -signal.SIGKILL


def test_a_status_that_is_not_there_or_no_status_changes_nothing(tmp_path):
    run = LocalRun(tmp_path, [], [], status={"progress": 0.5})
    assert not run.read_status()
    (tmp_path / "status.json").write_bytes(b'{"progress": 0.')
    assert not run.read_status() and run.status == {"progress": 0.5}
    (tmp_path / "status.json").write_bytes(b'{"progress": 0.75}')
    assert run.read_status() and run.status == {"progress": 0.75}


def test_a_child_that_said_nothing_is_said_to_have(tmp_path):
    child = Child("quiet", [], tmp_path / "quiet.log")
    assert not child.is_running and child.last_line() == "it said nothing"
    child.log.write_bytes(b"one\nskerry: two \xff\n\n")
    assert child.last_line().startswith("skerry: two")
