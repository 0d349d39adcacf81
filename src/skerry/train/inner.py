"""One inner step: forward, backward, clip, AdamW.

The learning rate follows the run's global progress, which is handed in, never the learner's own step count: a
learner that joins late or steps slowly is on the same schedule as the rest. The caller sets torch's threads.

What a step does is the run's: rate, decay, clip. How it is computed is the learner's own (`Execution`), and changes the
result by rounding alone. Parameters, gradients and the optimizer's moments are float32 in any case. What is compiled is
the model's loss and not the model, so its parameters keep their names, and whoever attaches it sees the plain module.

A step is begun and ended: what is ordered of a GPU in between, as a boundary's copies, runs beside it and not behind.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skerry import config as configs

from .data import Batch
from .gpt import GPT

BETAS = (0.9, 0.95)
WARMUP_SHARE = 0.02  # of the run's progress
FLOOR = 0.1  # of the peak rate, at the end
PASSES = 3  # until all is compiled: CUDA graphs are warmed up in the first pass and recorded in the second

log = logging.getLogger("skerry.learner")


@dataclass(frozen=True)
class Execution:
    """How a learner computes its steps."""

    autocast: torch.dtype | None = None  # of matrix products; None: as the parameters are
    compile: str = "off"  # or a mode of torch.compile
    micro_batch: int = 0  # sequences that are computed at once; 0: the whole batch


PLAIN = Execution()


def execution_of(learner: configs.Learner, device: str) -> Execution:
    """What the configuration asks for, and where it leaves the choice, what suits the device."""
    is_fast = torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    is_bf16 = learner.precision == "bf16" or (learner.precision == "auto" and is_fast)
    return Execution(torch.bfloat16 if is_bf16 else None, learner.compile, learner.micro_batch)


class Inner:
    """A model and its optimizer; `step` is the whole inner loop's body."""

    def __init__(
        self, model: GPT, lr: float, weight_decay: float = 0.1, clip: float = 1.0, execution: Execution = PLAIN
    ) -> None:
        self.model = model
        self.lr = lr
        self.clip = clip
        self.execution = execution
        self.grad_norm = 0.0  # of the last step that has ended, before it was clipped; 0 where nothing is
        self._begun: tuple[Tensor, Tensor | None] | None = None  # loss and norm of the step that has not
        self._loss: Callable[[Tensor, Tensor], Tensor] = model.loss
        if execution.compile != "off":
            self._loss = torch.compile(model.loss, mode=execution.compile)
        self._keeps_gradients = execution.compile == "reduce-overhead"
        if self._keeps_gradients:  # a CUDA graph's own would be overwritten by the next micro-batch (pytorch #169545)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        gains = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)

    def prepare(self, batch: int, context: int) -> None:
        """Compile for batches of this shape, which takes long, before anybody waits for a step; nothing is learned.

        A GPU loads its kernels at their first use, half a second of them: on it a pass is made in any case, so that
        those who begin together stay together.
        """
        if self.execution.compile != "off":
            log.info("compiling the model (torch.compile, %s), which may take minutes", self.execution.compile)
        self.model.train()
        nothing = np.zeros((batch, context), np.uint8)
        for _ in range(self._passes):
            self._backward(nothing, nothing)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or 1.0)
        self.optimizer.zero_grad(set_to_none=not self._keeps_gradients)

    @property
    def _passes(self) -> int:
        if self.execution.compile != "off":
            return PASSES
        return 1 if self.model.tok_emb.weight.is_cuda else 0

    def step(self, inputs: np.ndarray, targets: np.ndarray, progress: float, ramp: float = 1.0) -> float:
        """Learn from one batch, wait for that, and say the loss."""
        self.begin(inputs, targets, progress, ramp)
        return self.end()

    def begin(self, inputs: np.ndarray, targets: np.ndarray, progress: float, ramp: float = 1.0) -> None:
        """Order all of a step; `progress` is the run's in [0, 1], `ramp` a newcomer's share of the rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * schedule(progress) * ramp
        self.model.train()
        self.optimizer.zero_grad(set_to_none=not self._keeps_gradients)
        loss = self._backward(inputs, targets)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip) if self.clip else None
        self.optimizer.step()
        self._begun = loss, norm

    def end(self) -> float:
        """Wait until the step is done, and whatever was ordered behind it; its loss."""
        assert self._begun is not None, "no step was begun"
        (loss, norm), self._begun = self._begun, None
        said = loss.item()
        self.grad_norm = 0.0 if norm is None else norm.item()
        return said

    def _backward(self, inputs: np.ndarray, targets: np.ndarray) -> Tensor:
        """Add up the gradients of the batch's mean loss, a micro-batch at a time; that loss."""
        total, size = len(inputs), self.execution.micro_batch or len(inputs)
        losses = []
        for at in range(0, total, size):
            some = inputs[at : at + size], targets[at : at + size]
            loss = self._loss_of(*some) * (len(some[0]) / total)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _loss_of(self, inputs: np.ndarray, targets: np.ndarray) -> Tensor:
        there = on_device(self.model, inputs, targets)
        dtype = self.execution.autocast
        with torch.autocast(there[0].device.type, dtype, enabled=dtype is not None):
            return self._loss(*there)

    def __repr__(self) -> str:
        return f"Inner(lr={self.lr:g}, parameters={sum(p.numel() for p in self.model.parameters())})"


def unheard(done: int, total: int) -> None:
    """Nobody wants to know how far it is."""


def schedule(progress: float) -> float:
    """Share of the peak rate: from a tenth, linear over the first 2 %, then a cosine down to a tenth."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < WARMUP_SHARE:
        return FLOOR + (1 - FLOOR) * progress / WARMUP_SHARE
    decayed = (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * decayed))


def held_out_loss(
    model: GPT, batches: Sequence[Batch], told: Callable[[int, int], None] = unheard, threads: int = 1
) -> float:
    """Mean loss in nats per token over batches of equal size, in float32; the model's mode is left as it was.

    `told` hears how many of how many batches are done. Each thread has a batch of its own: that gives the same bits for
    any number of them, and on busy cores none waits for the others in every operation, as torch's own threads do.
    """
    assert batches, "held-out loss of no batches"

    def loss_of(batch: Batch) -> float:
        with torch.no_grad():  # which is each thread's own
            return model.loss(*on_device(model, *batch)).item()

    was_training = model.training
    model.eval()
    losses = []
    pool = ThreadPoolExecutor(threads, "skerry-held-out")
    try:
        for done, loss in enumerate(pool.map(loss_of, batches), 1):
            losses.append(loss)
            told(done, len(batches))
    finally:
        pool.shutdown(cancel_futures=True)
    model.train(was_training)
    return sum(losses) / len(losses)


def on_device(model: GPT, *arrays: np.ndarray) -> list[Tensor]:
    device = model.tok_emb.weight.device
    return [torch.from_numpy(array).to(device=device, dtype=torch.int64) for array in arrays]
