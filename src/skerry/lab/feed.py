"""The learners' text on the device: the same batches the built-in learner draws, gathered where they are used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skerry.config import Config
from skerry.lab.study import Setting
from skerry.train.data import Corpus, Stream, held_out_batches
from skerry.train.shapes import shape_of

HELD_OUT_ROWS = 8  # sequences a batch, as the judge of a local run has


class Feed:
    """One stream a learner; `windows` gives every row a batch, drawing anew for those that take part."""

    def __init__(self, config: Config, setting: Setting, device: str) -> None:
        self.corpus = Corpus.open(config.data.path, config.data.bytes_max)
        self.context = shape_of(config.model).context
        shards = config.run.learners
        self.streams = [
            Stream(self.corpus, shard, shards, config.run.seed, config.data.batch, self.context)
            for shard in range(shards)
        ]
        if setting.domains:
            for stream, part in zip(self.streams, np.array_split(self.corpus.train, shards), strict=True):
                stream.text = part
        self.device = torch.device(device)
        self._text = torch.from_numpy(np.concatenate([stream.text for stream in self.streams])).to(self.device)
        self._first = np.cumsum([0, *(len(stream.text) for stream in self.streams[:-1])])
        self._at = np.zeros((shards, config.data.batch), np.int64)
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
