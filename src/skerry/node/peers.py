"""Between peers on a wire and the nodes: who a connection is, and what it may say.

Identity comes from the connection: a peer is the learner and life it was welcomed as, and a message that says otherwise
ends it. No socket, no clock and no thread here: the endpoint and the time are handed in, so the simulator's network
goes through the same lines as the real one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial

import msgspec

from skerry.algo.contents import frozen_difference
from skerry.algo.fragments import decode_layout, first_difference
from skerry.core import admission
from skerry.core.events import (
    Departed,
    Expelled,
    Joined,
    Linked,
    OrderGiven,
    PublicationSent,
    Readmitted,
    Reported,
    Unlinked,
)
from skerry.core.messages import (
    FULL,
    PROTOCOL,
    Answer,
    Ask,
    Buffers,
    Contribution,
    DropLearner,
    Hello,
    LearnerMessage,
    Lent,
    Message,
    Order,
    Outcome,
    Publication,
    ReadmitLearner,
    Refused,
    Report,
    SyncerMessage,
    Welcome,
)
from skerry.errors import ProtocolError, one_line
from skerry.node.learner import LearnerNode
from skerry.node.syncer import SyncerNode
from skerry.wire.handshake import mismatch
from skerry.wire.quotas import Places
from skerry.wire.repeats import Lines, Repeats
from skerry.wire.transport import Endpoint, Instructed, Lost, Opened, Received, Sent, WireEvent

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # of a file, too, and of a row in tables of any kind
SILENT_SPARE = 8  # peers that said no hello, beside as many as there are learners: all may come at once
TURNED_AWAY_SAYS_S = 10.0  # at most one line in this time about a syncer that will not have a learner at present
COMINGS_BURST = 512.0  # lines about who joined and who was lost: all of a large run may come at once
COMPARED_BYTES_MAX = 256 << 10  # of a layout that differs: whoever decides for all has no time for longer ones,
COMPARED_FROZEN_MAX = 10_000  # nor for more names of what is frozen
ANY = 'skerry.Learner(frozen="any") takes part with whatever it has'

log = logging.getLogger("skerry.syncer")
learner_log = logging.getLogger("skerry.learner")


def no_name(name: str) -> str:
    """What is said of a learner's name that is none."""
    known = "use 1 to 64 of a-z, 0-9, '.', '_' and '-', and begin with a letter or a digit"
    return f"learner name {name[:80]!r}: {known}"


def lane_of(message: Message) -> int:
    """Payloads of one fragment must keep their order, and no others need to."""
    return message.fragment if isinstance(message, Publication | Contribution | Lent) else 0


