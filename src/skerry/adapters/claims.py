"""What a learner of this process changes in place is no other's: two would both hand in what either of them learned."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from skerry.adapters.sharing import Memory, memory_of, pairs
from skerry.errors import ModelError

_claims: set[Claim] = set()  # of learners that are not closed


class Claim:
    """These tensors by name, with the memory they have, until they are let go; a fork of the process claims nothing."""

    def __init__(self, tensors: Mapping[str, object]) -> None:
        self._tensors, self._owner = dict(tensors), os.getpid()
        others = [claim for claim in _claims if claim._owner == self._owner]
        held = [(claim, name, memory) for claim in [*others, self] for name, memory in claim._memories()]
        for one, other in pairs([memory for *_, memory in held]):
            if (held[one][0] is self) != (held[other][0] is self):
                raise ModelError(
                    f"{held[one][1]} is attached to another learner of this process, which is not closed: close() "
                    "that one first, or give each a model of its own"
                )
        _claims.add(self)

    def _memories(self) -> Iterator[tuple[str, Memory]]:
        """Where they are by now: a loop may give a parameter other memory."""
        for name, tensor in self._tensors.items():
            if (memory := memory_of(tensor)) is not None:
                yield name, memory

    def let_go(self) -> None:
        _claims.discard(self)
