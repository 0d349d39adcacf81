"""A syncer process in a simulated world: the real node, its learners and its store, on a disk that may fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skerry.core.events import Arrived, Merge, Started, SyncerEvent, Ticked
from skerry.core.messages import Contribution
from skerry.core.vocabulary import Refusal
from skerry.errors import StoreError
from skerry.node.peers import Learners
from skerry.node.syncer import SyncerNode
from skerry.node.turns import SyncerDriver
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
COMMITS_PER_COLLECT = 4  # a simulated run is short


class SyncerProcess:
    """It is its node's `SyncerObserver`: events are counted, the oracle hears what is promised and checks it all."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_dead = False
        self.paused_until = 0.0
        self.clock_ahead_s = 0.0
        self.session = Session(world.disk)
        self.learners = Learners()
        self.is_serving = False
        self.store: Store
        self.node: SyncerNode
        self.driver: SyncerDriver
        self._refused: dict[Refusal, int] = {}  # contributions so far, by reason

    def start(self) -> None:
        """Open the directory and serve; anything may go wrong on the way, and then the process is gone."""
        self._guarded(self._start)

    def _start(self) -> None:
        self.store = Store.open(ROOT, files=cast(FileSystem, self.session), clock=self.world.wall_clock)
        self.world.oracle.recovered(self.store)
        self.node = self.learners.node = SyncerNode(
            self.store, self.learners, self.clock(), self.world.algebra, observer=self
        )
        self.driver = SyncerDriver(self.node, self.learners, self.clock)
        self.node.commits_per_collect = COMMITS_PER_COLLECT
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
            self._guarded(self.driver.turn)
            self._guarded(self.tidy)
        self.world.at(TICK_S, self.tick)

    def tidy(self) -> None:
        before = self.store.tape.number
        self.node.tidy()
        self.world.saw["tape rotated"] += self.store.tape.number > before

    def take(self, event: WireEvent) -> None:
        """It waits in line until the next turn, which is soon or, in some worlds, at once."""
        waiting = len(self.driver)
        self.driver.offer(event)
        self.world.saw["report replaced by a newer one"] += len(self.driver) == waiting
        if not self.world.scenario.turn_s:
            self._turn()
        elif not waiting:
            self.world.at(self.world.turn_random.uniform(0, self.world.scenario.turn_s), self._turn)

    def _turn(self) -> None:
        if (asleep_s := self.paused_until - self.world.now) > 0:
            self.world.at(asleep_s, self._turn)
            return
        self.world.saw["several events in one turn"] += len(self.driver) > 1
        self._guarded(self.driver.turn)

    # ------------------------------------------------------------------------------------------ what its node says

    def event_came(self, event: SyncerEvent) -> None:
        self.world.tell("syncer >", event)
        self.world.events += not isinstance(event, Ticked)

    def event_done(self, event: SyncerEvent) -> None:
        if isinstance(event, Started):
            return  # the oracle looks when the node is whole
        if isinstance(event, Arrived):
            self._look_at(event.contribution)
        refused = dict(self.node.machine.refused)
        if refused != self._refused:
            self.world.saw.update({f"refused: {k}": n - self._refused.get(k, 0) for k, n in refused.items()})
            self._refused = refused
        self.world.oracle.check_syncer(self)

    def _look_at(self, c: Contribution) -> None:
        """Held although its round went by and none is open: it was late, and waits for the next."""
        machine = self.node.machine
        is_held = machine.held[c.fragment].get(c.learner) == c
        went_by = c.base_version < machine.state.fragments[c.fragment].version
        is_late = is_held and went_by and c.fragment not in machine.rounds.open
        self.world.saw["late contribution carried over"] += is_late

    def merging(self, order: Merge) -> None: ...

    def committing(self, records: Sequence[bytes]) -> None:
        self.world.oracle.trying = list(records)

    def committed(self, records: Sequence[bytes]) -> None:
        self.world.oracle.acked(self.store, list(records))

    # ------------------------------------------------------------------------------------------ its end

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
