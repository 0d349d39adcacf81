"""Windows of tokens, and the part of them that is held out.

The data is cut into chunks and every twentieth is held out, of a pack as of text. A window is a context and one token
more: inputs, and targets one token later.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from skerry.errors import DataError

CHUNK_TOKENS = 8 << 10
HELD_OUT_EVERY = 20  # chunks

Batch = tuple[np.ndarray, np.ndarray]  # inputs, and targets one token later: [batch, context] each


class Tokens(Protocol):
    """A stretch of tokens, to be read slice by slice: an array, or a part of a pack."""

    def __len__(self) -> int: ...

    def __getitem__(self, wanted: slice, /) -> np.ndarray: ...


class Source(Protocol):
    """What a learner trains on: text, or a pack."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...  # what it holds, in words

    @property
    def train(self) -> Tokens: ...

    @property
    def held_out(self) -> Tokens: ...


def chunk_tokens(total: int) -> int:
    """A short text is cut finer, so that it has a held-out chunk too."""
    return max(1, min(CHUNK_TOKENS, total // HELD_OUT_EVERY))


def windows(tokens: Tokens, starts: np.ndarray, context: int) -> Batch:
    rows = np.stack([tokens[start : start + context + 1] for start in starts.tolist()])  # [batch, context + 1]
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def held_out_batches(source: Source, batch: int, context: int, count: int) -> list[Batch]:
    """Fixed batches, spread evenly over what is held out: the same for every learner and every run."""
    need_window(source, source.held_out, context)
    starts = np.linspace(0, len(source.held_out) - context - 1, batch * count).astype(np.int64)
    return [windows(source.held_out, some, context) for some in starts.reshape(count, batch)]


def need_window(source: Source, part: Tokens, context: int) -> None:
    """The held-out part, a twentieth, must have a window as well."""
    if len(part) > context:
        return
    window = context + 1
    chunk = min(CHUNK_TOKENS, window)
    needed = HELD_OUT_EVERY * chunk * math.ceil(window / chunk)
    total = len(source.train) + len(source.held_out)
    raise DataError(
        f"{source.name} holds {total} {source.kind}, too few for a context of {context}: "
        f"at least {needed} are needed; add text or shorten the context"
    )
