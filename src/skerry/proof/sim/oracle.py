"""What is true in a simulated world, kept apart from everything the product believes, and held against it all the time.

The oracle learns from two sources only: what learners really did, step by step, and what the disk has acknowledged. The
product's own books are the thing under test. A `Violation` names the invariant.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from skerry import config as configs
from skerry.core.audit import Audit
from skerry.core.facts import (
    Checkpointed,
    Committed,
    Decision,
    Discarded,
    Fact,
    Kept,
    LifeStarted,
    Ordered,
    PhaseChanged,
    Result,
    RolledBack,
    Row,
    SteppedBack,
)
from skerry.core.ledger import MERGED, Account
from skerry.core.messages import (
    FULL,
    Contribution,
    Done,
    DropLearner,
    ExtendRun,
    FinishRun,
    Message,
    Order,
    Publication,
    Pull,
    ReadmitLearner,
    Refused,
    SetKeys,
    Welcome,
)
from skerry.core.state import RunState, decode_fact
from skerry.core.vocabulary import GivenUp
from skerry.errors import FileDamaged
from skerry.node import versions
from skerry.node.algebra import Payload
from skerry.node.learner import Outstanding
from skerry.node.mailbox import NO_CELL
from skerry.node.orders import Sent
from skerry.proof.sim import hostile
from skerry.proof.sim.algebra import SPOILED, unpack
from skerry.proof.sim.alone import Span
from skerry.store.store import Store

if TYPE_CHECKING:
    from skerry.proof.sim.learner import LearnerProcess
    from skerry.proof.sim.syncer import SyncerProcess
    from skerry.proof.sim.world import World

OVERLAPPING = 4  # orders that may have been carried out before the first of them is answered
CALM_S = 70.0  # no fault for longer than closing takes: whatever goes wrong now is not the weather's doing


class Violation(AssertionError):
    """An invariant is broken."""


def need(holds: bool, invariant: str, what: object) -> None:
    if not holds:
        raise Violation(f"{invariant}: {what}")


class Oracle:
    def __init__(self, world: World) -> None:
        self.world = world
        self.audit = Audit()
        self.tape: list[bytes] = []  # every record that is durable, folds left out
        self.trying: list[bytes] = []  # handed to the disk, fate unknown
        self.versions: list[int] = []  # newest durable version by fragment
        self.published: dict[tuple[int, int], bytes] = {}  # (fragment, version) -> digest
        self.masters: list[int] = []
        self.masters_of: dict[tuple[int, int], int] = {}  # (fragment, version) -> the master there was
        self.since: list[int] = []  # by fragment, the version that the last rollback made
        self.forsaken: dict[tuple[str, int], int] = {}  # life -> the last step it took on what was rolled back
        self.seen: list[int] = []  # newest version any learner ever saw, by fragment
        self.lives: dict[tuple[str, int], LearnerProcess] = {}
        self.newest: dict[str, int] = {}  # life on the tape
        self.said: dict[tuple[str, int, int, int], int] = {}  # (learner, life, fragment, seq) -> what it contributed
        self.booked: dict[tuple[str, int, int], tuple[int, int]] = {}
        self.discarded: dict[tuple[str, int, int], list[Span]] = defaultdict(list)
        self.merged_to: dict[tuple[str, int, int], int] = {}
        self.merged_seq: dict[tuple[str, int, int], int] = {}  # of the newest contribution in a durable version
        self.past: dict[tuple[str, int], Account] = {}  # lives that the books have in sum alone, as they were
        self.alone: dict[tuple[str, int], set[Span]] = defaultdict(set)  # stretches that the tape tells of
        self.dropped: dict[str, int] = {}  # learner that an order keeps out -> which order it was
        self.ever_dropped: frozenset[str] = frozenset()
        self.ordered: list[RunState] = []  # what the run was like behind each order
        self.told: dict[int, float] = {}  # budget -> the most of it that a syncer ever said to be spent
        self.turned_out: set[str] = set()
        self.last_of_them: set[tuple[str, int, int, int]] = set()  # what was being merged when they were turned out
        self.saw: Counter[str] = world.saw

    # ------------------------------------------------------------------------------------------ the disk

    def recovered(self, store: Store) -> None:
        """A syncer opened the directory: all that was acknowledged is there, and of the last try all or nothing."""
        found = [record.body for record in store.history() if not record.is_fold]
        whole = self.tape + self.trying
        need(found in (self.tape, whole), "I4 acked is durable", f"{len(self.tape)} records acked, {len(found)} found")
        if self.trying and found == whole:
            self.saw["unacknowledged commit survived a crash"] += 1
            self.acked(store, self.trying)
        self.trying = []
        self._seen_in_folds(store)

    def _seen_in_folds(self, store: Store) -> None:
        """A fold has what was heard of and no fact holds yet. It is on the tape, and who starts from it knows it."""
        state = self.audit.state
        for fold in (decode_fact(record.body) for record in store.history() if record.is_fold):
            if isinstance(fold, RunState) and state is not None:
                for key, account in fold.ledger.accounts.items():
                    learner, _, life = key.rpartition("/")
                    seen = fold.ledger.seen(learner, int(life))
                    for alone in account.alone or [seen.alone]:
                        state.ledger.see(replace(seen, alone=alone))
                        self.alone[learner, int(life)].add(Span(alone.from_step, alone.to_step))

    def acked(self, store: Store, records: list[bytes]) -> None:
        self.tape += records
        self.trying = []
        for record in records:
            fact = decode_fact(record)
            assert not isinstance(fact, RunState)
            self._take(store, fact)

    def _take(self, store: Store, fact: Fact) -> None:
        if isinstance(fact, LifeStarted):
            self._remember_lives(fact)
        for seen in fact.decision.seen if isinstance(fact, Committed) else getattr(fact, "seen", ()):
            self.alone[seen.learner, seen.life].add(Span(seen.alone.from_step, seen.alone.to_step))
        self.audit.take(fact)
        need(not self.audit.violations, "audit", self.audit.violations)
        match fact:
            case Committed():
                self._commit(store, fact.decision, fact.result)
                self._book(fact.decision.rows, fact.decision.orders)
            case Discarded():
                self._book(fact.rows)
                self.saw.update({f"discarded: {row.fate}": 1 for row in fact.rows})
            case Checkpointed():
                self._checkpointed(store, fact.fragment)
            case Kept():
                self._check_kept(store)
                self.saw["version kept"] += 1
            case SteppedBack():
                self._step_back(store, fact)
            case RolledBack():
                self.since = list(self.versions)
                self.saw["rolled back"] += 1
                self.saw["rolled back to the start"] += fact.number == 0
                for process in self.lives.values():
                    self.stepped(process)
            case Ordered():
                self._obeyed(fact)
            case PhaseChanged(phase="closing"):
                self._check_spent()
            case LifeStarted():
                self.newest[fact.learner] = fact.life
                self.saw["rejoined in a new life"] += fact.life > 1
                self.saw["rejoined in mid-round"] += fact.life > 1 and self.world.has_open_round

    def _obeyed(self, fact: Ordered) -> None:
        assert self.audit.state is not None
        self.saw[f"ordered: {fact.verb}"] += 1
        self.ordered.append(replace(self.audit.state, dropped=dict(self.audit.state.dropped)))
        if fact.verb == "drop":
            self.dropped[fact.learner] = self.audit.state.orders
            self.ever_dropped |= {fact.learner}
        elif fact.verb == "readmit":
            del self.dropped[fact.learner]

    @property
    def is_open(self) -> bool:
        return self.audit.state is not None and self.audit.state.phase != "closed"

    def check_order(self, order: Order) -> None:
        """Whoever gave it is told that it is done: so it is, on the disk, if it was not undone by one that followed."""
        assert self.audit.state is not None
        those = self.ordered[-OVERLAPPING:]
        is_so = any(_is_carried_out(order, state) for state in (*those, self.audit.state))
        need(is_so, "I23 orders", f"told that it is done, and it is not on the disk: {order}")

    def _remember_lives(self, fact: LifeStarted) -> None:
        """The books are about to have these lives in sum alone."""
        assert self.audit.state is not None
        ledger = self.audit.state.ledger
        for life in range(ledger.lives_folded(fact.learner) + 1, fact.folded + 1):
            self.past[fact.learner, life] = ledger.account(fact.learner, life)
            self.saw["lives summed up"] += 1

    def _commit(self, store: Store, decision: Decision, result: Result) -> None:
        p, version = decision.fragment, decision.version
        need(version == self.versions[p] + 1, "I3 one line of versions", (version, self.versions[p]))
        merged = [row for row in decision.rows if row.fate == MERGED]
        assert self.audit.state is not None
        values = versions.load(store, self.world.fragments[p], self.audit.state.fragments[p], self.world.algebra)
        digest = self.world.algebra.digest(values.theta)
        need(digest == result.digest, "I5 atomic", f"checkpoint and journal of {p}.{version} give other values")
        if self.world.is_exact:
            need(values.velocity == version, "I5 atomic", f"velocity of another version: {values}")
            self.masters[p] += sum(self.said[row.learner, row.life, p, row.seq] for row in merged)
            need(values.theta + values.error == self.masters[p], "I1 exactly once", f"{p}.{version} {merged}")
        self.versions[p] = version
        self.published[p, version] = result.digest
        self.masters_of[p, version] = self.masters[p]
        is_round = decision.reason not in ("everyone is leaving", "the last work")
        self.saw["merge at bare quorum"] += is_round and len(merged) == decision.quorum < decision.ready
        self.saw["merge of all"] += len(merged) == decision.ready
        self.saw["an old life's contribution merged"] += any(row.life < self.newest[row.learner] for row in merged)
        is_late = any(part.base_version < version - 1 for part in decision.parts)
        self.saw["merge over a restart"] += is_late and decision.epoch > 1

    def _check_spent(self) -> None:
        """When the closing begins all that was seen spends the budget, but for what is discarded or was done alone."""
        state = self.audit.state
        assert state is not None
        run = configs.decode(state.config).run
        if state.is_finishing:
            return
        if run.minutes or any(self.since) or self.world.scenario.is_hostile:
            return
        steps = tokens = 0
        more_steps = more_tokens = 0  # at most, contributed on a link before anybody knew how long it would be
        for (learner, life), process in self.lives.items():
            account = self.past.get((learner, life)) or state.ledger.account(learner, life)
            seen, told = Span(0, account.step), self.alone[learner, life]
            for p in range(len(self.versions)):
                for left in self._counted(process, seen, told, self.discarded[learner, life, p]):
                    steps += left.upto - left.after
                    tokens += process.tokens[left.upto] - process.tokens[left.after]
                for span in process.alone.with_links:
                    more_steps += span.upto - span.after
                    more_tokens += process.tokens[span.upto] - process.tokens[span.after]
        budget = (run.tokens or run.steps * run.learners) * len(self.versions)
        spent, kept = (tokens, state.ledger.kept.tokens) if run.tokens else (steps, state.ledger.kept.steps)
        more = more_tokens if run.tokens else more_steps
        need(spent + more >= budget, "I20 lone work", f"the run closes when {spent} of {budget} are spent")
        need(kept >= spent, "I20 lone work", f"{spent} are spent, and only {kept} count")

    def _counted(self, process: LearnerProcess, seen: Span, told: set[Span], discarded: list[Span]) -> list[Span]:
        """What of the steps that were seen is neither discarded nor was done alone for too long.

        A learner restates the last stretch that it did so. One before it counts if no syncer lived to write it down.
        """
        alone = [span for span in process.alone.too_long if span.upto <= seen.upto]
        out = sorted([*discarded, *(span for span in alone if span in told or span == alone[-1])])
        counted, after = [], 0
        for span in out:
            counted.append(seen.common(Span(after, span.after)))
            after = max(after, span.upto)
        return [*counted, seen.common(Span(after, seen.upto))]

    def _checkpointed(self, store: Store, p: int) -> None:
        """Each checkpoint leads to the newest version by itself: any of them may rot some day."""
        assert self.audit.state is not None
        at = self.audit.state.fragments[p]
        for checkpoint in at.checkpoints:
            alone = replace(at, checkpoints=[checkpoint])
            try:
                versions.load(store, self.world.fragments[p], alone, self.world.algebra)
            except FileDamaged as error:
                need(False, "I5 atomic", error)
        self.saw["checkpoint"] += 1

    def _step_back(self, store: Store, fact: SteppedBack) -> None:
        p, version = fact.fragment, fact.version
        need(version == self.versions[p] + 1, "I3 one line of versions", (version, self.versions[p]))
        self.versions[p] = version
        self.published[p, version] = fact.digest
        self.masters[p] = self.masters_of[p, version] = self.masters_of.get((p, fact.to), 0)
        assert self.audit.state is not None
        values = versions.load(store, self.world.fragments[p], self.audit.state.fragments[p], self.world.algebra)
        if self.world.is_exact:
            need(values.theta + values.error == self.masters[p], "I18 kept versions", f"{p}.{version} is not {fact.to}")

    def _check_kept(self, store: Store) -> None:
        """Every kept version can be had, and is what it was."""
        assert self.audit.state is not None
        for version in [self.audit.state.start, *self.audit.state.kept]:
            for fragment, checkpoint in zip(self.world.fragments, version.checkpoints, strict=True):
                try:
                    values = versions.whole(store, fragment, checkpoint, self.world.algebra)
                except FileDamaged as error:
                    need(False, "I18 kept versions", error)
                if self.world.is_exact:
                    master = self.masters_of.get((fragment.index, checkpoint.version), 0)
                    need(values.theta + values.error == master, "I18 kept versions", (version.number, fragment.index))

    def _book(self, rows: tuple[Row, ...], orders: int = 0) -> None:
        """`orders` of the operator's were in force when it was decided to merge them."""
        for row in rows:
            key = (row.learner, row.life, row.fragment)
            is_in = row.fate != MERGED or orders < self.dropped.get(row.learner, orders + 1)
            need(is_in, "I23 orders", f"merged, and its learner was dropped before that was decided: {row}")
            if row.learner == hostile.NAME:
                self._book_hostile(row)
                continue
            process = self.lives.get(key[:2])
            assert process is not None, f"a row of a life nobody lived: {row}"
            start = self.booked.get(key, (0, 0))
            need((row.from_step, row.from_tokens) == start, "I2 conservation", f"rows do not tile: {start} {row}")
            need(row.from_step <= row.to_step <= process.step_count, "I2 conservation", f"never produced: {row}")
            need(row.to_tokens == process.tokens[row.to_step], "I2 conservation", f"tokens of another step: {row}")
            if row.fate == "absent at close" and self.world.calm_s > CALM_S:
                need(process.is_dead, "L1", f"a learner that was there all the time was not waited for: {row}")
            self.booked[key] = (row.to_step, row.to_tokens)
            if row.fate == MERGED:
                is_new = row.from_step >= self.forsaken.get(key[:2], 0)
                need(is_new, "I18 kept versions", f"merged, and learned from what was rolled back: {row}")
                is_wanted = row.learner not in self.turned_out or (*key, row.seq) in self.last_of_them
                need(is_wanted, "I21 turned out", f"merged, and not under way when its learner was turned out: {row}")
                self.merged_to[key] = row.to_step
                self.merged_seq[key] = row.seq
            else:
                self.discarded[key].append(Span(row.from_step, row.to_step))

    def _book_hostile(self, row: Row) -> None:
        """Nothing it says is true; what is merged of it is in the model."""
        self.saw[f"hostile work: {row.fate}"] += 1
        if row.fate == MERGED:
            self.merged_seq[row.learner, row.life, row.fragment] = row.seq

    def expelled(self, learner: str, ordered: Iterable[Contribution]) -> None:
        """A syncer hears that the learner is turned out: of its work only what it has ordered to merge may still be."""
        if learner not in self.turned_out:
            self.turned_out.add(learner)
            its = [c for c in ordered if c.learner == learner]
            self.last_of_them = {(c.learner, c.life, c.fragment, c.seq) for c in its}
            self.saw["turned out"] += 1
            self.saw["turned out while merged"] += any(
                c.seq > self.merged_seq.get((c.learner, c.life, c.fragment), 0) for c in its
            )

    # ------------------------------------------------------------------------------------------ the wire

    def check_leaving(self, learner: str, message: Message, payload: Payload | None) -> None:
        """What a message of the syncer speaks of is durable when it leaves: it may arrive, whatever comes then."""
        if isinstance(message, Welcome | Pull | Publication):
            self.told[message.budget] = max(self.told.get(message.budget, 0.0), message.progress)
        match message:
            case Welcome():
                is_known = self.newest.get(message.learner, 0) >= message.life
                need(
                    is_known, "I13 fencing", f"life {message.life} of {message.learner} leaves before it is on the disk"
                )
            case Publication():
                self._check_publication(learner, message, payload)
            case Refused():
                self.saw["turned away: in use"] += message.why == "in use"
            case Done():
                is_closed = self.audit.state is not None and self.audit.state.phase == "closed"
                need(is_closed, "I4 acked is durable", "the end is told before it is on the disk")

    def _check_publication(self, learner: str, message: Publication, payload: Payload) -> None:
        p, version = message.fragment, message.version
        need(version <= self.versions[p], "I4 acked is durable", f"{p}.{version} leaves before it is on the disk")
        need(self.published[p, version] == message.digest, "I3 one line of versions", f"{p}.{version} has two digests")
        if version == self.versions[p]:  # those before it, of a chain, do not speak of what is settled
            merged = self.merged_seq.get((learner, message.life, p), 0)
            need(message.settled_seq == merged, "I1 exactly once", f"{p}.{version} has {merged} in it: {message}")
        if message.base_version == FULL:
            algebra = self.world.algebra
            is_it = algebra.digest(algebra.decode("fp32", payload)) == message.digest
            need(is_it, "I3 one line of versions", f"{p}.{version} leaves with the values of another version")

    # ------------------------------------------------------------------------------------------ the syncer

    def check_syncer(self, syncer: SyncerProcess) -> None:
        machine = syncer.node.machine
        machine.state.ledger.check()
        for p in range(len(machine.state.fragments)):
            for learner, c in machine.held[p].items():
                settled = machine.state.ledger.settled(learner, c.life, p)
                is_new = c.from_step >= settled.step and c.seq > settled.seq
                need(is_new, "I1 exactly once", ("held and settled", c, settled))
        held = {(learner, p, c.seq) for p, held in enumerate(machine.held) for learner, c in held.items()}
        payloads = {(learner, p, one.contribution.seq) for (learner, p), one in syncer.node.held.items()}
        need(held == payloads, "I16 rejected input changes nothing", ("held, and its bytes", held, payloads))

    def began(self, syncer: SyncerProcess) -> None:
        """A new syncer process serves the run: it knows all that was promised, and nothing else."""
        state, told = syncer.node.machine.state, self.audit.state
        assert told is not None
        self._check_kept(syncer.store)
        for name in (
            "fragments",
            "lives",
            "epoch",
            "phase",
            "merges",
            "kept",
            "last_kept",
            "orders",
            "dropped",
            "config",
        ):
            need(getattr(state, name) == getattr(told, name), "I5 atomic", f"{name} after a restart: {state}")
        need(state.ledger.merged == told.ledger.merged, "I5 atomic", f"{state.ledger.totals()}")
        for p, fragment in enumerate(syncer.node.machine.state.fragments):
            need(fragment.version >= self.seen[p], "I4 acked is durable", f"{p}.{fragment.version} < {self.seen[p]}")

    # ------------------------------------------------------------------------------------------ learners

    def born(self, process: LearnerProcess, life: int) -> None:
        need((process.name, life) not in self.lives, "I13 fencing", f"life {life} of {process.name} was given twice")
        need(self.newest.get(process.name, 0) >= life, "I13 fencing", f"life {life} leaves before it is on the disk")
        self.lives[process.name, life] = process

    def check_refused(self, process: LearnerProcess, refused: Refused) -> None:
        """Nobody who is there loses its name to a process that does not prove to have it."""
        is_evicted = refused.why == "taken over" and process.is_welcomed
        need(self.world.scenario.has_keys or not is_evicted, "I22 names", f"{process.name} was evicted: {refused.text}")
        self.saw["taken over with its key"] += is_evicted

    def check_learner(self, process: LearnerProcess) -> None:
        """Whatever is prepared or queued: nothing goes back, and every unit of its work is somewhere."""
        node, machine = process.node, process.node.machine
        if machine is None:
            return
        is_heard = machine.progress <= self.told.get(machine.budget, 0.0)
        need(
            is_heard,
            "I23 orders",
            f"{process.name} believes {machine.progress} of budget {machine.budget}: {self.told}",
        )
        for p, position in enumerate(machine.positions):
            version, mark = process.low[p]
            goes_on = position.base_version >= version and position.mark_step >= mark
            need(goes_on, "I14 no going back", (p, version, mark, position))
            process.low[p] = (position.base_version, position.mark_step)
            if position.base_version > version:
                process.alone.took_version()
            if position.base_version > FULL:
                base = node.bases[p]
                right = self.published.get((p, position.base_version)) == self.world.algebra.digest(base)
                need(right, "I3 one line of versions", (process.name, "holds other values", p, position))
                self.seen[p] = max(self.seen[p], position.base_version)
        if self.world.is_exact:
            for p in range(len(machine.positions)):
                self._weigh(process, p)

    def need_same(self, is_same: bool, name: str) -> None:
        """What a device reads from a cell stays there until it has read it."""
        need(is_same, "I19 cells have one owner", f"{name}: a cell was changed under its reader")

    def _check_wanted(self, process: LearnerProcess, p: int) -> None:
        """Somebody wants a contribution now, and did not on another link or before the end."""
        if not process.is_pulled[p]:
            need(process.is_ordered[p], "I17 orders end with their link", f"{process.name} contributes to {p} unasked")
            need(not process.is_stopped, "I17 orders end with the run", f"{process.name} contributes to {p} unasked")

    def said_by(self, process: LearnerProcess, out: Outstanding) -> None:
        """A new contribution: remember what it says; the one before it has its fate."""
        c, p = out.contribution, out.contribution.fragment
        self._check_wanted(process, p)
        need(c.base_version > FULL, "I15 no fresh start wins", c)
        is_alone = process.last_seq[p] == process.settled_seq[p]
        need(is_alone, "I1 exactly once", f"the fate of {process.last_seq[p]} is unknown: {c}")
        process.last_seq[p] = c.seq
        said = self.said[c.learner, c.life, p, c.seq] = unpack(out.payload) if self.world.is_exact else 0
        settings = self.world.scenario.config.learner
        is_whole = c.to_step in process.taken[p]
        need(is_whole, "no work lost or doubled", f"a blend scaled what was on its way: {c}")
        taken = process.taken[p].pop(c.to_step)
        process.kept[p] = said if settings.residual == "theta" else taken.drift
        if self.world.is_exact:
            held = taken.drift + (process.node.residuals[p] or 0) + process.taken_out[p]
            is_once = (held - (process.done[p][c.to_step] - taken.given_up)) % SPOILED == 0
            need(is_once, "I1 exactly once", f"what is settled is in it again, or something is missing: {c}")
        if self.world.is_exact and settings.adopt == "overwrite":
            done = process.done[p]
            work = (done[c.to_step] - done[c.from_step]) % SPOILED  # a NaN may have come after the snapshot
            need(
                said == unpack(self.world.algebra.encode(c.codec, work)),
                "no work lost or doubled",
                f"of other steps: {c}",
            )

    def stepped(self, process: LearnerProcess) -> None:
        """It took a step, or is where it is: on versions that all count, or all of its work so far is for nothing."""
        machine, applied = process.node.machine, process.training.applied
        if machine is not None and any(change.version < self.since[p] for p, change in applied.items()):
            self.forsaken[process.name, machine.life] = process.step_count

    def fast_forwarded(self, reason: GivenUp) -> None:
        self.saw["fast-forward: stale"] += reason == "stale"
        self.saw["fast-forward: rolled back"] += reason == "rolled back"
        is_at_hand = reason != "settled but not at hand"
        need(is_at_hand, "no work lost or doubled", "settled, and its learner cannot take it out")

    def _weigh(self, process: LearnerProcess, p: int) -> None:
        """θ − Θ_b, residual and what was taken out add up to all it ever did, less what it gave up."""
        node = process.node
        if p not in process.values:
            return
        due, sent = node.orders.due.get(p), node.orders.under_way.get(p)
        sent = None if sent is None or not process.is_on_its_way(sent) else sent
        if (due is not None and due.is_write) or (sent is not None and sent.change.is_write):
            return  # what it holds is given up
        base = process.base_of(p)
        taken: int = 0 if due is None else due.taken or 0
        if sent is not None:
            self._check_blend(process, sent, taken)
            taken += sent.to.base - base - self._lies_in(process, sent.change.cell)
        held: int = process.values[p] - base - taken
        residual: int = node.residuals[p] or 0
        done = process.done[p][-1] - process.given_up[p]
        need(held + residual + process.taken_out[p] == done, "no work lost or doubled", (process.name, p))

    def _check_blend(self, process: LearnerProcess, sent: Sent, taken_since: int) -> None:
        """One that will be made leaves what is outstanding whole."""
        change, p = sent.change, sent.change.fragment
        if change.towards == NO_CELL or taken_since or not process.training.is_current(change):
            return
        is_whole = self._lies_in(process, change.towards) - sent.to.base == process.kept[p]
        need(is_whole, "no work lost or doubled", (process.name, p, "a blend scales what is outstanding"))

    def _lies_in(self, process: LearnerProcess, cell: int) -> int:
        assert process.cells is not None
        lies: int = process.cells.down[cell].load(1)
        return lies


def _is_carried_out(order: Order, state: RunState) -> bool:
    """The run is as the order wants it."""
    config = configs.decode(state.config)
    match order:
        case FinishRun():
            return state.is_finishing or state.phase in ("closing", "closed")
        case SetKeys():
            tables = msgspec.to_builtins(config)
            keys = [(*key.split("."), value) for key, value in order.settings.items()]
            return all(tables[table][key] == value for table, key, value in keys)
        case ExtendRun():
            return (config.run.tokens, config.run.steps, config.run.minutes) == (
                order.tokens,
                order.steps,
                order.minutes,
            )
        case DropLearner():
            return order.learner in state.dropped
        case ReadmitLearner():
            return order.learner not in state.dropped
    return False
