"""The syncer's node: global fragments and outer state, held payloads, and the order of durable things.

Actions are carried out in list order. Records go to the log (`node/log.py`), whose thread writes them in groups; what
stands behind them is decided and worked on meanwhile, and leaves this process only when they are durable. So no byte of
a version leaves before the version can be had again from the disk.

One thread decides and sends. Looking at a contribution, merging, and writing a checkpoint are work for the pool
(`node/work.py`); what has ended is handed to the machine as `Arrived`, `MergeDone` and `CheckpointDone`. Until then
nothing has happened: a merge leaves the version before it in its place, what it merges stays held, and a file that was
put is nobody's. So work that is under way when the process ends, in order or not, needs no care: learners keep what is
not settled, and answer with it again.

`outbox`, store and pools are handed in.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from skerry import config as configs
from skerry.algo.codecs import Inspection
from skerry.algo.contents import decode_contents
from skerry.algo.fragments import Layout, decode_fragments, decode_layout
from skerry.core.events import (
    Arrived,
    BuffersStored,
    Checkpoint,
    CheckpointDone,
    Dismiss,
    Drop,
    Finish,
    Hold,
    Merge,
    MergeDone,
    Publish,
    Record,
    Reply,
    Send,
    Started,
    SyncerAction,
    SyncerEvent,
    Ticked,
)
from skerry.core.facts import Buffered, Checkpointed, Committed, Decision, Entry, EpochStarted, Fact, Result, Took
from skerry.core.flow import WINDOW_BYTES, Window
from skerry.core.ledger import MERGED
from skerry.core.messages import FULL, Buffers, Contribution, Outcome, Publication, Refused, SyncerMessage
from skerry.core.state import state_of
from skerry.core.syncer import SyncerMachine
from skerry.core.vocabulary import Ending, Flaw
from skerry.errors import one_line
from skerry.node import versions
from skerry.node.algebra import FLOAT32, Algebra, Merged, Payload, Values
from skerry.node.buffers import looked_at
from skerry.node.log import Log
from skerry.node.observers import UNWATCHED, SyncerObserver
from skerry.node.transitions import Transitions
from skerry.node.work import AtOnce, Behind, Pool
from skerry.store.journal import Place, file_bytes
from skerry.store.store import RECORD, Store
from skerry.wire.repeats import Repeats

ABS_MAX = 1e6  # no parameter moves this far: larger values are damage or malice, and would overflow sums
COMMITS_PER_COLLECT = 32
DELTAS_BYTES = 512 << 20  # of deltas that are kept for learners a few versions behind, beside each fragment's newest
SPARE_BYTES = 128 << 20  # of those that everybody has: who loses its link for a moment is not sent whole fragments then
BEHIND_BYTES = 256 << 20  # of deltas that wait for the disk: beyond it no further merge is begun
MERGING_ELEMENTS = 1 << 25  # of all fragments that are merged at a time, if they are several: each works in 16.5 bytes
LOOK_BYTES = 1 << 20  # of payloads that are looked at together: to hand one over takes as long as to look at 100 kB
SAYS_S = 10.0  # at most one line in this time about a disk that is too slow

log = logging.getLogger("skerry.syncer")


def merges_at_once(threads: int, elements: int) -> int:
    """Of fragments of this size, with so many threads: the larger, the fewer, and the more threads each has."""
    return max(1, min(threads, MERGING_ELEMENTS // elements))


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
    took_s: float  # to find it


class Unseen(NamedTuple):
    """A contribution that is complete and was not looked at yet."""

    contribution: Contribution
    payload: Payload
    payload_s: float  # that it was on its way


class Inspected(NamedTuple):
    """A contribution was looked at: what the machine is told, and what there is to hold."""

    event: Arrived
    arrival: Arrival | None  # none if its bytes are damaged


class Looked(NamedTuple):
    """Some contributions were, one after the other."""

    inspected: tuple[Inspected, ...]


class Version(NamedTuple):
    """A merge has ended: what was decided, what came of it, and what the journal is to have."""

    decision: Decision
    merged: Merged
    entry: Any
    checksum: bytes  # of the entry
    payloads: str  # the file with its contributions, if they are recorded
    took: Took
    ended_at: float


Work = Looked | Version | Checkpointed | BuffersStored


class Outbox(Protocol):
    """Where the node's words go: to learners by (name, life), and not before all that is in the log is durable."""

    def send(self, learner: str, life: int, message: SyncerMessage, payload: Payload | None, tag: object) -> None: ...

    def dismiss(self, learner: str, life: int, refused: Refused) -> None: ...

    def reply(self, ticket: int, outcome: Outcome) -> None: ...


