"""The audit of a tape: each fact is held against the invariants of a run, in the order it was written.

Pure, incremental and fast: a fact costs its own size (a fold and the end cost the books'). The simulator, chaos and
replay use the same one. What a merge has to be is worked out by rules of its own (`core/expected.py`), never by those
that decide. The first bad fact is the last one judged: what follows it would be held against books that are
wrong. A violation is one line: the invariant (`INVARIANTS`), the fact, and the values that disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import msgspec

from skerry import config as configs
from skerry.core import expected
from skerry.core.expected import Brought, HowFar
from skerry.core.facts import (
    Buffered,
    Checkpointed,
    Committed,
    Decision,
    Discarded,
    Entry,
    EpochStarted,
    Evaluated,
    Fact,
    Injected,
    Kept,
    LifeStarted,
    Lineage,
    Ordered,
    Paused,
    PhaseChanged,
    Pruned,
    Restored,
    RolledBack,
    Row,
    RunCreated,
    Sampled,
    Seen,
    SteppedBack,
    Witnessed,
)
from skerry.core.ledger import MERGED, Account, Ledger, Settled
from skerry.core.state import RunState, created
from skerry.core.vocabulary import PHASES

HASH_BYTES = 32  # of a commit
UNREADABLE = (msgspec.MsgspecError, RecursionError)  # what a fact has encoded may be anything, and nested without end
INVARIANTS = {
    "I1": "no contribution is merged twice, merged ranges never overlap",
    "I2": "rows tile each life's work; after the end nothing is pending and nothing is settled",
    "I3": "versions and parents form one line; weights, order and settings of a merge are what the run's say",
    "I5": "a fold is the state after everything before it",
    "I11": "a merge has its quorum, and the quorum is the configured one",
    "I12": "a contribution's base is a version there was, and not one that was rolled back",
    "I13": "epochs and lives rise by one; only the current epoch commits; only lives that began have work",
    "I15": "the state comes from the run's creation, which happens once",
    "I18": "a kept version is made of checkpoints; a rollback takes every fragment to one, or none",
    "I21": "work is booked as expelled only of learners that were turned out",
    "I23": (
        "an order changes what it says and nothing else; a decision goes by the configuration of the orders before it; "
        "who is dropped begins no life before it is readmitted"
    ),
    "budget": (
        "the closing begins when it is spent or an order says so; what was spent stays spent under another budget; "
        "neither what is discarded nor what a learner did alone for longer than the run's bound spends any of it"
    ),
    "clock": "time and progress never go back",
    "phase": "phases never go back",
}
CLOCK_SLACK_S = 1e-6  # `now - (now - elapsed)` is not quite `elapsed`
START = HowFar(0.0, Fraction(0))
FOLDED = (
    "created", "fragments", "epoch", "phase", "before_close", "elapsed_s",
    "merges", "merges_alone", "contributors", "ready", "kept", "last_kept", "first_segment", "buffers",
    "config_set", "orders", "budgets", "budget_since", "dropped", "is_finishing",
)  # fmt: skip


class Era(NamedTuple):
    """The time between two orders: the configuration in force, and how far the run was when it began and ended."""

    config: configs.Config
    began: HowFar
    ended: HowFar | None = None  # of the last one nobody knows yet


class Audit:
    """Take every record of a tape, from its first or from a fold; `state` is the run after the last good one."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.checks = 0
        self.state: RunState | None = None
        self._eras: dict[int, Era] = {}  # by how many orders there were; those before what was read are not known
        self._last: dict[int, Decision] = {}  # fragment -> its newest merge
        self._merges: dict[int, int] = {}  # fragment -> how many there were with it
        self._digests: dict[tuple[int, int], tuple[bytes, bytes]] = {}  # of each version, as far as it was read
        self._journal_end = (0, 0)  # where the last entry ends: its file and offset
        self._at_epoch = (0, 0.0, 0)  # orders, progress and merges then: rounds do not survive a restart, none is older
        self._expelled: set[str] | None = set()  # learners that were turned out; None: some were before what was read
        self._fact: Fact | RunState | None = None

    @property
    def _config(self) -> configs.Config:
        """That is in force: of the newest era, which is the last that was put in."""
        return self._eras[next(reversed(self._eras))].config

    def __repr__(self) -> str:
        return f"<audit checks={self.checks} violations={self.violations}>"

    def take(self, fact: Fact | RunState) -> None:
        if self.violations:
            return
        self._fact = fact
        if self.state is None:
            self._begin(fact)
        elif isinstance(fact, RunState):
            self._fold(self.state, fact)
        else:
            self._judge(self.state, fact)
            if not self.violations:
                self.state.apply(fact)
                self._remember(self.state, fact)

    def _remember(self, state: RunState, fact: Fact) -> None:
        if isinstance(fact, Witnessed) and fact.what == "expelled" and self._expelled is not None:
            self._expelled.add(fact.learner)
        if isinstance(fact, Ordered):
            self._begin_era(state, fact)
        if isinstance(fact, Committed):
            p, entry = fact.decision.fragment, fact.result.entry
            self._last[p] = fact.decision
            self._merges[p] = state.merges
            self._journal_end = (entry.file, entry.offset + entry.size)
        if isinstance(fact, Committed | SteppedBack | Restored):
            p = fact.decision.fragment if isinstance(fact, Committed) else fact.fragment
            at = state.fragments[p]
            self._digests[p, at.version] = (at.digest, at.state)

    def _demand(self, is_right: bool, invariant: str, text: str, *values: object) -> bool:
        self.checks += 1
        if not is_right:
            self.violations.append(f"{invariant}: {_name(self._fact)}: {text.format(*values)}")
        return is_right

    # ------------------------------------------------------------------------------------------ the beginning, folds

    def _begin(self, fact: Fact | RunState) -> None:
        if not self._demand(isinstance(fact, RunCreated | RunState), "I15", "the tape does not begin with a run"):
            return
        assert isinstance(fact, RunCreated | RunState)
        about = fact if isinstance(fact, RunCreated) else fact.created
        count = len(about.files)
        counts = {len(about.digests), len(about.states), len(about.thetas)}
        if not self._demand(counts == {count} and count > 0, "I15", "{} files, {} digests", count, counts):
            return
        try:
            tabled = len(msgspec.json.decode(about.fragments, type=list[msgspec.Raw]))
        except UNREADABLE as error:
            self._demand(False, "I15", "its fragment table cannot be read ({})", error)
            return
        if not self._demand(tabled == count, "I15", "{} files, {} fragments in its table", count, tabled):
            return
        self._lineage(about.lineage)
        try:
            config = configs.decode(fact.config)
        except UNREADABLE as error:
            self._demand(False, "I15", "its configuration cannot be read ({})", error)
            return
        self._eras = {0: Era(config, START)}
        self.state = created(about)
        for p, digests in enumerate(zip(about.digests, about.states, strict=True)):
            self._digests[p, 0] = digests
        if isinstance(fact, RunState):
            is_whole = fact.phase in PHASES and len(fact.fragments) == count
            self._demand(is_whole, "I5", "phase {}, {} of {} fragments", fact.phase, len(fact.fragments), count)
            self._books(fact.ledger, count)
            self._journal_end, self._expelled = (fact.journal_file, 0), None
            self._eras = {fact.orders: Era(config, START)}
            self._adopt(fact)

    def _lineage(self, lineage: Lineage | None) -> None:
        """A fork names one commit of its parent's tape, and versions that this parent had."""
        if lineage is None:
            return
        versions = lineage.versions
        self._demand(len(lineage.head) == HASH_BYTES, "I15", "its parent's commit is {} bytes", len(lineage.head))
        self._demand(len(versions) > 0 and min(versions) >= 0, "I15", "its parent's versions are {}", versions)
        is_start = lineage.kept != 0 or not any(versions)
        self._demand(is_start, "I15", "version 0 of its parent, at versions {}", versions)

    def _fold(self, state: RunState, fact: RunState) -> None:
        """What the syncer has heard but not written yet may be in a fold: positions seen, and progress."""
        for field in FOLDED:
            mine, said = getattr(state, field), getattr(fact, field)
            self._demand(mine == said, "I5", "{} is {}, the facts before it say {}", field, said, mine)
        self._demand(
            _lives_agree(state, fact), "I5", "lives are {}, the facts before it say {}", fact.lives, state.lives
        )
        file, end = fact.journal_file, self._journal_end[0]
        self._demand(file in (0, end), "I5", "the journal's newest file is {}, the facts before it say {}", file, end)
        self._demand(
            state.progress <= fact.progress <= 1, "I5", "progress is {}, was {}", fact.progress, state.progress
        )
        mine, said = state.ledger, fact.ledger
        sums, sums_said = (mine.merged, mine.discarded), (said.merged, said.discarded)
        self._demand(sums == sums_said, "I5", "settled are {}, the facts before it say {}", sums_said, sums)
        steps, steps_said = mine.discarded_steps, said.discarded_steps
        is_told = steps_said in (0, steps)  # the first builds of this format did not count them
        self._demand(is_told, "I5", "steps discarded are {}, the facts before it say {}", steps_said, steps)
        if self._books(said, len(state.fragments)):
            self._accounts(fact, mine, said)
        self._adopt(fact)

    def _books(self, ledger: Ledger, count: int) -> bool:
        """They are whole by themselves: nothing settled that was not produced, and the sums balance."""
        accounts = ledger.accounts
        is_whole = all(len(a.settled) == count for a in accounts.values())
        if not self._demand(is_whole and ledger.fragment_count == count, "I5", "books of another number of fragments"):
            return False
        for key, a in accounts.items():
            is_covered = all(s.step <= a.step and s.tokens <= a.tokens for s in a.settled)
            self._demand(is_covered, "I2", "{} has more settled than produced: {}", key, a)
        totals = ledger.totals()
        steps = sum(a.step for a in accounts.values()) + sum(past.steps for past in ledger.past.values())
        self._demand(totals.balance == 0, "I2", "the books do not balance: {}", totals)
        self._demand(min(ledger.kept) >= 0, "I20", "more is left out of the budget than was done: {}", ledger.kept)
        said = (ledger.produced, ledger.steps)
        return self._demand(
            said == (totals.produced, steps), "I2", "{} produced in steps {}", said, (totals.produced, steps)
        )

    def _accounts(self, fact: RunState, mine: Ledger, said: Ledger) -> None:
        self._demand(mine.past == said.past, "I5", "past lives are {}, the facts say {}", said.past, mine.past)
        nothing = Account([Settled() for _ in range(mine.fragment_count)])
        for key in mine.accounts.keys() | said.accounts.keys():
            learner, _, life = key.rpartition("/")
            known = fact.lives.get(learner)
            began = known is not None and life in map(str, range(1, known.life + 1))
            self._demand(began, "I13", "an account of {}, which never began", key)
            a, b = mine.accounts.get(key, nothing), said.accounts.get(key, nothing)
            self._demand(a.settled == b.settled, "I5", "{} settled {}, the facts say {}", key, b.settled, a.settled)
            self._demand(b.step >= a.step and b.tokens >= a.tokens, "I5", "{} went back: {} after {}", key, b, a)

    def _adopt(self, fact: RunState) -> None:
        if not self.violations:  # a copy: the caller's may be the syncer's own, which goes on
            self.state = msgspec.msgpack.decode(msgspec.msgpack.encode(fact), type=RunState)

    # ------------------------------------------------------------------------------------------ facts

    def _judge(self, state: RunState, fact: Fact) -> None:
        match fact:
            case RunCreated():
                self._demand(False, "I15", "a run is created once")
            case EpochStarted():
                self._demand(fact.epoch == state.epoch + 1, "I13", "epoch {} after {}", fact.epoch, state.epoch)
                self._at_epoch = (state.orders, state.progress, state.merges)
            case LifeStarted():
                self._open(state, fact.elapsed_s)
                self._life_started(state, fact)
            case Committed():
                self._decided(state, fact.decision)
                self._entered(fact.result.entry)
            case Checkpointed():
                self._checkpointed(state, fact)
            case SteppedBack():
                self._stepped_back(state, fact)
            case Kept():
                self._open(state, fact.elapsed_s)
                self._kept(state, fact)
            case RolledBack():
                self._rolled_back(state, fact)
            case Pruned():
                self._pruned(state, fact)
            case Discarded():
                self._open(state, fact.elapsed_s)
                self._demand(bool(fact.rows), "I2", "nothing is discarded")
                merged = [row for row in fact.rows if row.fate == MERGED]
                self._demand(not merged, "I3", "merged outside any commit: {}", merged)
                self._turned_out(fact.rows)
                self._seen(state, fact.seen)
                self._rows(state, fact.rows)
            case Buffered():
                self._open(state, fact.elapsed_s)
                self._began(state, fact.learner, fact.life)
                before = state.buffers.get(fact.learner)
                was = (before.life, before.step, before.tokens) if before else (0, 0, 0)
                now = (fact.life, fact.step, fact.tokens)
                self._demand(now >= was, "I13", "buffers of {} at {} after {}", fact.learner, now, was)
            case Paused():
                self._clock(state, fact.elapsed_s)
                self._seen(state, fact.seen)
            case PhaseChanged():
                self._open(state, fact.elapsed_s)
                self._phase_changed(state, fact)
            case Ordered():
                self._open(state, fact.elapsed_s)
                self._obeyed(state, fact)
            case Witnessed():
                self._open(state, fact.elapsed_s)
                self._began(state, fact.learner, fact.life)
            case Sampled():
                self._open(state, fact.elapsed_s)
                for sample in fact.samples:
                    self._began(state, sample.learner, sample.life)
            case Restored():
                self._restored(state, fact)
            case Evaluated():
                self._evaluated(state, fact)
            case Injected():
                pass

    # ------------------------------------------------------------------------------------------ orders

    def _obeyed(self, state: RunState, fact: Ordered) -> None:
        self._demand(bool(fact.by), "I23", "nobody gave it")
        is_about = bool(fact.learner) == (fact.verb in ("drop", "readmit"))
        self._demand(is_about, "I23", "{} of {!r}", fact.verb, fact.learner)
        was, now = fact.progress_before, fact.progress
        self._demand(state.progress <= was <= 1, "clock", "progress {} after {}", was, state.progress)
        has_config = bool(fact.config) == bool(fact.changes) == (fact.verb in ("set", "extend"))
        if not self._demand(has_config, "I23", "{} with {} changes", fact.verb, len(fact.changes)):
            return
        match fact.verb:
            case "finish":
                is_first = state.phase == "training" and not state.is_finishing
                self._demand(is_first, "phase", "in phase {}", state.phase)
            case "drop":
                is_in = fact.learner in state.lives and fact.learner not in state.dropped
                self._demand(is_in, "I23", "{} was not in", fact.learner)
            case "readmit":
                self._demand(fact.learner in state.dropped, "I23", "{} was not out", fact.learner)
            case "set" | "extend":
                self._reconfigured(state, fact)
        if fact.verb != "extend":
            self._demand(was == now, "budget", "{} spent before it, {} behind it", was, now)

    def _reconfigured(self, state: RunState, fact: Ordered) -> None:
        """It changes the keys that it names, of which the budget is one if and only if it extends."""
        is_open = state.phase in ("created", "training") and not state.is_finishing
        self._demand(is_open, "phase", "in phase {}", state.phase)
        try:
            before, after = self._config, configs.decode(fact.config)
        except UNREADABLE as error:
            self._demand(False, "I23", "its configuration cannot be read ({})", error)
            return
        said = [(one.key, one.before, one.after) for one in fact.changes]
        differ = configs.changes(before, after)
        told = [(key, *(msgspec.json.encode(value).decode() for value in values)) for key, *values in differ]
        self._demand(said == told, "I23", "says {}, changes {}", said, told)
        is_budget = {key for key, *_ in told} <= {"run.tokens", "run.steps", "run.minutes"}
        self._demand(is_budget == (fact.verb == "extend"), "I23", "{} of {}", fact.verb, told)
        was, now = fact.progress_before, fact.progress
        is_right = now <= 1 and expected.is_carried_over(was, now, before.run, after.run)
        self._demand(is_right, "budget", "{} spent before it, {} behind it", was, now)

    def _begin_era(self, state: RunState, fact: Ordered) -> None:
        """Behind the fact, which the state has in it by now."""
        last = self._eras[state.orders - 1]
        ended = HowFar(fact.progress_before, self._warmth(last.config, state, state.merges))
        self._eras[state.orders - 1] = last._replace(ended=ended)
        config = configs.decode(fact.config) if fact.config else last.config
        began = HowFar(fact.progress, self._warmth(config, state, state.merges))
        self._eras[state.orders] = Era(config, began)
        if fact.verb == "drop" and self._expelled is not None:
            self._expelled.add(fact.learner)

    def _turned_out(self, rows: Iterable[Row]) -> None:
        """Only whom the tape says to be turned out has work that is booked so."""
        if self._expelled is not None:
            strange = [r for r in rows if r.fate == "expelled" and r.learner not in self._expelled]
            self._demand(not strange, "I21", "it was never turned out: {}", strange)

    def _evaluated(self, state: RunState, fact: Evaluated) -> None:
        newest = tuple(at.version for at in state.fragments)
        were = len(fact.versions) == len(newest) and all(
            0 <= v <= n for v, n in zip(fact.versions, newest, strict=True)
        )
        self._demand(were, "I3", "evaluated {}, the newest are {}", fact.versions, newest)
        upto = 1.0 if state.budgets else state.progress  # it may be a share of an earlier budget
        is_there = 0 <= fact.progress <= upto and 0 <= fact.tokens <= state.ledger.merged
        self._demand(is_there, "I3", "evaluated with {} tokens, {} are merged", fact.tokens, state.ledger.merged)

    def _life_started(self, state: RunState, fact: LifeStarted) -> None:
        known = state.lives.get(fact.learner)
        self._demand(fact.learner not in state.dropped, "I23", "{} begins a life, and was dropped", fact.learner)
        next_index = 1 + max((at.index for at in state.lives.values()), default=-1)
        life, index = (known.life + 1, known.index) if known else (1, next_index)
        self._demand(fact.life == life, "I13", "life {} where {} is next", fact.life, life)
        self._demand(fact.index == index, "I13", "index {}, expected {}", fact.index, index)
        for name in fact.forgotten:
            at = state.lives.get(name)
            is_nobody = at is not None and name != fact.learner and not state.ledger.has_worked(name, at.life)
            self._demand(is_nobody, "I2", "{} is forgotten, and has worked or was never there", name)
        self._seen(state, fact.seen)
        before = state.ledger.lives_folded(fact.learner)
        is_over = 0 <= fact.folded < max(1, life - 1) and (not fact.folded or fact.folded >= before)
        self._demand(is_over, "I2", "sums up lives to {}, {} of which {} are", fact.folded, life, before)
        known_to = {s.life: (s.step, s.tokens) for s in fact.seen if s.learner == fact.learner}
        for n in range(before + 1, fact.folded + 1):
            account = state.ledger.accounts.get(f"{fact.learner}/{n}", Account([]))
            end = max(known_to.get(n, (0, 0)), (account.step, account.tokens))
            is_settled = all((s.step, s.tokens) == end for s in account.settled) and (account.settled or end == (0, 0))
            self._demand(bool(is_settled), "I2", "life {} of {} is not settled: {}", n, fact.learner, account)

    def _phase_changed(self, state: RunState, fact: PhaseChanged) -> None:
        follows = PHASES.index(state.phase) + 1
        is_next = follows < len(PHASES) and fact.phase == PHASES[follows]
        self._demand(is_next, "phase", "{} after {}", fact.phase, state.phase)
        self._seen(state, fact.seen)
        if fact.phase == "closing":
            versions = tuple(f.version for f in state.fragments)
            self._demand(fact.versions == versions, "I3", "begins with {}, the newest are {}", fact.versions, versions)
            self._spent(state, fact.seen)
        if fact.phase == "closed":
            self._nothing_pending(state, {f"{s.learner}/{s.life}": s for s in fact.seen})

    def _spent(self, state: RunState, seen: Iterable[Seen]) -> None:
        """The closing begins when the budget is spent, by work that is not discarded, or when an order says so."""
        if state.is_finishing:
            return
        (steps, tokens), count = state.ledger.kept, len(state.fragments)
        for at in seen:
            known = state.ledger.accounts.get(f"{at.learner}/{at.life}", Account([Settled()] * count))
            steps += max(0, at.step - known.step) * count
            tokens += max(0, at.tokens - known.tokens) * count
            if not known.alone or at.alone.to_step > known.alone[-1].to_step:
                steps -= sum(max(0, at.alone.to_step - max(at.alone.from_step, s.step)) for s in known.settled)
                tokens -= sum(max(0, at.alone.to_tokens - max(at.alone.from_tokens, s.tokens)) for s in known.settled)
        spent = expected.spent(self._config.run, count, steps, tokens)
        is_spent = spent is None or spent >= 1 - expected.ROUNDING
        self._demand(is_spent, "budget", "{} of it is spent", spent and float(spent))

    def _nothing_pending(self, state: RunState, seen: dict[str, Seen]) -> None:
        for key, account in state.ledger.accounts.items():
            last = seen.pop(key, account)
            end = (max(last.step, account.step), max(last.tokens, account.tokens))
            for p, s in enumerate(account.settled):
                self._demand((s.step, s.tokens) == end, "I2", "{} settled on {} up to {}, not {}", key, p, s, end)
        unsettled = [key for key, last in seen.items() if last.step > 0]
        self._demand(not unsettled, "I2", "nothing of {} is settled", unsettled)

    def _restored(self, state: RunState, fact: Restored) -> None:
        if self._demand(0 <= fact.fragment < len(state.fragments), "I3", "there is no such fragment"):
            at = state.fragments[fact.fragment]
            self._demand(fact.version == at.version, "I3", "version {}, the newest is {}", fact.version, at.version)
            self._demand(fact.digest == at.digest, "I3", "digest {}, was {}", fact.digest.hex(), at.digest.hex())

    def _checkpointed(self, state: RunState, fact: Checkpointed) -> None:
        if self._demand(0 <= fact.fragment < len(state.fragments), "I3", "there is no such fragment"):
            at = state.fragments[fact.fragment]
            is_new = at.checkpoints[-1].version < fact.version <= at.version
            last, newest = at.checkpoints[-1].version, at.version
            self._demand(
                is_new, "I5", "version {}, the last checkpoint is {}, the newest {}", fact.version, last, newest
            )

    # ------------------------------------------------------------------------------------------ kept versions

    def _kept(self, state: RunState, fact: Kept) -> None:
        number = 1 + (state.last_kept.number if state.last_kept else 0)
        self._demand(fact.number == number, "I18", "number {} where {} is next", fact.number, number)
        self._demand(0 <= fact.progress <= 1, "clock", "progress {}", fact.progress)
        counts = {len(fact.versions), len(fact.files), len(state.fragments)}
        if not self._demand(len(counts) == 1, "I18", "versions, files and fragments number {}", counts):
            return
        for p, (at, *named) in enumerate(zip(state.fragments, fact.versions, fact.files, strict=True)):
            is_there = named in [[c.version, c.file] for c in at.checkpoints]
            self._demand(is_there, "I18", "fragment {}: version {} in {} is no checkpoint", p, *named)

    def _rolled_back(self, state: RunState, fact: RolledBack) -> None:
        """Every fragment has the state of the kept version, in a version that this epoch made."""
        self._demand(state.phase in ("created", "training"), "phase", "in phase {}", state.phase)
        self._demand(0 < fact.epoch == state.epoch, "I13", "epoch {}, current is {}", fact.epoch, state.epoch)
        version = state.kept_version(fact.number)
        if version is None:
            self._demand(False, "I18", "version {} is not kept", fact.number)
            return
        for p, (at, checkpoint) in enumerate(zip(state.fragments, version.checkpoints, strict=True)):
            is_it = at.state == checkpoint.state and at.version > checkpoint.version
            what = "fragment {}: version {} is not version {} of kept version {}"
            self._demand(is_it, "I18", what, p, at.version, checkpoint.version, fact.number)

    def _pruned(self, state: RunState, fact: Pruned) -> None:
        first, known = state.first_segment, {version.number for version in state.kept}
        self._demand(fact.segment >= first, "I5", "begins with segment {}, began with {}", fact.segment, first)
        self._demand(known.issuperset(fact.kept), "I18", "removes {}, kept are {}", fact.kept, sorted(known))

    # ------------------------------------------------------------------------------------------ commits

    def _entered(self, entry: Entry) -> None:
        """Entries of the journal follow each other, and none is on another."""
        file, offset = self._journal_end
        is_behind = entry.size >= 0 and (entry.file > file or (entry.file == file and entry.offset >= offset))
        self._demand(is_behind, "I5", "its entry {} begins before byte {} of file {}", entry, offset, file)

    def _decided(self, state: RunState, d: Decision) -> None:
        if not self._next_version(state, d):
            return
        at, last = state.fragments[d.fragment], self._last.get(d.fragment)
        # A merge may take a while, so only commits of one fragment are in the order in which they were decided.
        elapsed_s = last.elapsed_s if last else 0.0
        self._demand(self._goes_on(last, d), "clock", "progress {} after {}", d.progress, last and last.progress)
        is_later = elapsed_s - CLOCK_SLACK_S <= d.elapsed_s < math.inf
        self._demand(is_later, "clock", "{} s of training after {} s", d.elapsed_s, elapsed_s)
        self._seen(state, d.seen)
        if not self.violations:
            self._rows(state, d.rows)
            merged = [row for row in d.rows if row.fate == MERGED]
            self._merged(d, merged, at.since)
            self._quorum(state, d, len(merged))
            self._settings(state, d, self._since(state, d, last))
            if not self.violations:  # of rows and an H that are sound
                self._gain(d, merged, at.merged_in)

    def _goes_on(self, last: Decision | None, d: Decision) -> bool:
        """What is spent only grows, whatever budget it is a share of."""
        if last is None or last.orders == d.orders:
            return (last.progress if last else 0.0) <= d.progress <= 1
        was, now = self._eras.get(last.orders), self._eras.get(d.orders)
        if was is None or now is None or last.orders > d.orders:
            return last.orders < d.orders and d.progress <= 1
        spent = Fraction(last.progress) * expected.budget(was.config.run)
        return d.progress <= 1 and Fraction(d.progress) * expected.budget(now.config.run) >= spent * (
            1 - expected.ROUNDING
        )

    def _since(self, state: RunState, d: Decision, last: Decision | None) -> dict[int, tuple[HowFar, HowFar]] | None:
        """By orders, how far the run was in each era in which the round of this merge may have been opened.

        No earlier than the merge of its fragment before it, and than the process that decided. None: not all are known.
        """
        began = (last.orders, last.progress, self._merges.get(d.fragment, 0)) if last else (0, 0.0, 0)
        first = max(began[0], self._at_epoch[0])
        those = [one for one in (began, self._at_epoch) if one[0] == first]
        spans: dict[int, tuple[HowFar, HowFar]] = {}
        for n in range(first, d.orders + 1):
            if (era := self._eras.get(n)) is None:
                return None
            start, end = era.began, era.ended
            if n == first:
                merges = max(merges for *_, merges in those)
                start = HowFar(max(progress for _, progress, _ in those), self._warmth(era.config, state, merges))
            if n == d.orders or end is None:
                end = HowFar(d.progress, self._warmth(era.config, state, state.merges))
            spans[n] = (start, end)
        return spans

    def _next_version(self, state: RunState, to: Decision | SteppedBack) -> bool:
        if not self._demand(0 <= to.fragment < len(state.fragments), "I3", "there is no such fragment"):
            return False
        at = state.fragments[to.fragment]
        self._demand(to.version == at.version + 1, "I3", "version {} after {}", to.version, at.version)
        self._demand(to.parent == at.digest, "I3", "parent {}, was {}", to.parent.hex(), at.digest.hex())
        self._demand(0 < to.epoch == state.epoch, "I13", "epoch {}, current is {}", to.epoch, state.epoch)
        return True

    def _stepped_back(self, state: RunState, fact: SteppedBack) -> None:
        if self._next_version(state, fact):
            is_back = 0 <= fact.to < fact.version
            self._demand(is_back, "I3", "goes back to {} from {}", fact.to, fact.version - 1)
            said = (fact.digest, fact.state)
            its = self._digests.get((fact.fragment, fact.to), said)
            self._demand(said == its, "I3", "digests {}, version {} has {}", said, fact.to, its)

    def _merged(self, d: Decision, merged: Sequence[Row], since: int) -> None:
        """In learner-id order, each with its own weight, codec and base; what is given up is only what lies before."""
        learners, order = [row.learner for row in merged], [row.learner for row in d.rows]
        is_ordered = learners == sorted(set(learners)) and order == sorted(order)
        self._demand(is_ordered, "I3", "settled in the order {}, merged {}", order, learners)
        who = {(row.learner, row.life) for row in merged}
        its = [r for r in d.rows if r.fragment == d.fragment and r.fate in (MERGED, "fast-forward")]
        strange = [r for r in d.rows if r not in its or (r.learner, r.life) not in who]
        self._demand(not strange, "I3", "settles what it does not merge: {}", strange)
        if not self._demand(len(d.parts) == len(merged), "I3", "{} merged in {} parts", len(merged), len(d.parts)):
            return
        wire = self._config.wire
        codecs = {wire.codec_up, "fp32"} if d.is_closing else {wire.codec_up}
        for row, part in zip(merged, d.parts, strict=True):
            name, codec, base, weight = row.learner, part.codec, part.base_version, part.weight
            due = expected.weight(row.tokens, row.steps)
            self._demand(0 < weight == due, "I3", "{} weighs {}, not {}", name, weight, due)
            self._demand(codec in codecs, "I3", "{} came in {}, not in {}", name, codec, sorted(codecs))
            self._demand(since <= base < d.version, "I12", "{} is relative to version {}", name, base)

    def _quorum(self, state: RunState, d: Decision, merged: int) -> None:
        """What is left at the end is merged by however few have it."""
        known = len(state.lives)
        self._demand(0 <= d.ready <= known, "I11", "{} ready of {} learners that ever joined", d.ready, known)
        is_left = d.reason != "everyone is leaving" or d.ready == 0
        self._demand(is_left, "I11", "closed because {}, with {} ready", d.reason, d.ready)
        is_last = (d.reason == "the last work") == d.is_closing
        self._demand(is_last, "I11", "closed because {}, in stage {}", d.reason, d.stage)
        self._demand(0 <= d.open_s < math.inf, "clock", "its round was open for {} s", d.open_s)
        self._demand(1 <= d.quorum <= merged, "I11", "{} merged, quorum {}", merged, d.quorum)
        last = self._last.get(d.fragment)
        first = max(last.orders if last else 0, self._at_epoch[0])
        is_known = first <= d.orders <= state.orders
        if not self._demand(is_known, "I23", "decided by {} orders, not {} to {}", d.orders, first, state.orders):
            return
        era = self._eras.get(d.orders)
        if era is None:
            return  # it was decided before what was read
        configured = 1 if d.is_closing else era.config.sync.quorum
        is_right = expected.is_quorum(d.quorum, configured, d.ready)
        self._demand(is_right, "I11", "quorum {} with {} ready, configured {}", d.quorum, d.ready, configured)

    def _gain(self, d: Decision, merged: Sequence[Row], merged_in: Mapping[str, int]) -> None:
        before = d.version - 1  # who has never been merged counts as if it had been in there
        brought = [Brought(row.tokens, row.steps, d.version - merged_in.get(row.learner, before)) for row in merged]
        is_right, due = expected.is_gain(d.gain, brought, d.every), expected.gain(brought, d.every)
        self._demand(is_right, "I3", "takes {} of its delta, not {}", d.gain, due)

    def _settings(self, state: RunState, d: Decision, spans: Mapping[int, tuple[HowFar, HowFar]] | None) -> None:
        """What its stage says; that is the stage when its round was opened: not on the tape, but in one of `spans`."""
        if spans is None:
            return  # some of it was before what was read
        config, configured = self._eras[d.orders].config, [self._eras[n].config for n in spans]
        if d.is_closing:
            is_possible = state.phase == "closing"
        else:
            stages = (expected.stages(self._eras[n].config, *span) for n, span in spans.items())
            is_possible = state.phase in ("training", "closing") and any(d.stage in those for those in stages)
        what, steps = d.stage or "closing", self._warmth(config, state, state.merges)
        self._demand(is_possible, "phase", "a {} merge at {}, {} steps, run {}", what, d.progress, steps, state.phase)
        every = expected.sync_every(config.sync, d.stage)
        self._demand(d.sync_every == every, "I3", "H = {}, not {}", d.sync_every, every)
        least = min(expected.sync_every(each.sync, d.stage) for each in configured)
        self._demand(d.every >= least, "I3", "H = {} was asked for, {} is configured", d.every, least)
        codecs = ("fp32", "fp32") if d.is_closing else (config.wire.codec_down, "bf16")
        due = (*expected.recipe(config, d.stage), *codecs)
        said = (d.rule, d.outer, d.lr, d.momentum, d.delay, d.restart, d.codec, d.delta)
        self._demand(said == due, "I3", "merged by {}, configured {}", said, due)

    def _warmth(self, config: configs.Config, state: RunState, merges: int) -> Fraction:
        """What the warm stage is counted in."""
        return expected.steps_merged(config, len(state.fragments), merges)

    # ------------------------------------------------------------------------------------------ small things

    def _open(self, state: RunState, elapsed_s: float) -> None:
        self._demand(state.phase != "closed", "I2", "written after the end")
        self._clock(state, elapsed_s)

    def _clock(self, state: RunState, elapsed_s: float) -> None:
        is_later = state.elapsed_s - CLOCK_SLACK_S <= elapsed_s < math.inf
        self._demand(is_later, "clock", "{} s of training after {} s", elapsed_s, state.elapsed_s)

    def _began(self, state: RunState, learner: str, life: int) -> bool:
        known = state.lives.get(learner)
        newest = known.life if known else 0
        return self._demand(1 <= life <= newest, "I13", "life {} of {}, the newest is {}", life, learner, newest)

    def _seen(self, state: RunState, seen: Iterable[Seen]) -> None:
        for one in seen:
            if not self._began(state, one.learner, one.life):
                continue
            at = state.ledger.accounts.get(f"{one.learner}/{one.life}", Account([]))
            self._was_alone(at, one)
            if state.phase == "closed":
                is_old = one.step <= at.step and one.tokens <= at.tokens
                self._demand(is_old, "I2", "produced after the end: {}", one)

    def _was_alone(self, at: Account, one: Seen) -> None:
        """A stretch that spends no budget is longer than the bound, was done, and is apart from those before."""
        alone = one.alone
        if alone.to_step and alone not in at.alone:
            is_long = 0 < self._config.learner.alone_steps_max < alone.to_step - alone.from_step
            steps, tokens = max(one.step, at.step), max(one.tokens, at.tokens)
            is_done = alone.to_step <= steps and 0 <= alone.from_tokens <= alone.to_tokens <= tokens
            is_apart = all(alone.from_step >= before.to_step for before in at.alone)
            self._demand(is_long and is_done and is_apart, "budget", "it was not alone like that: {}", one)

    def _rows(self, state: RunState, rows: Iterable[Row]) -> None:
        """Each begins where the last of its life and fragment ended; rows of one fact follow each other too."""
        ends: dict[tuple[str, int, int], tuple[int, int, int]] = {}
        for row in rows:
            if not self._began(state, row.learner, row.life):
                return
            if not self._demand(0 <= row.fragment < len(state.fragments), "I2", "no such fragment: {}", row):
                return
            key = (row.learner, row.life, row.fragment)
            settled = state.ledger.settled(*key)
            step, tokens, seq = ends.get(key, (settled.step, settled.tokens, settled.seq))
            if row.fate == MERGED:
                is_new = row.seq > seq and row.from_step >= step
                self._demand(is_new, "I1", "merged again: {}, settled up to step {}, seq {}", row, step, seq)
            follows = (row.from_step, row.from_tokens) == (step, tokens)
            self._demand(follows, "I2", "{} does not begin at step {}, token {}", row, step, tokens)
            least = 1 if row.fate == MERGED else 0  # tokens; a step without any is still a step
            grows = row.steps >= 1 and row.tokens >= least
            self._demand(grows, "I2", "{} settles {} steps, {} tokens", row, row.steps, row.tokens)
            ends[key] = (row.to_step, row.to_tokens, max(seq, row.seq))


