"""The supervisor of a local run, over a real syncer process: it starts, watches, brings back, and leaves nobody."""

import errno
import json
import os
import signal
import socket
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from e2e.processes import OPTIONS, write_genesis
from node.test_record import RECORD
from skerry.core.messages import PauseRun
from skerry.engines import LINE_BYTES_MAX, LINE_CHARS_MAX, Member, engine, folder, lines_of, local, supervisor
from skerry.engines.child import Child
from skerry.engines.spec import Island
from skerry.engines.supervisor import LocalRun
from skerry.errors import AddressInUse, DiskFull, NoAnswer, Refusal, RunFailed, StoreError, one_line
from skerry.run.status import ending_of
from skerry.run.summary import Kill
from skerry.shell.identity import read_admin_token
from skerry.wire.inquiry import ask_status, give_order

PATIENCE = 600  # looks at a run, a tenth of a second each


class Watched(LocalRun):
    """A local run without learners; `look` is called whenever there may be something to see."""

    def watch(self, look):
        looks = iter(range(PATIENCE))

        def show():
            assert next(looks, None) is not None, self.news
            look(self)

        try:
            self.run(show)
        except KeyboardInterrupt:
            if not self.asked:
                raise

    def end(self):
        """Order the run to be paused, which ends its syncer with exit code 0 and the run as an interrupt does; once."""
        if self.is_up and self.asked != self.syncer.process.pid:
            self.asked = self.syncer.process.pid
            give_order("127.0.0.1", self.port, PauseRun(), read_admin_token(self.run_dir))

    asked = 0

    @property
    def is_up(self):
        """Its syncer, and no earlier one, has written the status."""
        return self.syncer.is_running and self.status.get("pid") == self.syncer.process.pid


@pytest.fixture
def run(tmp_path):
    arguments = ["--genesis", str(write_genesis(tmp_path / "genesis.safetensors")), *OPTIONS]
    return Watched(tmp_path / "run", [], [], syncer_arguments=arguments)


def test_it_ends_when_an_order_ends_its_syncer(run):
    run.watch(Watched.end)
    assert run.asked and ending_of(run.run_dir) == "ordered"
    assert run.syncer.ended and run.syncer.process.returncode == 0
    assert run.status["address"] == f"127.0.0.1:{run.port}" and not run.crashes and not run.news


def test_a_syncer_that_somebody_ends_alone_is_brought_back(run):
    """It ends with 0, in order, and the run is not closed: learners would train on for nobody."""

    def look(run):
        if run.is_up and not run.news:
            run.tell("asked")
            run.syncer.process.terminate()
        elif run.syncer.restarts:
            run.end()

    run.watch(look)
    assert run.status["epoch"] == 2 and not run.crashes
    assert "syncer ended, and the run is not closed: it is brought back" in run.news[1]


def test_its_processes_have_a_secret_that_is_in_no_command_line_and_gone_afterwards(run):
    path, seen = run.run_dir / "token", []

    def look(watched):
        if watched.is_up and not seen:
            token = path.read_text().strip()
            process = Path("/proc", str(watched.syncer.process.pid))
            seen.append(token)
            assert len(token) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
            assert not any(token.encode() in (process / name).read_bytes() for name in ("cmdline", "environ"))
            with pytest.raises(NoAnswer, match="this syncer requires a token"):
                ask_status("127.0.0.1", watched.port, None)
            assert ask_status("127.0.0.1", watched.port, token.encode()).record
        watched.end()

    run.run_dir.mkdir()
    path.symlink_to(run.run_dir / "elsewhere")  # nothing is written through it
    run.watch(look)
    assert seen and not path.exists() and not (run.run_dir / "elsewhere").exists()


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
    monkeypatch.setattr(supervisor, "CRASHES_MAX", 1)
    monkeypatch.setattr(supervisor, "RESTART_S", 0.0)

    def crash(run):
        if run.is_up:
            run.syncer.process.kill()

    with pytest.raises(RunFailed, match=r"^syncer crashed 2 times: .*log: "):
        run.watch(crash)
    said = one_line(run.syncer.last_line().removeprefix("skerry: "))
    assert run.crashes == [f"syncer crashed (exit -9): {said} (log: {run.syncer.log})"] and said


def test_a_syncer_whose_port_is_taken_for_a_while_is_brought_back(run, monkeypatch):
    """It was killed, and somebody else listens there before it is back."""
    monkeypatch.setattr(supervisor, "RESTART_S", 0.1)
    taken = socket.socket()

    def look(run):
        if run.is_up and not run.news:
            run.syncer.process.kill()
            run.syncer.process.wait()
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", run.port))
            taken.listen()
        elif run.syncer.code == AddressInUse.code:
            taken.close()
        elif run.is_up:
            run.end()

    run.watch(look)
    assert run.crashes[0].startswith("syncer crashed (exit -9)")
    assert run.crashes[1].startswith(f"syncer crashed (exit {AddressInUse.code})")
    assert run.status["address"] == f"127.0.0.1:{run.port}" and run.status["epoch"] == 2


