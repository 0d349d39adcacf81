"""Runs one job of a study on one device and says how it went: `run(job, device) -> Result`.

The baseline is data-parallel on the same text: one replica whose batch is all learners' batches of that step put
together, the same model, optimizer, schedule and number of tokens.
"""

from __future__ import annotations

import math
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

import skerry
from skerry.proof.lab.feed import Feed
from skerry.proof.lab.laboratory import Laboratory
from skerry.proof.lab.stack import Stack
from skerry.proof.lab.study import Job, Point, Result
from skerry.train.inner import schedule
from skerry.train.loop import model_of

CURVE_BATCHES = 32  # held-out batches of a point on the curve; the last loss has the setting's own number
DIVERGED = 2.0  # times the loss at first: nothing good comes after


class DivergedError(Exception):
    """The loss is not finite, or far above where it began."""


class Judge:
    """The held-out text, the loss curve, and when to give a run up."""

    def __init__(self, job: Job, stack: Stack, feed: Feed, told: Callable[[float], None]) -> None:
        self.stack, self.told = stack, told
        self.every = 1 / job.setting.points
        self.curve = feed.held_out(CURVE_BATCHES)
        self.final = feed.held_out(job.setting.held_out)
        self.points: list[Point] = []
        self.diverged = False
        self.first = stack.held_out(stack.initial(), self.curve)

    def is_due(self, progress: float) -> bool:
        return progress >= self.every * (len(self.points) + 1) and progress < 1

    def look(
        self, progress: float, tokens: int, values: Tensor, sent: int = 0, cosines: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        loss = self.stack.held_out(values, self.curve)
        agreement, echo = (0.0 if math.isnan(cosine) else cosine for cosine in cosines)  # nothing agrees with a NaN
        self.points.append(
            Point(progress=progress, tokens=tokens, bytes=sent, loss=loss, agreement=agreement, echo=echo)
        )
        self.told(progress)
        self.diverged = self._is_beyond(loss)
        if self.diverged:
            raise DivergedError

    def verdict(self, values: Tensor) -> float:
        """The last loss; of a run that is given up, here or before, the loss at which that is done."""
        loss = self.stack.held_out(values, self.final)
        self.diverged |= self._is_beyond(loss)
        return DIVERGED * self.first if self.diverged else loss

    def _is_beyond(self, loss: float) -> bool:
        return not loss <= DIVERGED * self.first  # so that a NaN is, too


def run(job: Job, device: str, told: Callable[[float], None] = lambda progress: None) -> Result:
    began = time.monotonic()
    torch.set_float32_matmul_precision("highest")
    result = _data_parallel(job, device, told) if job.setting.data_parallel else _decoupled(job, device, told)
    return msgspec.structs.replace(result, seconds=time.monotonic() - began)


def _decoupled(job: Job, device: str, told: Callable[[float], None]) -> Result:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="skerry-lab-", dir=memory if memory.is_dir() else None) as folder:
        world = Laboratory(job, device, Path(folder) / "run")
        judge = Judge(job, world.stack, world.feed, told)

        def each_tick() -> None:
            if judge.is_due(world.progress):
                ledger = world.syncer.machine.state.ledger
                kept = (ledger.produced - sum(ledger.discarded.values())) // len(world.fragments)
                judge.look(
                    world.progress, kept, world.master(), sum(world.payload_bytes.values()), world.algebra.cosines()
                )

        with suppress(DivergedError):
            world.run(each_tick)
        state, before = world.syncer.machine.state, world.before_close
        discarded = sum(state.ledger.discarded.values())
        return _result(
            job,
            judge,
            world.stack,
            loss=judge.verdict(world.master()),
            loss_before_close=judge.verdict(world.master(before)),
            tokens=(state.ledger.produced - discarded) // len(world.fragments),
            tokens_discarded=discarded // len(world.fragments),
            steps=state.ledger.steps,
            merges=state.merges,
            contributors=state.contributors / max(1, state.merges),
            bytes_up=world.payload_bytes["up"],
            bytes_down=world.payload_bytes["down"],
        )


def _data_parallel(job: Job, device: str, told: Callable[[float], None]) -> Result:
    config = job.config
    model = model_of(config)
    setting = job.setting
    learner = config.learner
    stack = Stack(model, 1, learner.weight_decay, device, setting.precision, setting.trial, learner.clip)
    stack.flat[0] = stack.initial()
    feed = Feed(config, job.setting, device)
    judge = Judge(job, stack, feed, told)
    step_tokens = config.run.learners * config.data.batch * feed.context
    steps = config.run.steps or math.ceil(config.run.tokens / step_tokens)
    with suppress(DivergedError):
        for step in range(steps):
            inputs, targets = feed.windows(range(config.run.learners))
            rate = learner.lr * schedule(step / steps)
            stack.step([0], inputs.flatten(0, 1)[None], targets.flatten(0, 1)[None], [rate])
            if judge.is_due((step + 1) / steps):
                judge.look((step + 1) / steps, (step + 1) * step_tokens, stack.flat[0])
    loss = judge.verdict(stack.flat[0])
    return _result(
        job,
        judge,
        stack,
        loss=loss,
        loss_before_close=loss,
        tokens=steps * step_tokens,
        tokens_discarded=0,
        steps=steps,
        merges=0,
        contributors=0.0,
        bytes_up=0,
        bytes_down=0,
    )


def _result(job: Job, judge: Judge, stack: Stack, **found: Any) -> Result:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "skerry": skerry.__version__}
    is_gpu = stack.device.type == "cuda"
    return Result(
        key=job.key,
        study=job.study,
        variant=job.variant,
        seed=job.seed,
        diverged=judge.diverged,
        points=tuple(judge.points),
        parameters=sum(p.numel() for p in stack.model.parameters()),
        seconds=0.0,
        device=torch.cuda.get_device_name(stack.device) if is_gpu else platform.processor() or platform.machine(),
        versions=versions,
        config=msgspec.to_builtins(job.config),
        setting=msgspec.to_builtins(job.setting),
        **found,
    )
