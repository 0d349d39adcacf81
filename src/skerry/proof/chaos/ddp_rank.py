"""One rank of an ordinary DistributedDataParallel run over gloo: what the built-in learner trains, without Skerry.

Model, text, batch, inner step and pace are the built-in learner's. After every step one line goes to the log: wall
time, step, tokens. SIGUSR1 divides the rank's pace; SIGTERM ends it at once, for it has nothing to hand over.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from skerry import config as configs
from skerry.proof.chaos.ddp import THROTTLE
from skerry.shell.signals import end_with
from skerry.train.data import open_data
from skerry.train.gpt import GPT
from skerry.train.inner import Inner, execution_of
from skerry.train.loop import Pace, model_of
from skerry.train.shapes import shape_of

PROGRESS = 0.5  # of the run: the rate of learning has no part in the rate of tokens


class Parallel(DistributedDataParallel):
    """A GPT whose gradients are averaged over all ranks, with what `Inner` asks of a GPT."""

    loss = GPT.loss  # calls self, and so DistributedDataParallel's forward

    @property
    def tok_emb(self) -> nn.Module:
        return cast(nn.Module, self.module.tok_emb)


def train(config: configs.Config, rank: int, log: Path) -> None:
    """Step until ended from outside, or until the process group fails."""
    context, learners = shape_of(config.model).context, config.run.learners
    stream = open_data(config).batches(rank, config.run.seed, config.data.batch, context, learners=learners)
    model = Parallel(model_of(config))
    own = config.learner
    inner = Inner(cast(GPT, model), own.lr, own.weight_decay, own.clip, execution_of(own, "cpu"))
    pace = Pace(own.step_s)

    def slow_down(*_: Any) -> None:
        nonlocal pace
        pace = Pace(pace.period_s * THROTTLE)

    signal.signal(signal.SIGUSR1, slow_down)
    with log.open("a") as lines:
        for step in itertools.count(1):
            inputs, targets = next(stream)
            inner.step(inputs, targets, PROGRESS)
            pace.wait()
            print(f"{time.time():.6f} {step} {inputs.size}", file=lines, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m skerry.proof.chaos.ddp_rank", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--init", required=True, help="where the ranks meet: tcp://host:port or file:///path")
    parser.add_argument("--config", type=Path, required=True, help="the configuration, JSON")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--parent", type=int, default=0, help="end when this process is gone")
    options = parser.parse_args()
    end_with(options.parent)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", options.init, rank=options.rank, world_size=options.world)
    train(configs.decode(options.config.read_bytes()), options.rank, options.log)


if __name__ == "__main__":
    main()
