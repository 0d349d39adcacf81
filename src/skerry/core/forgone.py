"""Work that a rollback has made useless, and that the ledger does not have as discarded yet.

After a rollback a learner gives up all that it did meanwhile, however long it trained alone; it is booked as discarded
with its next contribution. Until then it must not spend the budget, for progress never goes back.
"""

from __future__ import annotations

from collections.abc import Sequence

from skerry.core.ledger import Ledger
from skerry.core.messages import FULL, Report
from skerry.core.state import FragmentState


class Forgone:
    """Of each life, by fragment, up to which token its work is of no use; lost in a crash, for reports say it again."""

    def __init__(self) -> None:
        self._upto: dict[tuple[str, int], list[int]] = {}

    def note(self, report: Report, fragments: Sequence[FragmentState]) -> None:
        """All of its work while it stands on what was rolled back, and later what its marks have passed."""
        held = zip(report.positions, fragments, strict=True)
        is_rolled_back = any(FULL < position.base_version < at.since for position, at in held)
        before = self._upto.get((report.learner, report.life), [0] * len(fragments))
        self._upto[report.learner, report.life] = [
            max(upto, report.tokens if is_rolled_back else position.mark_tokens)
            for upto, position in zip(before, report.positions, strict=True)
        ]

    def tokens(self, ledger: Ledger) -> int:
        """Tokens x fragments that will be discarded and are not booked so yet."""
        total = 0
        for (learner, life), uptos in list(self._upto.items()):
            settled = ledger.account(learner, life).settled
            left = sum(max(0, upto - at.tokens) for upto, at in zip(uptos, settled, strict=True))
            if not left:
                del self._upto[learner, life]
            total += left
        return total
