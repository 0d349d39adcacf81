"""What is true in a simulated world, kept apart from everything the product believes, and held against it all the time.

The oracle learns from two sources only: what learners really did, step by step, and what the disk has acknowledged. The
product's own books are the thing under test. A `Violation` names the invariant.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from msgspec.structs import replace

from skerry.core.audit import Audit
from skerry.core.facts import (
    Checkpointed,
    Committed,
    Decision,
    Discarded,
    Fact,
    Kept,
    LifeStarted,
    PhaseChanged,
    Result,
    RolledBack,
    Row,
    SteppedBack,
)
from skerry.core.ledger import MERGED
from skerry.core.messages import FULL, Done, Message, Publication, Welcome
from skerry.core.state import RunState, decode_fact
from skerry.core.vocabulary import GivenUp
from skerry.errors import FileDamaged
from skerry.node import versions
from skerry.node.algebra import Payload
from skerry.node.learner import Outstanding
from skerry.node.mailbox import NO_CELL
from skerry.node.orders import Sent
from skerry.proof.sim.algebra import SPOILED, unpack
from skerry.proof.sim.alone import Span
from skerry.store.store import Store

if TYPE_CHECKING:
    from skerry.proof.sim.learner import LearnerProcess
    from skerry.proof.sim.syncer import SyncerProcess
    from skerry.proof.sim.world import World

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

    def acked(self, store: Store, records: list[bytes]) -> None:
        self.tape += records
        self.trying = []
        for record in records:
            fact = decode_fact(record)
            assert not isinstance(fact, RunState)
            self._take(store, fact)

    def _take(self, store: Store, fact: Fact) -> None:
        self.audit.take(fact)
        need(not self.audit.violations, "audit", self.audit.violations)
        match fact:
            case Committed():
                self._commit(store, fact.decision, fact.result)
                self._book(fact.decision.rows)
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
            case PhaseChanged(phase="closing"):
                self._check_spent()
            case LifeStarted():
                self.newest[fact.learner] = fact.life
                self.saw["rejoined in a new life"] += fact.life > 1
                self.saw["rejoined in mid-round"] += fact.life > 1 and self.world.has_open_round

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
        state, run = self.audit.state, self.world.scenario.config.run
        assert state is not None
        if run.minutes or any(self.since):
            return
        steps = tokens = 0
        more_steps = more_tokens = 0  # at most, contributed on a link before anybody knew how long it would be
        for (learner, life), process in self.lives.items():
            account = state.ledger.account(learner, life)
            seen, told = Span(0, account.step), {Span(at.from_step, at.to_step) for at in account.alone}
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

    def _book(self, rows: tuple[Row, ...]) -> None:
        for row in rows:
            key = (row.learner, row.life, row.fragment)
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
                self.merged_to[key] = row.to_step
                self.merged_seq[key] = row.seq
            else:
                self.discarded[key].append(Span(row.from_step, row.to_step))

    # ------------------------------------------------------------------------------------------ the wire

    def check_leaving(self, learner: str, message: Message, payload: Payload | None) -> None:
        """What a message of the syncer speaks of is durable when it leaves: it may arrive, whatever comes then."""
        match message:
            case Welcome():
                is_known = self.newest.get(message.learner, 0) >= message.life
                need(
                    is_known, "I13 fencing", f"life {message.life} of {message.learner} leaves before it is on the disk"
                )
            case Publication():
                self._check_publication(learner, message, payload)
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
        for name in ("fragments", "lives", "epoch", "phase", "merges", "kept", "last_kept"):
            need(getattr(state, name) == getattr(told, name), "I5 atomic", f"{name} after a restart: {state}")
        need(state.ledger.merged == told.ledger.merged, "I5 atomic", f"{state.ledger.totals()}")
        for p, fragment in enumerate(syncer.node.machine.state.fragments):
            need(fragment.version >= self.seen[p], "I4 acked is durable", f"{p}.{fragment.version} < {self.seen[p]}")

    # ------------------------------------------------------------------------------------------ learners

    def born(self, process: LearnerProcess, life: int) -> None:
        need((process.name, life) not in self.lives, "I13 fencing", f"life {life} of {process.name} was given twice")
        need(self.newest.get(process.name, 0) >= life, "I13 fencing", f"life {life} leaves before it is on the disk")
        self.lives[process.name, life] = process

    def check_learner(self, process: LearnerProcess) -> None:
        """Whatever is prepared or queued: nothing goes back, and every unit of its work is somewhere."""
        node, machine = process.node, process.node.machine
        if machine is None:
            return
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
