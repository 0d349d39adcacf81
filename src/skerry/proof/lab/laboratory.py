"""One run in virtual time: the real core, nodes, identities and store around a stack of learners on one device.

Learners step on a common grid, a learner of speed 1/n every n-th tick, so that steps that end together are computed
together. Everything between is what production runs: reports, rounds, quorum and grace, contributions, merges,
publications, adoption, lives. Only the wire is a delay, the clock is virtual, and values stay on the device
(`lab.algebra`); what the product's own work takes there is charged as the setting says (`sim.workers`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from skerry.adapters.torch import layout_of_model
from skerry.algo.fragments import Fragment
from skerry.core.events import Merge
from skerry.core.messages import ExtendRun, Message
from skerry.node.algebra import Payload, Values
from skerry.node.driver import LearnerDriver, both_halves
from skerry.node.observers import Unwatched
from skerry.node.peers import Learners
from skerry.node.syncer import SyncerNode, Work
from skerry.node.training import ByHand, TrainingHalf
from skerry.node.turns import SyncerDriver
from skerry.node.work import Pool
from skerry.proof.lab.algebra import Device
from skerry.proof.lab.feed import Feed
from skerry.proof.lab.stack import Stack, initial
from skerry.proof.lab.study import PRODUCT, Job
from skerry.proof.lab.trials import Trials
from skerry.proof.sim.lines import Hub, Line, Trip
from skerry.proof.sim.timeline import Timeline
from skerry.proof.sim.workers import NodeThread, TimedDisk, TimedWorkers
from skerry.run.delays import NONE
from skerry.run.facts import fragments_of
from skerry.run.genesis import begin
from skerry.store.store import Store
from skerry.train.inner import schedule
from skerry.train.loop import model_of
from skerry.wire.transport import Instructed, Lost, WireEvent

STEP_S = 0.3  # of a learner of speed 1, where the configuration does not pace it
CLOSE_S_MAX = 3600.0  # virtual: a run that has not closed so long after its last step never will


class BeforeClose(Unwatched):
    """Keeps the values that the closing began with; they lie on the device, so no file of the run holds them."""

    def __init__(self, world: Laboratory) -> None:
        self.world = world

    def merging(self, order: Merge) -> None:
        if order.decision.is_closing and not self.world.before_close:
            self.world.before_close = tuple(self.world.syncer.values)


class Laboratory(Timeline):
    def __init__(self, job: Job, device: str, folder: Path) -> None:
        super().__init__()
        self.config, self.setting = job.config, job.setting
        self.period_s = self.config.learner.step_s or STEP_S
        self.batch_tokens = 0
        self.trains = True  # or steps are only counted: what is decided hangs on no value
        self.feed = Feed(self.config, self.setting, device)
        model = model_of(self.config)
        self.layout = layout_of_model(model)
        trial = self.setting.trial
        self.algebra = Device(device) if trial == PRODUCT else Trials(device, trial)
        with Store.open(folder, clock=self.clock) as store:
            created = begin(store, self.config, self.layout, partial(initial, model, device), self.algebra)
        self.fragments = fragments_of(created)
        self.stack = Stack(
            model,
            self.config.run.learners,
            self.config.learner.weight_decay,
            device,
            self.setting.precision,
            self.setting.trial,
            self.config.learner.clip,
        )
        self.learners = Learners()
        self.before_close: tuple[Values, ...] = ()
        self.store = Store.open(folder, clock=self.clock)
        self.sizes = [fragment.size for fragment in self.fragments]
        self.syncer = self.learners.node = SyncerNode(
            self.store, self.learners, self.clock, self.algebra, BeforeClose(self), self._pool()
        )
        if self.setting.delays != NONE:
            self.syncer.log.pool = TimedDisk(self, self.setting.delays, self._wake)
        self.driver = SyncerDriver(self.syncer, self.learners, self.clock)
        self.hub = self.learners.endpoint = Hub()
        self.islands = [Island(self, row) for row in range(self.config.run.learners)]
        self.has_been_away = False  # the syncer, as the setting may say
        self.is_extended = False  # by an order, likewise

    def clock(self) -> float:
        return self.now

    def _pool(self) -> Pool[Work] | None:
        delays, count = self.setting.delays, self.config.merge.threads
        return TimedWorkers(self, delays, self.sizes, count, self._wake) if delays != NONE else None

    def _wake(self) -> None:
        """A worker has ended something; the syncer's next turn takes it in."""
        self.driver.turn()

    # ------------------------------------------------------------------------------------------ what is asked of it

    @property
    def progress(self) -> float:
        return self.syncer.machine.progress

    @property
    def phase(self) -> str:
        return self.syncer.machine.state.phase

    @property
    def payload_bytes(self) -> dict[str, int]:
        """Carried so far, by way."""
        return self.hub.payload_bytes

    @property
    def mark(self) -> str:
        """How things stand, in so much detail that it is hardly ever so by chance."""
        return f"{self.now!r} {self._order} {self.payload_bytes} {self.syncer.machine.state.ledger.totals()}"

    def master(self, values: list[Values] | tuple[Values, ...] = ()) -> Tensor:
        """The global model as one row: published values and what the codec could not say yet."""
        masters = [each.theta + each.error for each in values or self.syncer.values]
        return self.stack.row_of(self.fragments, masters)

    def run(self, each_tick: Callable[[], None]) -> None:
        """To the end of the budget and through the close."""
        closing_at = 0.0
        with self.store:
            for tick in itertools.count():
                self.run_until(tick * self.period_s)
                if self.phase == "closed":
                    break
                if self.phase != "closing":
                    closing_at = self.now
                assert self.now - closing_at < CLOSE_S_MAX, f"the run does not close: {self.syncer.machine}"
                self._tick(tick)
                each_tick()

    def _tick(self, tick: int) -> None:
        """The boundaries that fall on this tick; what follows from them is on its way when it returns."""
        self._go_away()
        self._extend()
        for island in self.islands:
            island.look_around(tick)
        stepping = [island for island in self.islands if island.ends_step(tick)]
        if stepping:
            inputs, targets = self.feed.windows([island.row for island in stepping])
            self.batch_tokens = inputs[0].numel()
            if self.trains:
                self.stack.step([island.row for island in stepping], inputs, targets, [i.rate for i in stepping])
        for island in self.islands:
            island.pass_boundary(island in stepping)
        self.driver.turn()
        self.syncer.tidy()
        self.at(self.period_s / 2, self._half)

    def _go_away(self) -> None:
        """Nobody can reach the syncer for a while, if it is time for that."""
        setting = self.setting
        if setting.outage_steps and not self.has_been_away and self.progress >= setting.outage_at:
            self.has_been_away = True
            for island in self.islands:
                island.link.cut()
                self.at((setting.outage_steps + 0.5) * self.period_s, island.dial)

    def _extend(self) -> None:
        """An operator gives the run another budget, if it is time for that."""
        setting, run = self.setting, self.config.run
        if setting.extend_by and not self.is_extended and self.progress >= setting.extend_at:
            self.is_extended = True
            order = ExtendRun(tokens=round(run.tokens * setting.extend_by), steps=round(run.steps * setting.extend_by))
            self.bring(Instructed(0, order, "the laboratory"))

    def bring(self, event: WireEvent) -> None:
        """To the syncer, whose next turn is at once: it takes in what comes at the same moment together."""
        if not len(self.driver):
            self.at(0.0, self.driver.turn)
        self.driver.offer(event)

    def _half(self) -> None:
        """Node threads wake up now and then between boundaries."""
        for island in self.islands:
            island.wake()
        self.driver.turn()


