"""What the syncer lets in: why a contribution is refused, why a process is sent away, and what merging one settles.

Pure functions of values. Exactly-once rests on two lines here: what starts before what is settled is refused, and so
is every seq up to the settled one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from skerry.core.facts import Row, Stretch
from skerry.core.ledger import MERGED, Ledger, Settled
from skerry.core.messages import STEP_S_MIN, Contribution, Report
from skerry.core.state import LifeState
from skerry.core.vocabulary import Flaw, Refusal

NAMES_PER_LEARNER, NAMES_MIN = 10, 1000  # that a run's books have room for
FORGOTTEN_S = 600.0  # after which a name that never took a step may be forgotten
LIFE_S, LIVES_AT_ONCE = 10.0, 60  # a name may begin so many lives in ten minutes, and then one in so long
LINKS_PER_S, LINKS_BURST = 5.0, 60.0  # that a name may begin: one that is lost is a record on the tape
SPARE_MIN = 4  # places beside those of the learners that a run expects
SUM_MAX = 1 << 62  # of all work in a run's books, times fragments: more cannot be written down


def illegal(report: Report, ledger: Ledger, learners: int, alone_steps_max: int) -> str:
    """What nobody would report who keeps to the protocol, beside what is known of that life; empty if it is fine.

    `learners` is how many the run expects.
    """
    if any(at.mark_step > report.step or at.mark_tokens > report.tokens for at in report.positions):
        return "a report of work that is settled and was not done"
    if 0 < report.step_s < STEP_S_MIN:
        return f"a report of a step of {report.step_s} s"
    if not _was_alone(report, ledger, alone_steps_max):
        return "a report of work done alone that was not done so, or is told of already"
    most = work_max(learners, ledger.fragment_count)
    return contradiction(report.learner, report.life, report.step, report.tokens, ledger, most)


def _was_alone(report: Report, ledger: Ledger, alone_steps_max: int) -> bool:
    """What it says it did alone is longer than the bound, was done, and lies behind what it said of that before."""
    alone, account = report.alone, ledger.accounts.get(f"{report.learner}/{report.life}")
    if alone == Stretch():
        return True
    is_long = 0 < alone_steps_max < alone.to_step - alone.from_step
    is_done = alone.to_step <= report.step and 0 <= alone.from_tokens <= alone.to_tokens <= report.tokens
    before = account.alone[-1] if account is not None and account.alone else Stretch()
    is_known = alone.to_step <= before.to_step
    is_apart = alone.from_step >= before.to_step and alone.from_tokens >= before.to_tokens
    return is_long and is_done and (is_known or is_apart)


def work_max(learners: int, fragment_count: int) -> int:
    """Steps and tokens of one name in all its lives: its own share, so that nobody's claims fill the others' books."""
    return SUM_MAX // (names_max(learners) * fragment_count)


def contradiction(learner: str, life: int, step: int, tokens: int, ledger: Ledger, most: int) -> str:
    """Why a life cannot have come to this position, if it came to the highest that is known of it; empty if it can.

    Tokens grow with steps, and only with them: else there would be work that no contribution can settle. `most` is how
    much of it a name may have.
    """
    account = ledger.accounts.get(f"{learner}/{life}")
    known = (account.step, account.tokens) if account is not None else (0, 0)
    if step < known[0]:
        is_possible = tokens <= known[1]
    elif step == known[0]:
        is_possible = tokens == known[1]
    else:
        is_possible = tokens >= known[1]
    if not is_possible:
        return f"{tokens} tokens in {step} steps, where there were {known[1]} in {known[0]}"
    if sum(ledger.before(learner, life)) + step + tokens > most:
        return f"{tokens} tokens in {step} steps, which is more than a run's books can hold of one learner"
    return ""


def verdict(
    c: Contribution,
    flaw: Flaw | None,
    settled: Settled,
    held: Contribution | None,
    version: int,
    since: int = 0,
    is_impossible: bool = False,
) -> tuple[Refusal | None, bool]:
    """Why it is refused (None if it is not), and whether it shows that the learner must fast-forward.

    `flaw` is what is wrong with its values, `held` the contribution of the same learner that lies here already, `since`
    the version that the last rollback made: what was learned on an earlier one is part of what was rolled back.
    `is_impossible` says that its life cannot have come to where it ends.
    """
    if c.seq <= settled.seq or (held is not None and (held.life, held.seq) == (c.life, c.seq)):
        return "duplicate", False
    if flaw is not None:
        return flaw, True
    if c.from_step < settled.step or c.from_tokens < settled.tokens:
        return "overlap", True
    if is_impossible or (c.from_step == settled.step and c.from_tokens > settled.tokens):
        return "tokens without steps", True
    if c.steps <= 0 or c.tokens <= 0:
        return "no work", True
    if not 0 <= c.base_version <= version:
        return "unknown base", True
    if c.base_version < since:
        return "rolled back", True
    if held is not None:
        return "one is held", False
    return None, False


def rows_of(c: Contribution, settled: Settled) -> list[Row]:
    """What merging it settles: the gap its learner gave up, if any, and its own stretch."""
    who = (c.learner, c.life, c.fragment)
    start, end = (c.from_step, c.from_tokens), (c.to_step, c.to_tokens)
    merged = Row(*who, *start, *end, MERGED, c.seq)
    if c.from_step == settled.step:
        return [merged]
    return [Row(*who, settled.step, settled.tokens, *start, "fast-forward"), merged]


def superseded(learner: str, life: int, newest: int) -> str:
    """Why a process that is not the newest life of a learner is sent away for good."""
    return (
        f"learner {learner} was taken over by a newer process (life {newest}, this one was {life}): "
        "give each process its own name (SKERRY_NAME) or key (SKERRY_KEY_FILE)"
    )


def places(learners: int) -> int:
    """How many learners a run has room for at once: those that it expects, and some to spare."""
    return learners + max(SPARE_MIN, learners // 2)


def full(learner: str, places: int) -> str:
    return (
        f"learner {learner} is not let in: {places} learners are here, which is all that this run has room for "
        f"(run.learners and half as many more, {SPARE_MIN} more at least); it is let in once one of them has left"
    )


def names_max(learners: int) -> int:
    """How many names a run's books have room for."""
    return NAMES_PER_LEARNER * learners + NAMES_MIN


