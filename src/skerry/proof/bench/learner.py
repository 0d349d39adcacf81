"""What attaching to a syncer costs a training loop: plain and attached tokens/s, in alternation, in one process.

Both run the same model, optimizer and data, free of any pacing. The syncer is a process of its own; the learner's own
node and I/O threads run beside the loop, as they do in use.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from skerry.adapters.torch import Learner
from skerry.config import Config, Data, Model, Run, Sync, encode
from skerry.shell.local import LocalRun
from skerry.train.data import Corpus, Stream
from skerry.train.inner import Inner, execution_of
from skerry.train.loop import model_of
from skerry.train.shapes import shape_of

FIRST_STEPS = 2  # of each stretch, not counted: caches and queues fill


def measure(model_preset: str, steps: int, pairs: int, batch: int, device: str) -> dict[str, Any]:
    """Alternate plain and attached stretches of `steps` steps; `ratio` is the median over pairs."""
    config = Config(
        run=Run(learners=1, steps=10**9),
        model=Model(preset=model_preset),
        data=Data(batch=batch),
        sync=Sync(quorum=1, policy="fixed"),
    )
    loop = _Loop(config, device)
    plain, attached = [], []
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder, _syncer(config, Path(folder)) as local:
        for _ in range(pairs):
            plain.append(loop.tokens_per_s(steps, None))
            learner = Learner(loop.model, loop.inner.optimizer, f"127.0.0.1:{local.port}", name="bench")
            attached.append(loop.tokens_per_s(steps, learner))
            learner.close()
        local.read_status()
        merges, status = local.status["merges"], local.status
    ratios = [a / p for a, p in zip(attached, plain, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "plain_tokens_per_s": statistics.median(plain),
        "attached_tokens_per_s": statistics.median(attached),
        "pairs": pairs,
        "steps": steps,
        "model": model_preset,
        "device": device,
        "merges": merges,
        "bytes_up": status["bytes_in"],
        "bytes_down": status["bytes_out"],
    }


class _Loop:
    def __init__(self, config: Config, device: str) -> None:
        import torch

        torch.set_num_threads(1)
        self.model = model_of(config).to(device)
        own = config.learner
        self.inner = Inner(self.model, own.lr, own.weight_decay, own.clip, execution_of(own, device))
        corpus = Corpus.open(config.data.path, config.data.bytes_max)
        self.stream = Stream(corpus, 0, 0, config.data.batch, shape_of(config.model).context)

    def tokens_per_s(self, steps: int, learner: Learner | None) -> float:
        tokens, began = 0, 0.0
        for number in range(FIRST_STEPS + steps):
            if number == FIRST_STEPS:
                tokens, began = 0, time.perf_counter()
            inputs, targets = next(self.stream)
            self.inner.step(inputs, targets, 0.5)
            tokens += inputs.size
            if learner is not None:
                learner.step(tokens=inputs.size)
        return tokens / (time.perf_counter() - began)


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
