"""The syncer's node: global fragments and outer state, held payloads, and the order of durable things.

Actions are carried out in list order. Facts and merges that stand together share one commit; nothing behind them is
carried out before it is durable, so no byte of a version leaves before the version exists on disk. One thread; `send`,
`dismiss` and the store are handed in.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple, Protocol

import msgspec

from skerry import config as configs
from skerry.algo.codecs import Inspection
from skerry.algo.fragments import Layout, decode_fragments, decode_layout
from skerry.core.events import (
    Arrived,
    Dismiss,
    Finish,
    Hold,
    Merge,
    MergeDone,
    Publish,
    Record,
    Send,
    Started,
    SyncerAction,
    SyncerEvent,
    Ticked,
)
from skerry.core.facts import Committed, EpochStarted, Fact, Result
from skerry.core.messages import FULL, Contribution, Publication, Refused, SyncerMessage
from skerry.core.state import state_of
from skerry.core.syncer import SyncerMachine
from skerry.core.vocabulary import Ending, Flaw
from skerry.node.algebra import FLOAT32, Algebra, Payload
from skerry.node.observers import UNWATCHED, SyncerObserver
from skerry.store.store import RECORD, Store

ABS_MAX = 1e6  # no parameter moves this far: larger values are damage or malice, and would overflow sums
COMMITS_PER_COLLECT = 32

log = logging.getLogger("skerry.syncer")


class Delta(NamedTuple):
    """A published delta, kept for learners a few versions behind."""

    codec: str
    payload: Payload
    digest: bytes


class Arrival(NamedTuple):
    """A contribution with its encoded payload, and what was found in it."""

    contribution: Contribution
    payload: Payload
    found: Inspection


class Outbox(Protocol):
    """Where the node's words go: to learners by (name, life)."""

    def send(self, learner: str, life: int, message: SyncerMessage, payload: Payload | None, tag: object) -> None: ...

    def dismiss(self, learner: str, life: int, refused: Refused) -> None: ...


