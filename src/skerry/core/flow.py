"""How much may be on its way to one learner: what is handed to the wire and has not left this machine yet.

Without a bound a learner that joins would have the whole model queued for it, and a slow link every version of it. So
what a learner lacks waits with the machine, by its number alone, and is handed over when its turn comes: then it is the
newest version, and what is settled in it is read at that very moment. Whoever lacks a fragment longest comes first.

A fragment goes over one of the learner's streams, always the same. One for each stream is let through however large it
is, so that no stream stands idle and a fragment larger than the window gets there too. Fragments are counted as whole
ones: what is sent of them is never more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

WINDOW_BYTES = 128 << 20  # a tenth of a second at 10 Gbit/s: longer than a busy syncer takes to hand over the next


class Window:
    """The same for all learners; who lacks what, and what is on its way, is the member's to know."""

    def __init__(self, fragment_bytes: Sequence[int], streams: int, bytes_max: int = WINDOW_BYTES) -> None:
        self.fragment_bytes, self.streams, self.bytes_max = fragment_bytes, streams, bytes_max

    def admitted(self, sending: Collection[int], waiting: Collection[int]) -> list[int]:
        """Those of the waiting, longest first, that may follow what is being sent; none overtakes one of its stream."""
        on_way = sum([self.fragment_bytes[p] for p in sending])
        if on_way + sum([self.fragment_bytes[p] for p in waiting]) <= self.bytes_max:
            return list(waiting)
        busy = {p % self.streams for p in sending}
        held_back: set[int] = set()  # streams whose next fragment has to wait
        admitted = []
        for p in waiting:
            stream, needed = p % self.streams, self.fragment_bytes[p]
            if stream in held_back or (stream in busy and on_way + needed > self.bytes_max):
                held_back.add(stream)
                continue
            busy.add(stream)
            on_way += needed
            admitted.append(p)
        return admitted
