"""The learner's node: bases, drift, outstanding contributions, and the step boundary.

Two threads meet here, at one lock. The *node thread* runs the machine, encodes, decodes and prepares adoptions. The
*training thread* only passes boundaries: it adds prepared increments to the live parameters, takes snapshots, and goes
on; it never waits for the network, and the lock is held for a few assignments at a time.

    drift = θ − Θ_b            adopt: θ ← θ + (Θ_new − Θ_b) − (what a settled contribution takes out)
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from skerry import config as configs
from skerry.algo.fragments import F32, Fragment, Layout, split
from skerry.core.events import (
    Adopt,
    Boundary,
    Contribute,
    End,
    FastForward,
    LearnerAction,
    LearnerEvent,
    Prepared,
    Resend,
    SayHello,
    SendReport,
    Snapshot,
    Spoiled,
    Taken,
    Told,
    Unusable,
)
from skerry.core.learner import LearnerMachine
from skerry.core.messages import FULL, PROTOCOL, Contribution, Hello, LearnerMessage, Lend, Lent, Publication, Welcome
from skerry.node.algebra import FLOAT32, Algebra, Payload

log = logging.getLogger("skerry.learner")

Pending = Callable[[], F32]  # a snapshot under way: call it, off the training thread, for the values


class Parameters(Protocol):
    """The live parameters, fragment by fragment as flat float32; called on the training thread at a boundary."""

    def read(self, fragment: Fragment) -> Pending: ...
    def add(self, fragment: Fragment, increment: F32) -> None: ...
    def write(self, fragment: Fragment, values: F32) -> None: ...
    def reset_optimizer(self) -> None: ...


class Link(Protocol):
    """The way to the syncer; what is sent while it is down is lost."""

    def send(self, message: LearnerMessage, payload: Payload | None = None, tag: object = None) -> None: ...

    @property
    def bytes_up(self) -> int: ...
    @property
    def bytes_down(self) -> int: ...


@dataclass
class Adoption:
    """What the next boundary does to one fragment: add the increment, or write the values of a first base."""

    version: int
    base: F32
    increment: F32 | None


@dataclass
class Work:
    """Everything that waits for the next boundary."""

    adoptions: dict[int, Adoption] = field(default_factory=dict)
    snapshots: set[int] = field(default_factory=set)
    fast_forward: bool = False
    reset_optimizer: bool = False


@dataclass
class Outstanding:
    """A contribution of unknown fate: its bytes, what leaves θ and what stays as residual once it is settled."""

    contribution: Contribution
    payload: Payload
    take_out: F32
    residual: F32 | None
    sending: bool = True


@dataclass
class Applied:
    """The base the live parameters stand on, as the training thread knows it."""

    version: int
    base: F32


class LearnerNode:
    """One learner process: its machine, its arrays, and the mailbox between its two threads."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        parameters: Parameters,
        link: Link,
        process: str,
        clock: Callable[[], float],
        algebra: Algebra = FLOAT32,
    ) -> None:
        self.name, self.layout, self.parameters, self.link = name, layout, parameters, link
        self.process, self.clock, self.algebra = process, clock, algebra
        self.machine: LearnerMachine | None = None
        self.config: configs.Config | None = None
        self.welcome: Welcome | None = None
        self.fragments: tuple[Fragment, ...] = ()
        self.ended = False
        self.refused = ""
        self.bases: list[F32 | None] = []
        self.residuals: list[F32 | None] = []
        self.outstanding: dict[int, Outstanding] = {}
        self._lock = threading.Lock()
        self._work = Work()
        self._boundaries: deque[tuple[Boundary, dict[int, tuple[F32, Pending]]]] = deque()
        self._applied: dict[int, Applied] = {}  # training thread only
        self._snapshots: dict[int, tuple[F32, Pending]] = {}  # node thread only: base and values just taken
        self._payload: Payload | None = None
        self._payload_bytes, self._payload_s = 0, 0.0  # of all publications so far

    # ------------------------------------------------------------------------------------------ training thread

    def boundary(self, steps: int, tokens: int, step_s: float, loss: float = 0.0) -> None:
        """Pass a step boundary: adopt what is prepared, take the snapshots that are asked for, go on."""
        with self._lock:
            work, self._work = self._work, Work()
        for p, adoption in work.adoptions.items():
            if adoption.increment is None:
                self.parameters.write(self.fragments[p], adoption.base)
            else:
                self.parameters.add(self.fragments[p], adoption.increment)
            self._applied[p] = Applied(adoption.version, adoption.base)
        if work.fast_forward:
            for p, applied in self._applied.items():
                self.parameters.write(self.fragments[p], applied.base)
        if work.reset_optimizer:
            self.parameters.reset_optimizer()
        taken, values = [], {}
        for p in sorted(work.snapshots):
            applied = self._applied[p]
            taken.append(Taken(p, applied.version))
            values[p] = (applied.base, self.parameters.read(self.fragments[p]))
        passed = Boundary(steps, tokens, step_s, tuple(taken), work.fast_forward, loss)
        self._boundaries.append((passed, values))

    @property
    def is_adopted(self) -> bool:
        """Every fragment's base is in the live parameters: the first step may be taken."""
        return bool(self.fragments) and len(self._applied) == len(self.fragments)

    @property
    def has_work(self) -> bool:
        work = self._work
        return bool(work.adoptions or work.snapshots or work.fast_forward)

    # ------------------------------------------------------------------------------------------ node thread

    def hello(self, life: int) -> Hello:
        layout = msgspec.json.encode(self.layout)
        return Hello(PROTOCOL, self.name, self.process, life, layout, self.layout.digest)

    def told(self, message: object, payload: Payload | None, payload_s: float = 0.0) -> None:
        """A message of the syncer, with its payload if it is a publication."""
        if isinstance(message, Lend):
            self._lend(message)
            return
        if isinstance(message, Welcome) and self.machine is None:
            self._begin(message)
        if self.machine is not None:
            self._payload = payload
            self._payload_bytes += 0 if payload is None else len(payload)
            self._payload_s += payload_s
            self.handle(Told(message))  # type: ignore[arg-type]
            self._payload = None

    def _begin(self, welcome: Welcome) -> None:
        """The first welcome brings the run's configuration, and with it the fragments."""
        self.config = configs.decode(welcome.config)
        fragments = split(self.layout, self.config.sync.num_fragments)
        self.machine = LearnerMachine(self.name, self.config, len(fragments))
        self.bases = [None] * len(fragments)
        self.residuals = [None] * len(fragments)
        self.fragments = fragments
        self.welcome = welcome

    def _lend(self, message: Lend) -> None:
        """A syncer repairs its files: give it the base if it is the version it lost, else it asks somebody else."""
        p = message.fragment
        if self.machine is None or not 0 <= p < len(self.bases):
            return
        base = self.bases[p]
        if base is not None and self.machine.positions[p].base_version == message.version:
            lent = Lent(self.name, p, message.version, self.algebra.digest(base))
            self.link.send(lent, self.algebra.whole(base))

    def handle(self, event: LearnerEvent) -> None:
        """One event, and everything that follows from it."""
        assert self.machine is not None
        events = deque([event])
        while events:
            for action in self.machine.step(events.popleft(), self.clock()):
                if (outcome := self._perform(action)) is not None:
                    events.append(outcome)

    def drain_boundaries(self) -> None:
        """Tell the machine of every boundary passed since the last time."""
        while self._boundaries and self.machine is not None:
            passed, self._snapshots = self._boundaries.popleft()
            self.handle(passed)
            self._snapshots = {}

    def sent(self, fragment: int, seq: int) -> None:
        out = self.outstanding.get(fragment)
        if out is not None and out.contribution.seq == seq:
            out.sending = False

    def relinked(self) -> None:
        """A new connection: nothing is on its way on it yet, whatever was given to the last one."""
        for out in self.outstanding.values():
            out.sending = False

    def _perform(self, action: LearnerAction) -> LearnerEvent | None:
        match action:
            case SayHello():
                self.link.send(self.hello(action.life))
            case SendReport():
                report = msgspec.structs.replace(
                    action.report,
                    bytes_up=self.link.bytes_up,
                    bytes_down=self.link.bytes_down,
                    payload_bytes=self._payload_bytes,
                    payload_s=self._payload_s,
                )
                self.link.send(report)
            case Snapshot():
                with self._lock:
                    self._work.snapshots.add(action.fragment)
            case Contribute():
                return self._contribute(action.contribution)
            case Resend():
                self._send(self.outstanding[action.fragment])
            case Adopt():
                return self._adopt(action.publication, action.take_out)
            case FastForward():
                self._fast_forward(action)
            case End():
                self.ended, self.refused = True, action.refused
        return None

    def _contribute(self, c: Contribution) -> LearnerEvent | None:
        """Encode u = drift + residual and send it; keep what settling it will take out of θ."""
        base, pending = self._snapshots[c.fragment]
        drift = pending() - base
        residual = self.residuals[c.fragment]
        u = drift if residual is None else drift + residual
        if spoiled := self.algebra.first_spoiled(u, self.fragments[c.fragment]):
            return Spoiled(c.fragment, spoiled)
        payload, decoded = self.algebra.encode(c.codec, u)
        assert self.config is not None
        if self.config.learner.residual == "buffer":
            take_out, left = drift, u - decoded
        else:
            take_out, left = decoded, None
        signed = msgspec.structs.replace(c, digest=self.algebra.checksum(payload))
        out = self.outstanding[c.fragment] = Outstanding(signed, payload, take_out, left, sending=False)
        self._send(out)
        return None

    def _send(self, out: Outstanding) -> None:
        if not out.sending:
            out.sending = True
            c = out.contribution
            self.link.send(c, out.payload, (c.fragment, c.seq))

    def _adopt(self, publication: Publication, take_out: int) -> LearnerEvent:
        """Decode the new base, check its digest, and leave one add for the boundary."""
        assert self._payload is not None
        p, old = publication.fragment, self.bases[publication.fragment]
        base = self._decode(publication, old)
        if base is None or not self._is_right(base, publication):
            log.warning("fragment %d version %d did not arrive whole: asking for all of it", p, publication.version)
            return Unusable(p)
        increment = None
        if old is not None:
            increment = base - old
            if take_out:
                increment -= self._settle(p, take_out)
        with self._lock:
            waiting = self._work.adoptions.get(p)
            if waiting is not None and increment is not None:
                increment = None if waiting.increment is None else waiting.increment + increment
            self._work.adoptions[p] = Adoption(publication.version, base, increment)
        self.bases[p] = base
        return Prepared(p, publication.version, take_out)

    def _decode(self, publication: Publication, old: F32 | None) -> F32 | None:
        if publication.base_version == FULL:
            return self.algebra.decode(self._payload)
        return None if old is None else self.algebra.adopt(publication.codec, self._payload, old)

    def _is_right(self, base: F32, publication: Publication) -> bool:
        is_whole = self.algebra.digest(base) == publication.digest
        return is_whole and not self.algebra.first_spoiled(base, self.fragments[publication.fragment])

    def _settle(self, p: int, seq: int) -> F32:
        out = self.outstanding.pop(p)
        assert out.contribution.seq == seq, (out.contribution, seq)
        self.residuals[p] = out.residual
        return out.take_out

    def _fast_forward(self, action: FastForward) -> None:
        log.warning("%s: fast-forward to the published model: %s", self.name, action.reason)
        self.outstanding.clear()
        self.residuals = [None] * len(self.fragments)
        with self._lock:
            self._work.fast_forward = True
            self._work.reset_optimizer |= action.reset_optimizer
