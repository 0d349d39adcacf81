"""A syncer process in a simulated world: the real node, its learners and its store, on a disk that may fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, cast

from skerry.core.events import Arrived, Interrupted, Merge, Started, SyncerEvent, Ticked
from skerry.core.messages import Contribution, Order, Outcome
from skerry.core.vocabulary import Refusal
from skerry.errors import FileDamaged, StoreError
from skerry.node.log import Written
from skerry.node.peers import Learners
from skerry.node.syncer import SyncerNode, Version, Work
from skerry.node.turns import SyncerDriver
from skerry.node.work import AtOnce, Ended, Pool, Rank
from skerry.proof.sim.files import Crash, Session
from skerry.proof.sim.network import SimEndpoint
from skerry.proof.sim.oracle import need
from skerry.store.files import FileSystem
from skerry.store.store import Store
from skerry.wire.frames import syncer_dialect
from skerry.wire.transport import Instructed, WireEvent

if TYPE_CHECKING:
    from skerry.proof.sim.world import World

TICK_S = 0.3
WORK_S_MAX = 2.0
WAKE_S = 0.1  # after which the deciding thread looks, unless something else has woken it
ROOT = Path("/run")
COMMITS_PER_COLLECT = 4  # a simulated run is short
JOURNAL_FILE_BYTES = 200  # four entries


class LateWork(Generic[Ended]):
    """A pool in virtual time: a piece of work is carried out after a while, and has ended after another.

    In between its file is on the disk, and nobody knows. Those submitted later may overtake it.
    """

    def __init__(self, syncer: SyncerProcess) -> None:
        self.syncer, self.world = syncer, syncer.world
        self._ended: list[Ended] = []
        self._failure: StoreError | None = None
        self._submitted = 0
        self._newest = 0  # of those that have ended

    def submit(self, work: Callable[[], Ended], rank: Rank = "long") -> None:
        self._submitted += 1
        number = self._submitted
        self._later(lambda: self._carry_out(number, work))

    def ended(self) -> list[Ended]:
        if self._failure is not None:
            raise self._failure
        taken, self._ended = self._ended, []
        self.world.saw["merges committed together"] += sum(isinstance(one, Version) for one in taken) > 1
        return taken

    def _carry_out(self, number: int, work: Callable[[], Ended]) -> None:
        self.world.saw["work overtaken by later work"] += number < self._newest
        self._newest = max(self._newest, number)
        try:
            ended = work()
        except StoreError as error:
            self._failure = error
        else:
            self._later(lambda: self._end(ended))

    def _end(self, ended: Ended) -> None:
        self._ended.append(ended)
        self.world.at(WAKE_S, lambda: self._awake(self.syncer.finish))

    def _later(self, call: Callable[[], object]) -> None:
        wait_s = self.world.work_random.expovariate(1 / self.world.scenario.work_s)
        self.world.at(min(wait_s, WORK_S_MAX), lambda: self._awake(call))

    def _awake(self, call: Callable[[], object]) -> None:
        """A process that stands still, stands still with all its threads."""
        asleep_s = self.syncer.paused_until - self.world.now
        if asleep_s > 0:
            self.world.at(asleep_s, lambda: self._awake(call))
        else:
            self.syncer.guarded(call)


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
        self.is_to_end = False  # as soon as it merges: the operator has a bad hand
        self.store: Store
        self.node: SyncerNode
        self.driver: SyncerDriver
        self._refused: dict[Refusal, int] = {}  # contributions so far, by reason
        self._tape_number = 0  # of the segment that was last seen to be written to
        self._tickets: dict[int, Callable[[Outcome], None]] = {}  # who waits for what becomes of an order
        self._merging: dict[int, Sequence[Contribution]] = {}  # fragment -> what its last merge is of
        self._ordered: list[Contribution] = []  # of all merges: one that has ended may wait for the disk behind others

    def start(self) -> None:
        """Open the directory and serve; anything may go wrong on the way, and then the process is gone."""
        self.guarded(self._start)

    def _start(self) -> None:
        self.store = Store.open(ROOT, files=cast(FileSystem, self.session), clock=self.world.wall_clock)
        self.world.oracle.recovered(self.store)
        try:
            self.node = self.learners.node = SyncerNode(
                self.store,
                self.learners,
                self.clock,
                self.world.algebra,
                self,
                self._pool(),
                self.world.scenario.window_bytes,
            )
        except FileDamaged as error:  # nothing here rots
            need(False, "I4 acked is durable", error)
        if self.world.scenario.work_s:
            self.node.log.pool = LateWork[Written](self)
        self.driver = SyncerDriver(self.node, self.learners, self.clock)
        self.node.commits_per_collect = COMMITS_PER_COLLECT
        self.store.journal.file_bytes = JOURNAL_FILE_BYTES
        self.world.saw["merges done again at a start"] += sum(len(at.redo) for at in self.node.machine.state.fragments)
        self.learners.endpoint = SimEndpoint(self.world, self, syncer_dialect(self.learners.payload_bytes))
        self.learners.answer = self._answer
        self._tape_number = self.store.tape.number
        self.world.oracle.began(self)
        self.is_serving = True
        if self.world.expelled:
            self.expel(self.world.expelled)
        self.world.at(TICK_S, self.tick)

    def _pool(self) -> Pool[Work]:
        return LateWork[Work](self) if self.world.scenario.work_s else AtOnce()

    def clock(self) -> float:
        return self.world.now + self.clock_ahead_s

    def tick(self) -> None:
        self.is_serving = self.is_serving and not self.is_dead and not self.node.finished
        if not self.is_serving:
            return
        if self.world.now >= self.paused_until:
            self.guarded(self.driver.turn)
            self.guarded(self.tidy)
            self._leave_if_finished()
        self.world.at(TICK_S, self.tick)

    def tidy(self) -> None:
        self.node.tidy()
        self.world.saw["tape rotated"] += self.store.tape.number > self._tape_number
        self._tape_number = self.store.tape.number

    def finish(self) -> None:
        """Word from a worker that something has ended, which a turn takes in."""
        if self.is_serving:
            self.driver.turn()
            self._leave_if_finished()

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
        self.guarded(self.driver.turn)
        self._leave_if_finished()

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
        self.world.saw["message waited for the disk"] += not self.node.log.is_durable
        waiting = any(member.waiting for member in self.node.machine.members.values())
        self.world.saw["version waited for the window"] += waiting
        self.world.oracle.check_syncer(self)

    def _look_at(self, c: Contribution) -> None:
        """Held although its round went by and none is open: it was late, and waits for the next."""
        machine, p = self.node.machine, c.fragment
        is_held = machine.held[p].get(c.learner) == c
        went_by = c.base_version < machine.state.fragments[p].version
        is_merging = p in machine.rounds.merging
        is_late = is_held and went_by and p not in machine.rounds.open and not is_merging
        self.world.saw["late contribution carried over"] += is_late
        self.world.saw["held while its fragment merged"] += is_held and is_merging and c not in self._merging[p]

    def merging(self, order: Merge) -> None:
        self._merging[order.decision.fragment] = order.contributions
        self._ordered += order.contributions
        if self.is_to_end and self.world.faults.is_on:
            self.world.at(0.0, self.interrupt)

    def committing(self, records: Sequence[bytes]) -> None:
        self.world.oracle.trying = list(records)

    def committed(self, records: Sequence[bytes]) -> None:
        self.world.oracle.acked(self.store, list(records))

    # ------------------------------------------------------------------------------------------ its end

    def order(self, order: Order, hear: Callable[[Outcome], None]) -> None:
        """An operator's, over the wire; a process that stands still takes it in later, or never."""
        ticket = len(self._tickets) + 1
        self._tickets[ticket] = hear
        self.take(Instructed(ticket, order, "admin.token"))

    def _answer(self, ticket: int, outcome: Outcome) -> None:
        if not self.is_dead:
            self._tickets[ticket](outcome)

    def expel(self, learner: str) -> None:
        """The operator turns a learner out; a process that stands still hears of it later."""
        if (asleep_s := self.paused_until - self.world.now) > 0:
            self.world.at(asleep_s, lambda: self.expel(learner))
        elif self.is_serving and not self.node.finished:
            self.world.oracle.expelled(learner, self._ordered)
            self.guarded(lambda: self.learners.expel(learner, "its key was revoked", self.clock()))

    def interrupt(self) -> None:
        """The operator wants it to end, whatever is under way."""
        is_ending = self.node.finished or self.node.machine.is_interrupted if self.is_serving else True
        if is_ending or self.world.now < self.paused_until:
            return
        self.world.saw["interrupted while merging"] += self.is_merging
        self.guarded(lambda: self.node.handle(Interrupted(), self.clock()))
        self._leave_if_finished()

    def _leave_if_finished(self) -> None:
        """One that was interrupted ends once its checkpoints are written; a closed run has ended for good."""
        if not self.is_dead and self.node.finished == "interrupted":
            self.world.syncer_left(self)

    @property
    def is_merging(self) -> bool:
        return self.is_serving and bool(self.node.machine.rounds.merging)

    def guarded(self, call: Callable[[], Any]) -> None:
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
