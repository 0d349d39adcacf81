"""A learner in a simulated world that says what is legal in form and wrong in meaning, drawn from the seed.

It joins under its own name, claims steps, tokens and times as it likes, contributes unasked, half, or over other work,
leaves and comes as another process. What becomes of it is of no interest. The others' work has to be merged exactly
once, they have to take part, the run has to close, and its tape to balance. What it contributes is told to the oracle,
for the model has that in it if it is merged.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from skerry.algo.fragments import encode_layout
from skerry.core.facts import Stretch
from skerry.core.messages import FULL, PROTOCOL, Contribution, FragmentPosition, Hello, Report, Welcome
from skerry.core.vocabulary import LearnerState
from skerry.proof.sim.algebra import unpack
from skerry.proof.sim.network import SimEndpoint, SimLink
from skerry.wire.frames import learner_dialect
from skerry.wire.transport import Lost, Opened, Received, WireEvent

if TYPE_CHECKING:
    from skerry.proof.sim.world import World

NAME = "mallory"
SAYS_S = 0.3  # between two of its words, on average
GAIN_MAX = 1 << 30  # of what it contributes: it may be in the model
HUGE = (1, 1, 2, 10, 1000, 10**6, 10**12)  # steps, and tokens in a step, by which it claims to have gone on


class HostileProcess:
    def __init__(self, world: World) -> None:
        self.world, self.name = world, NAME
        self.random = random.Random(f"hostile {world.seed}")
        self.is_dead, self.paused_until = False, 0.0
        self.endpoint = SimEndpoint(world, self, learner_dialect(lambda message: 0))
        self.link: SimLink | None = None
        self.peer: int | None = None
        self.processes = itertools.count(1)
        self.process, self.life, self.number, self.seq = "", 0, 0, 0
        self.at = (0, 0)  # steps and tokens that it claims
        world.at(0.5, self.turn)

    def take(self, event: WireEvent) -> None:
        match event:
            case Opened():
                self.peer = event.peer
                self._say_hello()
            case Received(message=Welcome() as welcome) if welcome.life != self.life:
                self.life, self.number, self.seq, self.at = welcome.life, 0, 0, (0, 0)
            case Lost():
                self.peer = self.link = None

    def turn(self) -> None:
        """One word, or it goes, or comes."""
        if self.link is None:
            self.link = self.world.connect(self)
        elif self.peer is not None and self.life:
            draw = self.random.random()
            if draw < 0.05:
                self.link.cut()
            elif draw < 0.25:
                self._contribute()
            else:
                self._report()
        self.world.at(self.random.expovariate(1 / SAYS_S), self.turn)

    def _say_hello(self) -> None:
        assert self.peer is not None
        is_new = not self.process or self.random.random() < 0.5
        if is_new:
            self.process, self.life = f"{NAME}{next(self.processes)}", 0
        layout = self.world.layout
        life = self.life if self.random.random() < 0.9 else self.random.randrange(1, 10)
        hello = Hello(PROTOCOL, NAME, self.process, life, encode_layout(layout), layout.digest)
        self.endpoint.send(self.peer, hello)

    def _report(self) -> None:
        assert self.peer is not None
        r, steps = self.random, self.random.choice(HUGE)
        if r.random() < 0.8:
            self.at = (self.at[0] + steps, self.at[1] + steps * r.choice(HUGE[:5]))
        self.number += r.choice([0, 1, 1, 1, 1000])
        step, tokens = self.at
        positions = tuple(self._position(p) for p in range(len(self.world.fragments)))
        alone = Stretch(0, 0, step, tokens) if r.random() < 0.05 else Stretch()
        states: list[LearnerState] = ["training", "training", "training", "training", "stopped", "leaving"]
        state = r.choice(states)
        step_s = r.choice([0.0, 1e-6, 0.3, 3600.0])
        report = Report(NAME, self.life, self.number, step, tokens, step_s, state, positions, alone=alone)
        self.endpoint.send(self.peer, report)

    def _position(self, p: int) -> FragmentPosition:
        r, newest = self.random, self.world.oracle.versions[p]
        mark = r.choice([0, 0, self.at[0] // 2, self.at[0]])
        base = r.choice([FULL, 0, newest, newest, newest])
        tokens = self.at[1] if mark == self.at[0] else 0
        return FragmentPosition(
            base, mark, tokens, r.choice([0, 0, self.seq, 99]), r.random() < 0.1, r.choice([0, 1, 9])
        )

    def _contribute(self) -> None:
        assert self.peer is not None
        r, p = self.random, self.random.randrange(len(self.world.fragments))
        start = r.choice([(0, 0), self.at])
        end = r.choice([self.at, (self.at[0] + 1, self.at[1] + r.choice(HUGE))])
        self.seq += 1
        codec = self.world.scenario.config.wire.codec_up
        payload = self.world.algebra.encode(codec, r.randrange(GAIN_MAX))
        digest = self.world.algebra.checksum(payload)
        base = r.choice([0, self.world.oracle.versions[p], 10**6])
        message = Contribution(NAME, self.life, self.seq, p, base, *start, *end, codec, digest)
        self.world.oracle.said[NAME, self.life, p, self.seq] = unpack(payload)
        self.endpoint.send(self.peer, message, payload)
