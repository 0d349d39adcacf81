"""What runs inside Ray's actors: one process of a run each, started, watched, brought back and ended.

    SyncerMember    the syncer, and what the learners' members ask it for: the address, their keys, their last words
    LearnerMember   a learner, or what one machine has of a learner that is spread over several

Ray brings back an actor that it lost with its process or its machine, by calling the constructor again; so everything
begins there, in a thread, and no call has to be made twice. A process that ends while its actor lives is brought back
by the actor, as its island asks. Nothing is kept in Ray's object store, and what must survive is in the run directory:
the run itself, its keys, and `ray.json`, which says who takes part and how those ended that have.

A process is held by `leash.py`, so that it does not outlive its actor. What it says is in a file on its machine, in a
folder that is this user's alone, and so is its key. When it has ended for good its last words go to the run directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from skerry.engines import Member, State, last_line_of, leash, spec
from skerry.engines.alone import free_port
from skerry.engines.command import folder_of, learner_argv, learner_env, meeting, syncer_argv
from skerry.errors import one_line
from skerry.node.record import legible
from skerry.run.keys import Keys
from skerry.store.files import UNREADABLE, appended, contents, put_in_place

NAMESPACE = "skerry"
SYNCER = "syncer"
POLL_S = 0.2
ASK_S = 2.0  # how often a learner's member asks where the syncer is, or where its machines meet
ANSWER_S = 10.0  # for another actor's answer
BACKOFF_S, BACKOFF_S_MAX = 2.0, 60.0
FORGIVEN_S = 60.0  # who has run for so long has not failed before
LEAVE_MORE_S = 10.0  # for a learner to end, besides learner.leave_timeout_s
GROUP_MORE_S = 35.0  # likewise under torchrun, which gives its workers 30 s
SYNCER_LEAVE_S = 60.0  # it writes checkpoints meanwhile
LAST_WORDS_S = 45.0  # for the learners of a closed run to say how they ended
WORDS_BYTES_MAX = 1 << 20  # of a log that is kept in the run directory
READ_BYTES_MAX = 1 << 18  # of a log, at a time
BUG_S = 5.0  # before an actor that hit a bug of ours ends, for Ray brings it back at once
ENDS = "ray.json"
CLOSED = "this run is closed; export it with: skerry export "

log = logging.getLogger("skerry.ray")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a member is told once, when it is made; it travels as JSON, and Ray keeps it for as long as the actor."""

    id: str  # of the launch: runs of one name on one machine have folders of their own
    text: str  # of the launched file
    overrides: list[tuple[str, str | int | float | bool]]
    folder: str  # the launched file's; a relative one is below what `ray job submit` brought to each machine
    run_dir: str
    port: int
    island: str = ""
    index: int = 0
    machine: int = 0  # which of a learner's
    learners: list[str] = []  # for the syncer: who takes part at first

    @property
    def launch(self) -> spec.Launch:
        return spec.again(self.text, Path(self.folder).absolute() / "run.toml", self.overrides)


class Ends(msgspec.Struct):
    """RUN/ray.json: who takes part, and how those ended that have."""

    launch: str = ""  # its id: the next launch of the same run begins with none ended
    learners: list[str] = []
    ended: dict[str, Member] = {}


def actor_name(run: str, name: str, machine: int = 0) -> str:
    return f"{run}-{name}" + (f".{machine}" if machine else "")


def actor_of(run: str, name: str, machine: int = 0) -> Any | None:
    """Its handle; None where there is none, or none any more."""
    import ray

    try:
        return ray.get_actor(actor_name(run, name, machine), namespace=NAMESPACE)
    except ValueError:
        return None


def leave_s(launch: spec.Launch, island: spec.Island) -> float:
    """What a learner of this island may take to leave in order."""
    return launch.config.learner.leave_timeout_s + (GROUP_MORE_S if island.is_group else LEAVE_MORE_S)


def release(run: str, learners: Sequence[str], grace_s: float) -> None:
    """Have these leave in order, and then remove whatever Ray still has of them: also what waits for a machine."""
    import ray

    there = {name: actor for name in learners if (actor := actor_of(run, name)) is not None}
    asked = [actor.leave.remote() for actor in there.values()]
    if asked:
        heard, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
        leaving = [name for name, answer in zip(there, asked, strict=True) if answer in set(heard)]
        deadline = time.monotonic() + grace_s
        while any(actor_of(run, name) for name in leaving) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    for name in learners:
        remove(run, name)


