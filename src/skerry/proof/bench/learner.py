"""What attaching to a syncer costs a training loop: plain and attached stretches, in alternation, in one process.

Both run the same model, optimizer and data, free of any pacing. The syncer is a process of its own, and the learner's
node is where it is in use.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from skerry.adapters.torch import Learner
from skerry.config import Config, Data, Model, Run, Sync, encode
from skerry.proof.bench import cores
from skerry.shell.local import LocalRun
from skerry.train.data import Corpus, Stream
from skerry.train.inner import Inner, execution_of
from skerry.train.loop import model_of
from skerry.train.shapes import shape_of

FIRST_STEPS = 2  # of each stretch, not counted: caches and queues fill


class Spread(Struct, frozen=True):
    """Of the seconds that steps took."""

    p50_s: float
    p99_s: float
    p999_s: float
    max_s: float


class Attached(Struct, frozen=True):
    """Plain and attached stretches beside each other; memory is None where the system does not tell."""

    ratio: float  # attached over plain tokens/s, the median over pairs
    ratio_min: float
    ratio_max: float
    plain_tokens_per_s: float
    attached_tokens_per_s: float
    plain_step: Spread
    attached_step: Spread
    pairs: int
    steps: int
    model: str
    device: str
    node: str
    state: str
    parameters: int
    trainer_plain_bytes: int | None  # resident before the first attached stretch,
    trainer_attached_bytes: int | None  # and at the end of the last
    node_peak_bytes: int | None  # of a node process
    merges: int
    bytes_up: int
    bytes_down: int


def measure(
    model_preset: str, steps: int, pairs: int, batch: int, device: str, node: str | None, state: str | None
) -> Attached:
    """Pairs of a plain and an attached stretch of `steps` steps; every second pair has them the other way round."""
    config = Config(
        run=Run(learners=1, steps=10**9),
        model=Model(preset=model_preset),
        data=Data(batch=batch),
        sync=Sync(num_fragments=24, quorum=1, policy="fixed"),  # one a step, whatever the model's size
    )
    loop = _Loop(config, device)
    trainer_plain_bytes = cores.memory_bytes(os.getpid(), "VmRSS")
    plain: list[list[float]] = []
    attached: list[list[float]] = []
    seen: list[_Seen] = []
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder, _syncer(config, Path(folder)) as local:

        def attach() -> None:
            address = f"127.0.0.1:{local.port}"
            with Learner(loop.model, loop.inner.optimizer, address, name="bench", node=node, state=state) as learner:
                attached.append(loop.stretch(steps, learner))
                seen.append(_seen(learner))

        for pair in range(pairs):
            for is_attached in (False, True) if pair % 2 == 0 else (True, False):
                if is_attached:
                    attach()
                else:
                    plain.append(loop.stretch(steps, None))
        local.read_status()
        status = local.status
    ratios = [sum(p) / sum(a) for p, a in zip(plain, attached, strict=True)]
    return Attached(
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        plain_tokens_per_s=statistics.median(loop.step_tokens * steps / sum(times) for times in plain),
        attached_tokens_per_s=statistics.median(loop.step_tokens * steps / sum(times) for times in attached),
        plain_step=_spread(plain),
        attached_step=_spread(attached),
        pairs=pairs,
        steps=steps,
        model=model_preset,
        device=device,
        node=seen[-1].node,
        state=seen[-1].state,
        parameters=sum(p.numel() for p in loop.model.parameters()),
        trainer_plain_bytes=trainer_plain_bytes,
        trainer_attached_bytes=seen[-1].trainer_bytes,
        node_peak_bytes=seen[-1].node_bytes,
        merges=status["merges"],
        bytes_up=status["bytes_in"],
        bytes_down=status["bytes_out"],
    )


class _Seen(NamedTuple):
    """Of an attached learner."""

    node: str
    state: str
    trainer_bytes: int | None
    node_bytes: int | None


def _seen(learner: Learner) -> _Seen:
    pid, trainer_bytes = learner.node_pid, cores.memory_bytes(os.getpid(), "VmRSS")
    if pid is None:
        return _Seen("thread", learner.state, trainer_bytes, None)
    return _Seen("process", learner.state, trainer_bytes, cores.memory_bytes(pid, "VmHWM"))


def _spread(stretches: list[list[float]]) -> Spread:
    times = np.concatenate([np.array(times) for times in stretches])
    return Spread(*(float(np.quantile(times, share)) for share in (0.5, 0.99, 0.999, 1.0)))


class _Loop:
    def __init__(self, config: Config, device: str) -> None:
        import torch

        torch.set_num_threads(1)
        self.model = model_of(config).to(device)
        own = config.learner
        self.inner = Inner(self.model, own.lr, own.weight_decay, own.clip, execution_of(own, device))
        corpus = Corpus.open(config.data.path, config.data.bytes_max)
        shape = shape_of(config.model)
        self.stream = Stream(corpus, 0, 0, config.data.batch, shape.context)
        self.step_tokens = config.data.batch * shape.context

    def stretch(self, steps: int, learner: Learner | None) -> list[float]:
        """The seconds of each step."""
        took = []
        for _ in range(FIRST_STEPS + steps):
            began = time.perf_counter()
            inputs, targets = next(self.stream)
            self.inner.step(inputs, targets, 0.5)
            if learner is not None:
                learner.step(tokens=inputs.size)
            took.append(time.perf_counter() - began)
        return took[FIRST_STEPS:]


class _syncer:
    """A syncer over a fresh run directory, as a child process."""

    def __init__(self, config: Config, folder: Path) -> None:
        file = folder / "config.toml"
        file.write_text(_toml(msgspec.json.decode(encode(config))))
        self.local = LocalRun(folder / "run", [], [], syncer_arguments=["--config", str(file)])

    def __enter__(self) -> LocalRun:
        self._ends = self.local.ends_everything()
        self._ends.__enter__()
        self.local.start_syncer()
        return self.local

    def __exit__(self, *error: Any) -> None:
        self._ends.__exit__(*error)


def _toml(tables: dict[str, dict[str, Any]]) -> str:
    lines = []
    for table, values in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in values.items()]
    return "\n".join(lines)