# ---------------------------------------------------------------------------------------------- a learner


class Island:
    """A learner's place: its row of the stack, its data, and its processes one after the other."""

    training: TrainingHalf
    driver: LearnerDriver
    thread: NodeThread
    link: LabLine

    def __init__(self, world: Laboratory, row: int) -> None:
        setting, config = world.setting, world.config
        self.world, self.row, self.name = world, row, f"learner-{row:03d}"
        speed = setting.speeds[row % len(setting.speeds)] if setting.speeds else 1.0
        self.ticks_a_step = round(1 / speed)
        self.visits_only = row >= config.run.learners - setting.away_half
        self.random = random.Random(f"deaths {config.run.seed} {row}")
        self.is_alive = False
        self.began_tick: int | None = None  # of the step it is in
        self._lives = 0
        if not self.visits_only:
            world.at(1e-6 * row, self.boot)  # in order: a learner's index, and so its data, follows who comes first

    def boot(self) -> None:
        world = self.world
        if world.phase in ("closing", "closed") or self.is_visit_over:
            return
        self._lives += 1
        self.is_alive, self.began_tick = True, None
        process = f"{self.name}-{self._lives}"
        self.training, self.driver = both_halves(
            self.name, world.layout, ByHand(self), process, world.clock, world.algebra
        )
        self.thread = NodeThread(world, world.setting.delays, world.sizes)
        self.dial()
        if not world.setting.keep_optimizer:
            world.stack.reset(self.row)
        if world.setting.dead_share:
            up_steps = world.setting.dead_steps * (1 - world.setting.dead_share) / world.setting.dead_share
            world.at(self.random.expovariate(1 / (up_steps * world.period_s)), self.die)

    def dial(self) -> None:
        trial, alone_steps = self.world.setting.trial, self.training.alone_steps
        if trial.alone in ("forward", "shrink") and alone_steps > trial.alone_steps > 0:
            self._shrink(trial.alone_steps / alone_steps if trial.alone == "shrink" else 0.0)
        self.link = self.driver.uplink.endpoint = LabLine(self.world, self)

    def _shrink(self, share: float) -> None:
        """So much of its drift is left, but for what is outstanding: of that the syncer has the bytes."""
        for fragment in self.world.fragments:
            p, node = fragment.index, self.driver.node
            out = node.outstanding.get(p)
            base = node.orders.stands[p].base
            self.blend(fragment, base if out is None or out.drift is None else base + out.drift, share)

    def die(self) -> None:
        """The process is gone, with its drift and its moments; it comes back after a while."""
        if not self.is_alive or self.training.is_closing:
            return
        self.is_alive = False
        self.link.cut()
        away_s = self.world.setting.dead_steps * self.world.period_s
        self.world.at(self.random.expovariate(1 / away_s), self.boot)

    # ------------------------------------------------------------------------------------------ the training thread

    def look_around(self, tick: int) -> None:
        """Come and go with the run's progress; begin to train once every fragment is there."""
        progress = self.world.progress
        if self.visits_only and not self._lives and progress >= 0.25:
            self.boot()
        if self.is_alive and self.began_tick is None and self.training.is_adopted:
            self.began_tick = tick
            self.world.feed.streams[self.row].seek(self.training.prior_steps)

    def ends_step(self, tick: int) -> bool:
        if not self.is_alive or self.training.is_closing or self.began_tick is None:
            return False
        trial = self.world.setting.trial
        if trial.alone == "pause" and self.training.alone_steps >= trial.alone_steps > 0:
            return False
        return tick > self.began_tick and (tick - self.began_tick) % self.ticks_a_step == 0

    @property
    def is_visit_over(self) -> bool:
        return self.visits_only and self.world.progress >= 0.75

    @property
    def rate(self) -> float:
        return self.world.config.learner.lr * schedule(self.training.progress) * self.training.ramp

    def pass_boundary(self, has_stepped: bool) -> None:
        if not self.is_alive:
            return
        if has_stepped:
            self.training.boundary(1, self.world.batch_tokens, self.world.period_s * self.ticks_a_step)
        elif self.training.is_closing or self.began_tick is None:
            self.training.stand()
        is_wanted = self.training.is_running and not self.is_visit_over
        if has_stepped and not is_wanted:
            self.training.close()
        self.wake()

    def wake(self) -> None:
        """Its node thread looks around; a process with nothing left to do ends, and its last words still leave."""
        if not self.is_alive:
            return
        self.driver.tick()
        while self.began_tick is not None and self.training.must_stand and self.training.stand():
            self.driver.tick()  # no time passes in a fast-forward
        if self.driver.node.left is not None:
            self.is_alive = False
            self.world.at(1.0, self.link.cut)

    # ------------------------------------------------------------------------------------------ its parameters

    def read(self, fragment: Fragment) -> Tensor:
        values = torch.zeros(fragment.size, device=self.world.stack.device)
        for run, at in self._runs(fragment):
            values[at] = run
        return values

    @torch.no_grad()
    def add(self, fragment: Fragment, increment: Tensor) -> None:
        for run, at in self._runs(fragment):
            run.add_(increment[at])

    @torch.no_grad()
    def write(self, fragment: Fragment, values: Tensor) -> None:
        for run, at in self._runs(fragment):
            run.copy_(values[at])

    @torch.no_grad()
    def blend(self, fragment: Fragment, towards: Tensor, alpha: float) -> None:
        for run, at in self._runs(fragment):
            run.lerp_(towards[at], 1 - alpha)

    def reset_optimizer(self) -> None:
        self.world.stack.reset(self.row)

    def _runs(self, fragment: Fragment) -> Iterator[tuple[Tensor, slice]]:
        return self.world.stack.runs(self.world.stack.flat[self.row], fragment)


# ---------------------------------------------------------------------------------------------- the wire


class LabLine(Line):
    """As long and as narrow as the setting says."""

    def __init__(self, world: Laboratory, island: Island) -> None:
        self.world, self.island = world, island
        super().__init__(world.hub, world, island.name, 0.0, island.thread)

    def trip(self, way: str, message: Message, payload: Payload | None) -> Trip:
        setting, takes_s = self.world.setting, 0.0
        if payload is not None and setting.mbit_s:
            takes_s = 8e-6 * len(payload) / setting.mbit_s
        return Trip(takes_s, 0.0, setting.latency_s)

    def tell(self, end: str, event: WireEvent) -> None:
        if not self.is_up and not isinstance(event, Lost):
            return
        if end == "down":
            self.world.bring(event)
        elif self.island.is_alive and self.island.link is self:
            self.island.driver.take(event)