def remove(run: str, name: str) -> None:
    """Whatever there is of this member, its machines and the place that is kept for them."""
    import ray
    from ray.util import get_placement_group, remove_placement_group

    with contextlib.suppress(ValueError):
        remove_placement_group(get_placement_group(actor_name(run, name)))
    for machine in sorted(_machines_of(run, name), reverse=True):  # the first may be the one that removes them
        if (actor := actor_of(run, name, machine)) is not None:
            ray.kill(actor)


def _machines_of(run: str, name: str) -> list[int]:
    """Those that Ray has anything of, also where it has nothing of the first any more."""
    from ray.util import list_named_actors

    there = {each["name"] for each in list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE}
    others = (each.removeprefix(f"{actor_name(run, name)}.") for each in there)
    return [0, *(int(each) for each in others if each.isascii() and each.isdecimal())]


# ---------------------------------------------------------------------------------------------- on a machine


class Home:
    """A folder of this user's on a machine: a member's key, its log, and the lock of its leash."""

    def __init__(self, run: str, launch: str, name: str) -> None:
        self.name = name
        above = Path(tempfile.gettempdir()) / f"skerry-ray-{os.getuid()}"
        self.path = above / f"{run}-{launch}"
        for folder in (above, self.path):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            found = os.lstat(folder)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise PermissionError(f"{folder}: is not a folder of this user's alone")

    def file(self, suffix: str) -> Path:
        return self.path / f"{self.name}.{suffix}"

    @contextlib.contextmanager
    def locked(self, goes_on: Callable[[], bool]) -> Iterator[int | None]:
        """The member's lock on this machine, for a process to inherit; None where waiting for it was given up."""
        with appended(self.file("lock")) as file:
            is_mine = False
            while not is_mine:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_mine = True
                except BlockingIOError:
                    if not goes_on():
                        break
            lock = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, SHELL_FDS) if is_mine else None
            try:
                yield lock
            finally:
                if lock is not None:
                    os.close(lock)

    def key_file(self, pem: bytes) -> Path:
        path = self.file("key")
        path.unlink(missing_ok=True)
        with appended(path) as file:
            file.write(pem)
        return path

    def clear(self) -> None:
        for suffix in ("key", "log", "toml", "lock"):
            self.file(suffix).unlink(missing_ok=True)
        for folder in (self.path, self.path.parent):
            with contextlib.suppress(OSError):  # others are at home there
                folder.rmdir()


# A worker of Ray that ends kills its children with SIGKILL, and one that is killed tells them nothing. So its child is
# this shell, which is ended by Ray, or by the end of the pipe that the worker holds. The leash behind it sees that it
# is gone, and has the command leave in order. SIGTERM for the group of them is for the leash alone.
HOLDER = """
trap "" TERM
exec 9<&0
(read _ <&9; kill -KILL $$) &
watch=$! leash=$1
shift
"$0" -I -S "$leash" $$ "$@" </dev/null 9<&- &
wait $!
code=$?
kill -KILL $watch
exit $code
"""
SHELL_FDS = 10  # numbers below this one are the shell's own
HELD_LONGER_S = 7.0  # beyond the grace, for a leash to have ended all that the command left behind


