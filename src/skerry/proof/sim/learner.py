"""A learner process in a simulated world: the real node and its uplink, around a loop that "trains" known numbers.

The two threads of a real learner take turns here; now and then the training thread passes a boundary at the worst
moment, while the node is at a message.
"""

from __future__ import annotations

import math
from collections import deque
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from skerry.algo.fragments import Fragment
from skerry.core.events import Closing, FastForward, Gone, LearnerEvent, Ticked
from skerry.core.messages import FULL, Contribution
from skerry.node.learner import LearnerNode, Pending
from skerry.node.peers import Uplink
from skerry.proof.sim.algebra import SPOILED
from skerry.proof.sim.network import SimEndpoint, SimLink
from skerry.wire.frames import learner_dialect
from skerry.wire.transport import WireEvent

if TYPE_CHECKING:
    from skerry.proof.sim.world import World

TICK_S = 0.4
STEP_TOKENS_MAX = 10


class WatchedNode(LearnerNode):
    """The real node; the process hears what leaves the drift."""

    watcher: LearnerProcess

    def _contribute(self, c: Contribution) -> LearnerEvent | None:
        outcome = super()._contribute(c)
        if outcome is None:
            self.watcher.world.oracle.said_by(self.watcher, self.outstanding[c.fragment])
        return outcome

    def _settle(self, p: int, seq: int) -> Any:
        taken = super()._settle(p, seq)
        self.watcher.settled(p, seq)
        return taken

    def _fast_forward(self, action: FastForward) -> None:
        self.watcher.world.oracle.fast_forwarded(action.reason)
        super()._fast_forward(action)

    def handle(self, event: LearnerEvent) -> None:
        self.watcher.world.tell(self.process, ">", event)
        if not isinstance(event, Ticked):
            self.watcher.world.events += 1
        super().handle(event)


class LearnerProcess:
    """It is its node's `Parameters`: a fragment's values are whatever the world computes with."""

    def __init__(self, world: World, name: str, number: int) -> None:
        count = len(world.fragments)
        self.world, self.name = world, name
        self.uplink = Uplink()
        self.node = WatchedNode(name, world.layout, self, self.uplink, f"{name}{number}", self.clock, world.algebra)
        self.node.watcher = self
        self.uplink.node = self.node
        self.uplink.endpoint = SimEndpoint(world, self, learner_dialect(self.uplink.payload_bytes))
        self.link: SimLink | None = None
        self.is_dead = False
        self.is_closing = False  # takes no further step
        self.wants_to_leave = False
        self.closing_at = 0.0
        self.ended_at: float | None = None
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
        value = self.world.copy(self.values[p])
        self.taken[p], self.is_taken_whole[p] = value - self.node._applied[p].base, True
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
        world, node = self.world, self.node
        if world.now < self.paused_until:
            world.at(0.5, self.turn)
        elif self.is_closing or not node.is_adopted:
            if node.has_work:
                self.boundary(0, 0.0)
            if self.is_closing:
                self.wait_for_the_end()
            world.at(0.1, self.turn)
        else:
            step_s = world.scenario.step_s[self.name] / self.speed * world.random.uniform(0.9, 1.1)
            self.train()
            self.boundary(1, step_s)
            self.look_at_the_end()
            world.at(step_s, self.turn)

    def train(self) -> None:
        self.step_count += 1
        self.tokens.append(self.tokens[-1] + self.world.random.randrange(1, STEP_TOKENS_MAX))
        for p, done in enumerate(self.done):
            gained = self.world.gain()
            done.append(done[-1] + gained)
            self.values[p] = self.values[p] + gained

    def boundary(self, steps: int, step_s: float) -> None:
        is_dropping = self.is_dropping
        tokens = self.tokens[-1] - self.tokens[-1 - steps]
        self.node.boundary(steps, tokens, step_s)
        if is_dropping:
            self.settled_seq = list(self.last_seq)  # whatever becomes of them, they are not its own any more
            self.kept = [0] * len(self.kept)
        self.check()

    @property
    def is_dropping(self) -> bool:
        """It is about to give its drift up: the books of its work are open until the boundary."""
        return self.node._work.fast_forward

    def look_at_the_end(self) -> None:
        machine = self.node.machine
        assert machine is not None
        if machine.is_stop_asked or self.node.ended or self.wants_to_leave:
            self.is_closing, self.closing_at = True, self.clock()
            self.node.drain_boundaries()
            self.node.handle(Closing())

    def wait_for_the_end(self) -> None:
        """As the shell's `close` does."""
        node, machine, config = self.node, self.node.machine, self.world.scenario.config
        assert machine is not None
        node.drain_boundaries()
        if node.ended and self.ended_at is None:
            self.ended_at = self.clock()
        is_late = self.ended_at is not None and self.clock() - self.ended_at > 2.0
        is_over = is_late or (machine.is_settled and (node.ended or machine.state == "leaving"))
        limit_s = config.sync.close_timeout_s + 5 if machine.is_stop_asked else config.learner.leave_timeout_s
        if is_over or self.clock() - self.closing_at > limit_s:
            self.world.saw["left"] += not machine.is_stop_asked
            self.node.handle(Gone())
            self.end()

    def settled(self, p: int, seq: int) -> None:
        """A contribution left the drift: what it said is taken out, what the codec could not say stays."""
        assert self.node.machine is not None
        self.settled_seq[p] = seq
        self.kept[p] = 0
        self.taken_out[p] += self.world.oracle.said[self.name, self.node.machine.life, p, seq]

    # ------------------------------------------------------------------------------------------ the node thread

    def tick(self) -> None:
        if self.is_dead:
            return
        if self.node.machine is not None and self.world.now >= self.paused_until:
            self.node.drain_boundaries()
            self.node.handle(Ticked())
            self.check()
        self.world.at(TICK_S, self.tick)

    def take(self, event: WireEvent) -> None:
        """What the wire brings; now and then the training thread passes boundaries that the node does not know yet."""
        node, hidden = self.node, None
        if self.world.random.random() < 0.2:
            hidden, node._boundaries = node._boundaries, deque()
        self.uplink.take(event)
        if hidden is not None:
            hidden.extend(node._boundaries)
            node._boundaries = hidden
        if node.machine is not None and not self.is_known:
            self.is_known = True
            self.world.oracle.born(self, node.machine.life)
        if node.refused:
            self.world.saw["fenced old life" if "taken over" in node.refused else "refused"] += 1
            self.end()
        elif node.ended and not self.is_closing and not node.is_adopted:
            self.end()
        if self.uplink.peer is None and self.link is not None and not self.link.client.up:
            self.link = None
            self.world.at(self.world.random.uniform(0.1, 1.0), self.dial)
        self.check()

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
