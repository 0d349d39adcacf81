"""Runs one job of a study on one device and says how it went: `run(job, device) -> Result`.

A job that is given a `Stint` is saved now and then, and goes on where it was saved (`lab.saves`).

The baseline is data-parallel on the same text: one replica whose batch is all learners' batches of that step put
together, the same model, optimizer, schedule and number of tokens.
"""

from __future__ import annotations

import math
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

import skerry
from skerry.proof.lab.feed import Feed
from skerry.proof.lab.laboratory import Laboratory
from skerry.proof.lab.saves import Course, Origin, TimeUpError
from skerry.proof.lab.stack import Stack
from skerry.proof.lab.study import Job, Point, Result, Stint
from skerry.train.inner import schedule
from skerry.train.loop import model_of

CURVE_BATCHES = 32  # held-out batches of a point on the curve; the last loss has the setting's own number
DIVERGED = 2.0  # times the loss at first: nothing good comes after


class DivergedError(Exception):
    """The loss is not finite, or far above where it began."""


class Judge:
    """The held-out text, the loss curve, and when to give a run up; points that are known are not looked for again."""

    def __init__(
        self, job: Job, stack: Stack, feed: Feed, told: Callable[[float], None], known: Sequence[Point] = ()
    ) -> None:
        self.stack, self.told, self.known = stack, told, known
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
        if len(self.points) < len(self.known):
            self.points.append(self.known[len(self.points)])
            return
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


def run(
    job: Job, device: str, told: Callable[[float], None] = lambda progress: None, stint: Stint | None = None
) -> Result | None:
    """None if its time was up: it is saved then."""
    torch.set_float32_matmul_precision("highest")
    course = Course(Origin(job.key, _name_of(torch.device(device)), _versions()), stint)
    train = _data_parallel if job.setting.data_parallel else _decoupled
    try:
        result = train(job, device, told, course)
    except TimeUpError:
        return None
    return msgspec.structs.replace(result, seconds=course.seconds)


def _decoupled(job: Job, device: str, told: Callable[[float], None], course: Course) -> Result:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="skerry-lab-", dir=memory if memory.is_dir() else None) as folder:
        world = Laboratory(job, device, Path(folder) / "run")
        world.trains = not course.is_rehearsal
        judge = Judge(job, world.stack, world.feed, told, course.points)

        def each_tick() -> None:
            if judge.is_due(world.progress):
                ledger = world.syncer.machine.state.ledger
                kept = (ledger.produced - sum(ledger.discarded.values())) // len(world.fragments)
                judge.look(
                    world.progress, kept, world.master(), sum(world.payload_bytes.values()), world.algebra.cosines()
                )
            course.passed(world, judge.points, lambda: world.mark)
            world.trains = not course.is_rehearsal

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


def _data_parallel(job: Job, device: str, told: Callable[[float], None], course: Course) -> Result:
    config = job.config
    model = model_of(config)
    setting = job.setting
    learner = config.learner
    stack = Stack(model, 1, learner.weight_decay, device, setting.precision, setting.trial, learner.clip)
    stack.flat[0] = stack.initial()
    feed = Feed(config, job.setting, device)
    judge = Judge(job, stack, feed, told, course.points)
    step_tokens = config.run.learners * config.data.batch * feed.context
    steps = config.run.steps or math.ceil(config.run.tokens / step_tokens)
    with suppress(DivergedError):
        for step in range(steps):
            inputs, targets = feed.windows(range(config.run.learners))
            rate = learner.lr * schedule(step / steps)
            if not course.is_rehearsal:
                stack.step([0], inputs.flatten(0, 1)[None], targets.flatten(0, 1)[None], [rate])
            if judge.is_due((step + 1) / steps):
                judge.look((step + 1) / steps, (step + 1) * step_tokens, stack.flat[0])
            course.passed(stack, judge.points)
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
    return Result(
        key=job.key,
        study=job.study,
        variant=job.variant,
        seed=job.seed,
        diverged=judge.diverged,
        points=tuple(judge.points),
        parameters=sum(p.numel() for p in stack.model.parameters()),
        seconds=0.0,
        device=_name_of(stack.device),
        versions=_versions(),
        config=msgspec.to_builtins(job.config),
        setting=msgspec.to_builtins(job.setting),
        **found,
    )


def _name_of(device: torch.device) -> str:
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_name(device) if is_gpu else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": str(torch.__version__), "skerry": skerry.__version__}
