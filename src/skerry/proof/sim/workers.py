"""The product's own work in virtual time: the syncer's workers and commits, and a learner's node thread.

What `lab` and `twin` charge for what the product pays (`run/delays.py`). Values do not hang on when they are computed,
so a piece of work is carried out when it is ordered, and has ended when its time is over. (The simulator of faults has
a pool of its own, whose work ends in any order: `sim.syncer`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skerry.core.messages import Contribution, Message, Publication
from skerry.node.log import Written
from skerry.node.syncer import Looked, Version, Work
from skerry.node.work import Rank
from skerry.proof.sim.timeline import Timeline
from skerry.run.delays import Delays


class TimedWorkers:
    """A `Pool` of so many workers; `wake` is called whenever something has ended.

    Work is begun in the order in which it was submitted; checkpoints are written beside it. The workers share one
    interpreter, which a contribution needs for `python_s` and a piece of work to end: however many workers there are,
    so many contributions a second and no more.
    """

    def __init__(
        self,
        timeline: Timeline,
        delays: Delays,
        sizes: Sequence[int],
        count: int,
        wake: Callable[[], object],
        python_s: float = 0.0,
    ) -> None:
        self._timeline, self._delays, self._sizes, self._wake = timeline, delays, sizes, wake
        self._python_s = python_s
        self._free_at = [0.0] * count
        self._interpreter_free_at = 0.0
        self._ended: list[Work] = []

    def submit(self, work: Callable[[], Work], rank: Rank = "long") -> None:
        done, now = work(), self._timeline.now
        if not isinstance(done, Looked | Version):
            self._end(done)
            return
        if isinstance(done, Looked):
            python_s = self._python_s * len(done.inspected)
            self._interpreter_free_at = max(now, self._interpreter_free_at) + python_s
        self._free_at.sort()
        self._free_at[0] = max(self._interpreter_free_at, max(now, self._free_at[0]) + self._takes_s(done))
        self._timeline.at(self._free_at[0] - now, lambda: self._end(done))

    def ended(self) -> list[Work]:
        taken, self._ended = self._ended, []
        return taken

    def _takes_s(self, done: Looked | Version) -> float:
        if isinstance(done, Version):
            return self._delays.merge_s(self._sizes[done.decision.fragment])
        fragments = [one.event.contribution.fragment for one in done.inspected]
        return sum(self._delays.inspect_s(self._sizes[p]) for p in fragments)

    def _end(self, done: Work) -> None:
        self._ended.append(done)
        self._timeline.at(0.0, self._wake)


class TimedDisk:
    """A `Pool` for the log: what is written is durable a commit's time later."""

    def __init__(self, timeline: Timeline, delays: Delays, wake: Callable[[], object]) -> None:
        self._timeline, self._delays, self._wake = timeline, delays, wake
        self._ended: list[Written] = []

    def submit(self, work: Callable[[], Written], rank: Rank = "long") -> None:
        done = work()
        self._timeline.at(self._delays.commit_s, lambda: self._end(done))

    def ended(self) -> list[Written]:
        taken, self._ended = self._ended, []
        return taken

    def _end(self, done: Written) -> None:
        self._ended.append(done)
        self._wake()


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
