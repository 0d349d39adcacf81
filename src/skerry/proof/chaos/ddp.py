"""Plain torch DistributedDataParallel under the faults Skerry is put under: the other half of `skerry chaos table`.

Real ranks on this machine train undisturbed, then under the fault. Rates come from the ranks' own logs; what a fault
does to them, crash or hang, is found out and never assumed. A step belongs to the window in which it began and ended:
the one in flight when the fault comes counts for neither side, and a window ends with a step where steps go on.

Nothing here imports torch; the ranks do (`ddp_rank.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from skerry import config as configs
from skerry.errors import ConfigError, NetworkError
from skerry.proof.chaos.ddp_net import DELAY_MS, INTERFACE, RATE, Network
from skerry.python import module_argv

FAILED_LEARNER = "failed learner"
REGIONAL_OUTAGE = "regional outage"
THROTTLING = "throttling"
WAN = "wan"
FAULTS = (FAILED_LEARNER, REGIONAL_OUTAGE, THROTTLING, WAN)

THROTTLE = 4  # the throttled rank's pace is divided by this
START_S = 120.0  # for the first step of all ranks
POLL_S = 0.1
STEPS_MIN = 2  # whole steps that make a rate
PATIENCE = 1.5  # windows in which those are waited for
WAN_PATIENCE_S = 90.0  # the same over a slow network, where one step may take half a minute
ERROR = re.compile(r"(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)): (?:\[\S+:\d+\] )?(.*?)(?:\. .*)?")  # of a traceback

Show = Callable[[str], None]


@dataclass(frozen=True)
class DdpResult:
    """Tokens per second of all ranks before and during a fault; `is_bound`: the true impact is this or higher."""

    fault: str
    rate_before: float = 0.0
    rate_during: float = 0.0
    seconds: float = 0.0  # of the window under the fault
    what_happened: str = ""
    is_bound: bool = False
    measured: bool = False
    why_not: str = ""


@dataclass(frozen=True)
class Step:
    """One step of the process group: when the last rank had ended it, and the tokens of those that did."""

    ended_at: float
    tokens: int


class NotRunning(Exception):
    """The ranks did not get as far as the fault: what they said."""


def measure(
    config: configs.Config,
    fault: str,
    *,
    learners: int = 4,
    seconds: float = 20.0,
    warm_s: float = 2.0,
    show: Show = lambda text: None,
) -> DdpResult:
    """Train for `seconds` undisturbed and as long under the fault; `show` is told every moment what goes on."""
    assert fault in FAULTS and learners >= 2 and seconds > 0, (fault, learners, seconds)
    if fault == THROTTLING and not config.learner.step_s:
        raise ConfigError("learner.step_s = 0: throttling divides a pace; set one, like 0.3")
    try:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="skerry-ddp-"))
            network = stack.enter_context(Network(learners)) if fault == WAN else None
            ranks = stack.enter_context(_started(config, learners, Path(folder), network))
            measurement = _Measurement(fault, ranks, network, lambda text: show(f"plain DDP, {fault}: {text}"))
            return measurement.run(seconds, warm_s)
    except (NetworkError, NotRunning) as error:
        return DdpResult(fault, why_not=f"not measured here: {error}")


class _Measurement:
    """The ranks, and what is done to them and read of them, in order."""

    def __init__(self, fault: str, ranks: Ranks, network: Network | None, show: Show) -> None:
        self.fault = fault
        self.ranks = ranks
        self.network = network
        self.show = show

    def run(self, seconds: float, warm_s: float) -> DdpResult:
        self._wait_for_first_step()
        self._train_undisturbed("warming up", warm_s)
        began = time.time()
        self._train_undisturbed("undisturbed", seconds)
        before = _between(self.ranks.steps(), began, time.time())
        if not _has_rate(before, began):
            raise NotRunning(f"{len(before)} steps in {seconds:.0f} s are too few for a rate; measure for longer")
        self._inject()
        return self._result(before, time.time(), seconds)

    def _wait_for_first_step(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.ranks.have_all_stepped():
            self.show("starting")
            self._need_all()
            if time.monotonic() > deadline:
                raise NotRunning(f"the ranks took no step within {START_S:.0f} s")
            time.sleep(POLL_S)

    def _train_undisturbed(self, doing: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.show(f"{doing}, {left:.0f} s to go")
            self._need_all()
            time.sleep(min(POLL_S, left))

    def _need_all(self) -> None:
        for rank in self.ranks.ended():
            raise NotRunning(f"rank {rank} ended before the fault: {self.ranks.said(rank)}")

    def _inject(self) -> None:
        count = len(self.ranks.processes)
        if self.fault == FAILED_LEARNER:
            self.ranks.kill([count - 1])
        elif self.fault == REGIONAL_OUTAGE:
            self.ranks.kill(range(count - count // 2, count))
        elif self.fault == THROTTLING:
            self.ranks.processes[-1].send_signal(signal.SIGUSR1)
        else:
            assert self.network is not None
            self.network.slow_down()

    # ------------------------------------------------------------------------------------------ under the fault

    def _result(self, before: list[Step], injected: float, seconds: float) -> DdpResult:
        ended = self._wait_under_fault(injected, seconds)
        during = _between(self.ranks.steps(), injected, ended)
        if _has_rate(during, injected + seconds):
            rate, is_bound = _rate(during), False
        else:
            rate, is_bound = stalled_rate(during, before[-1].tokens, injected, ended, not self.ranks.ended())
        return DdpResult(
            fault=self.fault,
            rate_before=_rate(before),
            rate_during=rate,
            seconds=ended - injected,
            what_happened=self._story(before, during),
            is_bound=is_bound,
            measured=True,
        )

    def _wait_under_fault(self, injected: float, seconds: float) -> float:
        """Until a window's worth of steps, or all patience, has passed; when that was."""
        patience = max(PATIENCE * seconds, WAN_PATIENCE_S if self.fault == WAN else 0.0)
        while (now := time.time()) < injected + patience:
            during = _between(self.ranks.steps(), injected, now)
            if _has_rate(during, injected + seconds):
                return during[-1].ended_at
            if len(self.ranks.ended()) == len(self.ranks.processes):
                return max(now, injected + seconds)  # nobody is left to take a step in the rest of the window
            self.show(f"under the fault for {now - injected:.0f} s, {len(during)} steps ended")
            time.sleep(POLL_S)
        return now

    def _story(self, before: list[Step], during: list[Step]) -> str:
        parts = []
        if killed := self.ranks.killed:
            parts.append(f"{_named(killed)} killed")
        crashed = [rank for rank in self.ranks.ended() if rank not in killed]
        if crashed:
            parts.append(f"{_named(crashed)} ended: {self.ranks.said(crashed[0])}")
        going = [rank for rank in range(len(self.ranks.processes)) if rank not in self.ranks.ended()]
        if len(during) > 1:
            parts.append(f"{len(during) - 1} steps of {_step_s(during):.2f} s, before {_step_s(before):.2f} s")
        elif going:
            parts.append(f"{_named(going)} {'hang' if killed or crashed else 'ended no step in the window'}")
        if self.network is not None:
            delay = f"{DELAY_MS} ms one way" if self.network.has_delay else "no delay: this kernel has no netem"
            parts.append(f"every link at {RATE}, {delay}")
        return "; ".join(parts)


