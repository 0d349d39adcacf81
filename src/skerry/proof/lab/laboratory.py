"""One run in virtual time: the real core, nodes, identities and store around a stack of learners on one device.

Learners step on a common grid, a learner of speed 1/n every n-th tick, so that steps that end together are computed
together. Everything between is what production runs: reports, rounds, quorum and grace, contributions, merges,
publications, adoption, lives. Only the wire is a delay, the clock is virtual, and values stay on the device
(`lab.algebra`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from skerry.adapters.torch import layout_of_model
from skerry.algo.fragments import Fragment, split
from skerry.core.events import Closing, Gone, Merge, Ticked
from skerry.core.facts import Committed
from skerry.core.messages import Message
from skerry.node.algebra import Payload, Values
from skerry.node.learner import LearnerNode, Pending
from skerry.node.peers import Learners, Uplink
from skerry.node.syncer import SyncerNode
from skerry.proof.lab.algebra import Device
from skerry.proof.lab.feed import Feed
from skerry.proof.lab.stack import Stack
from skerry.proof.lab.study import PRODUCT, Job
from skerry.proof.lab.trials import Trials
from skerry.proof.sim.lines import Hub, Line
from skerry.proof.sim.timeline import Timeline
from skerry.run.genesis import begin
from skerry.store.store import Store
from skerry.train.inner import schedule
from skerry.train.loop import model_of
from skerry.wire.transport import Lost, Opened, Received, Sent, WireEvent

STEP_S = 0.3  # of a learner of speed 1, where the configuration does not pace it
CLOSE_S_MAX = 3600.0  # virtual: a run that has not closed so long after its last step never will


class Syncer(SyncerNode):
    """The real node; it keeps the values its closing began with."""

    before_close: tuple[Values, ...] = ()

    def _merge(self, action: Merge) -> Committed:
        if action.phase == "closing" and not self.before_close:
            self.before_close = tuple(self.values)
        return super()._merge(action)


class Laboratory(Timeline):
    def __init__(self, job: Job, device: str, folder: Path) -> None:
        super().__init__()
        self.config, self.setting = job.config, job.setting
        self.period_s = self.config.learner.step_s or STEP_S
        self.batch_tokens = 0
        self.feed = Feed(self.config, self.setting, device)
        model = model_of(self.config)
        self.layout = layout_of_model(model)
        self.fragments = split(self.layout, self.config.sync.num_fragments)
        self.stack = Stack(
            model,
            self.fragments,
            self.config.run.learners,
            self.config.learner.weight_decay,
            device,
            self.setting.precision,
            self.setting.trial,
        )
        trial = self.setting.trial
        self.algebra = Device(device) if trial == PRODUCT else Trials(device, trial)
        self.learners = Learners()
        self.payload_bytes = {"up": 0, "down": 0}
        self._create(folder)
        self.store = Store.open(folder)
        self.syncer = self.learners.node = Syncer(self.store, self.learners, self.clock, 0.0, self.algebra)
        self.hub = self.learners.endpoint = Hub()
        self.islands = [Island(self, row) for row in range(self.config.run.learners)]

    def clock(self) -> float:
        return self.now

    def _create(self, folder: Path) -> None:
        with Store.open(folder) as store:
            begin(store, self.config, self.layout, self.stack.initial(), 0.0, self.algebra)

    # ------------------------------------------------------------------------------------------ what is asked of it

    @property
    def progress(self) -> float:
        return self.syncer.machine.progress

    @property
    def phase(self) -> str:
        return self.syncer.machine.state.phase

    def master(self, values: list[Values] | tuple[Values, ...] = ()) -> Tensor:
        """The global model as one row: published values and what the codec could not say yet."""
        return torch.cat([each.theta + each.error for each in values or self.syncer.values])

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
        for island in self.islands:
            island.look_around(tick)
        stepping = [island for island in self.islands if island.ends_step(tick)]
        if stepping:
            inputs, targets = self.feed.windows([island.row for island in stepping])
            self.batch_tokens = inputs[0].numel()
            self.stack.step([island.row for island in stepping], inputs, targets, [i.rate for i in stepping])
        for island in self.islands:
            island.pass_boundary(island in stepping)
        self.syncer.handle(Ticked(), self.now)
        self.syncer.tidy()
        self.at(self.period_s / 2, self._half)

    def _half(self) -> None:
        """Node threads wake up now and then between boundaries."""
        for island in self.islands:
            island.wake()
        self.syncer.handle(Ticked(), self.now)


# ---------------------------------------------------------------------------------------------- a learner


class Island:
    """A learner's place: its row of the stack, its data, and its processes one after the other."""

    node: LearnerNode
    uplink: Uplink
    link: LabLine

    def __init__(self, world: Laboratory, row: int) -> None:
        setting, config = world.setting, world.config
        self.world, self.row, self.name = world, row, f"learner-{row:03d}"
        speed = setting.speeds[row % len(setting.speeds)] if setting.speeds else 1.0
        self.ticks_a_step = round(1 / speed)
        self.visits_only = row >= config.run.learners - setting.away_half
        self.random = random.Random(f"deaths {config.run.seed} {row}")
        self.is_alive = self.is_closing = False
        self.began_tick: int | None = None  # of the step it is in
        self._lives = 0
        if not self.visits_only:
            world.at(1e-6 * row, self.boot)  # in order: a learner's index, and so its data, follows who comes first

    def boot(self) -> None:
        world = self.world
        if world.phase in ("closing", "closed") or self.is_visit_over:
            return
        self._lives += 1
        self.is_alive, self.is_closing, self.began_tick = True, False, None
        self.uplink = Uplink()
        process = f"{self.name}-{self._lives}"
        self.node = LearnerNode(self.name, world.layout, self, self.uplink, process, world.clock, world.algebra)
        self.uplink.node = self.node
        self.link = self.uplink.endpoint = LabLine(world, self)
        if not world.setting.keep_optimizer:
            world.stack.reset(self.row)
        if world.setting.dead_share:
            up_steps = world.setting.dead_steps * (1 - world.setting.dead_share) / world.setting.dead_share
            world.at(self.random.expovariate(1 / (up_steps * world.period_s)), self.die)

    def die(self) -> None:
        """The process is gone, with its drift and its moments; it comes back after a while."""
        if self.is_closing or not self.is_alive:
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
        if self.is_alive and self.began_tick is None and self.node.is_adopted:
            self.began_tick = tick
            assert self.node.welcome is not None
            self.world.feed.streams[self.row].seek(self.node.welcome.prior_steps)

    def ends_step(self, tick: int) -> bool:
        if not self.is_alive or self.is_closing or self.began_tick is None:
            return False
        return tick > self.began_tick and (tick - self.began_tick) % self.ticks_a_step == 0

    @property
    def is_visit_over(self) -> bool:
        return self.visits_only and self.world.progress >= 0.75

    @property
    def rate(self) -> float:
        machine = self.node.machine
        assert machine is not None
        return self.world.config.learner.lr * schedule(machine.progress) * self.node.ramp

    def pass_boundary(self, has_stepped: bool) -> None:
        if not self.is_alive:
            return
        if has_stepped:
            self.node.boundary(1, self.world.batch_tokens, self.world.period_s * self.ticks_a_step)
            self.node.drain_boundaries()
            self._look_for_the_end()
        elif self.is_closing or self.began_tick is None:
            if self.node.has_work:
                self.node.boundary(0, 0, 0.0)
                self.node.drain_boundaries()
            self._leave_when_settled()
        self.wake()

    def wake(self) -> None:
        if self.is_alive and self.node.machine is not None:
            self.node.handle(Ticked())

    def _look_for_the_end(self) -> None:
        machine = self.node.machine
        assert machine is not None
        is_over = machine.is_stop_asked or self.node.ended
        if is_over or self.is_visit_over:
            self.is_closing = True
            self.node.handle(Closing())

    def _leave_when_settled(self) -> None:
        machine = self.node.machine
        is_over = self.is_closing and machine is not None and machine.is_settled
        if is_over and machine is not None and (self.node.ended or machine.state == "leaving"):
            self.node.handle(Gone())
            self.is_alive = False
            self.world.at(1.0, self.link.cut)

    # ------------------------------------------------------------------------------------------ its parameters

    def read(self, fragment: Fragment) -> Pending:
        values = self.world.stack.slice(self.row, fragment).clone()
        return lambda: values

    @torch.no_grad()
    def add(self, fragment: Fragment, increment: Tensor) -> None:
        self.world.stack.slice(self.row, fragment).add_(increment)

    @torch.no_grad()
    def write(self, fragment: Fragment, values: Tensor) -> None:
        self.world.stack.slice(self.row, fragment).copy_(values)

    @torch.no_grad()
    def blend(self, fragment: Fragment, towards: Tensor, alpha: float) -> None:
        self.world.stack.slice(self.row, fragment).lerp_(towards, 1 - alpha)

    def reset_optimizer(self) -> None:
        self.world.stack.reset(self.row)


