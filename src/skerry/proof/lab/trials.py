"""What the product does not do, or not yet, so that it can be measured before it is built: ways to merge and to encode.

Rules that hold here: nothing of this is reached without a `Trial`; what wins moves to algo and core and leaves here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skerry.algo.codecs import Inspection, payload_bytes
from skerry.algo.fragments import BLOCK, Fragment, Slot
from skerry.algo.merge import Held
from skerry.core.schedule import PLAIN
from skerry.proof.lab.algebra import Blocks, Device, Payload
from skerry.proof.lab.study import Trial

CHUNK = 4096  # the largest elements are chosen within each
INDEX_BITS = 12  # of an element within its chunk
ECHO = 0.1  # the cosine between two merges of a fragment at which its outer step is left alone
FACTORS = (0.5, 2.0)  # of it, at least and at most


class Trials(Device):
    """A `Device` that does as its trial says."""

    def __init__(self, device: torch.device | str, trial: Trial) -> None:
        super().__init__(device)
        self.trial = trial
        self._factors: dict[int, Tensor] = {}  # of the outer step, by fragment

    def hold(self, codec: str, payload: Any, weight: float, seen: Inspection) -> Held:
        return super().hold(codec, payload, weight if self.trial.weights == "tokens" else 1.0, seen)

    def delta(self, rule: str, fragment: Fragment, held: Sequence[Any]) -> Tensor:
        found = super().delta(rule, fragment, held)
        if not self.trial.steer or rule == PLAIN.rule:
            return found
        echo = torch.cosine_similarity(found, self._deltas.get(fragment.index, found), dim=0)
        factor = self._factors.get(fragment.index, torch.ones_like(echo)) * (self.trial.steer * (echo - ECHO)).exp()
        self._factors[fragment.index] = factor.clamp(*FACTORS)
        return found * self._factors[fragment.index]

    def encode(self, codec: str, drift: Tensor, residual: Tensor | None = None) -> Payload:
        if self.trial.kept == 1:
            return super().encode(codec, drift, residual)
        u = drift if residual is None else drift + residual
        sparse = largest(u, self.trial.kept)
        decoded = torch.where(sparse == 0, 0.0, self.quantized(codec, sparse))
        indices = math.ceil(u.numel() * INDEX_BITS / 8)
        sent = math.ceil(self.trial.kept * (payload_bytes(codec, u.numel()) + indices))
        return Payload(decoded, sent)

    def blocks_of(self, fragment: Fragment) -> Blocks:
        tensors = super().blocks_of(fragment)
        averaged = [is_mean and self.trial.embeddings == "mean" for is_mean in tensors.averaged]
        if self.trial.norms == "tensor":
            return Blocks(tensors.group, averaged)
        group: list[int] = []
        by_row: list[bool] = []
        for slot, is_mean in zip(fragment.slots, averaged, strict=True):
            count = (slot.padded_stop - slot.offset) // BLOCK
            row = blocks_a_row(slot)
            each, first = (row, slot.start // BLOCK % row) if row else (count, 0)  # a slice may begin inside a row
            group += [len(by_row) + (first + block) // each for block in range(count)]
            by_row += [is_mean] * math.ceil((first + count) / each)
        return Blocks(group, by_row)


def blocks_a_row(slot: Slot) -> int:
    """How many blocks a row of this matrix has; 0 where it is none, or its rows do not begin with a block."""
    width = slot.shape[-1] if len(slot.shape) > 1 else 0
    return 0 if width % BLOCK else width // BLOCK


def largest(x: Tensor, share: float) -> Tensor:
    """x with all but the largest elements of each chunk set to zero."""
    chunks = torch.nn.functional.pad(x, (0, -len(x) % CHUNK)).view(-1, CHUNK)
    least = chunks.abs().topk(max(1, round(share * CHUNK)), dim=1).values[:, -1:]
    return torch.where(chunks.abs() >= least, chunks, 0.0).view(-1)[: len(x)]
