"""Every unit of work: produced, merged, discarded, pending.

The unit is one token's work on one fragment. For each (learner, life, fragment) the booked rows tile (0, settled], so
`produced = merged + discarded + pending` holds to the token: each row is booked once, each begins where the last ended.
Positions only grow. The ledger knows nothing of rounds, versions or messages.

Work that a learner did alone for too long has its fate like any other, but spends no budget: `kept` leaves it out. What
of it is discarded is left out once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct, field

from skerry.core.facts import Row, Seen, Stretch
from skerry.core.vocabulary import Fate

MERGED: Fate = "merged"
STRETCHES_MAX = 64  # done alone, of one life, that are not settled


class Settled(Struct):
    """Up to where one life's work on one fragment has its fate, and the newest contribution that has."""

    step: int = 0
    tokens: int = 0
    seq: int = 0


class Account(Struct):
    """One life: the highest position seen of it, and what is settled per fragment."""

    settled: list[Settled]
    step: int = 0
    tokens: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    step_gap_s_max: float = 0.0
    alone: list[Stretch] = field(default_factory=list)  # in order, apart from each other, and not settled but the last
    merged: int = 0  # in tokens x fragments


class Past(Struct):
    """The first lives of a learner, all of them settled, in sum."""

    lives: int = 0
    steps: int = 0
    tokens: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    step_gap_s_max: float = 0.0
    merged: int = 0  # in tokens x fragments

    def add(self, account: Account) -> None:
        self.steps += account.step
        self.tokens += account.tokens
        self.merged += account.merged
        self.bytes_up += account.bytes_up
        self.bytes_down += account.bytes_down
        self.step_gap_s_max = max(self.step_gap_s_max, account.step_gap_s_max)


class Totals(Struct):
    """Sums over lives and fragments, in tokens x fragments; `discarded` by reason."""

    produced: int = 0
    merged: int = 0
    pending: int = 0
    discarded: dict[Fate, int] = field(default_factory=dict)

    @property
    def balance(self) -> int:
        """Zero, always."""
        return self.produced - self.merged - sum(self.discarded.values()) - self.pending


class Work(NamedTuple):
    """Some of it, each times the fragments it was done on."""

    steps: int = 0
    tokens: int = 0


