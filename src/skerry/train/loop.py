"""The built-in learner: the GPT on the run's data, as a plain loop around `skerry.Learner`.

Learners that share a machine are paced: each step is padded to `step_s / speed`, so that figures on speed, gaps and
goodput speak of the protocol and not of the machine's scheduler. A pace file slows a learner down while it runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from skerry.adapters.torch import Learner
from skerry.config import Config
from skerry.errors import Refusal
from skerry.run.room import free_memory
from skerry.text import size
from skerry.train.data import open_data
from skerry.train.gpt import GPT, build
from skerry.train.inner import Inner, execution_of
from skerry.train.shapes import bytes_needed, shape_of


class Pace:
    """Pads each step to `period_s`; a late step is not made up for by quicker ones.

    While `file` holds a number, the pace is that share of it.
    """

    def __init__(self, period_s: float, file: Path | None = None) -> None:
        self.period_s = period_s
        self.file = file
        self._began = time.monotonic()

    def wait(self) -> None:
        now = time.monotonic()
        due = self._began + max(self.period_s, now - self._began) / self.share
        if now < due:
            time.sleep(due - now)
        self._began = max(due, now)

    @property
    def share(self) -> float:
        if self.file is not None:
            with contextlib.suppress(OSError):  # it is not there: full pace
                return float(self.file.read_text())
        return 1.0


def model_of(config: Config) -> GPT:
    shape = shape_of(config.model)
    return build(shape.layers, shape.width, shape.heads, shape.context, config.run.seed, shape.vocabulary)


def check_size(config: Config, is_trained: bool) -> None:
    """A run says how large its model and its batches are: none takes all the memory of a machine that joins it.

    A model is made on the host, wherever it is trained then. A GPU has its own way to say that it is full.
    """
    needed, free = bytes_needed(config, is_trained), free_memory()
    if free is not None and needed > free:
        what, smaller = ("model and batch need", ", or a smaller --micro-batch") if is_trained else ("model needs", "")
        raise Refusal(
            f"the run's {what} {size(needed)} of memory at least, {size(free)} are free: take a larger machine{smaller}"
        )


def train(
    config: Config,
    syncer: str,
    name: str,
    speed: float,
    token_file: str | None,
    key_file: str | None,
    join_timeout_s: float,
    device: str,
    pace_file: Path | None,
    wants_on: Callable[[], bool],
    node: str | None = None,
    state: str | None = None,
) -> None:
    """Join, train until the run or the operator says stop, hand over what is left, leave."""
    check_size(config, is_trained=device == "cpu")
    data = open_data(config)
    context = shape_of(config.model).context
    model = model_of(config).to(device)
    own = config.learner
    inner = Inner(model, own.lr, own.weight_decay, own.clip, execution_of(own, device))
    inner.prepare(config.data.batch, context)
    joining = Learner(
        model,
        inner.optimizer,
        syncer,
        name=name,
        token_file=token_file,
        key_file=key_file,
        insecure=True,  # `skerry learner` has looked at the address
        join_timeout_s=join_timeout_s,
        node=node,
        state=state,
        is_wanted=wants_on,
    )
    with joining as learner:
        batches = data.batches(
            learner.index,
            config.run.seed,
            config.data.batch,
            context,
            start=learner.prior_steps,
            learners=config.run.learners,
        )
        pace = Pace(own.step_s / speed, pace_file)
        going, loss = learner.is_running, 0.0  # what is said of a step is said with the next: see `Inner`
        while going and wants_on():
            inputs, targets = next(batches)
            inner.begin(inputs, targets, learner.progress, learner.ramp)
            pace.wait()
            going = learner.step(tokens=inputs.size, loss=loss, grad_norm=inner.grad_norm)
            loss = inner.end()