class Learners:
    """The syncer's side: peers in, learners out; it is the node's outbox."""

    node: SyncerNode
    endpoint: Endpoint

    def __init__(self) -> None:
        self.peers: dict[int, tuple[str, int]] = {}  # peer -> (learner, life)
        self.links: dict[tuple[str, int], int] = {}  # (learner, life) -> peer
        self.joining: dict[str, int] = {}  # learner -> peer that said hello and is not welcomed yet
        self.principals: dict[int, str] = {}  # peer -> the name that its connection proves
        self.answer: Callable[[int, Outcome], None] = _unheard  # tells whoever gave an order what became of it
        self.turned_away = Repeats()  # learners that cannot take part as they are
        self._unknown = Repeats()  # how connections ended that were no learner's
        self._comings = Lines(COMINGS_BURST)  # of learners that joined and were lost
        self._links_of = Places(admission.LINKS_PER_S, admission.LINKS_BURST)  # that a name may still begin
        self._refused: set[int] = set()  # peers whose end is no news: why has been said
        self._silent: dict[int, None] = {}  # peers that have said no hello yet, the oldest first
        self._answered: set[int] = set()  # peers that have yet to take the answer to what they asked

    # ------------------------------------------------------------------------------------------ wire -> node

    def take(self, event: WireEvent, now: float) -> None:
        match event:
            case Opened():
                log.debug("connection from %s", event.address)
                if event.principal:
                    self.principals[event.peer] = event.principal
                self._opened(event.peer, now)
            case Received():
                if event.peer in self._refused:
                    return  # it was on its way, and must not end the connection before why has been said
                try:
                    self._received(event, now)
                except ProtocolError as error:
                    self._drop(event.peer, str(error), now)
            case Sent(tag="answer"):
                self._answered.discard(event.peer)
            case Sent():
                if event.peer in self.peers and isinstance(event.tag, tuple):
                    learner, life = self.peers[event.peer]
                    self.node.handle(PublicationSent(learner, life, *event.tag), now)
            case Instructed():
                log.info("an order by %s: %s", event.by, _spelled(event.order))
                self.node.handle(OrderGiven(event.order, event.by, event.peer), now)
                if isinstance(event.order, ReadmitLearner):
                    self._let_in(event.order.learner)
            case Lost():
                self._lost(event, now)

    def _opened(self, peer: int, now: float) -> None:
        """Learners say hello at once. Who does not keeps a place only while there are not too many like it."""
        self._silent[peer] = None
        if len(self._silent) > self.node.config.run.learners + SILENT_SPARE:
            first = next(iter(self._silent))
            del self._silent[first]
            self._drop(first, "it says no hello, and others are waiting", now)

    def _drop(self, peer: int, why: str, now: float) -> None:
        """It may come again, and again say what it must not: that is said once in a while."""
        who = self.peers[peer][0] if peer in self.peers else "a peer"
        if self.turned_away.is_news(who, why, now):
            log.warning("dropped %s: %s", who, why)
        self.endpoint.drop(peer, why)

    def _received(self, event: Received, now: float) -> None:
        message = event.message
        if isinstance(message, Hello):
            self._hello(event.peer, message, now)
            return
        if isinstance(message, Ask):
            self._asked(event.peer)
            return
        if event.peer not in self.peers:
            raise ProtocolError(f"{type(message).__name__} before a hello")
        if not isinstance(message, Report | Contribution | Buffers):
            raise ProtocolError(f"a learner does not send {type(message).__name__}")
        if (message.learner, message.life) != self.peers[event.peer]:
            raise ProtocolError(f"a message in the name of {message.learner!r} life {message.life}")
        if isinstance(message, Report):
            if len(message.positions) != len(self.node.fragments):
                raise ProtocolError(f"a report on {len(message.positions)} fragments")
            config = self.node.config
            if wrong := admission.illegal(
                message, self.node.machine.state.ledger, config.run.learners, config.learner.alone_steps_max
            ):
                raise ProtocolError(wrong)
            self.node.handle(Reported(message), now)
        elif isinstance(message, Buffers):
            self.node.buffers(message)
        elif event.payload is not None:
            self.node.contribution(message, event.payload, event.payload_s)

    def _asked(self, peer: int) -> None:
        """One answer at a time: who asks again and reads nothing would have us keep them all."""
        if peer in self._answered:
            raise ProtocolError("it asks again before it has read the answer")
        self._answered.add(peer)
        state = self.node.machine.state
        self.endpoint.send(peer, Answer(state.created.run, state.config), tag="answer")

    def _hello(self, peer: int, hello: Hello, now: float) -> None:
        if peer in self.peers:
            raise ProtocolError("a second hello")
        self._silent.pop(peer, None)
        refused = self._objection(hello, self.principals.get(peer, hello.learner))
        if refused is None and self._links_of.wait_s(hello.learner, now):
            refused = Refused(admission.too_many_links(hello.learner), "full")
        if refused is not None:
            self._refuse(peer, hello.learner, refused, now)
            return
        self.joining[hello.learner] = peer
        has_key = self.principals.get(peer) == hello.learner
        self.node.handle(Joined(hello.learner, hello.process, hello.life, has_key), now)
        self.joining.pop(hello.learner, None)

    def _refuse(self, peer: int, learner: str, refused: Refused, now: float) -> None:
        who = one_line(learner) or "a learner without a name"
        if self.turned_away.is_news(who, refused.text, now):
            log.warning("refused %s%s: %s", who, "" if refused.is_final else ", which will come again", refused.text)
        self._refused.add(peer)
        self.endpoint.send(peer, refused)
        self.endpoint.drop(peer, refused.text)

    def _objection(self, hello: Hello, principal: str) -> Refused | None:
        """Why this learner cannot take part; None if it can. Whoever speaks another protocol may yet be upgraded."""
        if hello.protocol != PROTOCOL:
            return Refused(mismatch(syncer=PROTOCOL, learner=hello.protocol), "ahead")
        if hello.learner != principal:
            return Refused(one_line(f"its key is that of {principal}, and it calls itself {hello.learner!r:.80}"))
        reason = self._misfit(hello)
        return Refused(reason) if reason else None

    def _misfit(self, hello: Hello) -> str:
        if not NAME.fullmatch(hello.learner):
            return no_name(hello.learner)
        if hello.layout_digest == self.node.layout.digest:
            return self._other_base(hello)
        if len(hello.layout) > COMPARED_BYTES_MAX:
            return "its model has another layout (its digest differs); it is too large to be compared here"
        frozen = hello.frozen if isinstance(hello.frozen, dict) else {}
        try:
            theirs = decode_layout(hello.layout)
            difference = first_difference(theirs, self.node.layout, frozen, self.node.contents.frozen)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # also of a number that is too long to be written
            raise ProtocolError("a hello whose layout cannot be read") from None
        difference = difference or "their order differs"
        return one_line(f"the model differs from the run's: {difference} (here: the learner, there: the run)")

    def _other_base(self, hello: Hello) -> str:
        """What the learner trains is right; whether what it does not train is that of the run.

        Whoever says nothing is let in only where nothing is frozen: one wrong base among the learners spoils the work
        of all, and nobody would see why.
        """
        contents, said = self.node.contents, hello.frozen
        if said == "any" or not contents.is_whole or (said is None and not contents.frozen):
            return ""
        if said is None:
            first = f"the run's model has frozen parameters, like {min(contents.frozen)}"
            return f"{first}, and the learner says nothing of its own: upgrade Skerry there; {ANY}"
        if len(said) > COMPARED_FROZEN_MAX and said != contents.frozen:
            return f"its {len(said)} frozen parameters are not those of the run; they are too many to be compared here"
        difference = frozen_difference(said, contents.frozen)
        return difference and one_line(f"{difference}: load the base that the run began with; {ANY}")

    def _lost(self, event: Lost, now: float) -> None:
        who = self.peers.pop(event.peer, None)
        self.principals.pop(event.peer, None)
        self._silent.pop(event.peer, None)
        self._answered.discard(event.peer)
        if event.peer in self._refused:
            self._refused.discard(event.peer)
        elif who is None:
            if self._unknown.is_news("", event.reason, now):
                log.info("connection that is no learner's ended: %s", event.reason)
        elif self.links.get(who) == event.peer:
            if self._comings.has_one(who[0], now):
                log.info("%s %s", who[0], self._how_it_went(*who) or f"lost: {event.reason}")
            del self.links[who]
            self.node.handle(Departed(*who), now)

    def _how_it_went(self, learner: str, life: int) -> str:
        """What it has handed over, of one that said that it leaves; empty of one that did not.

        Its marks are behind what it gave up as well, so it is the ledger that knows what is merged.
        """
        member, ledger = self.node.machine.members.get(learner), self.node.machine.state.ledger
        if member is None or member.life != life or member.report is None or not member.has_left:
            return ""
        report = member.report
        settled = min(at.mark_step for at in report.positions)
        if settled < report.step:  # it could wait no longer
            return f"left before all was handed over ({settled} of {report.step} steps)"
        merged = ledger.merged_of(learner, life) / len(self.node.fragments)
        if merged < report.tokens:
            share = f"{merged:,.0f} of {report.tokens:,} tokens merged"
            return f"left in order ({settled} steps handed over or given up, {share})"
        return f"left in order ({settled} steps handed over)"

    def expel(self, learner: str, why: str, now: float) -> None:
        """An operator turns this learner out, whether it is here or not, for as long as this process lives."""
        log.warning("%s is turned out: %s", learner, why)
        self.node.handle(Expelled(learner, why), now)

    def readmit(self, learner: str, now: float) -> None:
        """A learner that was turned out may come again, as another life."""
        self.node.handle(Readmitted(learner), now)
        self._let_in(learner)

    def _let_in(self, learner: str) -> None:
        """That it was turned out is no news any more, unless it still is, for another reason."""
        if learner not in self.node.machine.door.expelled:
            self.turned_away.forget(learner, "expelled")

    def hang_up(self, learner: str, why: str) -> None:
        """End every connection that proves to be this learner's, whether it has joined or not; it may dial again."""
        for peer in [peer for peer, principal in self.principals.items() if principal == learner]:
            self.endpoint.drop(peer, why)

    def peers_of(self, learner: str) -> list[int]:
        """The connections that it has."""
        return [peer for peer, (name, _) in self.peers.items() if name == learner]

    def payload_bytes(self, message: Message) -> int:
        """The only legal payload length of a bulk message; called by the I/O thread before it allocates."""
        if not isinstance(message, Contribution):
            raise ProtocolError(f"{type(message).__name__} carries no payload")
        if not 0 <= message.fragment < len(self.node.fragments):
            raise ProtocolError(f"fragment {message.fragment} of {len(self.node.fragments)}")
        # What is not the run's codec is lossless, and asked for at the end alone; it may come when that is over.
        is_lossless = message.codec == "fp32" and self.node.machine.state.phase in ("closing", "closed")
        if message.codec != self.node.config.wire.codec_up and not is_lossless:
            raise ProtocolError(f"codec {message.codec[:16]!r} is not the run's {self.node.config.wire.codec_up}")
        return self.node.algebra.payload_bytes(message.codec, self.node.fragments[message.fragment])

    # ------------------------------------------------------------------------------------------ node -> wire

    def send(
        self, learner: str, life: int, message: SyncerMessage, payload: memoryview | bytes | None, tag: object
    ) -> None:
        if isinstance(message, Welcome):
            self._bind(learner, life)
            message = msgspec.structs.replace(message, wants_buffers=self.node.wants_buffers)
        peer = self.links.get((learner, life))
        if peer is not None:
            self._once_durable(partial(self.endpoint.send, peer, message, payload, tag, lane_of(message)))

    def _once_durable(self, call: Callable[[], None]) -> None:
        """What follows from a fact leaves behind it."""
        self.node.log.then(call)

    def _bind(self, learner: str, life: int) -> None:
        """From here on this peer is that life; an older connection of the same life is over."""
        peer = self.joining.pop(learner)
        before = self.links.get((learner, life))
        if before is not None:
            self.peers.pop(before, None)
            self.endpoint.drop(before, "the same learner connected again")
        self.links[learner, life] = peer
        self.peers[peer] = (learner, life)
        self._links_of.charge(learner, self.node.clock())  # who is let in alone: nobody can use up another's
        if self._comings.has_one(learner, self.node.clock()):
            log.info("%s joined (life %d)", learner, life)

    def left_out(self, now: float) -> int:
        """How many lines about learners and strangers were not said of late, where it is time to say that."""
        return self.turned_away.left_out(now) + self._comings.left_out(now)

    def reply(self, ticket: int, outcome: Outcome) -> None:
        log.info("%s: %s", "done" if outcome.is_done else "refused", outcome.text)
        self._once_durable(partial(self.answer, ticket, outcome))

    def dismiss(self, learner: str, life: int, refused: Refused) -> None:
        """Said once: a learner that is not dismissed for good comes again every few seconds."""
        if self.turned_away.is_news(learner, refused.text, self.node.clock(), refused.why):
            log.warning("dismissed: %s", refused.text)
        peer = self.links.pop((learner, life), None) if life else self.joining.pop(learner, None)
        if peer is not None:
            self.peers.pop(peer, None)
            self.principals.pop(peer, None)  # it is about to be hung up on, behind what it is told
            self._refused.add(peer)
            self._once_durable(partial(self.endpoint.send, peer, refused))
            self._once_durable(partial(self.endpoint.drop, peer, refused.text))