class Process:
    """One life of a command on its leash; `grace_s` is what it may take to end when it is asked to.

    The leash inherits `lock`: until all of this life is gone, the next one on this machine cannot begin.
    """

    def __init__(self, argv: Sequence[str], env: dict[str, str], folder: Path, said: Path, lock: int, grace_s: float):
        self.grace_s = grace_s
        self.began = time.monotonic()
        with appended(said) as file:
            self.popen = subprocess.Popen(
                ["sh", "-c", HOLDER, sys.executable, str(leash.__file__), f"{grace_s:g}", *argv],
                stdin=subprocess.PIPE, stdout=file, stderr=file, cwd=folder, env=os.environ | env,
                start_new_session=True, pass_fds=[lock],
            )  # fmt: skip

    @property
    def code(self) -> int | None:
        return self.popen.poll()

    def end(self) -> int:
        """In order, or once the grace is over by the leash's hand; if that fails, too, the leash itself."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.popen.wait(self.grace_s + HELD_LONGER_S)
        self._signal(signal.SIGKILL)
        return self.popen.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


def tail(said: Path, bytes_max: int) -> bytes:
    try:
        with open(said, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - bytes_max))
            return file.read(bytes_max)
    except FileNotFoundError:
        return b""


# ---------------------------------------------------------------------------------------------- members


class _Tended:
    """What every member has: its state for people, its log, its back-off and its end."""

    def __init__(self, order: bytes, name: str, file: str) -> None:
        import ray

        self.order = msgspec.json.decode(order, type=Order)
        self.launch = self.order.launch
        self.run, self.name = self.launch.name, name
        self.home = Home(self.run, self.order.id, file)
        self.said = self.home.file("log")
        self.where = ray.util.get_node_ip_address()
        self.state: State = "starting"
        self.detail, self.since = "", time.time()
        self.restarts = self.failures = 0
        self.is_leaving = False
        self.process: Process | None = None
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name}: %(message)s")

    def begin(self, live: Callable[[], None]) -> None:
        """In a thread, so that no call has to last as long as the member; a bug of ours ends the actor."""

        def all_my_life() -> None:
            try:
                live()
            except BaseException:
                traceback.print_exc()
                time.sleep(BUG_S)
                os._exit(1)

        threading.Thread(target=all_my_life, name=f"skerry-{self.name}", daemon=True).start()

    def turn(self, state: State, detail: str = "") -> None:
        if (state, detail) != (self.state, self.detail):
            log.info("%s%s", state, f": {detail}" if detail else "")
            self.state, self.detail, self.since = state, detail, time.time()

    def status(self) -> Member:
        return Member(
            self.name, self.order.island, self.state, self.where, self.restarts, self.since, self.detail
        )  # fmt: skip

    def leave(self) -> None:
        """End in order; the actor is gone when it has."""
        self.is_leaving = True

    def read(self, offset: int) -> tuple[str, int, bytes]:
        """What it has said from there on, a part at a time: on which machine, how much in all, and the part."""
        try:
            with open(self.said, "rb") as file:
                file.seek(offset)
                return self.where, os.fstat(file.fileno()).st_size, file.read(READ_BYTES_MAX)
        except FileNotFoundError:
            return self.where, 0, b""

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.is_leaving and time.monotonic() < until:
            time.sleep(POLL_S)

    def start(self, argv: Sequence[str], env: dict[str, str], folder: Path, grace_s: float) -> bool:
        """Whether it was begun; a life of before, whose actor Ray lost, leaves first."""
        try:
            with self.home.locked(self.waits_for_the_last) as lock:
                if lock is None:
                    return False
                self.process = Process(argv, env, folder, self.said, lock, grace_s)
        except OSError as error:
            self.process = None
            self.fail(f"{error.filename or folder}: {error.strerror}: must be on every machine of the island")
            return False
        return True

    def waits_for_the_last(self) -> bool:
        self.turn("starting", "its last process is still leaving")
        time.sleep(POLL_S)
        return not self.is_leaving

    def fail(self, why: str) -> None:
        """Wait as long as so many failures in a row ask for."""
        ran_s = time.monotonic() - self.process.began if self.process else 0.0
        self.failures = 1 if ran_s >= FORGIVEN_S else self.failures + 1
        self.restarts += 1
        wait_s = min(BACKOFF_S_MAX, BACKOFF_S * 2 ** min(self.failures - 1, 10))
        self.turn("restarting", f"{why}; again in {wait_s:.0f} s")
        self.pause(wait_s)


class SyncerMember(_Tended):
    """The syncer. It is brought back whatever it dies of, and when the run is closed everything of it goes."""

    def __init__(self, order: bytes) -> None:
        super().__init__(order, SYNCER, SYNCER)
        self.run_dir = Path(self.order.run_dir)
        self.address = f"{self.where}:{self.order.port}"
        self.keys: dict[str, bytes] = {}
        logs = self.run_dir / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.said = logs / f"{SYNCER}.log"
        self.ends = Ends(self.order.id, list(self.order.learners))
        if (before := read_ends(self.run_dir)) is not None and before.launch == self.order.id:
            self.ends = before
        self.begin(self._live)

    # ---------------------------------------------------------------------------------------- what others ask

    def where_it_is(self) -> str:
        """The address that learners dial; empty while nobody answers there."""
        return self.address if self.state == "running" else ""

    def admit(self, name: str) -> tuple[str, bytes]:
        """The address and the learner's key; a reason in place of the key where an operator has revoked it."""
        keys = Keys(self.run_dir)
        if name not in self.keys:
            mine = [row for row in keys.rows() if row.name == name] if (keys.folder / "issued.json").exists() else []
            if mine and mine[-1].revoked:
                return "", b""
            self.keys[name] = keys.issue(name).pem
        return self.where_it_is(), self.keys[name]

    def takes_part(self, name: str) -> None:
        """Known before it is started, so that the end of the run removes it, too."""
        if name not in self.ends.learners:
            self.ends.learners.append(name)
        self.ends.ended.pop(name, None)
        self._write_ends()

    def ended(self, member: Member, words: bytes) -> None:
        """A learner's last words."""
        self.ends.ended[member.name] = Member(*member)
        self._write_ends()
        put_in_place(self.run_dir / "logs" / f"{member.name}.log", words, 0o600)

    def _write_ends(self) -> None:
        put_in_place(self.run_dir / ENDS, msgspec.json.encode(self.ends), 0o600)

    # ---------------------------------------------------------------------------------------- its life

    def _live(self) -> None:
        self._write_ends()
        while not self.is_leaving:
            if not self.start(self._argv(), self.launch.syncer.env, self.run_dir, SYNCER_LEAVE_S):
                continue
            code = self._one_life()
            if self.is_leaving:
                break
            if code == 0:
                break
            self.fail(f"ended with {code}: {one_line(last_line_of(self.said))}")
        self._finish()

    def _argv(self) -> list[str]:
        config = self.home.file("toml")
        put_in_place(config, self.order.text.encode(), 0o600)
        genesis = str(self.launch.path(self.launch.syncer.genesis)) if self.launch.syncer.genesis else ""
        return syncer_argv(
            self.launch, sys.executable, str(self.run_dir), str(config), genesis, "0.0.0.0", self.order.port
        )  # fmt: skip

    def _one_life(self) -> int:
        assert self.process is not None
        while (code := self.process.code) is None:
            if self.is_leaving:
                return self.process.end()
            if self.state != "running" and self._answers():
                self.turn("running")
            time.sleep(POLL_S)
        return code

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.where, self.order.port), POLL_S):
            return True
        return False

    def _finish(self) -> None:
        """Of a closed run nobody is left; after `skerry stop` the learners wait for whoever comes next."""
        is_closed = phase_of(self.run_dir) == "closed"
        self.turn("ended", "the run is closed" if is_closed else "stopped: skerry launch goes on with it")
        if is_closed and not self.is_leaving:
            deadline = time.monotonic() + LAST_WORDS_S
            while set(self.ends.learners) - set(self.ends.ended) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            left = sorted(set(self.ends.learners) - set(self.ends.ended))
            release(self.run, left, max(leave_s(self.launch, island) for island in self.launch.islands))
        elif not self.is_leaving:
            while not self.is_leaving:
                time.sleep(POLL_S)
        self.ends.ended[SYNCER] = self.status()
        self._write_ends()
        self.home.clear()
        remove(self.run, SYNCER)


