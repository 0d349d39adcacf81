"""The end of a run: everyone stops, then all that is left is contributed losslessly and merged.

The budget is spent, no round opens any more. A fragment's last work merges once everyone who has work on it is in, or
the time is over. The run ends when nothing is pending, or when `close_timeout_s` has passed, whatever is pending then
being booked as absent. What comes after that is not held: one that contributes without end would keep the run open.
"""

from __future__ import annotations

from dataclasses import dataclass

from skerry.core.look import Close, GivenUp, View, Want
from skerry.core.membership import Member
from skerry.core.messages import Contribution

PATIENCE_SHARE = 0.5  # of the time, for those present where something stands in the way


@dataclass(frozen=True)
class Closing:
    """The closing that began at `since`; who is in, and who owes what, follows from the view."""

    since: float
    timeout_s: float

    def share(self, now: float) -> float:
        """How much of the time is over."""
        return (now - self.since) / self.timeout_s

    def whom_to_stop(self, view: View) -> list[Member]:
        """Those who still step, and were not told so just now."""
        return [m for m in view.connected if not m.is_stopped and not m.was_just_told_to_stop(view.now)]

    def settle(self, p: int, view: View) -> list[Want | GivenUp]:
        """What to do about each learner that has stopped: ask for its last work, or book that it gave it up."""
        orders: list[Want | GivenUp] = []
        for member in view.connected:
            if not member.is_stopped or member.learner in view.held[p]:
                continue
            if view.held.has_room(p, None) and member.may_be_asked(p):
                orders.append(Want(member, p, lossless=True))
            elif member.unsettled(p) == 0:
                orders.append(GivenUp(member, p))
        return orders

    def close(self, p: int, view: View) -> Close | None:
        """Merge a fragment's last contributions once everyone who has work on it is in, or the time is over.

        One that stands in the way of its learner's very last, or of others where there is no room for more, does not
        wait for learners that are away. It does wait for those present: merged one by one, each would move the model
        by its whole drift instead of its share. But for half of the time only: one that hangs must not cost the others
        their last work.
        """
        held, share = view.held[p], self.share(view.now)
        awaited = [m for m in view.roster if m.learner not in held and _owes(m, p, view)]
        if view.held.is_full or any(not _is_last(c, view) for c in held.values()):
            awaited = [m for m in awaited if m.connected and share < PATIENCE_SHARE]
        if not held or (awaited and share <= 1):
            return None
        return Close(p, None, view.sync_every, "the last work", 1, len(held), view.now)

    def unsettled(self, view: View) -> list[str]:
        """Current lives with pending work, those still stepping, and dead ones whose held work is not merged yet."""
        fragments = range(len(view.held))
        owing = {m.learner for m in view.roster if any(_owes(m, p, view) for p in fragments)}
        heard_of = view.roster.members.keys()  # since this process began
        away = {learner for learner, life in view.state.lives.items() if not life.has_left and learner not in heard_of}
        owing |= away.difference(view.expelled)
        return sorted(owing | {learner for held in view.held for learner in held})

    def is_over(self, unsettled: list[str], now: float) -> bool:
        return not unsettled or self.share(now) > 1


def _owes(member: Member, p: int, view: View) -> bool:
    """It may yet produce work on p, or has some pending."""
    if member.connected and not member.is_stopped:
        return True
    account = view.state.ledger.account(member.learner, member.life)
    return account.step > account.settled[p].step


def _is_last(c: Contribution, view: View) -> bool:
    """Nothing of its life comes after it, and no later life of its learner has come."""
    account = view.state.ledger.account(c.learner, c.life)
    return c.to_step >= account.step and c.life == view.state.lives[c.learner].life
