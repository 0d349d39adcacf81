"""One inner step: forward, backward, clip, AdamW.

The learning rate follows the run's global progress, which is handed in, never the learner's own step count: a
learner that joins late or steps slowly is on the same schedule as the rest. The caller sets torch's threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from .data import Batch
from .gpt import GPT

BETAS = (0.9, 0.95)
GRADIENT_NORM_MAX = 1.0
WARMUP_SHARE = 0.02  # of the run's progress
FLOOR = 0.1  # of the peak rate, at the end


class Inner:
    """A model and its optimizer; `step` is the whole inner loop's body."""

    def __init__(self, model: GPT, lr: float, weight_decay: float = 0.1) -> None:
        self.model = model
        self.lr = lr
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        gains = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)

    def step(self, inputs: np.ndarray, targets: np.ndarray, progress: float, ramp: float = 1.0) -> float:
        """Learn from one batch; `progress` is the run's in [0, 1], `ramp` a newcomer's share of the rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * schedule(progress) * ramp
        self.model.train()
        loss = self.model.loss(*on_device(self.model, inputs, targets))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        self.optimizer.step()
        return loss.item()

    def __repr__(self) -> str:
        return f"Inner(lr={self.lr:g}, parameters={sum(p.numel() for p in self.model.parameters())})"


def schedule(progress: float) -> float:
    """Share of the peak rate: from a tenth, linear over the first 2 %, then a cosine down to a tenth."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < WARMUP_SHARE:
        return FLOOR + (1 - FLOOR) * progress / WARMUP_SHARE
    decayed = (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * decayed))


def held_out_loss(model: GPT, batches: Iterable[Batch]) -> float:
    """Mean loss in nats per byte over batches of equal size; the model's mode is left as it was."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        losses = [model.loss(*on_device(model, *batch)).item() for batch in batches]
    model.train(was_training)
    assert losses, "held-out loss of no batches"
    return sum(losses) / len(losses)


def on_device(model: GPT, *arrays: np.ndarray) -> list[Tensor]:
    device = model.tok_emb.weight.device
    return [torch.from_numpy(array).to(device=device, dtype=torch.int64) for array in arrays]