class Ledger(Struct):
    """The accounts of all lives; keys are "learner/life" so that the whole is plain data."""

    fragment_count: int
    accounts: dict[str, Account] = field(default_factory=dict)
    steps: int = 0  # of all lives
    produced: int = 0  # running sums, in tokens x fragments
    merged: int = 0
    discarded: dict[Fate, int] = field(default_factory=dict)
    discarded_steps: int = 0  # steps x fragments
    alone_steps: int = 0  # the same of what was done alone for too long and is not discarded,
    alone_tokens: int = 0  # and in tokens x fragments
    past: dict[str, Past] = field(default_factory=dict)  # by learner, of whom lives are over and settled

    @property
    def kept(self) -> Work:
        """What is merged, or may still be, and spends the budget."""
        steps = self.steps * self.fragment_count - self.discarded_steps - self.alone_steps
        return Work(steps, self.produced - sum(self.discarded.values()) - self.alone_tokens)

    def account(self, learner: str, life: int) -> Account:
        key = f"{learner}/{life}"
        if (account := self.accounts.get(key)) is None:
            account = self.accounts[key] = Account([Settled() for _ in range(self.fragment_count)])
        return account

    def settled(self, learner: str, life: int, fragment: int) -> Settled:
        return self.account(learner, life).settled[fragment]

    def lives_folded(self, learner: str) -> int:
        return self.past[learner].lives if learner in self.past else 0

    def before(self, learner: str, life: int) -> Work:
        """What earlier lives of the learner did, in steps and tokens."""
        past = self.past.get(learner, Past())
        known = (self.accounts.get(f"{learner}/{n}") for n in range(past.lives + 1, life))
        lives = [account for account in known if account is not None]
        return Work(past.steps + sum(a.step for a in lives), past.tokens + sum(a.tokens for a in lives))

    def merged_of(self, learner: str, life: int) -> int:
        """Tokens x fragments of one life, or no fewer where the books have it in sum."""
        is_past = life <= self.lives_folded(learner)
        return self.past[learner].merged if is_past else self.account(learner, life).merged

    def has_worked(self, learner: str, life: int) -> bool:
        """It took a step, in this life or an earlier one."""
        past = self.past.get(learner, Past())
        accounts = (self.accounts.get(f"{learner}/{n}") for n in range(past.lives + 1, life + 1))
        return past.steps > 0 or any(account is not None and account.step > 0 for account in accounts)

    def forget(self, learner: str, life: int) -> None:
        """A learner of this many lives, who has never worked: nothing of it is in any sum."""
        assert not self.has_worked(learner, life), (learner, life)
        for n in range(1, life + 1):
            self.accounts.pop(f"{learner}/{n}", None)
        self.past.pop(learner, None)

    def is_settled(self, learner: str, life: int) -> bool:
        account = self.accounts.get(f"{learner}/{life}")
        return account is None or all((at.step, at.tokens) == (account.step, account.tokens) for at in account.settled)

    def fold(self, learner: str, upto: int) -> None:
        """Lives up to this one are over and settled: their sums are kept, and nothing else of them."""
        if upto > self.lives_folded(learner):
            past = self.past.setdefault(learner, Past())
            for life in range(past.lives + 1, upto + 1):
                assert self.is_settled(learner, life), (learner, life)
                if (account := self.accounts.pop(f"{learner}/{life}", None)) is not None:
                    past.add(account)
            past.lives = upto

    def see(self, seen: Seen) -> bool:
        """Raise the produced position of a life, and say whether it was raised; older sightings change nothing.

        Nor do those of a life that is in sum: a merge may have been decided before it was, and have ended since.
        """
        if seen.life <= self.lives_folded(seen.learner):
            return False
        account = self.account(seen.learner, seen.life)
        is_new = (
            seen.step > account.step
            or seen.tokens > account.tokens
            or seen.bytes_up > account.bytes_up
            or seen.bytes_down > account.bytes_down
            or seen.step_gap_s_max > account.step_gap_s_max
            or seen.alone.to_step > _last(account).to_step
        )
        if not is_new:
            return False
        self._leave_out(account, seen.alone)
        self._raise(account, seen.step, seen.tokens)
        account.bytes_up = max(account.bytes_up, seen.bytes_up)
        account.bytes_down = max(account.bytes_down, seen.bytes_down)
        account.step_gap_s_max = max(account.step_gap_s_max, seen.step_gap_s_max)
        return True

    def seen(self, learner: str, life: int) -> Seen:
        a = self.account(learner, life)
        return Seen(learner, life, a.step, a.tokens, a.bytes_up, a.bytes_down, a.step_gap_s_max, _last(a))

    def book(self, rows: Iterable[Row]) -> None:
        """Settle each row; it must begin exactly where the last one of its fragment ended."""
        for row in rows:
            account = self.account(row.learner, row.life)
            settled = account.settled[row.fragment]
            assert (row.from_step, row.from_tokens) == (settled.step, settled.tokens), (row, settled)
            assert row.to_step >= row.from_step and row.to_tokens >= row.from_tokens, row
            settled.step, settled.tokens = row.to_step, row.to_tokens
            settled.seq = max(settled.seq, row.seq)
            self._raise(account, row.to_step, row.to_tokens)
            if row.fate == MERGED:
                self.merged += row.tokens
                account.merged += row.tokens
            else:
                self.discarded[row.fate] = self.discarded.get(row.fate, 0) + row.tokens
                self.discarded_steps += row.steps
                for stretch in account.alone:
                    common = _common(row, stretch)
                    self.alone_steps -= common.steps
                    self.alone_tokens -= common.tokens
            _let_go(account)

    def _leave_out(self, account: Account, stretch: Stretch) -> None:
        """Of the budget; what of it is settled already has its fate, and was counted.

        Who was alone so often, and had nothing settled in between, is not believed any further.
        """
        if stretch.to_step <= _last(account).to_step or len(account.alone) >= STRETCHES_MAX:
            return
        account.alone.append(stretch)
        for at in account.settled:
            self.alone_steps += max(0, stretch.to_step - max(stretch.from_step, at.step))
            self.alone_tokens += max(0, stretch.to_tokens - max(stretch.from_tokens, at.tokens))

    def _raise(self, account: Account, step: int, tokens: int) -> None:
        if step > account.step:
            self.steps += step - account.step
            account.step = step
        if tokens > account.tokens:
            self.produced += (tokens - account.tokens) * self.fragment_count
            account.tokens = tokens

    def rest(self, learner: str, life: int, fragment: int, fate: Fate) -> list[Row]:
        """The row that would discard what this life has pending on a fragment (none if nothing is)."""
        account = self.account(learner, life)
        at = account.settled[fragment]
        if account.step <= at.step:
            return []
        return [Row(learner, life, fragment, at.step, at.tokens, account.step, account.tokens, fate)]

    def sums(self) -> Totals:
        """What `totals` adds up anew, from the running sums: pending is what is left over."""
        pending = self.produced - self.merged - sum(self.discarded.values())
        return Totals(self.produced, self.merged, pending, dict(sorted(self.discarded.items())))

    def totals(self) -> Totals:
        """Added up from every account, so that their balance says something."""
        tokens = sum(a.tokens for a in self.accounts.values()) + sum(past.tokens for past in self.past.values())
        produced = tokens * self.fragment_count
        pending = sum(a.tokens - s.tokens for a in self.accounts.values() for s in a.settled)
        return Totals(produced, self.merged, pending, dict(sorted(self.discarded.items())))

    def check(self) -> None:
        assert min(self.alone_steps, self.alone_tokens, *self.kept) >= 0, (self.alone_steps, self.kept)
        for key, account in self.accounts.items():
            for settled in account.settled:
                assert settled.step <= account.step and settled.tokens <= account.tokens, (
                    key,
                    settled,
                    account,
                )
        totals = self.totals()
        assert totals.balance == 0 and totals == self.sums(), (totals, self.sums())


def _let_go(account: Account) -> None:
    """Of stretches that are settled on every fragment, for no row will speak of them; the last says what is known.

    Settled in steps and in tokens: how many tokens each step has is the learner's word.
    """
    if len(account.alone) > 1:
        step, tokens = min(at.step for at in account.settled), min(at.tokens for at in account.settled)
        account.alone[:-1] = [one for one in account.alone[:-1] if one.to_step > step or one.to_tokens > tokens]


def _last(account: Account) -> Stretch:
    return account.alone[-1] if account.alone else Stretch()


def _common(row: Row, stretch: Stretch) -> Work:
    """What a row and a stretch of the same life have in common: positions in steps and in tokens grow together."""
    steps = min(row.to_step, stretch.to_step) - max(row.from_step, stretch.from_step)
    tokens = min(row.to_tokens, stretch.to_tokens) - max(row.from_tokens, stretch.from_tokens)
    return Work(max(0, steps), max(0, tokens))