class SyncerNode:
    """One syncer process over one run directory."""

    def __init__(
        self,
        store: Store,
        outbox: Outbox,
        clock: Callable[[], float],
        algebra: Algebra = FLOAT32,
        observer: SyncerObserver = UNWATCHED,
        pool: Pool[Work] | None = None,
        window_bytes: int = WINDOW_BYTES,
        threads: int = 1,
    ) -> None:
        self.store = store
        self.algebra = algebra
        self.outbox = outbox
        self.clock = clock  # for measuring alone: what is decided is decided by the time that comes with an event
        self.observer = observer
        self.pool: Pool[Work] = pool or AtOnce()
        self.threads = threads
        state = state_of(store.records)
        config = configs.decode(state.config)
        self.layout: Layout = decode_layout(state.created.layout)
        self.contents = decode_contents(state.created.contents)
        self.fragments = decode_fragments(state.created.fragments, self.layout)
        self.values = versions.newest(store, state, self.fragments, algebra, threads)
        self.deltas: list[dict[int, Delta]] = [{} for _ in self.fragments]
        self._deltas_by_age: dict[tuple[int, int], None] = {}  # fragment and version of each, the oldest first,
        self._deltas_bytes = 0  # and their sum
        self.held: dict[tuple[str, int], Arrival] = {}  # by learner and fragment
        self._storing: dict[str, Buffers | None] = {}  # learner whose buffers are being looked at -> what waits
        self.unseen_bytes = 0  # of contributions that wait to be looked at, or are,
        self.unseen_of: dict[str, int] = {}  # and by learner, where there are any
        self._flaws = Repeats()
        self._gathered: list[Unseen] = []  # those that no worker was handed yet,
        self._gathered_bytes = 0  # and their sum
        self.finished: Ending | None = None
        self._merges_waiting: deque[Merge] = deque()  # for the disk, or for memory to work in
        self._merging: set[int] = set()  # fragments of which a merge was begun, and has not been taken in
        self._said_at = float("-inf")  # that the disk is too slow
        self._entries: dict[Place, Any] = {}  # of merges that have ended, until they are written
        self._commits = 0  # since the last tidying
        self._transitions = Transitions(state.is_finishing)
        self._has_merged = False
        self._found = store.files  # when it began
        self.commits_per_collect = COMMITS_PER_COLLECT
        # One merge in `checkpoint_every` makes a checkpoint due: put off for half as many, they keep up.
        self._behind = Behind(config.store.checkpoint_every // 2)
        self.log = Log(store, lambda: self.clock(), observer)
        version_bytes = sum(algebra.payload_bytes("bf16", fragment) for fragment in self.fragments)
        store.journal.file_bytes = file_bytes(config.store.checkpoint_every * version_bytes)
        store.journal.known = state.journal_file
        started = EpochStarted(state.epoch + 1)
        self._write([started])
        state.apply(started)
        whole_bytes = [algebra.payload_bytes("fp32", fragment) for fragment in self.fragments]
        window = Window(whole_bytes, config.wire.streams, window_bytes)
        self.machine = SyncerMachine(config, state, clock(), window)
        self.handle(Started(), clock())

    @property
    def config(self) -> configs.Config:
        """That is in force."""
        return self.machine.config

    # ------------------------------------------------------------------------------------------ events in

    def handle(self, event: SyncerEvent, now: float, arrival: Arrival | None = None) -> None:
        """One event, and what follows from it alone; `arrival` is what came with an `Arrived`."""
        self.observer.event_came(event)
        self._perform(self.machine.take(event, now), arrival)
        self.observer.event_done(event)

    def look(self, now: float) -> None:
        """Take in the work that has ended, then what follows from where things stand; again if more has ended by then.

        What a look orders is taken in here if it was carried out at once, so that nothing is left to a later look.
        """
        self.finish(now)
        self._look(now)
        while self.finish(now):
            self._look(now)

    def _look(self, now: float) -> None:
        ticked = Ticked()
        self.observer.event_came(ticked)
        self._perform(self.machine.step(ticked, now), None)
        self.observer.event_done(ticked)

    def contribution(self, c: Contribution, payload: Payload, payload_s: float = 0.0) -> None:
        """A contribution is complete: its values are looked at before the machine decides on it.

        Those that come together, as a learner's of one boundary do, are handed to a worker together if they are small.
        """
        self.unseen_bytes += len(payload)
        self.unseen_of[c.learner] = self.unseen_of.get(c.learner, 0) + len(payload)
        self._gathered.append(Unseen(c, payload, payload_s))
        self._gathered_bytes += len(payload)
        if self._gathered_bytes >= LOOK_BYTES:
            self._begin_look()

    def buffers(self, given: Buffers) -> None:
        """A learner's buffers came: they are looked at and stored before the machine hears of them.

        One at a time of each learner, of which the newest waits, and none that are not newer than those on the tape.
        """
        before = self.machine.state.buffers.get(given.learner)
        is_newer = before is None or (before.life, before.step) < (given.life, given.step)
        if not self.wants_buffers or not is_newer:
            return
        if given.learner in self._storing:
            self._storing[given.learner] = given
        else:
            self._storing[given.learner] = None
            self.pool.submit(partial(self._store_buffers, given), "short")

    @property
    def wants_buffers(self) -> bool:
        return self.contents.has_buffers

    def _begin_look(self) -> None:
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        self.pool.submit(partial(self._look_at, gathered), "short")

    @property
    def has_unseen(self) -> bool:
        """Contributions have come that the machine does not know of yet."""
        return self.unseen_bytes > 0

    def finish(self, now: float) -> bool:
        """Begin the work that has gathered, take in what has ended, and say whether any had; a look is to follow.

        Once this process is finished it is dropped, and nobody has heard of it.
        """
        self.log.take_ended()
        if self.finished:
            return False
        if self._gathered:
            self._begin_look()
        if self._merges_waiting:
            self._begin_merges()
        if not (ended := self.pool.ended()):
            return False
        if not self.machine.is_interrupted:
            self._take_versions([one for one in ended if isinstance(one, Version)], now)
            self._begin_merges()
        for one in ended:
            if isinstance(one, Looked):
                self._take_looked(one, now)
            elif isinstance(one, Checkpointed):
                self.handle(CheckpointDone(one), now)
            elif isinstance(one, BuffersStored):
                waiting = self._storing.pop(one.learner)
                self.handle(one, now)
                if waiting is not None:
                    self.buffers(waiting)
        return True

    def _take_looked(self, looked: Looked, now: float) -> None:
        for event, arrival in looked.inspected:
            learner = event.contribution.learner
            self.unseen_bytes -= event.payload_bytes
            if left := self.unseen_of.pop(learner) - event.payload_bytes:
                self.unseen_of[learner] = left
            self.handle(event, now, arrival)

    def _take_versions(self, ended: Sequence[Version], now: float) -> None:
        """Merges that have ended together share one commit; what follows from any of them comes behind it."""
        events: list[MergeDone] = []
        actions: list[SyncerAction] = []
        for version in ended:
            event = MergeDone(self._placed(version))
            events.append(event)
            self.observer.event_came(event)
            actions += self.machine.take(event, now)
            self._install(version)
            self._merging.remove(version.decision.fragment)
        self._perform(_records_first(actions), None)
        if ended and not self._has_merged:
            self._has_merged, self._found = True, set()
            self._collect()
        for event in events:
            self.observer.event_done(event)

    # ------------------------------------------------------------------------------------------ actions out

    def _perform(self, actions: list[SyncerAction], arrival: Arrival | None) -> None:
        """Carry the actions out in order; records that stand together are written together."""
        facts: list[Fact] = []
        for action in actions:
            if isinstance(action, Record):
                facts.append(action.fact)
                continue
            if facts:
                self._write(facts)
                facts = []
            self._act(action, arrival)
        if facts:
            self._write(facts)

    def _act(
        self,
        action: Send | Hold | Drop | Publish | Merge | Checkpoint | Dismiss | Reply | Finish,
        arrival: Arrival | None,
    ) -> None:
        match action:
            case Send():
                self.outbox.send(action.learner, action.life, action.message, None, None)
            case Hold():
                assert arrival is not None and arrival.contribution.seq == action.seq, (action, arrival)
                self.held[action.learner, action.fragment] = arrival
            case Drop():
                del self.held[action.learner, action.fragment]
            case Publish():
                self._publish(action)
            case Merge():
                self._merges_waiting.append(action)
                self._begin_merges()
            case Checkpoint():
                # Of merges that ended together all are installed by now, a later one of this fragment among them.
                p, version = action.fragment, self.machine.state.fragments[action.fragment].version
                self.pool.submit(partial(self._checkpoint, p, version, self.values[p]), self._behind)
            case Dismiss():
                self.outbox.dismiss(action.learner, action.life, Refused(action.text, action.why))
            case Reply():
                self.outbox.reply(action.ticket, action.outcome)
            case Finish():
                self._collect()
                self.log.then(partial(self._finish, action.reason))

    def _finish(self, reason: Ending) -> None:
        self.finished = reason

    def _write(self, facts: list[Fact]) -> None:
        """To the log, to be kept together."""
        records = [msgspec.msgpack.encode(fact) for fact in facts]
        places = [Place(*fact.result.entry) for fact in facts if isinstance(fact, Committed)]
        self.log.write(records, _files_of(facts), [(place, self._entries.pop(place)) for place in places])
        self._commits += 1
        for template, values in self._transitions.lines(facts):
            self.log.then(partial(log.info, template, *values))

    def tidy(self) -> None:
        """Between events: begin a new segment when the tape's is full, collect what nobody needs any more.

        Not once the operator has ended this process: that is the tape's last word, but for checkpoints.
        """
        if self._commits < self.commits_per_collect or self.machine.is_interrupted:
            return
        self._commits = 0
        if self.store.tape.size > self.config.store.segment_bytes:
            self.log.do(partial(self.store.rotate, msgspec.msgpack.encode(self.machine.state)))
        self._collect()

    def _collect(self) -> None:
        """Remove what the tape does not need: at this process's first merge, now and then, and behind its last word.

        Before it has merged, only of what it wrote itself. An older copy of the tape may have been put back, and what
        that does not name is what the newer one needs; learners that know of it are not merged with.
        """
        state = self.machine.state
        if self._has_merged:
            self.log.do(partial(self.store.collect, state.files, state.journal))
        else:
            self.log.do(partial(self.store.collect, state.files | self._found, None))

    # ------------------------------------------------------------------------------------------ work for the pool

    def _look_at(self, unseen: Sequence[Unseen]) -> Looked:
        return Looked(tuple(self._inspect(*one) for one in unseen))

    def _inspect(self, c: Contribution, payload: Payload, payload_s: float) -> Inspected:
        began = self.clock()
        found, flaw = self._look_into(c, payload)
        took_s = self.clock() - began
        if flaw is not None and self._flaws.is_news(c.learner, flaw, began):
            largest = f" (largest value {found.max_abs:.3g})" if found else ""
            log.warning("refused contribution of %s to fragment %d: %s%s", c.learner, c.fragment, flaw, largest)
        arrival = Arrival(c, payload, found, took_s) if found else None
        return Inspected(Arrived(c, len(payload), flaw, payload_s), arrival)

    def _look_into(self, c: Contribution, payload: Payload) -> tuple[Inspection | None, Flaw | None]:
        if self.algebra.checksum(payload) != c.digest:
            return None, "damaged"
        found = self.algebra.inspect(c.codec, payload, self.fragments[c.fragment])
        if not found.finite:
            return found, "not finite"
        return found, "too large" if found.max_abs > ABS_MAX else None

    def _next_version(
        self, decision: Decision, old: Values, arrivals: Sequence[Arrival], ordered_at: float, threads: int
    ) -> Version:
        """What is decided, carried out on the version before; its commit follows."""
        fragment, began_at = self.fragments[decision.fragment], self.clock()
        held = [
            self.algebra.hold(part.codec, one.payload, part.weight, one.found)
            for part, one in zip(decision.parts, arrivals, strict=True)
        ]
        delta = self.algebra.merge(decision, fragment, held, threads)
        merged = self.algebra.advance(decision, fragment, old, delta, threads)
        entry = self.algebra.entry(delta)
        checksum = self.algebra.checksum(entry)
        merged_at = self.clock()
        is_recorded = self.config.store.record == "full"
        payloads = self.store.put([one.payload.data for one in held], RECORD) if is_recorded else ""
        ended_at = self.clock()
        inspect_s = sum(one.took_s for one in arrivals)
        took = Took(inspect_s, began_at - ordered_at, merged_at - began_at, ended_at - merged_at)
        return Version(decision, merged, entry, checksum, payloads, took, ended_at)

    def _store_buffers(self, given: Buffers) -> BuffersStored:
        """Without a file where they are not kept."""
        gift, who = looked_at(given.data, self.contents), given.learner
        why = gift.flaw or gift.strange
        if why and self._flaws.is_news(who, why, self.clock(), "buffers"):
            log.warning("%s the buffers of %s: %s", "refused" if gift.flaw else "left out of", who, one_line(why))
        file = self.store.put([gift.data]) if gift.data else ""
        return BuffersStored(given.learner, given.life, given.step, given.tokens, file)

    def _checkpoint(self, p: int, version: int, values: Values) -> Checkpointed:
        return Checkpointed(p, version, self.store.put(self.algebra.parts(values)), self.algebra.sha256(values.theta))

    # ------------------------------------------------------------------------------------------ merge and publish

    def _begin_merges(self) -> None:
        """As far as there is memory to work in, and unless too much waits for the disk: rounds wait with it then."""
        while self._merges_waiting and self._may_merge(self._merges_waiting[0].decision.fragment):
            self._merge(self._merges_waiting.popleft())
        if self._merges_waiting and self.is_disk_behind and self.clock() - self._said_at >= SAYS_S:
            self._said_at = self.clock()
            log.warning("the disk is slower than the merges: %d wait for it", len(self._merges_waiting))

    def _may_merge(self, p: int) -> bool:
        if self.is_disk_behind or self.machine.is_interrupted:
            return False
        elements = sum(self.fragments[each].size for each in (*self._merging, p))
        return not self._merging or elements <= MERGING_ELEMENTS

    @property
    def is_disk_behind(self) -> bool:
        return self.log.waiting_bytes > BEHIND_BYTES

    def _merge(self, order: Merge) -> None:
        """Begin a merge; no other of the fragment is ordered before it has ended."""
        self.observer.merging(order)
        self._merging.add(order.decision.fragment)
        arrivals = [self.held[c.learner, c.fragment] for c in order.contributions]
        assert [one.contribution for one in arrivals] == list(order.contributions), (order, arrivals)
        old = self.values[order.decision.fragment]
        self.pool.submit(partial(self._next_version, order.decision, old, arrivals, self.clock(), self._merge_threads))

    @property
    def _merge_threads(self) -> int:
        """Of one merge: those that the others leave to it, of as many as can be under way: learners wait for each."""
        most, largest = min(self.threads, self.config.merge.threads), max(each.size for each in self.fragments)
        others = min(len(self.machine.rounds.merging), merges_at_once(most, largest))
        return max(1, most // max(1, others))

    def _placed(self, version: Version) -> Committed:
        """Its fact, with a place in the journal, and what only this thread knows of the time it took."""
        merged = version.merged
        place = self.store.place(len(version.entry), version.checksum)
        self._entries[place] = version.entry
        taken_s = self.clock() - version.ended_at
        took = msgspec.structs.replace(version.took, taken_s=taken_s, commit_s=self.log.commit_s)
        return Committed(version.decision, Result(merged.digest, merged.state, Entry(*place), version.payloads), took)

    def _install(self, version: Version) -> None:
        """From here on it is the fragment's newest; what it merged is not held any longer."""
        decision, merged = version.decision, version.merged
        self.values[decision.fragment] = merged.values
        self._keep(decision.fragment, decision.version, Delta(decision.codec, merged.payload, merged.digest))
        for row in decision.rows:
            if row.fate == MERGED:
                del self.held[row.learner, row.fragment]

    def _keep(self, p: int, version: int, delta: Delta) -> None:
        """The newest, and as many before it as are asked for and find room; those of large models do not.

        Of what everybody has only a little is kept: the newest of all fragments is an eighth of the values.
        """
        self.deltas[p][version] = delta
        self._deltas_by_age[p, version] = None
        self._deltas_bytes += len(delta.payload)
        most = max(1, DELTAS_BYTES // (len(self.deltas) * max(1, len(delta.payload))))
        for old in [v for v in self.deltas[p] if v <= version - min(self.config.store.deltas_kept, most)]:
            self._forget(p, old)
        while self._deltas_bytes > SPARE_BYTES:
            oldest = next(iter(self._deltas_by_age))
            if not self.machine.all_have(*oldest):
                break
            self._forget(*oldest)

    def _forget(self, p: int, version: int) -> None:
        self._deltas_bytes -= len(self.deltas[p].pop(version).payload)
        del self._deltas_by_age[p, version]

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
            order=action.order if is_last else 0,
            lay_s=action.lay_s if is_last else 0.0,
            budget=action.budget,
        )
        tag = (action.fragment, version) if is_last else None
        self.outbox.send(action.learner, action.life, message, delta.payload, tag)


def _records_first(actions: list[SyncerAction]) -> list[SyncerAction]:
    """In their order otherwise: nothing is lost by keeping a fact before something that does not depend on it."""
    return sorted(actions, key=lambda action: not isinstance(action, Record))


def _files_of(facts: Sequence[Fact]) -> list[str]:
    recorded = [fact.result.payloads for fact in facts if isinstance(fact, Committed) and fact.result.payloads]
    return recorded + [fact.file for fact in facts if isinstance(fact, Checkpointed | Buffered)]
