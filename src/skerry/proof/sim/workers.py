"""The product's own work in virtual time: the syncer's workers and commits, and a learner's node thread.

What `lab` and `twin` charge for what the product pays (`run/delays.py`). Values do not hang on when they are computed,
so a piece of work is carried out when it is ordered, and has ended when its time is over. (The simulator of faults has
a pool of its own, whose work ends in any order: `sim.syncer`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skerry.core.messages import Contribution, Message, Publication
from skerry.node.syncer import Version, Work
from skerry.proof.sim.timeline import Timeline
from skerry.run.delays import Delays


class TimedWorkers:
    """A `Pool` of so many workers and a thread that commits; `wake` is called whenever something has ended.

    Work is begun in the order in which it was submitted. Merges that end during a commit share the next.
    """

    def __init__(
        self, timeline: Timeline, delays: Delays, sizes: Sequence[int], count: int, wake: Callable[[], object]
    ) -> None:
        self._timeline, self._delays, self._sizes, self._wake = timeline, delays, sizes, wake
        self._free_at = [0.0] * count
        self._ended: list[Work] = []
        self._computed: list[Work] = []  # merges that wait for a commit
        self._is_committing = False

    def submit(self, work: Callable[[], Work], is_short: bool = False) -> None:
        done, now = work(), self._timeline.now
        self._free_at.sort()
        self._free_at[0] = max(now, self._free_at[0]) + self._takes_s(done)
        self._timeline.at(self._free_at[0] - now, lambda: self._end(done))

    def ended(self) -> list[Work]:
        taken, self._ended = self._ended, []
        return taken

    def _takes_s(self, done: Work) -> float:
        if isinstance(done, Version):
            return self._delays.merge_s(self._sizes[done.fact.decision.fragment])
        return self._delays.inspect_s(self._sizes[done.event.contribution.fragment])

    def _end(self, done: Work) -> None:
        if isinstance(done, Version):
            self._computed.append(done)
            self._commit()
        else:
            self._ended.append(done)
            self._wake()

    def _commit(self) -> None:
        if self._computed and not self._is_committing:
            together, self._computed, self._is_committing = self._computed, [], True
            self._timeline.at(self._delays.commit_s, lambda: self._committed(together))

    def _committed(self, together: list[Work]) -> None:
        self._is_committing = False
        self._ended += together
        self._wake()
        self._commit()


class NodeThread:
    """A learner's: it encodes and adopts one fragment after the other, and all else that it hears or says waits."""

    def __init__(self, timeline: Timeline, delays: Delays, sizes: Sequence[int]) -> None:
        self._timeline, self._delays, self._sizes = timeline, delays, sizes
        self._free_at = 0.0
        self._seq = 0  # of the newest contribution that is encoded; one that is sent again is not encoded again

    def says_in_s(self, message: Message) -> float:
        """Until what it has to say now can leave."""
        takes_s = 0.0
        if isinstance(message, Contribution) and message.seq > self._seq:
            self._seq = message.seq
            takes_s = self._delays.encode_s(self._sizes[message.fragment])
        return self._busy_s(takes_s)

    def hears_in_s(self, message: Message) -> float:
        """Until what has come now is taken in."""
        if not isinstance(message, Publication):
            return self._busy_s(0.0)
        return self._busy_s(self._delays.adopt_s(self._sizes[message.fragment]))

    def _busy_s(self, takes_s: float) -> float:
        now = self._timeline.now
        self._free_at = max(now, self._free_at) + takes_s
        return self._free_at - now
