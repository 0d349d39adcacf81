"""What a syncer carries: a real syncer process under synthetic learners that answer at once, over real sockets.

A load of M learners at 1/step_s steps a second with H and P asks for P / (H step_s) merges a second with all M in each.
Learners take their first step when all have joined, or those who did within JOIN_S_MAX. The measured stretch begins one
interval of H steps after that, when every fragment has been due.

Counts come from the tape, times from the learners (one clock for all of them), CPU, memory and what was written from
the system. The run lies in the folder for temporary files: TMPDIR says on which disk, and a syncer waits for its disk.

A row takes longer than its stretch: a run is created, every learner joins (4 bytes a parameter each, over one core's
sockets), an interval passes, and in the end every fragment has a checkpoint.

A merged parameter is one of a version: however many contributions are in it, it counts once. What it costs is CPU time,
so the figures hold for a syncer that has time to spare as well as for one that has not.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from skerry import algo
from skerry import config as configs
from skerry.algo import codecs
from skerry.algo.fragments import Layout, split
from skerry.config import Config
from skerry.core.facts import Decision, Row
from skerry.core.ledger import MERGED
from skerry.engines.child import Child
from skerry.engines.supervisor import LocalRun
from skerry.errors import Refusal, RunFailed
from skerry.node.durations import between, quantile
from skerry.plan.layouts import even
from skerry.plan.needs import syncer_memory
from skerry.proof.bench import cores
from skerry.proof.bench.cores import Cores, Usage
from skerry.proof.bench.merge import DELTA_CODEC
from skerry.proof.bench.reference import Tell, check_disk, copy_gb_s, merge_bytes
from skerry.proof.bench.swarm import Sightings, Swarm
from skerry.run.genesis import begin
from skerry.run.keys import Keys
from skerry.run.tally import tally
from skerry.store.store import Store
from skerry.wire.tls import Tls

MAIN, DECIDING = "MainThread", "deciding"  # what the syncer's main thread is called, and what it does
SOCKETS = "skerry-server"  # the thread that has the sockets
STATE_BYTES = 12  # a parameter: values, velocity and residual
COPIED = 1 << 24  # numbers that are copied to see what this machine's memory carries: more than its caches hold
MINUTES = configs.most("run.minutes")  # a budget that no measurement spends
POLL_S = 0.1
TELL_S = 5.0  # between two lines of progress
JOIN_S_MAX = 120.0
SIGTERM_S_MAX = 60.0  # then the syncer is killed, and the answer is that there was none
SPARE_FILES = 128  # beside a process's sockets


class Load(Struct, frozen=True):
    """What is asked of the syncer."""

    learners: int  # M
    step_s: float
    sync_every: int  # H
    fragments: int  # P
    parameters: int
    seconds: float  # measured
    cores: int = 0  # for the syncer alone, the learners have the others; 0: all share all
    tls: bool = False  # every learner has a key of its own

    @property
    def merges_per_s(self) -> float:
        return self.fragments / (self.sync_every * self.step_s)


class Job(NamedTuple):
    """A load that this machine can be asked to carry."""

    load: Load
    config: Config
    layout: Layout
    division: Cores


class Spread(Struct, frozen=True):
    p50: float
    p99: float
    max: float


class Measured(Struct, frozen=True):
    """What a syncer did under a load; None where the system does not tell, or where nothing happened to speak of."""

    learners: int
    parameters: int
    merged_parameters_per_s: float
    cpu_ns_per_parameter: float | None  # for a merged one, without the sockets' thread
    sockets_ns_per_parameter: float | None  # of that thread
    of_bandwidth: float | None  # bytes that merges touch at least in a second of that CPU time, over those of a copy
    bytes_written_per_parameter: float | None  # to files, for a merged one, as handed to the system
    fsyncs_per_s: float  # of the tape
    merges_per_fsync: float | None
    quorum_to_publish_p99_ms: float | None
    rss_bytes_per_parameter: float | None  # in memory when the stretch ended, for one of the model

    load: Load
    pinned: bool  # the syncer had its cores to itself
    seconds: float
    joined: int  # learners that had the whole model at the end
    joined_s: float  # until the last of them had it, or nobody waited any longer
    steps_per_s: float  # of all learners; less than asked, and the learners' own process is what is measured
    steps_per_s_asked: float
    merges: int
    merges_per_s: float
    merges_per_s_asked: float
    contributions: int  # in these merges
    contributors_mean: float | None
    span_steps_mean: float | None  # that a contribution spans; H is asked
    gain_mean: float | None
    quorum_to_publication_s: Spread | None  # a merge's K-th contribution sent -> its version at the first learner
    sent_to_settled_s: Spread | None  # a contribution sent -> the version with it taken in by its learner
    cpu: float | None  # of a core, the whole process
    cpu_ms_per_merge: float | None
    cpu_by_thread: dict[str, float] | None  # of a core, the busiest first
    cpu_deciding: float | None
    cpu_missed: float | None  # of a core: its threads were ready to run, and others had the cores they may use
    status_age_s_max: float
    sigterm_s: float | None  # until the process had ended; None: it was killed after SIGTERM_S_MAX
    memory_idle_bytes: int | None  # before the first learner
    memory_peak_bytes: int | None
    memory_state_bytes: int  # that values and kept deltas need
    refused: dict[str, int]  # contributions by reason, over the whole run
    fast_forwards: int
    links_lost: int


class Status(Struct, frozen=True):
    """What is read of a status file."""

    at: float
    merges: int
    refused: dict[str, int]
    threads: dict[int, str]
    turns: dict[int, int]  # by length, since the syncer began


class Look(Struct, frozen=True):
    """The state of things at one moment."""

    at: float
    wall: float
    joined: int
    steps: int
    usage: Usage | None
    written_bytes: int | None
    turns: dict[int, int]
    fast_forwards: int
    links_lost: int


def prepared(load: Load, overrides: Iterable[tuple[str, Any]] = (), hostile: int = 0) -> Job:
    """Everything that can be refused about a load is refused here, before anything is started.

    `hostile` ones may be learners of the run beside those of the load.
    """
    config = _configured(load, overrides, hostile)
    check_disk(STATE_BYTES * load.parameters, f"--parameters {load.parameters}")
    _allow_files(load.learners, 1 + config.wire.streams)
    return Job(load, config, even(load.parameters, load.fragments), cores.divided(load.cores))


def _configured(load: Load, overrides: Iterable[tuple[str, Any]], hostile: int) -> Config:
    """The configuration of the run: the defaults, one H throughout, no budget to speak of."""
    base = Config(
        run=configs.Run(name="bench", learners=load.learners + hostile, minutes=MINUTES),
        sync=configs.Sync(
            policy="fixed",
            num_fragments=load.fragments,
            sync_every=load.sync_every,
            fragment_sync_delay=min(configs.Sync().fragment_sync_delay, load.sync_every),
        ),
    )
    return configs.validate(configs.resolve(base, None, overrides))


def measure(job: Job, tell: Tell) -> Measured:
    """Put one load on a syncer, from its start to its end."""
    algo.warm_up()  # the learners' one kernel too, so that none of them waits for it
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        local = LocalRun(Path(folder), [], [], ["--keys"] if job.load.tls else [])
        create(local.run_dir, job.config, job.layout)
        with local.ends_everything(), cores.confined(job.division.others):
            return Bench(job, local, tell).run()


def create(root: Path, config: Config, layout: Layout) -> None:
    """A run whose first values are zeros: what is merged does not depend on them."""
    with Store.open(root) as store:
        begin(store, config, layout, lambda fragment: np.zeros(fragment.size, np.float32))


def _allow_files(learners: int, connections: int) -> None:
    """Sockets for all learners, here and in the child; many systems give a process 1,024 unless it asks."""
    needed = connections * learners + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise Refusal(f"{learners} learners need {needed} open files, and the limit here is {hard}: raise ulimit -Hn")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Bench:
    """One load under way."""

    def __init__(self, job: Job, local: LocalRun, tell: Tell) -> None:
        self.load, self.config, self.layout, self.division = job
        self.local, self.tell = local, tell
        sync = job.config.sync
        self.fragments = split(job.layout, sync.num_fragments, sync.cut_tensors)
        self.sizes = [sum(slot.size for slot in fragment.slots) for fragment in self.fragments]  # without padding
        self.status_age_s_max = 0.0
        self._told_at = float("-inf")

    def run(self) -> Measured:
        with cores.confined(self.division.own):
            copied_gb_s = _copied_gb_s()
            self.local.start_syncer()
        idle_bytes = cores.memory_bytes(self.pid, "VmRSS")
        with self.swarm() as swarm:
            joined_s = self.join(swarm)
            swarm.start()
            self.wait(swarm, self.load.sync_every * self.load.step_s, "first interval")
            before, self.status_age_s_max = self.look(swarm), 0.0
            self.wait(swarm, self.load.seconds, "measuring")
            after, status = self.look(swarm), self.status()
            rss_bytes, peak_bytes = (cores.memory_bytes(self.pid, which) for which in ("VmRSS", "VmHWM"))
            sigterm_s = self.terminate()
        decisions, fsyncs = self._decisions(before.wall, after.wall)
        rows = [row for decision in decisions for row in _merged(decision)]
        seconds, cpu_s = after.at - before.at, threads_s(before, after, status)
        busy_s = None if cpu_s is None else sum(cpu_s.values())
        merged = sum(self.sizes[decision.fragment] for decision in decisions)
        sockets_s = None if cpu_s is None else cpu_s.get(SOCKETS, 0.0)
        merging_s = None if busy_s is None or sockets_s is None else busy_s - sockets_s
        publication_s = publication_spread(decisions, swarm.seen)
        return Measured(
            learners=self.load.learners,
            parameters=self.load.parameters,
            merged_parameters_per_s=merged / seconds,
            cpu_ns_per_parameter=_over(merging_s, merged, 1e9),
            sockets_ns_per_parameter=_over(sockets_s, merged, 1e9),
            of_bandwidth=_over(self._touched_bytes(decisions) if merged else None, merging_s, 1e-9 / copied_gb_s),
            bytes_written_per_parameter=_over(_written_bytes(before, after), merged),
            fsyncs_per_s=fsyncs / seconds,
            merges_per_fsync=_over(len(decisions), fsyncs),
            quorum_to_publish_p99_ms=None if publication_s is None else 1e3 * publication_s.p99,
            rss_bytes_per_parameter=_over(rss_bytes, self.load.parameters),
            load=self.load,
            pinned=self.division.own is not None,
            seconds=seconds,
            joined=after.joined,
            joined_s=joined_s,
            steps_per_s=(after.steps - before.steps) / seconds,
            steps_per_s_asked=self.load.learners / self.load.step_s,
            merges=len(decisions),
            merges_per_s=len(decisions) / seconds,
            merges_per_s_asked=self.load.merges_per_s,
            contributions=len(rows),
            contributors_mean=_mean([len(decision.parts) for decision in decisions]),
            span_steps_mean=_mean([row.steps for row in rows]),
            gain_mean=_mean([decision.gain for decision in decisions]),
            quorum_to_publication_s=publication_s,
            sent_to_settled_s=_spread(_settled_s(swarm.seen, before.at, after.at)),
            cpu=None if busy_s is None else busy_s / seconds,
            cpu_ms_per_merge=None if busy_s is None or not decisions else 1e3 * busy_s / len(decisions),
            cpu_by_thread=None if cpu_s is None else {name: used_s / seconds for name, used_s in cpu_s.items()},
            cpu_deciding=None if cpu_s is None else cpu_s.get(DECIDING, 0.0) / seconds,
            cpu_missed=_missed(before, after),
            status_age_s_max=self.status_age_s_max,
            sigterm_s=sigterm_s,
            memory_idle_bytes=idle_bytes,
            memory_peak_bytes=peak_bytes,
            memory_state_bytes=self._state_bytes(),
            refused=status.refused,
            fast_forwards=after.fast_forwards,
            links_lost=after.links_lost,
        )

    # ------------------------------------------------------------------------------------------ while it runs

    @property
    def syncer(self) -> Child:
        assert self.local.syncer is not None
        return self.local.syncer

    @property
    def pid(self) -> int:
        assert self.syncer.process is not None
        return self.syncer.process.pid

    @property
    def token(self) -> str:
        """Of the run; empty if it has none."""
        return self.local.token_file.read_text().strip() if self.local.token_file else ""

    @contextlib.contextmanager
    def swarm(self) -> Iterator[Swarm]:
        load, token = self.load, self.token.encode() or None
        names = [f"learner-{k}" for k in range(load.learners)] if load.tls else []
        keys = [Tls(path) for path in key_files(self.local.run_dir, names)]
        swarm = Swarm(self.local.port, self.config, self.layout, load.step_s, load.learners, token, keys)
        try:
            yield swarm
        finally:
            swarm.close()

    def join(self, swarm: Swarm) -> float:
        began = time.monotonic()
        while swarm.joined < self.load.learners and time.monotonic() - began < JOIN_S_MAX:
            self._pause(swarm, f"{swarm.joined} of {self.load.learners} joined")
        if not swarm.joined:
            raise RunFailed(f"no learner had the model after {JOIN_S_MAX:.0f} s: ask for less")
        return time.monotonic() - began

    def wait(self, swarm: Swarm, seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._pause(swarm, f"{what}, {left_s:.0f} s left, {self.status().merges} merges", left_s)

    def _pause(self, swarm: Swarm, doing: str, at_most_s: float = POLL_S) -> None:
        """A moment, with a look at everybody's health and now and then a word."""
        if time.monotonic() - self._told_at >= TELL_S:
            self._told_at = time.monotonic()
            self.tell(doing)
        time.sleep(min(POLL_S, at_most_s))
        self.status_age_s_max = max(self.status_age_s_max, time.time() - self.status().at)
        if not self.syncer.is_running:
            raise RunFailed(f"the syncer ended: {self.syncer.last_line().removeprefix('skerry: ')}")
        if swarm.failure:
            raise RunFailed(f"the learners cannot go on: {swarm.failure}")

    def status(self) -> Status:
        return msgspec.json.decode((self.local.run_dir / "status.json").read_bytes(), type=Status)

    def look(self, swarm: Swarm) -> Look:
        usage = cores.usage(self.pid)
        return Look(
            at=time.monotonic(),
            wall=time.time(),
            joined=swarm.joined,
            steps=swarm.steps,
            usage=usage,
            written_bytes=cores.written_bytes(self.pid),
            turns=self.status().turns,
            fast_forwards=swarm.seen.fast_forwards,
            links_lost=swarm.links_lost,
        )

    def terminate(self) -> float | None:
        """End the syncer while the load is on; the seconds it took."""
        process, began = self.syncer.process, time.monotonic()
        assert process is not None
        process.terminate()
        try:
            process.wait(SIGTERM_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None
        return time.monotonic() - began

    # ------------------------------------------------------------------------------------------ afterwards

    def _decisions(self, since: float, until: float) -> tuple[list[Decision], int]:
        """The merges committed in this stretch of wall-clock time, from the tape, and its fsyncs.

        It has one for each group, and a group has a stamp of its own.
        """
        with Store.open(self.local.run_dir, readonly=True) as store:
            groups = {record.at for record in store.history() if since <= record.at < until}
            return [decision for at, decision in tally(store).merges if since <= at < until], len(groups)

    def _touched_bytes(self, decisions: Sequence[Decision]) -> int:
        """That these merges had to read and write at least."""
        wire, total = self.config.wire, 0
        for decision in decisions:
            size = self.fragments[decision.fragment].size
            contributions = len(decision.parts) * codecs.payload_bytes(wire.codec_up, size)
            total += merge_bytes(contributions, size, DELTA_CODEC, wire.codec_down)
        return total

    def _state_bytes(self) -> int:
        needs = syncer_memory(self.config, [fragment.size for fragment in self.fragments], rounds=0)
        return needs["values"] + needs["deltas"]


def key_files(run: Path, names: Iterable[str]) -> list[Path]:
    """A key of the run for each of these names, in a file beside it."""
    keys, found = Keys(run), []
    for name in names:
        pem = keys.issue(name).pem
        found.append(path := run / f"{name}.key")
        path.touch(0o600)
        path.write_bytes(pem)
    return found


def _copied_gb_s() -> float:
    """Bytes that one thread reads and writes in a second when it copies."""
    source, target = np.zeros(COPIED, np.float32), np.zeros(COPIED, np.float32)
    with ThreadPoolExecutor(1) as pool:
        return max(copy_gb_s(pool, [(source, target)]) for _ in range(2))  # the first finds untouched memory


def _over(what: float | None, parts: float | None, unit: float = 1.0) -> float | None:
    """So much for each part; None where one of them is not known, or there is no part."""
    return None if what is None or not parts else unit * what / parts


def _written_bytes(before: Look, after: Look) -> int | None:
    if before.written_bytes is None or after.written_bytes is None:
        return None
    return after.written_bytes - before.written_bytes


def _merged(decision: Decision) -> list[Row]:
    return [row for row in decision.rows if row.fate == MERGED]


def publication_spread(decisions: Sequence[Decision], seen: Sightings) -> Spread | None:
    """From a merge's K-th contribution to its version at the first learner."""
    return _spread(_publication_s(decisions, seen))


def _publication_s(decisions: Sequence[Decision], seen: Sightings) -> list[float]:
    """From each merge's quorum to its version's arrival, grace included; not of versions that never arrived."""
    found = []
    for decision in decisions:
        sent = sorted(seen.sent[row.learner, row.seq] for row in _merged(decision))
        published = seen.published.get((decision.fragment, decision.version))
        if published is not None and sent:
            found.append(published - sent[min(decision.quorum, len(sent)) - 1])
    return found


def _settled_s(seen: Sightings, since: float, until: float) -> list[float]:
    return [at - seen.sent[which] for which, at in seen.settled.items() if since <= at < until]


def turn_spread(before: Look, after: Look) -> Spread | None:
    """How long a turn of the deciding thread took, of those that had something to take in."""
    turns = between(before.turns, after.turns)
    return Spread(*(quantile(turns, share) for share in (0.5, 0.99, 1.0))) if turns else None


def threads_s(before: Look, after: Look, status: Status) -> dict[str, float] | None:
    if before.usage is None or after.usage is None:
        return None
    names = {thread: DECIDING if name == MAIN else name for thread, name in status.threads.items()}
    return cores.spent(before.usage, after.usage, names)


def _missed(before: Look, after: Look) -> float | None:
    if before.usage is None or after.usage is None:
        return None
    return (after.usage.waited_s - before.usage.waited_s) / (after.at - before.at)


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _spread(numbers: Sequence[float]) -> Spread | None:
    if not numbers:
        return None
    middle, high = np.quantile(numbers, [0.5, 0.99])
    return Spread(float(middle), float(high), max(numbers))
