"""Work that a rollback has made useless, and that the ledger does not have as discarded yet.

After a rollback a learner gives up all that it did meanwhile, however long it trained alone; it is booked as discarded
with its next contribution. Until then it must not spend the budget, for progress never goes back.
"""

from __future__ import annotations

from collections.abc import Sequence

from skerry.core.ledger import Ledger, Work
from skerry.core.messages import FULL, Report
from skerry.core.state import FragmentState


class Forgone:
    """Of each life, by fragment, up to where its work is of no use; lost in a crash, for reports say it again."""

    def __init__(self) -> None:
        self._upto: dict[tuple[str, int], list[Work]] = {}

    def note(self, report: Report, fragments: Sequence[FragmentState]) -> None:
        """All of its work while it stands on what was rolled back, and later what its marks have passed."""
        held = zip(report.positions, fragments, strict=True)
        is_rolled_back = any(FULL < position.base_version < at.since for position, at in held)
        done = Work(report.step, report.tokens)
        before = self._upto.get((report.learner, report.life), [Work()] * len(fragments))
        self._upto[report.learner, report.life] = [
            _further(upto, done if is_rolled_back else Work(position.mark_step, position.mark_tokens))
            for upto, position in zip(before, report.positions, strict=True)
        ]

    def work(self, ledger: Ledger) -> Work:
        """What will be discarded and is not booked so yet."""
        steps = tokens = 0
        for (learner, life), uptos in list(self._upto.items()):
            if life <= ledger.lives_folded(learner):
                del self._upto[learner, life]
                continue
            account = ledger.account(learner, life)
            ends = [(min(upto.steps, account.step), min(upto.tokens, account.tokens)) for upto in uptos]
            left = [
                Work(max(0, end[0] - at.step), max(0, end[1] - at.tokens))
                for end, at in zip(ends, account.settled, strict=True)
            ]
            if not any(map(any, left)):
                del self._upto[learner, life]
            steps += sum(work.steps for work in left)
            tokens += sum(work.tokens for work in left)
        return Work(steps, tokens)


def _further(a: Work, b: Work) -> Work:
    """Each of the two by itself: how many tokens a step has is the learner's word."""
    return Work(max(a.steps, b.steps), max(a.tokens, b.tokens))
