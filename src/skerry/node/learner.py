"""The node half of a learner: its machine, bases, residuals, outstanding contributions and codecs.

It runs beside the training loop, in a process or a thread of its own, and shares nothing with it: what the loop did
comes as records, in order, and what it is to do leaves as records (`node/mailbox.py`).

    drift = θ − Θ_b            rebase:    θ ← θ + (Θ_new − Θ_b) − (what a settled contribution takes out)
                               overwrite: θ ← Θ_new
                               blend:     rebase, then θ ← t + α (θ − t), t = Θ_new + (what is outstanding)

What it holds of a fragment: the newest base, the residual, and of an outstanding contribution its bytes and its drift.
The base that θ stands on is kept beside the newest until the training half has confirmed the change between them
(`node/orders.py`). What the codec could not say is worked out again when a contribution is settled, and has the same
bits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

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
    Buffers,
    Contribution,
    Frozen,
    Hello,
    LearnerMessage,
    Lend,
    Lent,
    Publication,
    Pull,
    Refused,
    Rejected,
    SyncerMessage,
    Welcome,
)
from skerry.errors import ConfigError, ProtocolError
from skerry.node.algebra import FLOAT32, Adopted, Array, LearnerAlgebra, Payload
from skerry.node.cells import Cell, Lay, count_for
from skerry.node.mailbox import Begun, Closed, Freed, Gave, Left, Mailbox, News, Passed, Record, Took
from skerry.node.observers import UNWATCHED, LearnerObserver
from skerry.node.orders import Orders, Version

log = logging.getLogger("skerry.learner")


class Link(Protocol):
    """The way to the syncer; what is sent while it is down is lost."""

    def send(self, message: LearnerMessage, payload: Payload | None = None, tag: object = None) -> None: ...

    @property
    def bytes_up(self) -> int: ...
    @property
    def bytes_down(self) -> int: ...


@dataclass
class Outstanding:
    """A contribution of unknown fate: its bytes, and the drift it says (None: θ keeps what they do not say)."""

    contribution: Contribution
    payload: Payload
    drift: Array | None
    sending: bool = False


class Brought(NamedTuple):
    """The arrays that came with an event: the machine decides without them, its orders are carried out on them."""

    payload: Payload | None = None  # of a publication
    snapshots: Mapping[int, Array] = {}  # by fragment, of a boundary: the drift


NOTHING = Brought()


class Given(NamedTuple):
    """Buffers as the training half had them after so many steps and tokens."""

    step: int
    tokens: int
    data: bytes


class LearnerNode:
    """One learner process beside its training loop."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        link: Link,
        process: str,
        clock: Callable[[], float],
        mailbox: Mailbox,
        lay: Lay,
        algebra: LearnerAlgebra = FLOAT32,
        observer: LearnerObserver = UNWATCHED,
        frozen: Frozen = None,
    ) -> None:
        self.name, self.layout, self.link, self.frozen = name, layout, link, frozen
        self.process, self.clock, self.algebra, self.observer = process, clock, algebra, observer
        self.machine: LearnerMachine | None = None
        self.config: configs.Config | None = None
        self.settings = configs.Learner()
        self.welcome: Welcome | None = None
        self.fragments: tuple[Fragment, ...] = ()
        self.left: Leave | None = None  # set once nothing is left to do for this process
        self.bases: list[Array | None] = []  # the newest
        self.residuals: list[Array | None] = []
        self.outstanding: dict[int, Outstanding] = {}
        self.orders = Orders(mailbox)
        self._mailbox, self._lay = mailbox, lay
        self._news: News | None = None  # what the training half was told last
        self._unheard: deque[Record] = deque()  # what the training half did, in order
        self._snapshots: Sequence[Cell] = ()  # what the training half fills
        self._payload_bytes, self._payload_s = 0, 0.0  # of all publications so far
        self._labour = Labour()
        self._lent: dict[int, int] = {}  # by fragment, the version that was lent on this connection
        self._given: Given | None = None  # buffers that no syncer was told of yet

    # ------------------------------------------------------------------------------------------ the syncer's messages

    def hello(self, life: int) -> Hello:
        layout = encode_layout(self.layout)
        return Hello(PROTOCOL, self.name, self.process, life, layout, self.layout.digest, self.frozen)

    def told(self, message: SyncerMessage, payload: Payload | None, payload_s: float = 0.0) -> None:
        """A message of the syncer, with its payload if it is a publication."""
        if wrong := self._wrong(message):
            raise ProtocolError(wrong)
        if isinstance(message, Lend):
            self._lend(message)
            return
        if self.machine is None and self.left is None:
            self._introduced(message)
        if self.machine is not None:
            self._payload_bytes += 0 if payload is None else len(payload)
            self._payload_s += payload_s
            self.handle(Told(message), Brought(payload))

    def _wrong(self, message: SyncerMessage) -> str:
        """Why no syncer that keeps to the protocol says this to this learner; empty if one may."""
        machine = self.machine
        if isinstance(message, Welcome):
            if message.learner != self.name or not message.life:
                return f"a welcome for {message.learner!r} life {message.life}"
            if machine is not None and message.life != machine.life:
                return f"a welcome as life {message.life} to a process that is life {machine.life}"
        if machine is None or not isinstance(message, Pull | Publication | Rejected):
            return ""
        is_known = message.fragment < len(self.fragments)
        return "" if is_known else f"a {type(message).__name__} of fragment {message.fragment}"

    def _introduced(self, message: SyncerMessage) -> None:
        """The first answer to its hello: a welcome gives it a machine, a refusal leaves nothing to do."""
        if isinstance(message, Welcome):
            self._begin(message)
        elif isinstance(message, Refused):
            self._leave(Leave("refused", message))

    def _begin(self, welcome: Welcome) -> None:
        """The first welcome brings the run's configuration, and with it the fragments."""
        try:
            config = configs.offered(welcome.config)
            fragments = decode_fragments(welcome.fragments, self.layout)
        except (ConfigError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a welcome to what is no run: {error}") from None
        self.config, self.settings = config, config.learner
        self.machine = LearnerMachine(self.name, self.config, len(fragments))
        self.bases = [None] * len(fragments)
        self.residuals = [None] * len(fragments)
        self.fragments = fragments
        self.welcome = welcome
        size = max(fragment.size for fragment in fragments)
        count = count_for(len(fragments), size)
        can_blend = self.settings.adopt == "blend"
        up, down = self._lay(size, count, 2 * count if can_blend else count)
        self._snapshots = up
        self.orders.begin(down, len(fragments), can_blend)
        cells = (size, len(up), len(down))
        run = (welcome.config, welcome.fragments, welcome.index, welcome.prior_steps, welcome.progress)
        self._mailbox.send(Begun(*run, *cells, welcome.wants_buffers))

    def _lend(self, message: Lend) -> None:
        """A syncer repairs its files: give it the base if it is the version it lost, else it asks somebody else."""
        p = message.fragment
        if self.machine is None or not 0 <= p < len(self.bases):
            return
        base = self.bases[p]
        if self._lent.get(p) == message.version:
            return  # it is on its way: who asks again and again is not given a queue of them
        if base is not None and self.machine.positions[p].base_version == message.version:
            self._lent[p] = message.version
            lent = Lent(self.name, p, message.version, self.algebra.digest(base))
            self.link.send(lent, self.algebra.whole(base))

    def sent(self, fragment: int, seq: int) -> None:
        """A contribution has left."""
        out = self.outstanding.get(fragment)
        if out is not None and out.contribution.seq == seq:
            out.sending = False

    def relinked(self) -> None:
        """A new connection: nothing is on its way on it yet, whatever was given to the last one."""
        for out in self.outstanding.values():
            out.sending = False
        self._lent.clear()

    # ------------------------------------------------------------------------------------------ the training half

    def catch_up(self) -> None:
        """Tell the machine what the training half did since the last time, as far as it has come."""
        self._unheard += self._mailbox.receive()
        while self._unheard and self._is_here(self._unheard[0]):
            record = self._unheard.popleft()
            match record:
                case Passed() if self.machine is not None:
                    self._passed(self._with_what_follows(record))
                case Gave() if self.machine is not None:
                    self._given = Given(self.machine.step_count, self.machine.tokens, record.data)
                    self._give()
                case Closed() if self.machine is not None:
                    self.handle(Closing(record.limit_s))
                case Closed() if self.left is None:
                    self._leave(Leave("settled"))  # nobody ever welcomed it: there is nothing to hand over
        self._give()
        self._send_orders()

    @property
    def is_waiting(self) -> bool:
        """A device is yet to copy something: look again soon."""
        return bool(self._unheard or self.orders.is_waiting)

    def tell_news(self, trouble: str = "") -> None:
        """Let the training half know how things stand, if that is not what it knows."""
        machine = self.machine
        if machine is None:
            news = News(trouble=trouble)
        else:
            told = (machine.progress, machine.linked, machine.is_stop_asked, machine.is_done)
            news = News(*told, trouble, machine.steps_merged, machine.alone_steps)
        if news != self._news:
            self._news = news
            self._mailbox.send(news)

    def _is_here(self, record: Record) -> bool:
        """Its snapshots have been copied; what comes behind it waits for them too."""
        taken = record.taken if isinstance(record, Passed) else ()
        return all(self._snapshots[took.cell].is_marked(took.mark) for took in taken)

    def _with_what_follows(self, record: Passed) -> Passed:
        """Boundaries at which there was nothing but a step count as one with the next, so that a backlog is short."""
        while not (record.applied or record.returned or record.taken) and self._unheard:
            following = self._unheard[0]
            if not isinstance(following, Passed) or not self._is_here(following):
                break
            self._unheard.popleft()
            record = msgspec.structs.replace(
                following,
                steps=record.steps + following.steps,
                tokens=record.tokens + following.tokens,
                step_s=max(record.step_s, following.step_s),  # a pause among them shows
                loss=following.loss if following.steps else record.loss,
                grad_norm=following.grad_norm if following.steps else record.grad_norm,
            )
        return record

    def _passed(self, record: Passed) -> None:
        overwritten, wanted, on = self.orders.passed(record)
        snapshots = {took.fragment: self._drift(took, at) for took, at in zip(wanted, on, strict=True)}
        for took in record.taken:
            self._mailbox.send(Freed(took.cell))
        taken = tuple(
            Taken(took.fragment, took.version, took.version < self.orders.stands[took.fragment].version)
            for took in wanted
        )
        work = (record.steps, record.tokens, record.step_s)
        boundary = Boundary(*work, taken, record.loss, overwritten, record.grad_norm)
        self.handle(boundary, Brought(snapshots=snapshots))

    def _give(self) -> None:
        """Buffers go to the syncer by value, once somebody is there; newer ones take the place of what is lost."""
        machine, given = self.machine, self._given
        if machine is not None and given is not None and machine.linked:
            self.link.send(Buffers(self.name, machine.life, *given))
            self._given = None

    def _drift(self, took: Took, on: Version) -> Array:
        return self._snapshots[took.cell].less(on.base)

    def _send_orders(self) -> None:
        """Changes that are due, as far as there is room for them, and behind them what was ordered."""
        for p in self.orders.sendable():
            assert self.machine is not None
            to = Version(self.machine.positions[p].base_version, self.bases[p])
            self.orders.send(p, to, self._towards(p, to.base) if self.orders.blends(p) else None)
        self.orders.send_wants()

    def _towards(self, p: int, base: Array) -> Array:
        """Where a blend pulls θ: to the new base, and what is outstanding stays whole on top of it."""
        out = self.outstanding.get(p)
        return base if out is None else base + self._take_out(out)

    # ------------------------------------------------------------------------------------------ the machine

    def handle(self, event: LearnerEvent, brought: Brought = NOTHING) -> None:
        """One event, and everything that follows from it."""
        assert self.machine is not None
        self.observer.event_came(event)
        events = deque([event])
        while events:
            for action in self.machine.step(events.popleft(), self.clock()):
                if (outcome := self._perform(action, brought)) is not None:
                    events.append(outcome)
        self._send_orders()

    def _perform(self, action: LearnerAction, brought: Brought) -> LearnerEvent | None:
        match action:
            case SayHello():
                self.link.send(self.hello(action.life))
            case SendReport():
                self._report()
            case Snapshot():
                self.orders.want(action.fragment, action.step)
            case Spare():
                self.orders.waive(action.fragment)
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
                self._leave(action)
        return None

    def _leave(self, leave: Leave) -> None:
        if leave.way == "timeout":
            log.warning("%s: left without an answer from the syncer: %s", self.name, self._not_handed_in)
        elif leave.way == "no last versions":
            log.warning("%s: the run is closed, but its last versions did not come: export them", self.name)
        self.left = leave
        self._mailbox.send(Left(leave, self.machine.steps_merged if self.machine is not None else 0))

    @property
    def _not_handed_in(self) -> str:
        """What is lost with a process that nobody answered, as far as it knows: some of it may have arrived."""
        assert self.machine is not None
        steps = self.machine.step_count - min(position.mark_step for position in self.machine.positions)
        return (
            f"the work of its last {steps} steps may not be in the run (learner.leave_timeout_s is how long it waits)"
        )

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

    def _contribute(self, order: Contribute, drift: Array) -> LearnerEvent | None:
        """Encode u = drift + residual and send it; keep what settling it will take out of θ."""
        p = order.fragment
        payload = self.algebra.encode(order.codec, drift, self.residuals[p])
        if payload is None:
            return Spoiled(p, self._first_spoiled(p, drift))
        kept = drift if self.settings.residual == "buffer" else None
        out = self.outstanding[p] = Outstanding(self._signed(order, payload), payload, kept)
        self.observer.contributed(out)
        self._send(out)
        return None

    def _first_spoiled(self, p: int, drift: Array) -> str:
        residual = self.residuals[p]
        return self.algebra.first_spoiled(drift if residual is None else drift + residual, self.fragments[p])

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
        """Decode the new base and check its digest; the way to it is due."""
        p, old = publication.fragment, self.bases[publication.fragment]
        adopted = self._decode(publication, payload, old)
        if adopted is None or not self._is_right(adopted, publication):
            log.warning("fragment %d version %d did not arrive whole: asking for all of it", p, publication.version)
            return Unusable(p)
        taken = self._settle(p, take_out) if take_out else None
        self.orders.owe(p, taken, old is None or self.settings.adopt == "overwrite", settles=bool(take_out))
        self.bases[p] = adopted.base
        return Prepared(p, publication.version, take_out)

    def _decode(self, publication: Publication, payload: Payload, old: Array | None) -> Adopted | None:
        if publication.base_version == FULL:
            return self.algebra.adopt("fp32", payload, None)
        return None if old is None else self.algebra.adopt(publication.codec, payload, old)

    def _is_right(self, adopted: Adopted, publication: Publication) -> bool:
        return adopted.digest == publication.digest and adopted.is_finite

    def _settle(self, p: int, seq: int) -> Array:
        """What a contribution takes out of θ, now that a version has it; what it could not say is the residual."""
        out = self.outstanding.pop(p)
        assert out.contribution.seq == seq, (out.contribution, seq)
        if self.settings.adopt == "overwrite":
            self.residuals[p] = None
        elif out.drift is not None:
            codec = out.contribution.codec
            self.residuals[p] = self.algebra.unsaid(codec, out.payload, out.drift, self.residuals[p])
        self.observer.settled(p, seq)
        return self._take_out(out)

    def _take_out(self, out: Outstanding) -> Array:
        return self._said(out) if out.drift is None else out.drift

    def _said(self, out: Outstanding) -> Array:
        return self.algebra.decode(out.contribution.codec, out.payload)

    def _fast_forward(self, action: FastForward) -> None:
        detail = f" ({action.detail})" if action.detail else ""
        log.warning("%s: fast-forward to the published model: %s%s", self.name, action.reason, detail)
        self.observer.fast_forwarded(action.reason)
        self.outstanding.clear()
        self.residuals = [None] * len(self.fragments)
        self.orders.forward([p for p, base in enumerate(self.bases) if base is not None], action.reset_optimizer)
