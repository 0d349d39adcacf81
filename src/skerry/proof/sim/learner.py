"""A learner process in a simulated world: both real halves and the uplink, around a loop that "trains" known numbers.

The halves take turns here. What one says comes to the other when the world likes, in order: now and then the loop
passes boundaries of which the node has not heard, and the node orders what the loop does not know of yet. Copies to and
from cells are over when the world likes too, as those of a device are.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from safetensors.numpy import save

from skerry.algo.fragments import Fragment
from skerry.core.events import LearnerEvent, Ticked, Told, Unlinked
from skerry.core.messages import FULL, Publication, Pull, Stop, Welcome
from skerry.core.vocabulary import GivenUp
from skerry.node.cells import Box, Cell, Cells
from skerry.node.driver import LearnerDriver
from skerry.node.learner import Outstanding
from skerry.node.mailbox import Post, Record
from skerry.node.orders import Sent
from skerry.node.training import TrainingHalf
from skerry.proof.sim.algebra import SPOILED
from skerry.proof.sim.alone import Alone
from skerry.proof.sim.network import SimEndpoint, SimLink
from skerry.wire.frames import learner_dialect
from skerry.wire.transport import Received, WireEvent

if TYPE_CHECKING:
    from skerry.proof.sim.world import World

TICK_S = 0.4
STAND_S = 0.1  # between looks of a training thread that takes no step
PAUSE_S = 0.5  # between looks of a process that is stopped
STEP_TOKENS_MAX = 10
LATE = 0.2  # of all looks into a mailbox find less than was put there
COPIED_LATE = 0.2  # of all copies are not over when the boundary is
COPY_S_MAX = 0.3


class Taken(NamedTuple):
    """What was true when a snapshot was taken."""

    drift: Any
    given_up: Any


class LatePost(Post):
    """An end of a mailbox whose records come late, never out of order."""

    def __init__(self, world: World, outgoing: deque[Record], incoming: deque[Record]) -> None:
        super().__init__(outgoing, incoming)
        self._world = world

    def receive(self) -> list[Record]:
        random, count = self._world.mail_random, len(self._incoming)
        if count and random.random() < LATE:
            count = random.randrange(count)
            self._world.saw["a half heard of something late"] += 1
        return [self._incoming.popleft() for _ in range(count)]


class LearnerProcess:
    """It is its own `Carrier`, with whatever values the world computes with, and its node's `LearnerObserver`."""

    def __init__(self, world: World, name: str, number: int) -> None:
        count = len(world.fragments)
        self.world, self.name = world, name
        up: deque[Record] = deque()
        down: deque[Record] = deque()
        self.cells: Cells | None = None
        self.training = TrainingHalf(world.layout, self, LatePost(world, up, down), self.lay)
        post = LatePost(world, down, up)
        self.driver = LearnerDriver(
            name, world.layout, f"{name}{number}", self.clock, post, self.lay, world.algebra, self
        )
        self.node, uplink = self.driver.node, self.driver.uplink
        self.endpoint = uplink.endpoint = SimEndpoint(world, self, learner_dialect(uplink.payload_bytes))
        self.link: SimLink | None = None
        self.is_dead = False
        self.wants_to_leave = False
        self.paused_until = 0.0
        self.clock_ahead_s = 0.0
        self.speed = 1.0  # of what it usually is
        self.values: dict[int, Any] = {}
        # what is true of it, for the checks
        self.step_count = 0
        self.tokens = [0]
        self.done: list[list[Any]] = [[0] for _ in range(count)]  # fragment -> step -> all work up to it
        self.taken_out: list[Any] = [0] * count
        self.given_up: list[Any] = [0] * count
        self.taken: list[dict[int, Taken]] = [{} for _ in range(count)]  # by step, the snapshots not blended since,
        self.kept: list[Any] = [0] * count  # and what of it is outstanding
        self.last_seq = [0] * count
        self.settled_seq = [0] * count
        self.is_pulled = [False] * count  # since its last contribution
        self.is_ordered = [False] * count  # on the link that it has
        self.is_stopped = False
        self.is_welcomed = False  # on the link that it has
        self.low = [(FULL, 0)] * count
        self.alone = Alone(world.scenario.config.learner.alone_steps_max)
        self.is_known = False
        world.at(0.0, self.dial)
        world.at(0.01, self.turn)
        world.at(TICK_S, self.tick)

    def clock(self) -> float:
        return self.world.now + self.clock_ahead_s

    # ------------------------------------------------------------------------------------------ its parameters

    def lay(self, size: int, up_count: int, down_count: int) -> Cells:
        """So few cells that they run out, for both halves."""
        if self.cells is None:
            count, random = len(self.world.fragments), self.world.mail_random
            up_count, down_count = random.randint(1, count), random.randint(2, count + 1)
            self.cells = Cells([Box(0) for _ in range(up_count)], [Box(0) for _ in range(down_count)])
        return self.cells

    def copied(self, end: Callable[[], None]) -> None:
        """A copy is over now, or when the device gets to it."""
        if self.world.mail_random.random() < COPIED_LATE:
            self.world.at(self.world.mail_random.uniform(0, COPY_S_MAX), end)
        else:
            end()

    def read(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        p = fragment.index
        value = self.world.copy(self.values[p])
        self.taken[p][self.step_count] = Taken(value - self.base_of(p), self.given_up[p])

        def end() -> None:
            cell.store(value)
            cell.mark(mark)

        self.copied(end)

    def read_buffers(self) -> bytes:
        """Of a model that counts its steps."""
        return save({"count": np.array(self.step_count)})

    def base_of(self, p: int) -> Any:
        """What the live parameters stand on; the node may not know yet that they do."""
        sent = self.node.orders.under_way.get(p)
        return self.node.orders.stands[p].base if sent is None or self.is_on_its_way(sent) else sent.to.base

    def is_on_its_way(self, sent: Sent) -> bool:
        """A change was sent, and has not been made."""
        return self.training.applied.get(sent.change.fragment) != sent.change

    def load(self, cell: Cell, size: int, mark: int) -> Any:
        """What lies in a cell; the device reads it until the copy is over."""
        values = cell.load(size)
        before = self.world.algebra.digest(values)

        def end() -> None:
            after = self.world.algebra.digest(cell.load(size))
            self.world.oracle.need_same(before == after, self.name)
            cell.mark(mark)

        self.copied(end)
        return values

    def prepare(self, fragments: Sequence[Fragment]) -> None:
        """Nobody else has them."""

    def add(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        increment = self.load(cell, fragment.size, mark)
        self.values[fragment.index] = self.values[fragment.index] + increment

    def write(self, fragment: Fragment, cell: Cell, mark: int) -> None:
        p = fragment.index
        self.values[p] = self.world.copy(self.load(cell, fragment.size, mark))
        self.given_up[p] = self.done[p][-1] - self.taken_out[p]
        is_open = self.last_seq[p] != self.settled_seq[p] and self.node.settings.adopt == "overwrite"
        self.world.saw["overwritten while a contribution was outstanding"] += is_open

    def blend(self, fragment: Fragment, cell: Cell, alpha: float, mark: int) -> None:
        p = fragment.index
        towards = self.load(cell, fragment.size, mark)
        rest = self.values[p] - towards
        kept = math.floor(Fraction(alpha) * rest) if self.world.is_exact else alpha * rest
        self.values[p] = towards + kept
        self.given_up[p] = self.given_up[p] + rest - kept
        self.taken[p].clear()
        self.world.saw["blended while a contribution was outstanding"] += self.last_seq[p] != self.settled_seq[p]

    def reset_optimizer(self) -> None:
        self.world.saw["optimizer reset"] += 1

    # ------------------------------------------------------------------------------------------ the training thread

    def turn(self) -> None:
        """One turn of the training loop: a step, or a look for work while it stands still."""
        if self.is_dead:
            return
        if self.world.now < self.paused_until:
            wait_s = PAUSE_S
        elif self.training.must_stand or self.training.is_closing:
            self.boundary()
            wait_s = STAND_S
        else:
            wait_s = self.step_if_wanted()
        self.world.at(wait_s, self.turn)

    def step_if_wanted(self) -> float:
        """A step while the run and its user want one, and the closing as soon as they do not; what it takes."""
        step_s = STAND_S
        if self.is_wanted:
            step_s = self.world.scenario.step_s[self.name] / self.speed * self.world.random.uniform(0.9, 1.1)
            self.train()
            self.boundary(step_s)
        if not self.is_wanted:
            self.training.close()
        return step_s

    @property
    def is_wanted(self) -> bool:
        return self.training.is_running and not self.wants_to_leave

    def train(self) -> None:
        self.step_count += 1
        self.tokens.append(self.tokens[-1] + self.world.random.randrange(1, STEP_TOKENS_MAX))
        for p, done in enumerate(self.done):
            gained = self.world.gain()
            done.append(done[-1] + gained)
            self.values[p] = self.values[p] + gained
        self.world.oracle.stepped(self)

    def boundary(self, step_s: float = 0.0) -> None:
        """Of a step that took so long, or of none."""
        if step_s:
            self.training.boundary(1, self.tokens[-1] - self.tokens[-2], step_s)
        else:
            self.training.stand()
        self.check()

    # ------------------------------------------------------------------------------------------ what its node says

    def event_came(self, event: LearnerEvent) -> None:
        self.world.tell(self.node.process, ">", event)
        self.world.events += not isinstance(event, Ticked)
        stretches = len(self.alone.too_long)
        self.alone.hears(event)
        self.world.saw["alone for too long"] += len(self.alone.too_long) > stretches
        match event:
            case Told(message=Pull() as pull):
                self.is_pulled[pull.fragment] = True
            case Told(message=Publication() as publication):
                self.is_ordered[publication.fragment] |= publication.order > 0
            case Told(message=Stop()):
                self.is_stopped = True
            case Told(message=Welcome()):
                self.is_welcomed = True
            case Unlinked():
                self.is_welcomed = False
                self.is_ordered = [False] * len(self.is_ordered)

    def contributed(self, out: Outstanding) -> None:
        self.world.oracle.said_by(self, out)
        p = out.contribution.fragment
        self.world.saw["contributed by order"] += not self.is_pulled[p]
        self.is_pulled[p] = False

    def settled(self, p: int, seq: int) -> None:
        """A contribution left the drift: what it said is taken out, what the codec could not say stays."""
        assert self.node.machine is not None
        self.settled_seq[p] = seq
        self.kept[p] = 0
        self.taken_out[p] += self.world.oracle.said[self.name, self.node.machine.life, p, seq]

    def fast_forwarded(self, reason: GivenUp) -> None:
        self.settled_seq = list(self.last_seq)  # whatever becomes of them, they are not its own any more
        self.kept = [0] * len(self.kept)
        self.world.oracle.fast_forwarded(reason)

    # ------------------------------------------------------------------------------------------ the node thread

    def tick(self) -> None:
        if self.is_dead:
            return
        if self.world.now >= self.paused_until:
            self.driver.tick()
            self.look_around()
        self.world.at(TICK_S, self.tick)

    def take(self, event: WireEvent) -> None:
        """What the wire brings; now and then the training thread passes boundaries that the node does not know yet."""
        if self.name in self.world.scenario.older:
            event = _without_order(event)
        if self.world.random.random() < 0.2:
            self.driver.uplink.take(event)
        else:
            self.driver.take(event)
        if self.node.machine is not None and not self.is_known:
            self.is_known = True
            self.world.oracle.born(self, self.node.machine.life)
        if self.driver.uplink.peer is None and self.link is not None and not self.link.client.up:
            self.link = None
            self.world.at(self.world.random.uniform(0.1, 1.0), self.dial)
        self.look_around()

    def look_around(self) -> None:
        """After every turn of the node thread: the books, and whether anything is left to do."""
        self.check()
        left = self.node.left
        if left is None:
            return
        if left.refused is not None:
            self.world.saw["fenced old life" if left.refused.why == "taken over" else "refused"] += 1
            self.world.oracle.check_refused(self, left.refused)
        else:
            self.world.saw["left"] += self.node.machine is not None and not self.node.machine.is_stop_asked
        self.end()

    def check(self) -> None:
        self.world.oracle.check_learner(self)

    def spoil(self) -> None:
        """A NaN, from somewhere."""
        for p in self.values:
            self.values[p] = self.values[p] + SPOILED
            self.done[p][-1] += SPOILED

    # ------------------------------------------------------------------------------------------ its link

    def dial(self) -> None:
        if self.is_dead or self.link is not None:
            return
        self.link = self.world.connect(self)
        if self.link is None:
            self.world.at(0.5, self.dial)

    def end(self) -> None:
        """The process is over; its last words still leave."""
        self.is_dead = True
        if self.link is not None:
            link, self.link = self.link, None
            self.world.at(1.0, link.cut)


def _without_order(event: WireEvent) -> WireEvent:
    """As an older version reads it: what it does not know of is not there."""
    if isinstance(event, Received) and isinstance(event.message, Publication):
        return dataclasses.replace(event, message=msgspec.structs.replace(event.message, order=0))
    return event