# ---------------------------------------------------------------------------------------------- the wire


class LabLine(Line):
    """Control overtakes bulk; bulk goes through one payload at a time each way."""

    def __init__(self, world: Laboratory, island: Island) -> None:
        super().__init__(world.hub)
        self.world, self.island = world, island
        self._free_at = {"up": 0.0, "down": 0.0}
        for end in ("down", "up"):
            world.at(0.0, partial(self._tell, end, Opened(self.peer, island.name)))

    def carry(self, way: str, message: Message, payload: Payload | None, tag: object) -> None:
        world, takes_s = self.world, 0.0
        leaves_at = world.now
        if payload is not None:
            world.payload_bytes[way] += len(payload)
            takes_s = 8e-6 * len(payload) / world.setting.mbit_s if world.setting.mbit_s else 0.0
            leaves_at = self._free_at[way] = max(world.now, self._free_at[way]) + takes_s
        received = Received(self.peer, message, payload, takes_s)
        there = "down" if way == "up" else "up"
        world.at(leaves_at + world.setting.latency_s - world.now, partial(self._tell, there, received))
        if tag is not None:
            world.at(leaves_at - world.now, partial(self._tell, way, Sent(self.peer, tag)))

    def _tell(self, end: str, event: WireEvent) -> None:
        """To the end that sends this way."""
        if self.is_up and end == "up":
            self.island.uplink.take(event)
        elif self.is_up:
            self.world.learners.take(event, self.world.now)

    def lost(self) -> None:
        self.world.learners.take(Lost(self.peer, "its process ended"), self.world.now)
