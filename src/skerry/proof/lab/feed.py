"""The learners' text on the device: the same batches the built-in learner draws, gathered where they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from skerry.config import Config
from skerry.proof.lab.study import Setting
from skerry.train.data import CHUNK_BYTES, Corpus, Stream, cut, held_out_batches, join
from skerry.train.shapes import shape_of

HELD_OUT_ROWS = 8  # sequences a batch, as a local run has


def dealt(text: np.ndarray, learners: int) -> list[np.ndarray]:
    """A part for each learner, by chunks in turn."""
    return [join(cut(text, CHUNK_BYTES)[learner::learners]) for learner in range(learners)]


PARTS: dict[str, Callable[[np.ndarray, int], list[np.ndarray]]] = {"dealt": dealt, "domains": np.array_split}


class Feed:
    """One stream a learner; `windows` gives every row a batch, drawing anew for those that take part."""

    def __init__(self, config: Config, setting: Setting, device: str) -> None:
        self.corpus = Corpus.open(config.data.path, config.data.bytes_max)
        self.context = shape_of(config.model).context
        learners = config.run.learners
        self.streams = [
            Stream(self.corpus, learner, config.run.seed, config.data.batch, self.context)
            for learner in range(learners)
        ]
        self.device = torch.device(device)
        text, self._first = self.corpus.train, np.zeros(learners, np.int64)
        if setting.text != "all":
            parts = PARTS[setting.text](text, learners)
            text, self._first = np.concatenate(parts), np.cumsum([0, *(len(part) for part in parts[:-1])])
            for stream, part in zip(self.streams, parts, strict=True):
                stream.text = part
        self._text = torch.from_numpy(text).to(self.device)
        self._at = np.zeros((learners, config.data.batch), np.int64)
        self._span = torch.arange(self.context + 1, device=self.device)

    def windows(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [learners, batch, time]; rows that draw nothing repeat their last batch."""
        for row in rows:
            self._at[row] = self._first[row] + self.streams[row].starts()
        host = torch.from_numpy(self._at.copy())
        if self.device.type == "cuda":
            host = host.pin_memory()
        drawn = self._text[host.to(self.device, non_blocking=True)[..., None] + self._span].long()
        return drawn[..., :-1], drawn[..., 1:]

    def held_out(self, count: int) -> list[tuple[Tensor, Tensor]]:
        batches = held_out_batches(self.corpus, HELD_OUT_ROWS, self.context, count)
        return [(self._there(inputs), self._there(targets)) for inputs, targets in batches]

    def _there(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device).long()