def is_forgettable(known: LifeState, ledger: Ledger, learner: str, elapsed_s: float) -> bool:
    """It never took a step, and came long ago: its place in the books may be another's."""
    return elapsed_s - known.since > FORGOTTEN_S and not ledger.has_worked(learner, known.life)


def too_many_names(learner: str, names: int) -> str:
    return (
        f"learner {learner} is not let in for now: {names} names have joined this run, and its books have no "
        f"room for; those that never took a step make way after {FORGOTTEN_S / 60:.0f} min, and a name that has taken "
        "part before is let in at once"
    )


def life_booked(until: float, now: float) -> float | None:
    """Up to when the lives of a name last, if each lasts LIFE_S, with one that begins now; None if it has to wait.

    `until` is what this was after the life before. Lives cost records on the tape, whoever they are of.
    """
    booked = max(until, now) + LIFE_S
    return booked if booked - now <= LIVES_AT_ONCE * LIFE_S else None


def too_many_lives(learner: str) -> str:
    return (
        f"learner {learner} is not let in at present: {LIVES_AT_ONCE} processes have joined in its name within "
        f"{LIVES_AT_ONCE * LIFE_S / 60:g} minutes; one is let in every {LIFE_S:g} s from now on, so look why they end"
    )


def too_many_links(learner: str) -> str:
    return (
        f"learner {learner} is not let in at present: its link has come and gone {LINKS_BURST:g} times in a short "
        f"time; one is let in every {1 / LINKS_PER_S:g} s from now on, so look why they end"
    )


def in_use(learner: str) -> str:
    """What a new process is told while another one has its name and is there."""
    return (
        f"learner {learner} is in use by another process, which is connected: give each process its own name "
        "(SKERRY_NAME); with this one it is let in once the other is gone, and at once only with that name's own key"
    )


def expelled(learner: str, why: str) -> str:
    """What a learner is told that an operator has turned out."""
    return f"learner {learner} was turned out of this run by its operator: {why}"


def over(learner: str) -> str:
    """What the process of a life is told that was turned out, when its name may join again."""
    return f"learner {learner} was turned out of this run, and may join again as a new process only: start it anew"


def unknown_life(learner: str, life: int, newest: int) -> str:
    """What a life from the future says: lives are durable before a learner hears of them, so this tape lacks some."""
    return f"learner {learner} says it is in life {life}, this syncer knows of {newest}: {LACKING}"


def ahead(learner: str, held: Sequence[int], known: Sequence[int]) -> str:
    """What versions from the future say, fragment by fragment; "" if there are none. They too are durable first."""
    if all(map(operator.le, held, known)):
        return ""
    lost = [max(0, ours - its) for ours, its in zip(held, known, strict=True)]
    p = lost.index(max(lost))
    return (
        f"learner {learner} holds version {held[p]} of fragment {p}, this syncer knows of {known[p]} "
        f"({sum(lost)} merges are missing at least): {LACKING}"
    )


LACKING = (
    "its run directory is an older copy, or the tape lost its end: restore the newest copy "
    "(bytes that were cut off are in tape/*.cut), or restart the learners, which gives up what they hold"
)
CLOSED = "the run is closed, and everything is settled"