def _lives_agree(state: RunState, fold: RunState) -> bool:
    """The first builds of this format did not keep since when a life is there, nor that it is over."""
    said = {
        learner: msgspec.structs.replace(
            life, since=life.since or state.lives[learner].since, is_over=life.is_over or state.lives[learner].is_over
        )
        for learner, life in fold.lives.items()
        if learner in state.lives
    }
    return fold.lives.keys() == state.lives.keys() and said == state.lives


def _name(fact: Fact | RunState | None) -> str:
    """Which fact, in a few words."""
    match fact:
        case Committed():
            return f"Committed fragment {fact.decision.fragment} version {fact.decision.version}"
        case Checkpointed() | SteppedBack() | Restored():
            return f"{type(fact).__name__} fragment {fact.fragment} version {fact.version}"
        case Ordered():
            return f"Ordered {fact.verb} {fact.learner}".rstrip()
        case LifeStarted() | Witnessed() | Buffered():
            return f"{type(fact).__name__} {fact.learner}"
        case EpochStarted():
            return f"EpochStarted {fact.epoch}"
        case PhaseChanged():
            return f"PhaseChanged {fact.phase}"
        case Kept() | RolledBack():
            return f"{type(fact).__name__} {fact.number}"
        case _:
            return type(fact).__name__
