"""A real run's twin in virtual time: the real core, nodes and store, fed with what the run's tape measured.

Why the real machines and not a formula of them: which fragments are due, who is asked ahead, how long a window is and
what an outage leaves behind are decided by some thousand lines of `core/`, and a model of those would have to be
believed as well. What is simulated is only what the tape says of the world: step times (drawn from those sampled about
then), transfers, what encoding, adopting, merging and committing took on average, processes that were away, links that
were cut, slow or silent. Tensors are integers (`sim.algebra`), and a link that no fault delays takes a millisecond.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any, cast

from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import BLOCK, Fragment
from skerry.core.messages import Contribution, Message, Publication
from skerry.errors import MeasurementError
from skerry.node.algebra import Payload
from skerry.node.driver import both_halves
from skerry.node.peers import Learners
from skerry.node.syncer import SyncerNode
from skerry.node.training import ByHand
from skerry.node.turns import SyncerDriver
from skerry.proof.sim.algebra import BYTES, Integers
from skerry.proof.sim.files import CrashFiles, Session
from skerry.proof.sim.lines import OTHER, Hub, Line, Trip
from skerry.proof.sim.timeline import Timeline
from skerry.proof.sim.workers import NodeThread, TimedDisk, TimedWorkers
from skerry.proof.sim.world import layout_for
from skerry.proof.twin.measurements import CUTS, LATENCY_S, Life, Measurements
from skerry.run.delays import NONE, PYTHON_S
from skerry.run.genesis import begin
from skerry.run.tally import Tally, tally
from skerry.store.files import FileSystem
from skerry.store.store import Store
from skerry.wire.transport import Lost, Sent, WireEvent

ROOT = Path("/twin")
TICK_S = 0.05  # of the nodes between events
REDIAL_S = 0.3  # a first try, with what the handshake takes
BUFFER_BYTES = 2560 << 10  # of a stream, in kernels on the way: for its sender they have left (Linux, loopback)
LATE = 4.0  # a twin that needs so much longer than its run will never end


class Sized(Integers):
    """Integers; a whole fragment is as many times longer than a delta as the run's: the syncer sends the shorter."""

    def __init__(self, codec: str) -> None:
        self._whole_bytes = BYTES[codec] * payload_bytes("fp32", BLOCK) // payload_bytes(codec, BLOCK)

    def whole(self, theta: int) -> memoryview:
        return memoryview(theta.to_bytes(self._whole_bytes, "little", signed=True))


def live(measured: Measurements, seed: int) -> Tally:
    """The twin's own tape, folded."""
    return Twin(measured, seed).run()


