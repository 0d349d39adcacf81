"""One simulated run: virtual time, the processes, the faults, and what is demanded of it.

    World(seed).run()

First faults and safety: every invariant is checked after every event. Then everything is healed and liveness is
demanded within its bound: everyone takes part again, the run closes, nothing is pending. A broken invariant is a
`Violation`; the seed alone replays it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import numpy as np

from skerry.algo.contents import Contents
from skerry.algo.fragments import Fragment, Layout, Tensor, fragments_wanted, gather, layout_of
from skerry.core.messages import Order
from skerry.node.algebra import FLOAT32, Algebra
from skerry.proof.chaos.plan import Fault
from skerry.proof.sim.algebra import Integers
from skerry.proof.sim.faults import Faults
from skerry.proof.sim.files import CrashFiles, Session
from skerry.proof.sim.hostile import HostileProcess
from skerry.proof.sim.learner import LearnerProcess
from skerry.proof.sim.network import SimEndpoint, SimLink
from skerry.proof.sim.operator import begin_order, expel, order_here, roll_back, want_rollback
from skerry.proof.sim.oracle import Oracle, need
from skerry.proof.sim.scenario import Scenario, draw
from skerry.proof.sim.syncer import ROOT, SyncerProcess
from skerry.proof.sim.timeline import Timeline
from skerry.run.facts import fragments_of
from skerry.run.genesis import UNSAID, begin
from skerry.store.files import FileSystem
from skerry.store.store import Store

LIVE_S_MAX = 45.0  # after healing, everyone has taken part again within this
CLOSE_S_MAX = 600.0  # and the run has closed within this
INTEGERS = Integers()


@cache
def layout_for(fragments: int) -> Layout:
    """A tensor a fragment."""
    return layout_of([Tensor(f"w{p}", (3,)) for p in range(fragments)])


class World(Timeline):
    """Virtual time and everything that happens in it."""

    def __init__(
        self,
        seed: int,
        *,
        tensors: bool = False,
        scenario: Scenario | None = None,
        plan: Sequence[Fault] = (),
        contents: Contents = UNSAID,
    ) -> None:
        super().__init__()
        self.seed, self.contents = seed, contents
        self.scenario = scenario or draw(seed)
        self.random = random.Random(f"world {seed}")
        self.turn_random = random.Random(f"turns {seed}")
        self.operator_random = random.Random(f"operator {seed}")
        self.order_random = random.Random(f"orders of {seed}")
        self.work_random = random.Random(f"work of {seed}")  # apart, so that known seeds keep their course
        self.mail_random = random.Random(f"mail of {seed}")
        self.is_exact = not tensors
        self.algebra: Algebra = FLOAT32 if tensors else INTEGERS
        self.layout = layout_for(fragments_wanted(0, self.scenario.config.sync.num_fragments))  # of a tiny model
        self.fragments: tuple[Fragment, ...] = ()
        self.events = 0
        self.saw: Counter[str] = Counter()
        self.trace: Callable[[str], None] | None = None  # where every event is told, if anywhere
        self.healed_at = 0.0
        self.wall_ahead_s = 0.0
        self.disk = CrashFiles(seed)
        self.cuts_power = False  # whenever the syncer dies
        self.is_to_roll_back = False  # before the next syncer starts
        self.orders_here: list[Order] = []  # to be carried out on the directory before that
        self.expelled = ""  # the learner that the operator has turned out
        self.oracle = Oracle(self)
        self.syncer: SyncerProcess | None = None
        self.processes: dict[str, LearnerProcess] = {}  # the newest by name
        self._older: list[LearnerProcess] = []  # that may not know yet
        self.links: list[SimLink] = []
        self.faults = Faults(self, plan)
        self._numbers = 0
        self._create()
        self.hostile = HostileProcess(self) if self.scenario.is_hostile and self.is_exact else None

    def __repr__(self) -> str:
        syncer = self.syncer.node.machine if self.syncer and self.syncer.is_serving else "no syncer"
        return f"<world {self.seed} at {self.now:.1f}: {syncer} {[p.node.machine for p in self.processes.values()]}>"

    def _create(self) -> None:
        with Store.open(ROOT, files=cast(FileSystem, Session(self.disk)), clock=self.wall_clock) as store:
            created = begin(store, self.scenario.config, self.layout, self._zeros, self.algebra, contents=self.contents)
            self.oracle.acked(store, [record.body for record in store.history()])
        self.fragments = fragments_of(created)
        count = len(self.fragments)
        self.oracle.versions, self.oracle.seen, self.oracle.masters = [0] * count, [0] * count, [0] * count
        self.oracle.since = [0] * count
        self.oracle.published = {(p, 0): digest for p, digest in enumerate(created.digests)}
        self._start_syncer()
        for name in self.scenario.learners:
            self.at(self.random.uniform(0, 1), lambda name=name: self.boot(name))  # type: ignore[misc]

    def tell(self, *words: object) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:9.3f}  {' '.join(map(str, words))}")

    # ------------------------------------------------------------------------------------------ time

    def wall_clock(self) -> float:
        return self.now + self.wall_ahead_s

    @property
    def is_healed(self) -> bool:
        return self.healed_at > 0

    @property
    def calm_s(self) -> float:
        return 0.0 if self.faults.is_on else self.now - self.healed_at

    def run(self) -> Counter[str]:
        """Faults and safety; healing and liveness; the end. What happened, counted."""
        if self.scenario.rollback_s:
            self.at(self.scenario.rollback_s, lambda: want_rollback(self))
        if self.scenario.expelled:
            self.at(self.scenario.expel_s, lambda: expel(self))
        for at_s, kind in self.scenario.orders:
            self.at(at_s, lambda kind=kind: begin_order(self, kind))  # type: ignore[misc]
        if self.faults.is_on:
            self.faults.begin()
            self.run_until(self.scenario.fault_s)
            self._heal()
        self._demand_participation()
        self._demand_end()
        return self.saw

    # ------------------------------------------------------------------------------------------ values

    def _zeros(self, fragment: Fragment) -> Any:
        return 0 if self.is_exact else np.zeros(fragment.size, np.float32)

    def gain(self) -> Any:
        """What one step adds to a fragment."""
        if self.is_exact:
            return self.random.getrandbits(40)
        drawn = np.array([self.random.gauss(0, 0.01) for _ in range(3)], np.float32)
        return gather(self.fragments[0], {"w0": drawn})

    def copy(self, values: Any) -> Any:
        return values if self.is_exact else values.copy()

    # ------------------------------------------------------------------------------------------ links

    def connect(self, process: LearnerProcess | HostileProcess) -> SimLink | None:
        syncer = self.syncer
        if syncer is None or not syncer.is_serving or self.faults.is_blocked(process.name):
            return None
        principal = process.name if self.scenario.has_keys else ""
        endpoint = cast(SimEndpoint, syncer.learners.endpoint)
        link = SimLink(self, process.name, process.endpoint, endpoint, principal)
        self.links = [*(each for each in self.links if each.is_up), link]
        return link

    # ------------------------------------------------------------------------------------------ life and death

    def boot(self, name: str) -> None:
        self._numbers += 1
        if name in self.processes:
            self._older.append(self.processes[name])
        self.processes[name] = LearnerProcess(self, name, self._numbers)

    def _start_syncer(self) -> None:
        if self.syncer is None:
            if self.is_to_roll_back:
                self.is_to_roll_back = False
                roll_back(self)
            waiting, self.orders_here = self.orders_here, []
            for order in waiting:
                order_here(self, order)
            self.syncer = SyncerProcess(self)
            self.syncer.start()

    def syncer_died(self, syncer: SyncerProcess, away_s: float | None = None) -> None:
        """Its process is gone; what it had not synced is in the page cache, unless the power went too."""
        self.saw["syncer crash"] += 1
        self.saw["syncer crash while merging"] += syncer.is_merging
        if self.cuts_power or ("crash at write" in self.scenario.kinds and self.random.random() < 0.5):
            self.cut_power()
        self.syncer_left(syncer, away_s)

    def syncer_left(self, syncer: SyncerProcess, away_s: float | None = None) -> None:
        """Its process has ended, and another takes over before long."""
        syncer.is_dead, syncer.is_serving = True, False
        syncer.session.close()
        for link in self.links:
            link.cut()
        if self.syncer is syncer:
            self.syncer = None
        self.at(self.random.uniform(0.1, 2) if away_s is None else away_s, self._start_syncer)

    def cut_power(self) -> None:
        self.disk.power_cut()
        self.saw["power cut"] += 1

    def kill(self, process: LearnerProcess, away_s: float) -> None:
        process.is_dead = True
        if process.link is not None:
            process.link.cut()

        def boot() -> None:
            if self.processes[process.name].is_dead:
                self.boot(process.name)

        self.at(away_s, boot)

    def _heal(self) -> None:
        """No more faults: everything that is down comes up again, also who had left."""
        self.faults.heal()
        self.healed_at = self.now
        if self.syncer is not None:
            self.syncer.paused_until = 0.0
        for process in [*self.processes.values(), *self._older]:
            process.paused_until, process.wants_to_leave = 0.0, False
            if process.name == self.scenario.gone:
                process.end()
        self.at(4.0, self._supervise)

    def _supervise(self) -> None:
        """Somebody lives under every name: an older process that took it back, or a new one."""
        for name, process in list(self.processes.items()):
            if name in (self.scenario.gone, self.expelled) or name in self.oracle.dropped:
                continue
            alive = [older for older in self._older if older.name == name and not older.is_dead]
            joined = [older for older in alive if older.node.machine is not None]
            if joined and not process.is_dead and process.node.machine is None:
                self._lead(joined[-1])  # the other one is let in when this one is gone
            elif alive and process.is_dead:
                self._lead(alive[-1])
            elif process.is_dead and self._phase() != "closed":
                self.boot(name)
        self.at(4.0, self._supervise)

    def _lead(self, process: LearnerProcess) -> None:
        """It is the one of its name that counts."""
        self._older.remove(process)
        self._older.append(self.processes[process.name])
        self.processes[process.name] = process

    # ------------------------------------------------------------------------------------------ what is demanded

    @property
    def has_open_round(self) -> bool:
        return self.syncer is not None and self.syncer.is_serving and bool(self.syncer.node.machine.rounds.open)

    def _phase(self) -> str:
        return self.syncer.node.machine.state.phase if self.syncer is not None else ""

    @property
    def _is_closed(self) -> bool:
        """On the disk: a syncer may die between its last decision and that."""
        state = self.oracle.audit.state
        return state is not None and state.phase == "closed" and self.syncer is not None

    def _demand_participation(self) -> None:
        """Everyone's work that is done from here on merges on every fragment before long.

        But for those who know no orders where versions overwrite: they contribute when they are asked, and one that is
        overwritten at each of its boundaries never has anything to be asked for.
        """
        if self.run_until(self.now + 6.0, lambda: self._phase() in ("closing", "closed")):
            return
        exempt = self.scenario.older if self.scenario.config.learner.adopt == "overwrite" else frozenset()
        exempt |= self.oracle.ever_dropped  # they begin again when they are let in again
        those = {name: p for name, p in self.processes.items() if name not in exempt}
        reach = {name: p.step_count for name, p in those.items() if not p.training.is_closing}

        def all_took_part() -> bool:
            return self._phase() in ("closing", "closed") or all(
                self.oracle.merged_to.get((name, p.node.machine.life, fragment), 0) > reach[name]
                for name, p in self.processes.items()
                if name in reach
                and name not in self.oracle.ever_dropped
                and p.node.machine is not None
                and not p.is_dead
                for fragment in range(len(self.fragments))
            )

        need(self.run_until(self.now + LIVE_S_MAX, all_took_part), "L1 L5", f"someone takes no part: {self}")

    def _demand_end(self) -> None:
        """The budget is used up, everything settles, everyone goes home."""
        is_closed = self.run_until(self.now + CLOSE_S_MAX, lambda: self._is_closed)
        need(is_closed, "L7", f"the run does not close: {self}")
        self.run_until(self.now + 8.0)
        self.run_until(self.now + CLOSE_S_MAX, self._all_know_the_end)
        assert self.syncer is not None, "it stays down"
        totals = self.syncer.node.machine.state.ledger.totals()
        need(totals.pending == 0 and totals.balance == 0, "I2 conservation", totals)
        for process in self.processes.values():
            need(_knows_the_end(process), "L7", f"{process.node.machine} was not told of the end")

    def _all_know_the_end(self) -> bool:
        """The syncer may be down at any moment, also once the run is closed."""
        return self.syncer is not None and all(map(_knows_the_end, self.processes.values()))


def _knows_the_end(process: LearnerProcess) -> bool:
    """It has gone home, or has nobody to hear it from."""
    machine = process.node.machine
    return process.is_dead or machine is None or not machine.linked
