"""What leaves of the syncer's machine are shown in tests: members, contributions and views, made by hand."""

from __future__ import annotations

from core.hand import TOKENS_PER_STEP, Desk
from skerry.core.facts import Seen
from skerry.core.held import Held
from skerry.core.look import View
from skerry.core.membership import Member
from skerry.core.messages import Contribution, FragmentPosition, Report
from skerry.core.roster import Roster

FRAGMENTS = 2
PAYLOAD_BYTES = 10


def member(
    name: str, step: int = 0, marks: tuple[int, ...] = (0, 0), state: str = "training", number: int = 1
) -> Member:
    """A learner in its first life, on version 0 of every fragment, with steps of one second."""
    made = Member(name, 1, [0] * FRAGMENTS)
    made.connect(0.0)
    positions = tuple(FragmentPosition(0, mark, mark * TOKENS_PER_STEP, 0, False) for mark in marks)
    made.take_report(Report(name, 1, number, step, step * TOKENS_PER_STEP, 1.0, state, positions), 0.0)
    return made


def contribution(name: str, p: int = 0, to: int = 4) -> Contribution:
    """The first `to` steps of a learner's first life."""
    return Contribution(name, 1, 1, p, 0, 0, 0, to, to * TOKENS_PER_STEP, "fp32", b"")


def holding(*contributions: Contribution, bytes_max: int = 1000) -> Held:
    held = Held(FRAGMENTS, bytes_max)
    for c in contributions:
        held.expect(c.fragment, PAYLOAD_BYTES)
        held.add(c, PAYLOAD_BYTES)
    return held


def roster_of(*members: Member, held: Held | None = None, now: float = 0.0) -> Roster:
    roster = Roster(held or holding(), stall_s=1000.0)
    for each in members:
        roster.update(each, now)
    return roster


def view(*members: Member, held: Held | None = None, now: float = 0.0, quorum: int = 1) -> View:
    """Two fragments at H = 4, of which nothing is settled; the run knows of all these members."""
    held = held or holding()
    desk = Desk(num_fragments=FRAGMENTS, sync_every=4)
    for each in members:
        desk.join(each.learner)
        if each.report is not None:
            position = (each.report.step, each.report.tokens)
            desk.machine.state.ledger.see(Seen(each.learner, each.life, *position, 0, 0, 0.0))
    return View(
        now=now,
        elapsed_s=now,
        stage="steady",
        sync_every=4,
        quorum=quorum,
        roster=roster_of(*members, held=held, now=now),
        ahead=0,
        held=held,
        state=desk.machine.state,
    )