class LearnerMember(_Tended):
    """A learner, or one machine's part of it. The first machine decides, and the others do as it says."""

    def __init__(self, order: bytes) -> None:
        decoded = msgspec.json.decode(order, type=Order)
        self.learner, self.machine = f"{decoded.island}-{decoded.index}", decoded.machine
        part = self.learner + (f".{self.machine}" if self.machine else "")
        super().__init__(order, part, part)
        self.island = self.launch.island(decoded.island)
        self.address = ""
        self.met: tuple[str, str, int] | None = None  # this life of the whole learner: its token, and where it meets
        self.broken = ""  # the token of a life that lost a machine
        self.begin(self._follow if self.machine else self._live)

    # ---------------------------------------------------------------------------------------- what others ask

    def meeting(self) -> tuple[str, str, int] | None:
        """Asked by a learner's other machines: which life they are to take part in, if there is one."""
        return self.met

    def broke(self, token: str) -> None:
        """Said by a machine whose part of that life has ended."""
        self.broken = token

    # ---------------------------------------------------------------------------------------- the first machine

    def _live(self) -> None:
        state: State = "ended"
        why = ""
        while not self.is_leaving:
            key = self._admitted()
            if key is None:
                break
            if self.island.machines > 1:
                self.met = (secrets.token_hex(8), self.where, free_port())
            if not self._begin(key):
                continue
            code = self._one_life(self._is_off)
            self.met = None
            in_order = code in (0, 128 + signal.SIGTERM) or self.is_leaving  # torchrun that is told to end, ends with 1
            state, why = ("ended", "") if in_order else ("failed", f"ended with {code}")
            if self.is_leaving or not self._comes_back(code):
                break
            self.fail(f"ended with {code}: {one_line(last_line_of(self.said))}")
        self._finish(state, why and f"{why}: {one_line(last_line_of(self.said))}")

    def _admitted(self) -> bytes | None:
        """Its key, once the syncer has an address; None where there is no run any more, or it is to leave."""
        while not self.is_leaving:
            syncer = actor_of(self.run, SYNCER)
            if syncer is None:
                return None
            answer = _asked(syncer.admit, self.learner)
            if answer is not None:
                self.address, key = answer
                if self.address:
                    return bytes(key)
                if not key:
                    self.turn("restarting", "its key was revoked: skerry keys issue makes it good again")
            self.pause(POLL_S if answer else ASK_S)
        return None

    def _begin(self, key: bytes) -> bool:
        met: list[str] = []
        if self.met is not None:
            _, host, port = self.met
            met = meeting(self.island.machines, str(self.machine), host, str(port))
        argv = learner_argv(self.island, sys.executable, met, self.order.index)
        env = learner_env(
            self.island, self.order.index, self.address, key_file=str(self.home.key_file(key))
        )  # fmt: skip
        folder = folder_of(self.launch, self.island)
        begun = self.start(argv, env, folder, leave_s(self.launch, self.island))
        if begun:
            self.turn("running")
        return begun

    def _one_life(self, is_off: Callable[[], bool]) -> int:
        """Until the process has ended; `is_off` is asked now and then whether it must begin again elsewhere."""
        assert self.process is not None
        asked = time.monotonic()
        while (code := self.process.code) is None:
            if self.is_leaving:
                return self.process.end()
            if time.monotonic() - asked > ASK_S:
                asked = time.monotonic()
                if is_off():
                    return self.process.end() or 128 + signal.SIGHUP
            time.sleep(POLL_S)
        return code

    def _is_off(self) -> bool:
        """The syncer is at another address, or one of the learner's machines has lost its part."""
        if self.met is not None and self.broken == self.met[0]:
            return True
        syncer = actor_of(self.run, SYNCER)
        address = _asked(syncer.where_it_is) if syncer is not None else None
        return bool(address) and address != self.address

    def _comes_back(self, code: int) -> bool:
        if self.island.restart == "never":
            return False
        if code != 0:
            return True
        return self.island.restart == "always" and actor_of(self.run, SYNCER) is not None and not self._is_closed()

    def _is_closed(self) -> bool:
        syncer = actor_of(self.run, SYNCER)
        member = _asked(syncer.status) if syncer is not None else None
        return member is not None and Member(*member).state == "ended"

    def _finish(self, state: State, why: str) -> None:
        self.turn(state, why)
        if (syncer := actor_of(self.run, SYNCER)) is not None:
            _asked(syncer.ended, self.status(), tail(self.said, WORDS_BYTES_MAX))
        self.home.clear()
        remove(self.run, self.learner)

    # ---------------------------------------------------------------------------------------- its other machines

    def _follow(self) -> None:
        """Take part in each life that the first machine begins; the last one ends with the place for all of them."""
        while (lead := actor_of(self.run, self.learner)) is not None:
            met = _asked(lead.meeting)
            syncer = actor_of(self.run, SYNCER)
            answer = _asked(syncer.admit, self.learner) if met is not None and syncer is not None else None
            if met is None or answer is None or not answer[0] or (self.met is not None and met[0] == self.met[0]):
                self.pause(POLL_S)
                continue
            self.met, (self.address, key) = (met[0], met[1], met[2]), answer
            if self._begin(bytes(key)):
                code = self._one_life(self._is_over)
                self.turn("starting", f"ended with {code}: waits for the next life of {self.learner}")
            _asked(lead.broke, self.met[0])
        self.home.clear()
        remove_self(self.run, self.learner, self.machine)

    def _is_over(self) -> bool:
        lead = actor_of(self.run, self.learner)
        return lead is None or _asked(lead.meeting) != self.met


