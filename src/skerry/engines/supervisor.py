"""The supervisor of a run on this machine: the syncer, the learners of all islands and the evaluator are its children.

It starts them, brings back what dies by each island's restart policy, carries out the kills it was asked for at a
fraction of the run, and never touches the protocol: it reads the status file and, at the end, the tape. A child by
itself is in `child.py`. The local engine (`local.py`), `skerry train` and `skerry demo` run this; a worse disturber
(`proof/chaos/supervisor.py`) changes how learners dial and what is done to whom.

Its children end when it does, however it does: ours look for their parent, and somebody else's command is held by
`leash.py`. Other commands know of it by files: it holds the lock of a supervisor in the run directory; what it has is
in `members.json`, in the folder of the launch; and it looks at `launch.json` there for how many learners are wanted.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from skerry.engines import Member, command, leash
from skerry.engines import folder as folders
from skerry.engines.child import Child
from skerry.engines.folder import Record
from skerry.engines.machine import gpus_here
from skerry.engines.spec import Island
from skerry.errors import DiskFull, Refusal, RunFailed, SkerryError, one_line, printable
from skerry.node.record import legible
from skerry.python import module_argv
from skerry.run.evaluations import waiting
from skerry.run.status import ending_of
from skerry.run.summary import Kill
from skerry.shell.evaluate import figures_told
from skerry.store import lock
from skerry.store.files import appended, contents, put_in_place

POLL_S = 0.1
RESTART_S = 2.0  # a killed process stays away this long, and one that ended by itself at first
RESTART_S_MAX = 60.0  # then twice as long each time, up to this
FORGOTTEN_S = 60.0  # who has run for so long has not crashed before
CRASHES_MAX = 5  # of one child, not counting kills, before the run is given up where somebody waits for it
TERM_S = 4.0  # between asking a learner to end and ending it
LEASH_S = 7.0  # and beyond that, for a leash to have swept
SYNCER_TERM_S = 60.0  # between asking the syncer to end and ending it: it writes checkpoints meanwhile
START_S = 120.0  # for the syncer to come up
ALONE_S = 10.0  # without a learner that runs or will be brought back, before the run is ended
ENDS_TOLD = 4  # learners of which a line says how they ended
GONE = ("away", "lost", "left", "expelled")  # what a syncer says of learners that are not there
LOCAL = "local.json"
MEMBERS = "members.json"  # what the supervisor has, beside launch.json
COPY = "run.toml"  # the file as it was launched, which the syncer is given: nobody edits it meanwhile
TOKEN = "token"  # the secret of a local run's processes, while they run
TOKEN_BYTES = 32


class Local(msgspec.Struct):
    """What `skerry train` must know again when it resumes a run."""

    speeds: list[float]


@dataclass
class LocalRun:
    """Everything the supervisor holds; `run` blocks until the syncer has closed the run."""

    run_dir: Path
    islands: Sequence[Island]
    kills: list[Kill]
    syncer_arguments: list[str] = field(default_factory=list)
    learner_arguments: list[str] = field(default_factory=list)  # of each built-in one
    record: Record | None = None  # where other commands look; without it none do
    syncer_env: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()  # of the file: where commands are at home
    asked_port: int = 0  # that the syncer serves; 0: any
    term_s: float = TERM_S
    gives_up: bool = True  # a learner that is refused, or crashes again and again, ends the run
    status: dict[str, Any] = field(default_factory=dict)
    news: list[str] = field(default_factory=list)  # what happened to processes, for a person
    syncer: Child | None = None
    learners: list[Child] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)  # of children that nobody had killed
    port: int = 0
    token_file: Path | None = None  # while `run` is at it
    is_evaluated: bool = False  # while it goes, by a process beside it
    evaluator: Child | None = None
    evaluations_told: int = 0
    gpus_given: float = 0.0
    _alone_since: float | None = None  # monotonic: every learner has ended for good
    _asked: tuple[int, int] = (0, 0)  # by which a change of launch.json is seen
    _shown: list[Member] = field(default_factory=list)  # what is in members.json

    def run(self, show: Callable[[], None]) -> None:
        """Until the run is closed; `show` is called whenever there may be something to see."""
        with self.supervising():
            self.supervise(show)

    def supervise(self, show: Callable[[], None]) -> None:
        """The same for who is its supervisor already: start, watch, kill, bring back."""
        with self._having_token(), leash.adopting(), self.ends_everything():
            self.start_syncer()
            self._start_learners()
            if self.is_evaluated:
                self._start_evaluator()
            assert self.syncer is not None
            while not self.syncer.ended:
                self.read_status()
                self.disturb()
                self._fit()
                for child in [self.syncer, *self.learners]:
                    self._tend(child)
                self._look_for_learners()
                self._look_at_evaluator()
                self._write_members()
                show()
                time.sleep(POLL_S)
            self.read_status()
            self._wait_for_learners()

    # ------------------------------------------------------------------------------------------ starting

    def start_syncer(self) -> None:
        folders.made(self.logs)
        (self.run_dir / "status.json").unlink(missing_ok=True)
        self.syncer = Child("syncer", self.syncer_words(self.asked_port), self.logs / "syncer.log", self.syncer_env)
        self.syncer.start()
        self._write_members()
        deadline = time.monotonic() + START_S
        while not self.read_status():
            if not self.syncer.is_running:
                raise (DiskFull if self.syncer.code == DiskFull.code else RunFailed)(_said(self.syncer))
            if time.monotonic() > deadline:
                raise RunFailed(f"the syncer did not come up within {START_S:.0f} s: see {self.syncer.log}")
            time.sleep(POLL_S)
        self.port = int(self.status["address"].rpartition(":")[2])
        self.syncer.words = self.syncer_words(self.port)

    def syncer_words(self, port: int) -> list[str]:
        token = ["--token-file", str(self.token_file)] if self.token_file else []
        return ours("syncer", "--run", str(self.run_dir), *token, "--port", str(port), *self.syncer_arguments)

    def _start_learners(self) -> None:
        for island in self.islands:
            for index in range(self._count(island)):
                self._add(island, index)

    def _add(self, island: Island, index: int) -> None:
        child = self.learner_child(island, index)
        self.learners.append(child)
        child.start()

    def learner_child(self, island: Island, index: int) -> Child:
        """Not started yet."""
        name = island.learner(index)
        token = str(self.token_file) if self.token_file else ""
        env = self._gpus(island) | command.learner_env(
            island, index, f"127.0.0.1:{self.port_for(name)}", token_file=token
        )
        words = command.learner_argv(island, sys.executable, index=index)
        if island.is_built_in:
            words += ["--name", name, "--pace-file", str(self.pace_file(name))]
            words += [*self.learner_arguments, *parent_words()]
        else:
            env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, int(island.cpus))))} | env
            words = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), f"{self.term_s:g}", *words]
        log = self.logs / f"{name}.log"
        return Child(name, words, log, env, self.folder / island.folder, island.name, index, island.restart)

    def _gpus(self, island: Island) -> dict[str, str]:
        """Those of this machine in turn, to who asks for some; who asks for none is not kept from any."""
        devices, wanted = gpus_here(), island.gpus * island.workers
        if not wanted or not devices:
            return {}
        first = int(self.gpus_given)
        last = math.ceil(round(self.gpus_given + wanted, 6))
        self.gpus_given = (self.gpus_given + wanted) % len(devices)
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices[at % len(devices)] for at in range(first, last))}

    def _start_evaluator(self) -> None:
        """With one thread and what the others leave of the cores."""
        words = ours("evaluate", str(self.run_dir), "--watch", "--threads", "1")
        self.evaluator = Child("evaluator", words, self.logs / "evaluator.log")
        self.evaluator.start()

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def home(self) -> Path:
        """The folder of the launch, which is the run directory unless the file says otherwise."""
        return Path(self.record.folder) if self.record and self.record.handle.get("run_dir") else self.run_dir

    @property
    def speeds(self) -> dict[str, float]:
        """By name, of the built-in trainer."""
        return {each.learner(at): each.speed_of(at) for each in self.islands for at in range(each.count)}

    def port_for(self, name: str) -> int:
        """What this learner dials."""
        return self.port

    def pace_file(self, name: str) -> Path:
        return self.run_dir / "paces" / name

    def child(self, name: str) -> Child:
        assert self.syncer is not None
        return next(child for child in [self.syncer, *self.learners] if child.name == name)

    def read_status(self) -> bool:
        try:
            self.status = legible(contents(self.run_dir / "status.json"))
        except (OSError, ValueError):
            return False
        return True

    # ------------------------------------------------------------------------------------------ how many

    def _count(self, island: Island) -> int:
        return island.count if self.record is None else self.record.counts.get(island.name, island.count)

    def _fit(self) -> None:
        """As many learners as are asked for now: who is missing is started, and who is too many is told to leave."""
        self._look_at_record()
        for island in self.islands:
            there = {child.index: child for child in self.learners if child.island == island.name}
            for index in range(self._count(island)):
                if index not in there:
                    self._add(island, index)
                    self.tell(f"{island.learner(index)} started")
            for index, child in there.items():
                if index >= self._count(island) and child.leaves_at is None:
                    self._dismiss(child)
        for child in [child for child in self.learners if child.leaves_at is not None]:
            if child.process is None or not child.is_running:
                child.sweep()
                self.learners.remove(child)
                self.tell(f"{child.name} has left")
            elif child.leaves_at is not None and time.monotonic() > child.leaves_at + LEASH_S:
                child.process.kill()

    def _dismiss(self, child: Child) -> None:
        child.leaves_at, child.due_at = time.monotonic() + self.term_s, None
        if child.is_running and child.process is not None:
            child.process.terminate()

    def _look_at_record(self) -> None:
        if self.record is None:
            return
        with contextlib.suppress(OSError, Refusal):
            found = (self.home / folders.LAUNCHED).stat()
            if (found.st_ino, found.st_mtime_ns) != self._asked:
                self._asked = (found.st_ino, found.st_mtime_ns)
                self._want(folders.read(self.home).counts)

    def _want(self, counts: dict[str, int]) -> None:
        """What `skerry scale` would not have written is not done."""
        assert self.record is not None
        if folders.has_room(counts, self.record.learners):
            self.record.counts = counts
        else:
            self.tell(f"{folders.LAUNCHED} asks for more than {self.record.learners} learners: their number stays")

    # ------------------------------------------------------------------------------------------ watching

    def disturb(self) -> None:
        """Called between two looks at the children: the kills that are due."""
        progress = self.status.get("progress", 0.0)
        for kill in self.kills:
            if kill.killed_at is not None or progress < kill.at:
                continue
            child = self.child(kill.victim)
            if not child.is_running:
                continue
            kill.killed_at = time.time()
            child.kill(RESTART_S)
            self.tell(f"{child.name} killed (SIGKILL)")

    def calm(self) -> None:
        """Undo what disturbs at present; called before the children are ended, however the run went."""

    def tell(self, text: str) -> None:
        self.news.append(f"{100 * self.status.get('progress', 0.0):3.0f} %  {printable(text)}")

    def _tend(self, child: Child) -> None:
        """Start what is due, note what has ended, bring back what crashed, give up on what refuses to run."""
        if child.due_at is not None:
            if time.monotonic() >= child.due_at:
                child.start()
                self.tell(f"{child.name} started again")
            return
        if child.ended or child.is_running or child.leaves_at is not None:
            return
        if time.time() - child.started_at > FORGOTTEN_S:
            child.crashes = 0
        code, said = child.code, child.last_line().removeprefix("skerry: ")
        is_needed = child is self.syncer or self.gives_up
        if code == 0 and self._has_done_its_part(child):
            child.end()
        elif child.excused_s is not None:
            child.away(child.excused_s, f"{child.how}: {said}")
            child.excused_s = None
            self.tell(f"{child.name} ended ({child.how}): {said}")
        elif is_needed and child.error is not None and folders.is_of_disk(child.error):
            raise child.error  # its log cannot be written: `supervising` says so
        elif code == RunFailed.code and is_needed:
            raise RunFailed(_said(child))
        elif code == DiskFull.code and is_needed:
            # Or a directory that others held for too long: it means "later" as well. On a full disk it may have had no
            # room for its own last words.
            raise DiskFull(f"{child.name} ended ({child.how}): {_said(child)}")
        elif child.restart == "never":
            child.end(f"{child.how}: {said}")
            self.tell(f"{child.name} ended ({child.how}), and is not brought back: see {child.log}")
        else:
            self._bring_back(child, said)

    def _has_done_its_part(self, child: Child) -> bool:
        """Of who ended well; a learner is brought back only while there is work, and if its island says so.

        A syncer ends well too when it is paused: by an order, which then holds for all of the run, or by somebody's
        signal to it alone, after which the learners train on and need it back.
        """
        if child is not self.syncer:
            return child.restart != "always" or self.status.get("phase") in ("closing", "closed")
        ending = ending_of(self.run_dir)
        if ending == "ordered":
            raise KeyboardInterrupt
        return ending == "closed"

    def _bring_back(self, child: Child, said: str) -> None:
        child.crashes += 1
        if self.gives_up and child.crashes > CRASHES_MAX:
            raise RunFailed(f"{child.name} crashed {child.crashes} times: {_said(child)}")
        child.away(min(RESTART_S * 2 ** min(child.crashes - 1, 16), RESTART_S_MAX), f"{child.how}: {said}")
        if child.code == 0:
            why = "the run is not closed" if child is self.syncer else "its island has it back always"
            self.tell(f"{child.name} ended, and {why}: it is brought back")
            return
        why = child.trouble or f"{one_line(said)} (log: {child.log})"
        self.crashes.append(f"{child.name} crashed ({child.how}): {why}")
        del self.crashes[:-1000]  # of a run of months, the last ones will do
        self.tell(self.crashes[-1])

    def _look_for_learners(self) -> None:
        """A run of which every learner has ended for good would wait for ever: it is ended, unless some are added.

        Nobody is missed while the syncer is away or closes the run, nor where somebody scaled all islands to none, or
        has a learner of their own in it.
        """
        known = self.status.get("learners", {}).values()
        is_trained = any(each.get("state") not in GONE for each in known) or not self.learners
        if is_trained or not all(child.ended for child in self.learners) or not self._is_training:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
            self.tell(f"no learner is left: {self._ends()}; the run is ended in {ALONE_S:.0f} s unless one is added")
        elif time.monotonic() - self._alone_since > ALONE_S:
            where = shlex.quote(str(self.home))
            raise RunFailed(
                f"no learner is left, and the run is not closed: {self._ends()}; look at skerry logs {where} "
                f"{self.learners[0].name}, then launch it again, with more of them by skerry scale while it is up"
            )

    @property
    def _is_training(self) -> bool:
        """By the word of the syncer that is there now."""
        if self.syncer is None or self.syncer.process is None or not self.syncer.is_running:
            return False
        is_its_word = self.status.get("pid") == self.syncer.process.pid
        return is_its_word and self.status.get("phase") not in ("closing", "closed")

    def _ends(self) -> str:
        """Of the learners, how each ended."""
        told = [f"{child.name} {one_line(child.detail) or 'ended (exit 0)'}" for child in self.learners[:ENDS_TOLD]]
        more = len(self.learners) - ENDS_TOLD
        return ", ".join(told) + (f" and {more} more" if more > 0 else "")

    def _look_at_evaluator(self) -> None:
        """The run does not need it: what it finds and what becomes of it are told, and that is all."""
        if self.evaluator is None or self.evaluator.ended:
            return
        found = waiting(self.run_dir)
        for one in found[self.evaluations_told :]:
            self.tell(f"held out: {figures_told(one.figures)}, at {100 * one.progress:.0f} %")
        self.evaluations_told = len(found)
        if self.evaluator.is_running:
            return
        self.evaluator.ended = True
        if self.evaluator.code != 0:
            self.tell(f"the run goes on without its evaluator: {_said(self.evaluator)}")

    def _wait_for_learners(self) -> None:
        deadline = time.monotonic() + self.term_s
        while any(child.is_running for child in self.learners) and time.monotonic() < deadline:
            self._note_ends()
            time.sleep(POLL_S)
        self._note_ends()

    def _note_ends(self) -> None:
        """Of learners, once the run is over: nobody is brought back."""
        for child in self.learners:
            if not child.ended and not child.is_running:
                child.due_at = None
                child.end(f"exit {child.code}: {child.last_line()}" if child.code else "")

    # ------------------------------------------------------------------------------------------ what others see

    def _write_record(self) -> None:
        """What others find it by, and of its members those that there are: not what a killed supervisor had."""
        if self.record is not None:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.syncer = Child("syncer", [], self.logs / "syncer.log")
            self._write_members()
            folders.write(self.record)
            if self.record.text:  # as private as launch.json: an island's environment may be secret
                put_in_place(self.home / COPY, self.record.text.encode(), 0o600)

    def _write_members(self) -> None:
        """Whenever something of it has changed."""
        if self.record is None or self.syncer is None:
            return
        is_up = self.status.get("pid") == (self.syncer.process.pid if self.syncer.process else None)
        members = [self.syncer.member(is_up), *(child.member() for child in self.learners)]
        if members != self._shown:
            with contextlib.suppress(OSError):  # where there is no room, skerry ps says less; it is tried again
                put_in_place(self.home / MEMBERS, msgspec.json.encode(members), 0o600)
                self._shown = members

    # ------------------------------------------------------------------------------------------ ending

    @contextlib.contextmanager
    def supervising(self) -> Iterator[None]:
        """Whoever looks at the run finds this process, also while its syncer is away; two would fight over it.

        So nothing of a launch is written before: who comes second changes nothing.
        """
        with folders.writing(self.home), self._locked():
            self._write_record()
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with appended(self.run_dir / lock.SUPERVISOR) as file:
            file.seek(0)
            if holder := lock.take(file.fileno()):
                raise RunFailed(
                    f"{self.run_dir} is run by process {holder} already: stop it, or choose another directory"
                )
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # then it is a name without a lock, as of one that was killed
                    file.truncate(0)

    @contextlib.contextmanager
    def _having_token(self) -> Iterator[None]:
        """A secret of these processes alone: whoever else is on this machine is a stranger to them."""
        path = self.run_dir / TOKEN
        path.unlink(missing_ok=True)  # of a supervisor that was killed
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES) + "\n")
        self.token_file = path
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # who asked for it is gone: the next launch makes another
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def ends_everything(self) -> Iterator[None]:
        """However this ends, no process is left behind; learners go first, so that their last work is merged."""
        before = signal.signal(signal.SIGTERM, _as_interrupt)
        why = ""
        try:
            yield
        except SkerryError as error:
            why = str(error)
            raise
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is being done: who says it again waits
            try:
                self._end_in_order(why)
            finally:
                signal.signal(signal.SIGTERM, before)

    def _end_in_order(self, why: str) -> None:
        """A Ctrl-C while this goes on ends all of it at once; skerry ps tells why it ended beside the syncer."""
        self.calm()
        is_held = any(not island.is_built_in for island in self.islands)
        patience_s = self.term_s + (LEASH_S if is_held else 0.0)
        others, syncer = [*self.learners, *filter(None, [self.evaluator])], [*filter(None, [self.syncer])]
        try:
            _end(others, patience_s)
            _end(syncer, SYNCER_TERM_S)
        except KeyboardInterrupt:
            _end([*others, *syncer], 0.0)
            raise
        finally:
            if self.syncer is not None and why:
                self.syncer.end(why)
            self._write_members()


def ours(*words: str) -> list[str]:
    """A command of Skerry's that ends when this process does."""
    return module_argv("skerry", *words, *parent_words())


def parent_words() -> list[str]:
    """By which one of ours knows whose end is its own."""
    return ["--parent", str(os.getpid())]


def _end(children: Sequence[Child], patience_s: float) -> None:
    running = [child for child in children if child.is_running]
    for child in running:
        assert child.process is not None
        child.process.terminate()
    deadline = time.monotonic() + patience_s
    for child in running:
        assert child.process is not None
        try:
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
    for child in children:
        child.due_at = None
        if not child.ended:
            child.end()


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _said(child: Child) -> str:
    return f"{child.last_line().removeprefix('skerry: ')} (log: {child.log})"


def note_speeds(run_dir: Path, speeds: Sequence[float]) -> None:
    """For who resumes or forks a run of `skerry train`."""
    put_in_place(run_dir / LOCAL, msgspec.json.encode(Local([*speeds])))