class Ranks:
    """The processes and their logs; `killed` are those this side killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.killed: list[int] = []

    def start(self, config: Path, rank: int, world: int, network: Network | None) -> None:
        command = module_argv(
            "skerry.proof.chaos.ddp_rank", "--rank", str(rank), "--world", str(world),
            "--init", f"file://{self.folder / 'meeting'}", "--config", str(config), "--log", str(self._log(rank)),
            "--parent", str(os.getpid()),
        )  # fmt: skip
        interface = INTERFACE if network else "lo"
        with self._errors(rank).open("ab") as errors:
            process = subprocess.Popen(
                [*(network.inside(rank) if network else []), *command],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface},
                start_new_session=True,  # Ctrl-C is for this process, which then ends them
            )
        self.processes.append(process)

    def kill(self, ranks: Iterable[int]) -> None:
        self.killed = list(ranks)
        for rank in self.killed:
            self.processes[rank].kill()
        for rank in self.killed:
            self.processes[rank].wait()

    def ended(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll() is not None]

    def have_all_stepped(self) -> bool:
        return all(self._lines(rank) for rank in range(len(self.processes)))

    def steps(self) -> list[Step]:
        """What the logs hold, in order."""
        steps: dict[int, Step] = {}
        for rank in range(len(self.processes)):
            for at, number, tokens in self._lines(rank):
                known = steps.get(number, Step(0.0, 0))
                steps[number] = Step(max(known.ended_at, at), known.tokens + tokens)
        return [steps[number] for number in sorted(steps)]

    def said(self, rank: int) -> str:
        """A rank's first error without torch's own file names and advice, or else its last line."""
        lines = self._errors(rank).read_text(errors="replace").strip().splitlines()
        errors = [f"{match[1]}: {match[2]}" for line in lines if (match := ERROR.fullmatch(line))]
        return next(iter([*errors, *lines[-1:]]), "it said nothing")

    def _lines(self, rank: int) -> list[tuple[float, int, int]]:
        if not self._log(rank).exists():
            return []
        whole, _, _ = self._log(rank).read_text().rpartition("\n")
        rows = (line.split() for line in whole.splitlines())
        return [(float(at), int(number), int(tokens)) for at, number, tokens in rows]

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def _errors(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.err"


@contextlib.contextmanager
def _started(config: configs.Config, world: int, folder: Path, network: Network | None) -> Iterator[Ranks]:
    """Ranks that run; however this ends, none is left behind."""
    file = folder / "config.json"
    file.write_bytes(configs.encode(config))
    ranks = Ranks(folder)
    try:
        for rank in range(world):
            ranks.start(file, rank, world, network)
        yield ranks
    finally:
        ranks.kill(range(len(ranks.processes)))


def _between(steps: list[Step], begin: float, end: float) -> list[Step]:
    return [step for step in steps if begin < step.ended_at <= end]


def stalled_rate(
    during: list[Step], step_tokens: int, injected: float, ended: float, are_all_running: bool
) -> tuple[float, bool]:
    """Tokens per second where steps stopped or are too few for a rate, and whether that is only an upper bound.

    As long as all ranks run, a step may be in progress: it counts as if it had just been ended.
    """
    tokens = sum(step.tokens for step in during[1:])
    if not are_all_running:
        return tokens / (ended - injected), False
    began = during[0].ended_at if during else injected
    return (tokens + step_tokens) / (ended - began), True


def _has_rate(steps: list[Step], until: float) -> bool:
    return len(steps) > STEPS_MIN and steps[-1].ended_at >= until


def _rate(steps: list[Step]) -> float:
    """Tokens per second from the end of the first step, which began outside the window, to the end of the last."""
    return sum(step.tokens for step in steps[1:]) / (steps[-1].ended_at - steps[0].ended_at)


def _step_s(steps: list[Step]) -> float:
    return (steps[-1].ended_at - steps[0].ended_at) / (len(steps) - 1)


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