def remove_self(run: str, name: str, machine: int) -> None:
    import ray

    if (actor := actor_of(run, name, machine)) is not None:
        ray.kill(actor)


def _asked(method: Any, *arguments: object) -> Any | None:
    """What another actor answers; None where it does not, for it may be on its way back."""
    import ray

    try:
        return ray.get(method.remote(*arguments), timeout=ANSWER_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None


def phase_of(run_dir: Path) -> Literal["closed"] | str:
    try:
        return str(legible(contents(run_dir / "status.json")).get("phase", ""))
    except (OSError, ValueError):
        return ""


def read_ends(run_dir: Path) -> Ends | None:
    try:
        return msgspec.json.decode(contents(run_dir / ENDS), type=Ends)
    except UNREADABLE:
        return None


def probe(run_dir: str, genesis: str, port: int) -> tuple[str, int]:
    """On the syncer's machine, before anything is made: why it cannot be there, or its port."""
    import ray

    folder, host = Path(run_dir), str(ray.util.get_node_ip_address())
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"{host} cannot write to {folder} ({error.strerror})", 0
    if genesis and not Path(genesis).is_file():
        return f"{host} has no file {genesis}", 0
    if phase_of(folder) == "closed":
        return f"{CLOSED}{folder}", 0
    return "", port or free_port()
