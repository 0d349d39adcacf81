"""A real run's twin in virtual time: the real core, nodes and store, fed with what the run's tape measured.

Why the real machines and not a formula of them: which fragments are due, who is asked ahead, how long a window is and
what an outage leaves behind are decided by some thousand lines of `core/`, and a model of those would have to be
believed as well. What is simulated is only what the tape says of the world: step times (drawn from those sampled about
then), transfers, processes that were away, links that were cut, slow or silent. Tensors are integers (`sim.algebra`),
merging takes no time, and a link that no fault delays takes a millisecond.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any, cast

from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import BLOCK, Fragment
from skerry.core.events import Closing, Gone, Ticked
from skerry.core.messages import Contribution, Message, Publication
from skerry.errors import MeasurementError
from skerry.node.algebra import Payload
from skerry.node.learner import LearnerNode, Pending
from skerry.node.peers import Learners, Uplink
from skerry.node.syncer import SyncerNode
from skerry.proof.sim.algebra import BYTES, Integers
from skerry.proof.sim.files import CrashFiles, Session
from skerry.proof.sim.lines import Hub, Line
from skerry.proof.sim.timeline import Timeline
from skerry.proof.sim.world import layout_for
from skerry.proof.twin.measurements import CUTS, LATENCY_S, Life, Measurements
from skerry.run.genesis import begin
from skerry.run.tally import Tally, tally
from skerry.store.files import FileSystem
from skerry.store.store import Store
from skerry.wire.transport import Lost, Opened, Received, Sent, WireEvent

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
        self.layout, self.fragments = layout_for(len(measured.fragments))
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
        with Store.open(ROOT, files=self._files()) as store:
            begin(store, self.measured.config, self.layout, [0] * len(self.fragments), 0.0, self.algebra)

    def _files(self) -> FileSystem:
        return cast(FileSystem, Session(self.disk))

    def _start_syncer(self) -> None:
        self.learners = Learners()
        self.store = Store.open(ROOT, files=self._files())
        self.syncer = self.learners.node = SyncerNode(self.store, self.learners, self.clock, self.now, self.algebra)
        self.learners.endpoint = self.hub
        self._tick(self.syncer)

    def _end_syncer(self) -> None:
        self.syncer = None
        self.store.close()
        self.hub.close()

    def _tick(self, syncer: SyncerNode) -> None:
        if self.syncer is syncer and not syncer.finished:
            if self.awake_at("syncer") == self.now:
                syncer.handle(Ticked(), self.now)
                syncer.tidy()
            self.at(TICK_S, partial(self._tick, syncer))

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
        self.is_dead = self.is_closing = False
        self.values: dict[int, Any] = {}
        self.step_s: float | None = None  # of the step it is in
        self.step_count = 0
        self.uplink = Uplink()
        number = next(twin.hub.numbers)
        self.node = LearnerNode(
            self.name, twin.layout, self, self.uplink, f"{self.name}-{number}", twin.clock, twin.algebra
        )
        self.uplink.node = self.node
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
        self.line = self.uplink.endpoint = TwinLine(twin, self)

    def take(self, event: WireEvent) -> None:
        if self.is_dead:
            return
        self.uplink.take(event)
        if isinstance(event, Lost):
            self.line = None
            self.twin.at(REDIAL_S, self._dial)

    # ------------------------------------------------------------------------------------------ its two threads

    def _turn(self) -> None:
        """A step ends and the next begins, or it stands and looks for work."""
        twin, node = self.twin, self.node
        if self.is_dead:
            return
        if (awake_at := twin.awake_at(self.name)) > twin.now:
            twin.at(awake_at - twin.now, self._turn)
            return
        if self.is_closing or not node.is_adopted:
            if node.has_work:
                node.boundary(0, 0, 0.0)
            self._leave_when_settled()
            twin.at(TICK_S, self._turn)
            return
        if self.step_s is not None:
            for p in self.values:
                self.values[p] += 1
            node.boundary(1, twin.measured.step_tokens[self.name], self.step_s)
            node.drain_boundaries()
            self._look_for_the_end()
        self.step_s = twin.measured.step_s(self.life, self.step_count, twin.now, twin.random)
        self.step_count += 1
        twin.at(TICK_S if self.is_closing else self.step_s, self._turn)

    def _look_for_the_end(self) -> None:
        machine = self.node.machine
        assert machine is not None
        if machine.is_stop_asked or self.node.ended:
            self.is_closing = True
            self.node.handle(Closing())

    def _leave_when_settled(self) -> None:
        machine = self.node.machine
        self.node.drain_boundaries()
        if self.is_closing and machine is not None and machine.is_settled and self.node.ended:
            self.node.handle(Gone())
            self.is_dead = True
            if self.line is not None:
                self.twin.at(1.0, self.line.cut)

    def _tick(self) -> None:
        if self.is_dead:
            return
        if self.node.machine is not None and self.twin.awake_at(self.name) == self.twin.now:
            self.node.drain_boundaries()
            self.node.handle(Ticked())
        self.twin.at(TICK_S, self._tick)

    # ------------------------------------------------------------------------------------------ its parameters

    def read(self, fragment: Fragment) -> Pending:
        value = self.values[fragment.index]
        return lambda: value

    def add(self, fragment: Fragment, increment: Any) -> None:
        self.values[fragment.index] += increment

    def write(self, fragment: Fragment, values: Any) -> None:
        self.values[fragment.index] = values

    def blend(self, fragment: Fragment, towards: Any, alpha: float) -> None:
        self.values[fragment.index] = towards + int(alpha * (self.values[fragment.index] - towards))

    def reset_optimizer(self) -> None: ...


class TwinLine(Line):
    """Control overtakes bulk; bulk goes through one payload at a time each way."""

    def __init__(self, twin: Twin, island: Island) -> None:
        super().__init__(twin.hub)
        self.twin, self.island = twin, island
        self._free_at = {"up": 0.0, "down": 0.0}
        for way in ("up", "down"):
            twin.at(LATENCY_S, partial(self._tell, way, Opened(self.peer, island.name)))

    def carry(self, way: str, message: Message, payload: Payload | None, tag: object) -> None:
        twin, measured = self.twin, self.twin.measured
        takes_s, leaves_at, gone_at = 0.0, twin.now, twin.now
        if payload is not None:
            assert isinstance(message, Contribution | Publication)
            base = message.base_version if isinstance(message, Publication) else 0
            s_per_byte = measured.s_per_byte(self.island.name, way, twin.now)
            takes_s = measured.size(message.codec, message.fragment, base) * s_per_byte
            leaves_at = self._free_at[way] = max(twin.now, self._free_at[way]) + takes_s
            gone_at = max(twin.now, leaves_at - BUFFER_BYTES * s_per_byte)
        arrives_at = leaves_at + LATENCY_S + measured.worst(self.island.name, "delay", twin.now)
        received = Received(self.peer, message, payload, takes_s)
        twin.at(arrives_at - twin.now, partial(self._tell, "down" if way == "up" else "up", received))
        if tag is not None:
            twin.at(gone_at - twin.now, partial(self._tell, way, Sent(self.peer, tag)))

    def _tell(self, end: str, event: WireEvent) -> None:
        """To the end that sends this way, as soon as the link lets it through and the process is awake."""
        twin = self.twin
        if not self.is_up or twin.syncer is None:
            return
        way = "down" if end == "up" else "up"
        blocked_until = (
            twin.now if isinstance(event, Sent) else twin.measured.blocked_until(self.island.name, way, twin.now)
        )
        later = max(blocked_until, twin.awake_at(self.island.name if end == "up" else "syncer"))
        if later > twin.now:
            twin.at(later - twin.now, partial(self._tell, end, event))
        elif end == "up":
            self.island.take(event)
        else:
            twin.learners.take(event, twin.now)

    def lost(self) -> None:
        """Both ends notice at once."""
        lost = Lost(self.peer, "cut")
        self.island.take(lost)
        if self.twin.syncer is not None:
            self.twin.learners.take(lost, self.twin.now)
