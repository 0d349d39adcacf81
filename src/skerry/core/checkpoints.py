"""Which fragment's newest version is written whole next, and which versions of the whole model are kept for good.

Owns what is being written, and the least versions of which a version to keep is made. Neither has to survive a crash:
what is written is on the tape, and what is to be kept follows from it again.
"""

from __future__ import annotations

from skerry.config import Store
from skerry.core.facts import Kept
from skerry.core.schedule import is_keeping_due
from skerry.core.state import RunState


class Checkpoints:
    def __init__(self, config: Store) -> None:
        self.config = config
        self.under_way: set[int] = set()  # fragments whose checkpoint is being written
        self._keeping: tuple[int, ...] = ()  # the least versions of which a version to keep is made; none: none is due
        self._kept_at = 0.0  # progress when that was due

    def reconfigure(self, config: Store, scale: float) -> None:
        """From now on by this; shares of the budget are `scale` times what they were."""
        self.config, self._kept_at = config, self._kept_at * scale

    def begin(self, fragments: list[int]) -> list[int]:
        """Those of them that are not being written; from here on they are."""
        begun = [p for p in fragments if p not in self.under_way]
        self.under_way.update(begun)
        return begun

    def next(self, state: RunState) -> list[int]:
        """The fragment that is longest due, unless another is being written: they are to disturb nobody.

        One that a version to keep still lacks goes before, so that the fragments of that are not far apart.
        """
        if self.under_way:
            return []
        if lacking := self._lacking(state):
            return self.begin(lacking[:1])
        overdue = [self._overdue(state, p) for p in range(len(state.fragments))]
        worst = max(overdue)
        return self.begin([overdue.index(worst)]) if worst >= 0 else []

    def last(self, state: RunState) -> list[int]:
        """Every fragment that has moved since its last checkpoint, all at once: this process is about to end."""
        return self.begin([p for p, at in enumerate(state.fragments) if at.checkpoints[-1].version < at.version])

    def keep(self, state: RunState, elapsed_s: float) -> Kept | None:
        """The version that is to be kept, if one is and no fragment lacks its checkpoint any longer.

        It is made of the newest checkpoints, none of an earlier version than when it was due.
        """
        if not self._keeping and is_keeping_due(self.config.keep_every, state):
            self._keeping, self._kept_at = tuple(at.version for at in state.fragments), state.progress
        if not self._keeping or self._lacking(state):
            return None
        self._keeping = ()
        number = 1 + (state.last_kept.number if state.last_kept else 0)
        newest = [at.checkpoints[-1] for at in state.fragments]
        versions, files = tuple(c.version for c in newest), tuple(c.file for c in newest)
        return Kept(number, versions, files, self._kept_at, elapsed_s)

    def _lacking(self, state: RunState) -> list[int]:
        """Fragments without a checkpoint that is new enough for the version to keep."""
        newest = (at.checkpoints[-1].version for at in state.fragments)
        return [p for p, (version, least) in enumerate(zip(newest, self._keeping, strict=False)) if version < least]

    def _overdue(self, state: RunState, p: int) -> int:
        """By how many versions; the first of each fragment come staggered, so that they take turns later too."""
        every, at = self.config.checkpoint_every, state.fragments[p]
        last = at.checkpoints[-1].version
        return at.version - last - (every if last else 1 + p * every // len(state.fragments))
