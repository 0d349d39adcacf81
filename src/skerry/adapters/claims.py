"""What a learner of this process changes in place is no other's: two would both hand in what either of them learned."""

from __future__ import annotations

import os
from collections.abc import Mapping

from skerry.errors import ModelError

_claims: set[Claim] = set()  # of learners that are not closed


class Claim:
    """These tensors by name, each the very object, until they are let go; a fork of the process has claimed nothing."""

    def __init__(self, tensors: Mapping[str, object]) -> None:
        self._tensors, self._owner = dict(tensors), os.getpid()
        mine = {id(each) for each in self._tensors.values()}
        for other in _claims:
            shared = [name for name, each in other._tensors.items() if id(each) in mine]
            if shared and other._owner == self._owner:
                raise ModelError(
                    f"{shared[0]} is attached to another learner of this process, which is not closed: close() that "
                    "one first, or give each a model of its own"
                )
        _claims.add(self)

    def let_go(self) -> None:
        _claims.discard(self)