def _unheard(ticket: int, outcome: Outcome) -> None:
    """Where nobody can give an order, nobody waits for an answer."""


class Uplink:
    """The learner's side: one peer at a time, the syncer; it is the node's link."""

    node: LearnerNode
    endpoint: Endpoint

    def __init__(self) -> None:
        self.peer: int | None = None
        self.turned_away = ""  # why the last syncer that was reached would not have this learner at present
        self._is_turned_away = False  # on this connection: it is about to end, which is no news
        self._said_at = float("-inf")

    def take(self, event: WireEvent) -> None:
        match event:
            case Opened():
                self.peer, self._is_turned_away = event.peer, False
                self.node.relinked()
                if self.node.machine is None:
                    self.send(self.node.hello(0))
                else:
                    self.node.handle(Linked())
            case Received(message=Refused(is_final=False) as refused):
                self._turned_away(refused.text)
            case Received():
                if isinstance(event.message, Welcome):
                    self.turned_away = ""
                try:
                    self.node.told(event.message, event.payload, event.payload_s)  # type: ignore[arg-type]
                except ProtocolError as error:
                    self._broken(event.peer, str(error))
            case Sent():
                if isinstance(event.tag, tuple):
                    self.node.sent(*event.tag)
            case Lost():
                if event.peer == self.peer:
                    self.peer = None
                    if self.node.machine is not None:
                        self.node.handle(Unlinked())
                    elif not self._is_turned_away:
                        learner_log.info("syncer lost: %s", event.reason)

    def _broken(self, peer: int, why: str) -> None:
        """What it says is none of ours to make sense of: it is hung up on and dialled again, as after any loss."""
        self.turned_away = f"the syncer broke the protocol: {why}"
        if self.node.clock() - self._said_at >= TURNED_AWAY_SAYS_S:
            self._said_at = self.node.clock()
            learner_log.warning("hung up: %s", self.turned_away)
        self.endpoint.drop(peer, self.turned_away)

    def _turned_away(self, why: str) -> None:
        """The syncer hangs up and the endpoint dials again, until the right run is served; training goes on.

        Whoever has not joined yet is told by who waits for it.
        """
        self.turned_away, self._is_turned_away = one_line(why), True
        if self.node.machine is None:
            return
        if self.node.clock() - self._said_at >= TURNED_AWAY_SAYS_S:
            self._said_at = self.node.clock()
            learner_log.warning("not taken in, training goes on: %s", self.turned_away)

    def payload_bytes(self, message: Message) -> int:
        """The only legal payload length of a publication; called by the I/O thread before it allocates."""
        fragments, config = self.node.fragments, self.node.config
        if not isinstance(message, Publication) or not 0 <= message.fragment < len(fragments):
            raise ProtocolError(f"{type(message).__name__} with a payload")
        if config is None or message.codec not in (config.wire.codec_down, "fp32"):
            raise ProtocolError(f"codec {message.codec[:16]!r} is not the run's")
        codec = "fp32" if message.base_version == FULL else message.codec
        return self.node.algebra.payload_bytes(codec, fragments[message.fragment])

    # the node's link

    def send(self, message: LearnerMessage, payload: memoryview | None = None, tag: object = None) -> None:
        if self.peer is not None:
            self.endpoint.send(self.peer, message, payload, tag, lane_of(message))

    @property
    def bytes_up(self) -> int:
        return self.endpoint.bytes_out

    @property
    def bytes_down(self) -> int:
        return self.endpoint.bytes_in


def _spelled(order: Order) -> str:
    """An order as its operator gave it, in a word or two."""
    words = {"PauseRun": "stop", "FinishRun": "stop --finish", "SetKeys": "set", "ExtendRun": "extend"}
    words |= {"DropLearner": "drop", "ReadmitLearner": "drop --readmit"}
    about = f" {order.learner}" if isinstance(order, DropLearner | ReadmitLearner) else ""
    return words[type(order).__name__] + about
