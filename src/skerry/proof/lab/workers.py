"""Jobs in worker processes. One that fails takes no other with it; nothing but the workers imports torch."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, parent_process
from pathlib import Path

import msgspec

from skerry.proof.lab.results import decoded
from skerry.proof.lab.study import Job, Result, Stint
from skerry.python import Spawning

TELL_S = 0.2  # between two words of a worker on its progress
LOOK_S = 1.0  # between two looks at workers that may have died in silence
END_S = 5.0  # for a worker to end by itself

Run = Callable[[Job, str, Callable[[float], None], Stint], Result | None]


@dataclass(frozen=True)
class Event:
    """A job has begun or got further; or it has ended: with a result, saved, or with the reason why there is none."""

    job: Job
    progress: float = 0.0
    result: Result | None = None
    failure: str = ""
    is_saved: bool = False  # its time was up

    @property
    def is_end(self) -> bool:
        return self.result is not None or self.is_saved or bool(self.failure)


def execute(
    jobs: Iterable[Job],
    save_of: Callable[[Job], Path],
    device: str = "cpu",
    workers: int = 1,
    minutes: float = math.inf,
    run: Run | None = None,
) -> Generator[Event, None, None]:
    """Run jobs, each alone in one of a few processes, and tell what becomes of them.

    None starts after `minutes`, and those that are under way are saved then. Close the iterator and the processes end.
    `run` is what a worker calls, by default that of skerry.proof.lab.job.
    """
    waiting, until = deque(jobs), time.monotonic() + 60 * minutes
    idle: list[_Worker] = []
    busy: list[_Worker] = []
    try:
        while True:
            while waiting and len(busy) < workers and time.monotonic() < until:
                worker = idle.pop() if idle else _Worker(device, run)
                busy.append(worker)
                worker.begin(waiting[0], Stint(save_of(waiting[0]), until))
                yield Event(waiting.popleft())
            if not busy:
                return
            for worker in _speaking(busy):
                event = worker.heard()
                if event.is_end:
                    busy.remove(worker)
                    # A process in which something failed, on a GPU above all, is not trusted with another job.
                    worker.end() if event.failure else idle.append(worker)
                yield event
    finally:
        for worker in busy:
            worker.process.terminate()
        for worker in idle:
            worker.pipe.close()  # it ends by itself then, and what it had begun (compilers, semaphores) with it
        for worker in idle + busy:
            worker.end()


def _speaking(busy: list[_Worker]) -> list[_Worker]:
    pipes = connection.wait([worker.pipe for worker in busy], LOOK_S)
    return [worker for worker in busy if worker.pipe in pipes or not worker.process.is_alive()]


class _Worker:
    """A process and the job it has."""

    job: Job

    def __init__(self, device: str, run: Run | None) -> None:
        context = Spawning()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, device, run))
        with _no_interrupt():
            self.process.start()
        theirs.close()

    def begin(self, job: Job, stint: Stint) -> None:
        self.job = job
        with suppress(OSError):  # it has died meanwhile: heard next
            self.pipe.send((job, stint))

    def heard(self) -> Event:
        said: bytes | float | str | None
        try:
            said = self.pipe.recv() if self.pipe.poll() else self._death()
        except (EOFError, OSError):
            said = self._death()
        if said is None:
            return Event(self.job, is_saved=True)
        if isinstance(said, bytes):
            return Event(self.job, 1.0, result=_belonging(decoded(str(self.job), said), self.job))
        return Event(self.job, failure=said) if isinstance(said, str) else Event(self.job, said)

    def _death(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        if code >= 0:
            return f"its process ended with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"its process was killed by {signal.Signals(-code).name}{hint}"

    def end(self) -> None:
        self.pipe.close()
        self.process.join(END_S)
        self.process.kill()
        self.process.join()


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """A process begun here never sees Ctrl-C, which a terminal sends to all: its parent ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _belonging(result: Result, job: Job) -> Result:
    """Whose a result is, is said here, not by what made it."""
    return msgspec.structs.replace(
        result,
        key=job.key,
        study=job.study,
        variant=job.variant,
        seed=job.seed,
        config=msgspec.to_builtins(job.config),
        setting=msgspec.to_builtins(job.setting),
    )


def _work(pipe: connection.Connection, device: str, run: Run | None) -> None:
    """In a worker: one job after the other until the parent is gone; ends at the first failure."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # standard output is the parent's
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums in one order; many cores are for many jobs
    tell = _Teller(pipe)
    with suppress(EOFError, OSError):
        while True:
            job, stint = pipe.recv()
            os.chdir(job.folder)
            try:
                if run is None:
                    run = __import__("skerry.proof.lab.job", fromlist=["run"]).run
                result = _encoded(job, run(job, device, tell, stint))
            except Exception as error:
                pipe.send(_in_one_line(error))
                return
            pipe.send(result)


def _encoded(job: Job, result: Result | None) -> bytes | None:
    """What cannot be read back is this job's failure, not the parent's."""
    if result is None:
        return None
    line = msgspec.json.encode(result, enc_hook=str)  # torch has a str of its own
    decoded(str(job), line)
    return line


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_one_line(error: Exception) -> str:
    """What went wrong, and the last place on the way there that is no library's."""
    places = traceback.extract_tb(error.__traceback__)
    place = [one for one in places if "site-packages" not in one.filename][-1]
    text = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}: {text} ({os.path.basename(place.filename)}:{place.lineno})"


@dataclass
class _Teller:
    pipe: connection.Connection
    _at: float = field(default=-math.inf)

    def __call__(self, progress: float) -> None:
        if time.monotonic() - self._at > TELL_S:
            self._at = time.monotonic()
            self.pipe.send(float(progress))
