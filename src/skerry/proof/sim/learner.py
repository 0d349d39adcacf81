"""A learner process in a simulated world: the real driver, node and uplink, around a loop that "trains" known numbers.

The two threads of a real learner take turns here; now and then the training thread passes a boundary at the worst
moment, while the node is at a message.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec

from skerry.algo.fragments import Fragment
from skerry.core.events import LearnerEvent, Ticked, Told, Unlinked
from skerry.core.messages import FULL, Publication, Pull, Stop
from skerry.core.vocabulary import GivenUp
from skerry.node.driver import LearnerDriver
from skerry.node.learner import Outstanding, Pending
from skerry.proof.sim.algebra import SPOILED
from skerry.proof.sim.network import SimEndpoint, SimLink
from skerry.wire.frames import learner_dialect
from skerry.wire.transport import Received, WireEvent

if TYPE_CHECKING:
    from skerry.proof.sim.world import World

TICK_S = 0.4
STAND_S = 0.1  # between looks of a training thread that takes no step
PAUSE_S = 0.5  # between looks of a process that is stopped
STEP_TOKENS_MAX = 10


class LearnerProcess:
    """It is its node's `Parameters`, with whatever values the world computes with, and its `LearnerObserver`."""

    def __init__(self, world: World, name: str, number: int) -> None:
        count = len(world.fragments)
        self.world, self.name = world, name
        self.driver = LearnerDriver(name, world.layout, self, f"{name}{number}", self.clock, world.algebra, self)
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
        self.taken: list[Any] = [0] * count  # drift at the last snapshot,
        self.is_taken_whole = [True] * count  # no blend has scaled it since,
        self.kept: list[Any] = [0] * count  # and what of it is outstanding
        self.last_seq = [0] * count
        self.settled_seq = [0] * count
        self.is_pulled = [False] * count  # since its last contribution
        self.is_ordered = [False] * count  # on the link that it has
        self.is_stopped = False
        self.low = [(FULL, 0)] * count
        self.is_known = False
        world.at(0.0, self.dial)
        world.at(0.01, self.turn)
        world.at(TICK_S, self.tick)

    def clock(self) -> float:
        return self.world.now + self.clock_ahead_s

    # ------------------------------------------------------------------------------------------ its parameters

    def read(self, fragment: Fragment) -> Pending:
        p = fragment.index
        self.world.oracle.taking(self, p)
        value = self.world.copy(self.values[p])
        self.taken[p], self.is_taken_whole[p] = value - self.node.applied[p].base, True
        return lambda: value

    def add(self, fragment: Fragment, increment: Any) -> None:
        self.values[fragment.index] = self.values[fragment.index] + increment

    def write(self, fragment: Fragment, values: Any) -> None:
        p = fragment.index
        self.values[p] = self.world.copy(values)
        self.given_up[p] = self.done[p][-1] - self.taken_out[p]
        is_open = self.last_seq[p] != self.settled_seq[p] and self.node.settings.adopt == "overwrite"
        self.world.saw["overwritten while a contribution was outstanding"] += is_open

    def blend(self, fragment: Fragment, towards: Any, alpha: float) -> None:
        p = fragment.index
        rest = self.values[p] - towards
        kept = math.floor(Fraction(alpha) * rest) if self.world.is_exact else alpha * rest
        self.values[p] = towards + kept
        self.given_up[p] = self.given_up[p] + rest - kept
        self.is_taken_whole[p] = False
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
        elif self.driver.is_joining or self.driver.is_closing:
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
            self.driver.close()
        return step_s

    @property
    def is_wanted(self) -> bool:
        return self.driver.is_running and not self.wants_to_leave

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
        is_dropping = self.is_dropping
        if step_s:
            self.driver.boundary(self.tokens[-1] - self.tokens[-2], step_s)
        else:
            self.driver.stand()
        if is_dropping:
            self.settled_seq = list(self.last_seq)  # whatever becomes of them, they are not its own any more
            self.kept = [0] * len(self.kept)
        self.check()

    @property
    def is_dropping(self) -> bool:
        """It is about to give its drift up: the books of its work are open until the boundary."""
        return self.node.work.fast_forward

    # ------------------------------------------------------------------------------------------ what its node says

    def event_came(self, event: LearnerEvent) -> None:
        self.world.tell(self.node.process, ">", event)
        self.world.events += not isinstance(event, Ticked)
        match event:
            case Told(message=Pull() as pull):
                self.is_pulled[pull.fragment] = True
            case Told(message=Publication() as publication):
                self.is_ordered[publication.fragment] |= publication.order > 0
            case Told(message=Stop()):
                self.is_stopped = True
            case Unlinked():
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
        left = self.driver.left
        if left is None:
            return
        if left.refused is not None:
            self.world.saw["fenced old life" if left.refused.why == "taken over" else "refused"] += 1
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
