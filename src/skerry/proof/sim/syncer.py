"""A syncer process in a simulated world: the real node, its learners and its store, on a disk that may fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skerry.core.events import Arrived, Started, SyncerEvent, Ticked
from skerry.core.messages import Contribution
from skerry.errors import StoreError
from skerry.node.peers import Learners
from skerry.node.syncer import Arrival, SyncerNode
from skerry.proof.sim.files import Crash, Session
from skerry.proof.sim.network import SimEndpoint
from skerry.store.files import FileSystem
from skerry.store.store import Store
from skerry.wire.frames import syncer_dialect
from skerry.wire.transport import WireEvent

if TYPE_CHECKING:
    from skerry.proof.sim.world import World

TICK_S = 0.3
ROOT = Path("/run")


class WatchedStore(Store):
    """The real store; the oracle hears what it promises."""

    world: World

    def commit(self, records: Sequence[bytes]) -> None:
        oracle = self.world.oracle
        oracle.trying = list(records)
        super().commit(records)
        oracle.acked(self, list(records))


class WatchedNode(SyncerNode):
    """The real node; every event is counted, and the invariants are checked after it."""

    def __init__(self, syncer: SyncerProcess) -> None:
        self.syncer, world = syncer, syncer.world
        super().__init__(syncer.store, syncer.learners, syncer.clock(), world.algebra)
        self.commits_per_collect = 4  # a simulated run is short

    def handle(self, event: SyncerEvent, now: float, arrival: Arrival | None = None) -> None:
        world = self.syncer.world
        if not isinstance(event, Ticked):
            world.events += 1
        world.tell("syncer >", event)
        before = dict(self.machine.refused)
        super().handle(event, now, arrival)
        if isinstance(event, Arrived):
            self._look_at(event.contribution)
        if self.machine.refused != before:
            world.saw.update({f"refused: {k}": n - before.get(k, 0) for k, n in self.machine.refused.items()})
        if not isinstance(event, Started):
            world.oracle.check_syncer(self.syncer)

    def _look_at(self, c: Contribution) -> None:
        """Held although its round went by and none is open: it was late, and waits for the next."""
        is_held = self.machine.held[c.fragment].get(c.learner) == c
        went_by = c.base_version < self.machine.state.fragments[c.fragment].version
        is_late = is_held and went_by and c.fragment not in self.machine.rounds.open
        self.syncer.world.saw["late contribution carried over"] += is_late


class SyncerProcess:
    def __init__(self, world: World) -> None:
        self.world = world
        self.is_dead = False
        self.paused_until = 0.0
        self.clock_ahead_s = 0.0
        self.session = Session(world.disk)
        self.learners = Learners()
        self.is_serving = False
        self.store: WatchedStore
        self.node: WatchedNode

    def start(self) -> None:
        """Open the directory and serve; anything may go wrong on the way, and then the process is gone."""
        self._guarded(self._start)

    def _start(self) -> None:
        self.store = WatchedStore.open(ROOT, files=cast(FileSystem, self.session), clock=self.world.wall_clock)
        self.store.world = self.world
        self.world.oracle.recovered(self.store)
        self.node = self.learners.node = WatchedNode(self)
        self.learners.endpoint = SimEndpoint(self.world, self, syncer_dialect(self.learners.payload_bytes))
        self.world.oracle.began(self)
        self.is_serving = True
        self.world.at(TICK_S, self.tick)

    def clock(self) -> float:
        return self.world.now + self.clock_ahead_s

    def tick(self) -> None:
        self.is_serving = self.is_serving and not self.is_dead and not self.node.finished
        if not self.is_serving:
            return
        if self.world.now >= self.paused_until:
            self._guarded(lambda: self.node.handle(Ticked(), self.clock()))
            self._guarded(self.tidy)
        self.world.at(TICK_S, self.tick)

    def tidy(self) -> None:
        before = self.store.tape.number
        self.node.tidy()
        self.world.saw["tape rotated"] += self.store.tape.number > before

    def take(self, event: WireEvent) -> None:
        self._guarded(lambda: self.learners.take(event, self.clock()))

    def _guarded(self, call: Callable[[], Any]) -> None:
        if self.is_dead:
            return
        try:
            call()
        except Crash:
            self.world.syncer_died(self)
        except StoreError as error:
            self.world.tell("syncer stops:", error)
            self.world.saw["stopped by a disk error"] += 1
            self.world.syncer_died(self)