class Twin(Timeline):
    def __init__(self, measured: Measurements, seed: int) -> None:
        super().__init__()
        self.measured = measured
        self.algebra = Sized(measured.config.wire.codec_down)
        self.random = random.Random(seed)
        self.layout = layout_for(len(measured.fragments))
        self.disk = CrashFiles(seed)
        self.hub = Hub()
        self.syncer: SyncerNode | None = None
        self.learners = Learners()
        self._create()
        self._start_syncer()
        for at, until in measured.syncer_away:
            self.at(at, self._end_syncer)
            self.at(until, self._start_syncer)
        for life in measured.lives:
            self.at(life.begins, partial(Island, self, life))

    def clock(self) -> float:
        return self.now

    def _create(self) -> None:
        with Store.open(ROOT, files=self._files(), clock=self.clock) as store:
            begin(store, self.measured.config, self.layout, lambda fragment: 0, self.algebra)

    def _files(self) -> FileSystem:
        return cast(FileSystem, Session(self.disk))

    def _start_syncer(self) -> None:
        self.learners = Learners()
        self.store = Store.open(ROOT, files=self._files(), clock=self.clock)
        self.syncer = self.learners.node = SyncerNode(self.store, self.learners, self.clock, self.algebra)
        driver = self.driver = SyncerDriver(self.syncer, self.learners, self.clock)
        if self.measured.delays != NONE:
            self.syncer.pool = TimedWorkers(
                self,
                self.measured.delays,
                self.measured.sizes,
                self.measured.config.merge.threads,
                lambda: self._turn(driver),
                PYTHON_S,
            )
            self.syncer.log.pool = TimedDisk(self, self.measured.delays, lambda: self._turn(driver))
        self.learners.endpoint = self.hub
        self._tick(self.syncer)

    def _end_syncer(self) -> None:
        self.syncer = None
        self.store.close()
        self.hub.close()

    def _tick(self, syncer: SyncerNode) -> None:
        if self.syncer is syncer and not syncer.finished:
            if self.awake_at("syncer") == self.now:
                self.driver.turn()
                syncer.tidy()
            self.at(TICK_S, partial(self._tick, syncer))

    def bring(self, event: WireEvent) -> None:
        """To the syncer, whose next turn is at once: it takes in what comes at the same moment together."""
        if not len(self.driver):
            self.at(0.0, partial(self._turn, self.driver))
        self.driver.offer(event)

    def _turn(self, driver: SyncerDriver) -> None:
        if (awake_at := self.awake_at("syncer")) > self.now:
            self.at(awake_at - self.now, partial(self._turn, driver))
        elif self.syncer is driver.node:
            driver.turn()

    def awake_at(self, target: str) -> float:
        """When a process that was stopped goes on; now if it was not."""
        return max((b for a, b in self.measured.spans(target, "stop") if a <= self.now < b), default=self.now)

    def run(self) -> Tally:
        measured = self.measured.tally
        limit_s = LATE * ((measured.closing_at or 0.0) - measured.epochs[0].at) + 600
        is_over = self.run_until(limit_s, lambda: self.syncer is not None and bool(self.syncer.finished))
        if not is_over:
            raise MeasurementError(f"the twin did not end within {limit_s:.0f} s of virtual time: {self.syncer}")
        with self.store:
            return tally(self.store)