class SyncerNode:
    """One syncer process over one run directory."""

    def __init__(
        self,
        store: Store,
        outbox: Outbox,
        now: float,
        algebra: Algebra = FLOAT32,
        observer: SyncerObserver = UNWATCHED,
    ) -> None:
        self.store = store
        self.algebra = algebra
        self.outbox = outbox
        self.observer = observer
        state = state_of(store.records)
        self.config = configs.decode(state.created.config)
        self.layout: Layout = decode_layout(state.created.layout)
        self.fragments = decode_fragments(state.created.fragments, self.layout)
        self.values = [
            algebra.load(store.get(at.file), fragment)
            for at, fragment in zip(state.fragments, self.fragments, strict=True)
        ]
        self.deltas: list[dict[int, Delta]] = [{} for _ in self.fragments]
        self.held: dict[tuple[str, int], Arrival] = {}  # by learner and fragment
        self.finished: Ending | None = None
        self._turned_away: dict[str, str] = {}  # learner -> why it was last dismissed
        self._commits = 0
        self.commits_per_collect = COMMITS_PER_COLLECT
        started = EpochStarted(state.epoch + 1)
        self._write([started])
        state.apply(started)
        self.machine = SyncerMachine(self.config, state, now)
        self.handle(Started(), now)

    # ------------------------------------------------------------------------------------------ events in

    def handle(self, event: SyncerEvent, now: float, arrival: Arrival | None = None) -> None:
        """One event, and what follows from it alone; `arrival` is what came with an `Arrived`."""
        self.observer.event_came(event)
        self._perform(self.machine.take(event, now), arrival)
        self.observer.event_done(event)

    def look(self, now: float) -> None:
        """Time has passed: what follows from where things stand, and from the merges that this leads to."""
        ticked = Ticked()
        self.observer.event_came(ticked)
        events: deque[SyncerEvent] = deque([ticked])
        while events:
            events.extend(self._perform(self.machine.step(events.popleft(), now), None))
        self.observer.event_done(ticked)

    def contribution(self, c: Contribution, payload: Payload, now: float, payload_s: float = 0.0) -> None:
        """A contribution is complete: look at its values before the machine decides on it."""
        found, flaw = self._inspect(c, payload)
        if flaw is not None:
            largest = f" (largest value {found.max_abs:.3g})" if found else ""
            log.warning("refused contribution of %s to fragment %d: %s%s", c.learner, c.fragment, flaw, largest)
        arrival = Arrival(c, payload, found) if found else None
        self.handle(Arrived(c, len(payload), flaw, payload_s), now, arrival)

    def _inspect(self, c: Contribution, payload: Payload) -> tuple[Inspection | None, Flaw | None]:
        if self.algebra.checksum(payload) != c.digest:
            return None, "damaged"
        found = self.algebra.inspect(c.codec, payload, self.fragments[c.fragment])
        if not found.finite:
            return found, "not finite"
        return found, "too large" if found.max_abs > ABS_MAX else None

    # ------------------------------------------------------------------------------------------ actions out

    def _perform(self, actions: list[SyncerAction], arrival: Arrival | None) -> list[SyncerEvent]:
        """Carry the actions out in order; what must be durable before the next one is committed together."""
        facts: list[Fact] = []
        done: list[SyncerEvent] = []
        for action in actions:
            match action:
                case Record():
                    facts.append(action.fact)
                case Merge():
                    fact = self._merge(action)
                    facts.append(fact)
                    done.append(MergeDone(fact))
                case _:
                    self._write(facts)
                    facts = []
                    self._act(action, arrival)
        self._write(facts)
        return done

    def _act(self, action: Send | Hold | Publish | Dismiss | Finish, arrival: Arrival | None) -> None:
        match action:
            case Send():
                self.outbox.send(action.learner, action.life, action.message, None, None)
            case Hold():
                assert arrival is not None and arrival.contribution.seq == action.seq, (action, arrival)
                self.held[action.learner, action.fragment] = arrival
            case Publish():
                self._publish(action)
            case Dismiss():
                self._dismiss(action)
            case Finish():
                self.finished = action.reason

    def _dismiss(self, action: Dismiss) -> None:
        """Said once: a learner that is not dismissed for good comes again every few seconds."""
        refused = Refused(action.text, action.why)
        if refused.is_final or self._turned_away.get(action.learner) != action.text:
            log.warning("dismissed: %s", action.text)
        self._turned_away[action.learner] = action.text
        self.outbox.dismiss(action.learner, action.life, refused)

    def _write(self, facts: list[Fact]) -> None:
        """One group commit."""
        if not facts:
            return
        records = [msgspec.msgpack.encode(fact) for fact in facts]
        self.observer.committing(records)
        self.store.commit(records)
        self.observer.committed(records)
        self._commits += 1

    def tidy(self) -> None:
        """Between events: begin a new segment when the tape's is full, collect versions nobody needs."""
        if self._commits < self.commits_per_collect:
            return
        self._commits = 0
        if self.store.tape.size > self.config.store.segment_bytes:
            self.store.rotate(msgspec.msgpack.encode(self.machine.state))
        self.store.collect(self.machine.state.files)

    # ------------------------------------------------------------------------------------------ merge and publish

    def _merge(self, order: Merge) -> Committed:
        """The next version of a fragment; its file is written, its commit follows."""
        self.observer.merging(order)
        decision, p = order.decision, order.decision.fragment
        arrivals = [self._take(c) for c in order.contributions]
        held = [
            self.algebra.hold(part.codec, one.payload, part.weight, one.found)
            for part, one in zip(decision.parts, arrivals, strict=True)
        ]
        merged = self.algebra.merge(decision, self.fragments[p], self.values[p], held, self.config.merge.threads)
        self.values[p] = merged.values
        self._keep(p, decision.version, Delta(decision.codec, merged.payload, merged.digest))
        file = self.store.put(self.algebra.parts(merged.values))
        is_recorded = self.config.store.record == "full"
        payloads = self.store.put([one.payload.data for one in held], RECORD) if is_recorded else ""
        return Committed(decision, Result(file, merged.digest, payloads))

    def _take(self, c: Contribution) -> Arrival:
        arrival = self.held.pop((c.learner, c.fragment))
        assert arrival.contribution.seq == c.seq, (c, arrival.contribution)
        return arrival

    def _keep(self, p: int, version: int, delta: Delta) -> None:
        self.deltas[p][version] = delta
        self.deltas[p].pop(version - self.config.store.deltas_kept, None)

    def _publish(self, action: Publish) -> None:
        """The deltas a learner lacks if they are at hand and smaller than the whole fragment, else the whole."""
        p, kept = action.fragment, self.deltas[action.fragment]
        lacking = range(action.base_version + 1, action.version + 1)
        small = action.base_version > FULL and all(v in kept for v in lacking)
        theta = self.algebra.whole(self.values[p].theta)
        if small and sum(len(kept[v].payload) for v in lacking) < len(theta):
            for version in lacking:
                self._send_version(action, version, version - 1, kept[version])
        else:
            digest = self.machine.state.fragments[p].digest
            whole = Delta("fp32", theta, digest)
            self._send_version(action, action.version, FULL, whole)

    def _send_version(self, action: Publish, version: int, base_version: int, delta: Delta) -> None:
        is_last = version == action.version
        message = Publication(
            epoch=self.machine.state.epoch,
            life=action.life,
            fragment=action.fragment,
            version=version,
            base_version=base_version,
            codec=delta.codec,
            digest=delta.digest,
            settled_seq=action.settled_seq if is_last else 0,  # what is settled is only in the newest
            settled_step=action.settled_step if is_last else 0,
            progress=action.progress,
        )
        tag = (action.fragment, version) if is_last else None
        self.outbox.send(action.learner, action.life, message, delta.payload, tag)
