"""What is held: contributions that are complete and not merged yet, and how much room is left for more.

At most one of a learner and fragment is held. It stays until its merge has ended, so what is being merged is held too.
Only names and sizes are here; the payloads are the node's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from skerry.core.messages import Contribution


class Held:
    """`held[p]` maps learners to their contributions to fragment p; `bytes` is the size of all together."""

    def __init__(self, fragment_count: int, bytes_max: int) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self._by_fragment: list[dict[str, Contribution]] = [{} for _ in range(fragment_count)]
        self._sizes: dict[tuple[str, int], int] = {}  # of each that is held; `bytes` is their sum
        self._merging: set[tuple[str, int]] = set()  # learners and fragments of those that a merge is ordered of
        self._expected: dict[int, int] = {}  # fragment -> size of the contribution to it that came last

    def __repr__(self) -> str:
        return f"<held {[sorted(held) for held in self._by_fragment]} {self.bytes} of {self.bytes_max} bytes>"

    def __getitem__(self, p: int) -> Mapping[str, Contribution]:
        return self._by_fragment[p]

    def __len__(self) -> int:
        return len(self._by_fragment)

    def __iter__(self) -> Iterator[Mapping[str, Contribution]]:
        return iter(self._by_fragment)

    def add(self, c: Contribution, payload_bytes: int) -> None:
        assert c.learner not in self._by_fragment[c.fragment], c
        self._by_fragment[c.fragment][c.learner] = c
        self._sizes[c.learner, c.fragment] = payload_bytes
        self.bytes += payload_bytes

    def drop(self, learner: str, p: int) -> None:
        del self._by_fragment[p][learner]
        self.bytes -= self._sizes.pop((learner, p))
        self._merging.discard((learner, p))

    def merge(self, p: int) -> None:
        """All that are held of the fragment are being merged from here on; one that comes later is not."""
        self._merging.update((learner, p) for learner in self._by_fragment[p])

    def is_merging(self, learner: str, p: int) -> bool:
        return (learner, p) in self._merging

    def in_order(self, p: int) -> tuple[Contribution, ...]:
        """Those of a fragment by learner id, the order in which they are summed."""
        return tuple(self._by_fragment[p][learner] for learner in sorted(self._by_fragment[p]))

    # ------------------------------------------------------------------------------------------ room

    def expect(self, p: int, payload_bytes: int) -> None:
        """A contribution to p came, held or not: the next will be about as long."""
        self._expected[p] = payload_bytes

    def has_room(self, p: int, oldest: int | None) -> bool:
        """Within `bytes_max`; one fragment is let in beyond it, else full rounds wait for each other for ever.

        That one is the fragment of the `oldest` open round, or if none is open the first of which something is held.
        """
        return self.fits(p) or p == (oldest if oldest is not None else min(self._begun(), default=p))

    def fits(self, p: int) -> bool:
        """The next one to the fragment does, whichever rounds are open."""
        return self._fits(self._expected.get(p, 0))

    @property
    def is_full(self) -> bool:
        """There may be no room for the next one, whichever fragment it is of."""
        return not self._fits(max(self._expected.values(), default=0))

    @property
    def is_scarce(self) -> bool:
        """Half of the room is taken: nobody should send without being asked."""
        return self.bytes > self.bytes_max // 2

    def _fits(self, payload_bytes: int) -> bool:
        return self.bytes + payload_bytes <= self.bytes_max

    def _begun(self) -> Sequence[int]:
        return [p for p, held in enumerate(self._by_fragment) if held]
