"""The learner's node: bases, drift, outstanding contributions, and the step boundary.

Two threads meet here, at one lock. The *node thread* runs the machine, encodes, decodes and prepares adoptions. The
*training thread* only passes boundaries: it adds prepared increments to the live parameters, takes snapshots, and goes
on; it never waits for the network, and the lock is held for a few assignments at a time.

    drift = θ − Θ_b            rebase:    θ ← θ + (Θ_new − Θ_b) − (what a settled contribution takes out)
                               overwrite: θ ← Θ_new
                               blend:     rebase, then θ ← t + α (θ − t), t = Θ_new + (what is outstanding)
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from skerry import config as configs
from skerry.algo.fragments import Fragment, Layout, decode_fragments, encode_layout
from skerry.core.events import (
    Adopt,
    Boundary,
    Closing,
    Contribute,
    FastForward,
    LearnerAction,
    LearnerEvent,
    Leave,
    Prepared,
    Resend,
    SayHello,
    SendReport,
    Snapshot,
    Spare,
    Spoiled,
    Taken,
    Told,
    Unusable,
)
from skerry.core.learner import Labour, LearnerMachine, Traffic
from skerry.core.messages import (
    FULL,
    PROTOCOL,
    Contribution,
    Hello,
    LearnerMessage,
    Lend,
    Lent,
    Publication,
    Refused,
    SyncerMessage,
    Welcome,
)
from skerry.node.algebra import FLOAT32, Algebra, Array, Payload
from skerry.node.observers import UNWATCHED, LearnerObserver

log = logging.getLogger("skerry.learner")

Pending = Callable[[], Array]  # a snapshot under way: call it, off the training thread, for the values


class Parameters(Protocol):
    """The live parameters, a fragment as one flat array; called on the training thread at a boundary."""

    def read(self, fragment: Fragment) -> Pending: ...
    def add(self, fragment: Fragment, increment: Array) -> None: ...
    def write(self, fragment: Fragment, values: Array) -> None: ...
    def blend(self, fragment: Fragment, towards: Array, alpha: float) -> None: ...  # θ ← towards + alpha (θ − towards)
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
    """What the next boundary does to one fragment: add the increment, or write the base where there is none."""

    version: int
    base: Array
    increment: Array | None
    towards: Array | None = None  # of a blend


@dataclass
class Work:
    """Everything that waits for the next boundary."""

    adoptions: dict[int, Adoption] = field(default_factory=dict)
    snapshots: dict[int, int] = field(
        default_factory=dict
    )  # fragment -> the step at whose boundary, or after, it is due
    fast_forward: bool = False
    reset_optimizer: bool = False


@dataclass
class Outstanding:
    """A contribution of unknown fate: its bytes, what leaves θ and what stays as residual once it is settled."""

    contribution: Contribution
    payload: Payload
    take_out: Array
    residual: Array | None
    sending: bool = False


@dataclass
class Applied:
    """The base the live parameters stand on, as the training thread knows it."""

    version: int
    base: Array


class Taking(NamedTuple):
    """A snapshot of a fragment under way, and the base it was taken on."""

    base: Array
    values: Pending


class Brought(NamedTuple):
    """The arrays that came with an event: the machine decides without them, its orders are carried out on them."""

    payload: Payload | None = None  # of a publication
    snapshots: Mapping[int, Taking] = {}  # by fragment, of a boundary


NOTHING = Brought()


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
        observer: LearnerObserver = UNWATCHED,
    ) -> None:
        self.name, self.layout, self.parameters, self.link = name, layout, parameters, link
        self.process, self.clock, self.algebra, self.observer = process, clock, algebra, observer
        self.machine: LearnerMachine | None = None
        self.config: configs.Config | None = None
        self.settings = configs.Learner()
        self.welcome: Welcome | None = None
        self.fragments: tuple[Fragment, ...] = ()
        self.left: Leave | None = None  # set once nothing is left to do for this process
        self.bases: list[Array | None] = []
        self.residuals: list[Array | None] = []
        self.outstanding: dict[int, Outstanding] = {}
        self.applied: dict[int, Applied] = {}  # by fragment; training thread only
        self.work = Work()  # under the lock
        self._lock = threading.Lock()
        self._unread: set[int] = set()  # fragments with a snapshot that is no contribution yet; under the lock
        self._mailbox: deque[tuple[Boundary | Closing, Brought]] = deque()  # what the training thread did, in order
        self._payload_bytes, self._payload_s = 0, 0.0  # of all publications so far
        self._labour = Labour()
        self._step_count = 0  # training thread only: the machine hears of a step a little later

    # ------------------------------------------------------------------------------------------ training thread

    def boundary(self, steps: int, tokens: int, step_s: float, loss: float = 0.0) -> None:
        """Pass a step boundary: adopt what is prepared, take the snapshots that are due, go on."""
        self._step_count += steps
        work = self._take_work()
        for p, adoption in work.adoptions.items():
            self._apply(self.fragments[p], adoption)
        if work.fast_forward:
            for p, applied in self.applied.items():
                self.parameters.write(self.fragments[p], applied.base)
        if work.reset_optimizer:
            self.parameters.reset_optimizer()
        taken, snapshots = [], {}
        for p in sorted(work.snapshots):
            applied = self.applied[p]
            taken.append(Taken(p, applied.version))
            snapshots[p] = Taking(applied.base, self.parameters.read(self.fragments[p]))
        overwritten = tuple(p for p, adoption in work.adoptions.items() if adoption.increment is None)
        passed = Boundary(steps, tokens, step_s, tuple(taken), work.fast_forward, loss, overwritten)
        self._mailbox.append((passed, Brought(snapshots=snapshots)))

    def close(self, limit_s: float | None = None) -> None:
        """No further step is taken: hand over what is left, which `left` will say the end of."""
        self._mailbox.append((Closing(limit_s), NOTHING))

    def _take_work(self) -> Work:
        """All that is due, but no blend of a fragment whose last snapshot is still being encoded.

        What of the drift is outstanding, and so must stay whole, is known only after that.
        """
        with self._lock:
            work, self.work = self.work, Work()
            for p in [p for p, step in work.snapshots.items() if step > self._step_count]:
                self.work.snapshots[p] = work.snapshots.pop(p)
            if not work.fast_forward:
                for p in self._unread & work.adoptions.keys():
                    if work.adoptions[p].towards is not None:
                        self.work.adoptions[p] = work.adoptions.pop(p)
            self._unread |= work.snapshots.keys()
        return work

    def _apply(self, fragment: Fragment, adoption: Adoption) -> None:
        if adoption.increment is None:
            self.parameters.write(fragment, adoption.base)
        else:
            self.parameters.add(fragment, adoption.increment)
            if adoption.towards is not None:
                self.parameters.blend(fragment, adoption.towards, self.settings.adopt_alpha)
        self.applied[fragment.index] = Applied(adoption.version, adoption.base)

    @property
    def is_adopted(self) -> bool:
        """Every fragment's base is in the live parameters: the first step may be taken."""
        return bool(self.fragments) and len(self.applied) == len(self.fragments)

    @property
    def ramp(self) -> float:
        """Factor for the inner rate: rises to 1 over `join_warmup` steps after joining a run under way."""
        if self.machine is None or self.config is None or self.welcome is None:
            return 1.0
        warmup = self.config.learner.join_warmup
        if self.welcome.progress == 0 or not warmup:
            return 1.0
        return min(1.0, (self.machine.step_count + 1) / warmup)

    @property
    def has_work(self) -> bool:
        """Something is to be done at the next boundary, whether or not it ends a step."""
        with self._lock:
            work = self.work
            is_due = any(step <= self._step_count for step in work.snapshots.values())
            return bool(work.adoptions or is_due or work.fast_forward)

    # ------------------------------------------------------------------------------------------ node thread

    def hello(self, life: int) -> Hello:
        layout = encode_layout(self.layout)
        return Hello(PROTOCOL, self.name, self.process, life, layout, self.layout.digest)

    def told(self, message: SyncerMessage, payload: Payload | None, payload_s: float = 0.0) -> None:
        """A message of the syncer, with its payload if it is a publication."""
        if isinstance(message, Lend):
            self._lend(message)
            return
        if self.machine is None and self.left is None:
            self._introduced(message)
        if self.machine is not None:
            self._payload_bytes += 0 if payload is None else len(payload)
            self._payload_s += payload_s
            self.handle(Told(message), Brought(payload))

    def _introduced(self, message: SyncerMessage) -> None:
        """The first answer to its hello: a welcome gives it a machine, a refusal leaves nothing to do."""
        if isinstance(message, Welcome):
            self._begin(message)
        elif isinstance(message, Refused):
            self.left = Leave("refused", message)

    def _begin(self, welcome: Welcome) -> None:
        """The first welcome brings the run's configuration, and with it the fragments."""
        self.config = configs.decode(welcome.config)
        self.settings = self.config.learner
        fragments = decode_fragments(welcome.fragments, self.layout)
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

    def handle(self, event: LearnerEvent, brought: Brought = NOTHING) -> None:
        """One event, and everything that follows from it."""
        assert self.machine is not None
        self.observer.event_came(event)
        events = deque([event])
        while events:
            for action in self.machine.step(events.popleft(), self.clock()):
                if (outcome := self._perform(action, brought)) is not None:
                    events.append(outcome)

    def catch_up(self) -> None:
        """Tell the machine what the training thread did since the last time."""
        while self._mailbox:
            event, brought = self._mailbox.popleft()
            if self.machine is not None:
                self.handle(event, brought)
                self._read(brought.snapshots)
            elif isinstance(event, Closing) and self.left is None:
                self.left = Leave("settled")  # nobody ever welcomed it: there is nothing to hand over

    def _read(self, fragments: Iterable[int]) -> None:
        """The machine knows of these snapshots now; the next one is due when it says."""
        assert self.machine is not None
        with self._lock:
            for p in fragments:
                self._unread.discard(p)
                if (step := self.machine.positions[p].snapshot_at) is not None:
                    self.work.snapshots[p] = step

    def sent(self, fragment: int, seq: int) -> None:
        out = self.outstanding.get(fragment)
        if out is not None and out.contribution.seq == seq:
            out.sending = False

    def relinked(self) -> None:
        """A new connection: nothing is on its way on it yet, whatever was given to the last one."""
        for out in self.outstanding.values():
            out.sending = False

    def _perform(self, action: LearnerAction, brought: Brought) -> LearnerEvent | None:
        match action:
            case SayHello():
                self.link.send(self.hello(action.life))
            case SendReport():
                self._report()
            case Snapshot():
                with self._lock:
                    if action.fragment not in self._unread:  # else the machine does not know yet that one was taken
                        self.work.snapshots[action.fragment] = action.step
            case Spare():
                with self._lock:
                    self.work.snapshots.pop(action.fragment, None)
            case Contribute():
                began = self.clock()
                outcome = self._contribute(action, brought.snapshots[action.fragment])
                self._encoded(action.fragment, self.clock() - began)
                return outcome
            case Resend():
                self._send(self.outstanding[action.fragment])
            case Adopt():
                assert brought.payload is not None, action
                began = self.clock()
                outcome = self._adopt(action.publication, brought.payload, action.take_out)
                self._adopted(action.publication.fragment, self.clock() - began)
                return outcome
            case FastForward():
                self._fast_forward(action)
            case Leave():
                self.left = action
        return None

    def _report(self) -> None:
        assert self.machine is not None
        traffic = Traffic(self.link.bytes_up, self.link.bytes_down, self._payload_bytes, self._payload_s)
        self.link.send(self.machine.report(traffic, self._labour))

    def _encoded(self, p: int, took_s: float) -> None:
        done = self._labour
        self._labour = done._replace(encoded=done.encoded + self.fragments[p].size, encode_s=done.encode_s + took_s)

    def _adopted(self, p: int, took_s: float) -> None:
        done = self._labour
        self._labour = done._replace(adopted=done.adopted + self.fragments[p].size, adopt_s=done.adopt_s + took_s)

    def _contribute(self, order: Contribute, snapshot: Taking) -> LearnerEvent | None:
        """Encode u = drift + residual and send it; keep what settling it will take out of θ."""
        p = order.fragment
        drift = snapshot.values() - snapshot.base
        residual = self.residuals[p]
        u = drift if residual is None else drift + residual
        if spoiled := self.algebra.first_spoiled(u, self.fragments[p]):
            return Spoiled(p, spoiled)
        payload, decoded = self.algebra.encode(order.codec, u)
        if self.settings.residual == "buffer":
            take_out, left = drift, u - decoded
        else:
            take_out, left = decoded, None
        out = self.outstanding[p] = Outstanding(self._signed(order, payload), payload, take_out, left)
        with self._lock:  # a version that came in after the snapshot did not know of this
            if (waiting := self.work.adoptions.get(p)) is not None:
                waiting.towards = self._towards(p, waiting.base)
        self.observer.contributed(out)
        self._send(out)
        return None

    def _signed(self, order: Contribute, payload: Payload) -> Contribution:
        return Contribution(
            learner=self.name,
            life=order.life,
            seq=order.seq,
            fragment=order.fragment,
            base_version=order.base_version,
            from_step=order.from_step,
            from_tokens=order.from_tokens,
            to_step=order.to_step,
            to_tokens=order.to_tokens,
            codec=order.codec,
            digest=self.algebra.checksum(payload),
        )

    def _send(self, out: Outstanding) -> None:
        if not out.sending:
            out.sending = True
            c = out.contribution
            self.link.send(c, out.payload, (c.fragment, c.seq))

    def _adopt(self, publication: Publication, payload: Payload, take_out: int) -> LearnerEvent:
        """Decode the new base, check its digest, and leave one add for the boundary."""
        p, old = publication.fragment, self.bases[publication.fragment]
        base = self._decode(publication, payload, old)
        if base is None or not self._is_right(base, publication):
            log.warning("fragment %d version %d did not arrive whole: asking for all of it", p, publication.version)
            return Unusable(p)
        taken = self._settle(p, take_out) if take_out else None
        increment = towards = None
        if old is not None and self.settings.adopt != "overwrite":
            increment, towards = base - old, self._towards(p, base)
            if taken is not None:
                increment -= taken
        with self._lock:
            waiting = self.work.adoptions.get(p)
            if waiting is not None and increment is not None:
                increment = None if waiting.increment is None else waiting.increment + increment
            self.work.adoptions[p] = Adoption(publication.version, base, increment, towards)
        self.bases[p] = base
        return Prepared(p, publication.version, take_out)

    def _decode(self, publication: Publication, payload: Payload, old: Array | None) -> Array | None:
        if publication.base_version == FULL:
            return self.algebra.decode(payload)
        return None if old is None else self.algebra.adopt(publication.codec, payload, old)

    def _is_right(self, base: Array, publication: Publication) -> bool:
        is_whole = self.algebra.digest(base) == publication.digest
        return is_whole and not self.algebra.first_spoiled(base, self.fragments[publication.fragment])

    def _towards(self, p: int, base: Array) -> Array | None:
        """Where a blend pulls θ: to the new base, and what is outstanding stays whole on top of it."""
        if self.settings.adopt != "blend":
            return None
        out = self.outstanding.get(p)
        return base if out is None else base + out.take_out

    def _settle(self, p: int, seq: int) -> Array:
        out = self.outstanding.pop(p)
        assert out.contribution.seq == seq, (out.contribution, seq)
        self.residuals[p] = None if self.settings.adopt == "overwrite" else out.residual
        self.observer.settled(p, seq)
        return out.take_out

    def _fast_forward(self, action: FastForward) -> None:
        detail = f" ({action.detail})" if action.detail else ""
        log.warning("%s: fast-forward to the published model: %s%s", self.name, action.reason, detail)
        self.observer.fast_forwarded(action.reason)
        self.outstanding.clear()
        self.residuals = [None] * len(self.fragments)
        with self._lock:
            self.work.fast_forward = True
            self.work.reset_optimizer |= action.reset_optimizer