class Island:
    """One life of a learner, from its hello to its end; it is its node's `Parameters`."""

    def __init__(self, twin: Twin, life: Life) -> None:
        self.twin, self.name, self.life = twin, life.learner, life
        self.is_dead = False
        self.values: dict[int, Any] = {}
        self.step_s: float | None = None  # of the step it is in
        self.step_count = 0
        process = f"{self.name}-{next(twin.hub.numbers)}"
        self.training, self.driver = both_halves(
            self.name, twin.layout, ByHand(self), process, twin.clock, twin.algebra
        )
        self.thread = NodeThread(twin, twin.measured.delays, twin.measured.sizes)
        self.line: Line | None = None
        self._dial()
        self._turn()
        self._tick()
        if life.ends < float("inf"):
            twin.at(life.ends - twin.now, self._die)
        for fault in twin.measured.faults:
            if fault.target == self.name and fault.kind in CUTS and fault.at > twin.now:
                twin.at(fault.at - twin.now, self._cut)
        for kind in ("partition", "half_open"):
            for at, until in twin.measured.spans(self.name, kind):
                silent_s = twin.measured.config.wire.timeout_s
                if until - at > silent_s and at + silent_s > twin.now:
                    twin.at(at + silent_s - twin.now, self._cut)

    def _die(self) -> None:
        self.is_dead = True
        self._cut()

    def _cut(self) -> None:
        if self.line is not None:
            self.line.cut()

    # ------------------------------------------------------------------------------------------ its link

    def _dial(self) -> None:
        twin = self.twin
        free_at = max(twin.measured.blocked_until(self.name, way, twin.now) for way in ("up", "down"))
        if self.is_dead or self.line is not None:
            return
        if twin.syncer is None or twin.syncer.finished or free_at > twin.now:
            twin.at(max(REDIAL_S, free_at - twin.now), self._dial)
            return
        self.line = self.driver.uplink.endpoint = TwinLine(twin, self)

    def take(self, event: WireEvent) -> None:
        if self.is_dead:
            return
        self.driver.take(event)
        if isinstance(event, Lost):
            self.line = None
            self.twin.at(REDIAL_S, self._dial)
        self._end_if_left()

    # ------------------------------------------------------------------------------------------ its two threads

    def _turn(self) -> None:
        """A step ends and the next begins, or it stands and looks for work."""
        twin, training = self.twin, self.training
        if self.is_dead:
            return
        if (awake_at := twin.awake_at(self.name)) > twin.now:
            twin.at(awake_at - twin.now, self._turn)
            return
        if not training.must_stand and not training.is_closing:
            self._end_step()
        if training.must_stand or training.is_closing:
            training.stand()
            twin.at(TICK_S, self._turn)
            return
        self.step_s = twin.measured.step_s(self.life, self.step_count, twin.now, twin.random)
        self.step_count += 1
        twin.at(self.step_s, self._turn)

    def _end_step(self) -> None:
        """The step it is in is over, and perhaps the run wants no other."""
        if self.step_s is not None:
            for p in self.values:
                self.values[p] += 1
            self.training.boundary(1, self.twin.measured.step_tokens[self.name], self.step_s)
        if not self.training.is_running:
            self.training.close()
        self.driver.tick()  # a boundary wakes the node thread

    def _tick(self) -> None:
        if self.is_dead:
            return
        if self.twin.awake_at(self.name) == self.twin.now:
            self.driver.tick()
            self._end_if_left()
        self.twin.at(TICK_S, self._tick)

    def _end_if_left(self) -> None:
        """The process ends; its last words still leave."""
        if self.driver.node.left is not None:
            self.is_dead = True
            if self.line is not None:
                self.twin.at(1.0, self.line.cut)

    # ------------------------------------------------------------------------------------------ its parameters

    def read(self, fragment: Fragment) -> Any:
        return self.values[fragment.index]

    def add(self, fragment: Fragment, increment: Any) -> None:
        self.values[fragment.index] += increment

    def write(self, fragment: Fragment, values: Any) -> None:
        self.values[fragment.index] = values

    def blend(self, fragment: Fragment, towards: Any, alpha: float) -> None:
        self.values[fragment.index] = towards + int(alpha * (self.values[fragment.index] - towards))

    def reset_optimizer(self) -> None: ...


class TwinLine(Line):
    """As fast as the tape says of this learner's link at the time, and as broken."""

    def __init__(self, twin: Twin, island: Island) -> None:
        self.twin, self.island = twin, island
        super().__init__(twin.hub, twin, island.name, LATENCY_S, island.thread)

    def trip(self, way: str, message: Message, payload: Payload | None) -> Trip:
        measured, name, now = self.twin.measured, self.island.name, self.twin.now
        latency_s = LATENCY_S + measured.worst(name, "delay", now)
        if payload is None:
            return Trip(0.0, 0.0, latency_s)
        assert isinstance(message, Contribution | Publication)
        base = message.base_version if isinstance(message, Publication) else 0
        s_per_byte = measured.s_per_byte(name, way, now)
        takes_s = measured.size(message.codec, message.fragment, base) * s_per_byte
        return Trip(takes_s, BUFFER_BYTES * s_per_byte, latency_s)

    def tell(self, end: str, event: WireEvent) -> None:
        """As soon as the link lets it through and the process is awake; an end that is lost is lost at once."""
        twin = self.twin
        if not self.is_up and not isinstance(event, Lost):
            return
        heard_at = self._heard_at(end, event)
        if heard_at > twin.now:
            twin.at(heard_at - twin.now, partial(self.tell, end, event))
        elif end == "up":
            self.island.take(event)
        elif twin.syncer is not None:
            twin.bring(event)

    def _heard_at(self, end: str, event: WireEvent) -> float:
        twin, name = self.twin, self.island.name
        if isinstance(event, Lost):
            return twin.now
        awake_at = twin.awake_at(name if end == "up" else "syncer")
        if isinstance(event, Sent):
            return awake_at
        return max(twin.measured.blocked_until(name, OTHER[end], twin.now), awake_at)