def test_a_port_that_is_taken_from_the_beginning_is_refused_at_once(tmp_path):
    """Somebody chose it, and wants to hear of it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["--genesis", str(write_genesis(tmp_path / "genesis.safetensors")), *OPTIONS]
        run = Watched(tmp_path / "run", [], [], syncer_arguments=arguments, asked_port=port)
        with pytest.raises(RunFailed, match=f":{port} is in use: "):
            run.watch(lambda run: None)
    assert not run.crashes


def test_a_syncer_whose_log_cannot_be_written_any_more_ends_the_run_in_a_line_that_names_it(run, monkeypatch):
    """As on a disk that is read-only now: it would be started again and again, and nobody would hear why."""
    monkeypatch.setattr(supervisor, "RESTART_S", 0.0)

    def look(run):
        run.syncer.log = Path("/sys/kernel/syncer.log")  # where not even root makes a file
        if run.is_up and not run.news:
            run.syncer.process.kill()

    with pytest.raises(StoreError) as failed:
        run.watch(look)
    assert str(failed.value).startswith("/sys/kernel/syncer.log: Permission denied; check its owner")


def test_a_learner_that_cannot_be_started_is_told_of_with_the_reason(tmp_path):
    run = LocalRun(tmp_path, [], [], gives_up=False)
    run._tend(ended_child(tmp_path, "true", folder=tmp_path / "gone"))
    assert "a-0 crashed (not started): it cannot be started in" in run.news[0] and "No such file" in run.news[0]


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.ENOSPC, DiskFull, "elsewhere/launch.json: the disk is full (No space left on device): free space"),
        (errno.EROFS, StoreError, "elsewhere/launch.json: Read-only file system; mount it writable"),
        (errno.EACCES, StoreError, "elsewhere/launch.json: Permission denied; check its owner and permissions"),
        (errno.EIO, StoreError, "elsewhere/launch.json: Input/output error; check the disk"),
        (errno.ENOENT, FileNotFoundError, ""),
    ],
)
def test_what_a_disk_has_against_a_launch_names_the_file_that_it_is_about(tmp_path, number, kind, said):
    """Which may lie on another disk than the run directory."""
    with pytest.raises(kind) as failed, folder.writing(tmp_path):
        raise OSError(number, os.strerror(number), "elsewhere/launch.json")
    assert str(failed.value).startswith(said) and "\n" not in str(failed.value)


def test_a_terminal_that_is_gone_is_no_trouble_of_a_disk(tmp_path):
    with pytest.raises(OSError) as failed, folder.writing(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert type(failed.value) is OSError


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


def test_who_is_told_to_end_twice_still_ends_in_order(run):
    """The second word comes while the syncer takes its time."""

    def calm():
        os.kill(os.getpid(), signal.SIGTERM)

    run.calm = calm
    with pytest.raises(ZeroDivisionError):
        run.watch(lambda run: 1 / 0)
    assert run.syncer.process.returncode == 0


def test_a_second_interrupt_ends_all_of_it_at_once(run):
    def look(run):
        run.syncer.process.send_signal(signal.SIGSTOP)  # it would be waited for
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt):
        run.watch(look)
    assert run.syncer.process.returncode == -signal.SIGKILL


def test_who_does_not_end_when_asked_is_ended(run, monkeypatch):
    monkeypatch.setattr(supervisor, "SYNCER_TERM_S", 0.2)

    def look(run):
        run.syncer.process.send_signal(signal.SIGSTOP)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.watch(look)
    assert run.syncer.process.returncode == -signal.SIGKILL


def test_a_table_that_cannot_be_written_ends_nobody(run):
    run.record = folder.Record(engine="local", name="mine", folder=str(run.run_dir), file="", text="")
    (run.run_dir / "members.json.tmp").mkdir(parents=True)
    run.watch(Watched.end)
    assert run.asked and run.syncer.process.returncode == 0 and not (run.run_dir / "members.json").exists()


def test_a_status_that_is_not_there_or_no_status_changes_nothing(tmp_path):
    run = LocalRun(tmp_path, [], [], status={"progress": 0.5})
    assert not run.read_status()
    (tmp_path / "status.json").write_bytes(b'{"progress": 0.')
    assert not run.read_status() and run.status == {"progress": 0.5}
    (tmp_path / "status.json").write_bytes(json.dumps(RECORD | {"progress": 0.75}).encode())
    assert run.read_status() and run.status["progress"] == 0.75


def test_a_child_that_said_nothing_is_said_to_have(tmp_path):
    child = Child("quiet", [], tmp_path / "quiet.log")
    assert not child.is_running and child.last_line() == "it said nothing"
    child.log.write_bytes(b"one\nskerry: two \xff\n\n")
    assert child.last_line().startswith("skerry: two")


def test_a_line_that_only_rules_off_is_not_what_a_child_said_last(tmp_path):
    child = Child("grouped", [], tmp_path / "grouped.log")
    child.log.write_bytes(b"  Signal 9 (SIGKILL) received by PID 7\n" + b"=" * 60 + b"\n")
    assert child.last_line() == "Signal 9 (SIGKILL) received by PID 7"


@pytest.mark.parametrize(
    "line", ["[" * 60_000, '{"event": ' * 10_000, '{"event": ' + "[" * 900 + "]" * 900 + "}", "[]", "\0", "1" * 5000]
)
def test_whatever_a_child_says_last_is_only_a_line(tmp_path, line):
    run, child = LocalRun(tmp_path, [], [], gives_up=False), ended_child(tmp_path, "false")
    child.log.write_text(f"{line}\n")
    run._tend(child)
    assert child.member().state == "restarting" and len(child.last_line()) <= LINE_CHARS_MAX


# ---------------------------------------------------------------------------------------------- islands


class Noted(Child):
    """Notes for how long it is to stay away."""

    def away(self, away_s, detail):
        self.aways = [*getattr(self, "aways", []), away_s]
        super().away(away_s, detail)


def ended_child(tmp_path, *words, **options):
    child = Noted("a-0", [*words], tmp_path / "a-0.log", island="a", **options)
    child.start()
    if child.process is not None:
        child.process.wait(60)
    return child


def test_who_crashes_again_and_again_stays_away_for_longer_each_time(tmp_path):
    run, child = LocalRun(tmp_path, [], [], gives_up=False), ended_child(tmp_path, "false")
    for _ in range(8):
        run._tend(child)
        child.due_at = None
    assert child.aways == [2, 4, 8, 16, 32, 60, 60, 60] and child.member().detail == "exit 1: it said nothing"
    child.started_at -= supervisor.FORGOTTEN_S + 1
    run._tend(child)
    assert child.aways[-1] == 2, "it had run for a minute"


@pytest.mark.parametrize(
    ("restart", "words", "phase", "state"),
    [
        ("failure", ["true"], "training", "ended"),
        ("failure", ["false"], "training", "restarting"),
        ("always", ["true"], "training", "restarting"),
        ("always", ["true"], "steady", "restarting"),
        ("always", ["true"], "closing", "ended"),
        ("never", ["false"], "training", "failed"),
        ("never", ["true"], "training", "ended"),
    ],
)
def test_who_is_brought_back(tmp_path, restart, words, phase, state):
    run = LocalRun(tmp_path, [], [], gives_up=False, status={"phase": phase})
    child = ended_child(tmp_path, *words, restart=restart)
    run._tend(child)
    assert child.member().state == state


def test_a_learner_whose_folder_is_gone_has_crashed_and_the_run_has_not(tmp_path):
    run, child = LocalRun(tmp_path, [], [], gives_up=False), ended_child(tmp_path, "true", folder=tmp_path / "gone")
    run._tend(child)
    assert child.member().state == "restarting" and "cannot be started in" in child.last_line()
    (tmp_path / "gone").mkdir()
    child.start()
    assert child.process.wait(60) == 0 and child.restarts == 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("link", "a-0.log: is no plain file"),
        ("pipe", "a-0.log: is no plain file"),
        ("folder", "a-0.log: is no plain file"),
        ("NUL", "embedded null byte"),
    ],
)
@pytest.mark.parametrize(("restart", "state"), [("failure", "restarting"), ("never", "failed")])
def test_a_learner_that_cannot_be_started_has_failed_and_the_run_has_not(tmp_path, how, said, restart, state):
    log, elsewhere = tmp_path / "a-0.log", tmp_path / "elsewhere"
    {"link": lambda: log.symlink_to(elsewhere), "pipe": lambda: os.mkfifo(log), "folder": log.mkdir, "NUL": str}[how]()
    words = ["true", "\0"] if how == "NUL" else ["true"]
    run, child = LocalRun(tmp_path, [], [], gives_up=False), ended_child(tmp_path, *words, restart=restart)
    run._tend(child)
    assert child.member().state == state and said in child.member().detail
    assert child.member().detail.startswith("not started: ") and not elsewhere.exists()


def test_the_supervisor_takes_no_more_learners_than_the_run_has_room_for(tmp_path):
    record = folder.Record(
        engine="local", name="mine", folder=str(tmp_path), file="", text="", counts={"a": 1}, learners=3
    )
    run = LocalRun(tmp_path, [Island(name="a", count=1)], [], record=record)
    for counts, taken in [({"a": 2}, 2), ({"a": 4}, 2), ({"a": 1_000_000_000}, 2), ({"a": -1}, 2), ({"a": 3}, 3)]:
        folder.write(msgspec.structs.replace(record, counts=counts, learners=10**9))
        run._look_at_record()
        assert run.record.counts == {"a": taken}, counts
    assert len(run.news) == 1 and "launch.json asks for more than 3 learners: their number stays" in run.news[0]


def test_logs_are_written_through_no_link(run):
    elsewhere = run.run_dir.parent / "elsewhere"
    elsewhere.mkdir()
    run.run_dir.mkdir(mode=0o700)
    (run.run_dir / "logs").symlink_to(elsewhere)
    with pytest.raises(Refusal, match="logs: is a link, which is not followed: remove it"):
        run.watch(Watched.end)
    child = Child("a-0", ["true"], run.run_dir / "logs" / "a-0.log")
    child.start()
    assert child.process is None and "symbolic link" in child.trouble and not any(elsewhere.iterdir())


def test_what_others_can_read_says_nothing_of_the_members(tmp_path):
    record = folder.Record(engine="local", name="mine", folder=str(tmp_path), file="", text="")
    run = LocalRun(tmp_path, [], [], record=record, syncer=Child("syncer", ["true"], tmp_path / "syncer.log"))
    run._write_members()
    assert stat.S_IMODE((tmp_path / "members.json").stat().st_mode) == 0o600


def test_gpus_are_given_out_in_turn_to_who_asks_for_some(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    run = LocalRun(tmp_path, [], [])
    given = [run._gpus(Island(name="a", gpus=gpus, workers=workers)) for gpus, workers in
             [(1, 1), (1, 2), (0, 1), (0.5, 1), (0.5, 1), (1, 2)]]  # fmt: skip
    shown = [each.get("CUDA_VISIBLE_DEVICES") for each in given]
    assert shown == ["4", "5,6", None, "4", "4", "5,6"]


def test_a_log_that_has_grown_long_is_put_aside_and_read_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("skerry.engines.child.LOG_BYTES_MAX", 10)
    (tmp_path / "logs").mkdir()
    child = Child("a-0", ["echo", "a line that is long"], tmp_path / "logs" / "a-0.log")
    for _ in range(3):
        child.start()
        child.process.wait(60)
    record = folder.Record(engine="local", name="mine", folder=str(tmp_path), file="", text="")
    assert list(local.logs(record, "a-0", follow=False)) == ["a line that is long"] * 2


def test_a_log_is_read_in_lines_and_one_without_an_end_in_pieces():
    """Each byte once: a line of 64 MiB that comes in small parts was looked at from its beginning with each of them."""
    assert [*lines_of([b"on", b"e\ntwo\n\nth", b"", b"ree"])] == ["one", "two", "", "three"]
    assert [*lines_of([b"one\n"])] == ["one"] and not [*lines_of([])]
    piece = LINE_BYTES_MAX
    parts = [b"x" * 1024] * (64 * piece // 1024)
    assert [len(line) for line in lines_of(parts)] == [piece] * 64
    assert [len(line) for line in lines_of([b"x" * (piece + 1) + b"\ny"])] == [piece, 1, 1]


def test_who_is_turned_away_is_told_why_until_it_takes_part():
    member = Member("a-0", "a", "running")
    row = {"who": "a-0", "why": "no room", "count": 3, "ago_s": 1.0}
    away = {"turned_away": [row | {"who": "a-01"}, row], "learners": {}}
    assert local._told(member, away).detail == "turned away: no room"
    assert local._told(member, {"turned_away": [row | {"who": "a-0 at 127.0.0.1"}]}).detail == "turned away: no room"
    lost, here = ({"a-0": {"state": state, "step": 7}} for state in ("lost", "training"))
    assert local._told(member, away | {"learners": lost}).detail == "turned away: no room"
    assert local._told(member, away | {"learners": here}).detail == "training, step 7"
    assert local._told(member, {"turned_away": [row | {"who": "a-01"}]}) == member


def test_an_engine_that_a_file_names_is_one_of_ours():
    for name in ("spec", "../x", "moon"):
        with pytest.raises(Refusal, match="unknown engine"):
            engine(name)
