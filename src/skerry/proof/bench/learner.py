"""What attaching to a syncer costs a training loop: plain and attached stretches, in alternation, in one process.

Both run the same model, optimizer and data, free of any pacing, in the order of the built-in trainer (`train/loop.py`).
The learner joins once, before the first of them: in a plain stretch it is told nothing, so what is beside the loop has
nothing to do. The syncer is a process of its own, and the learner's node is where it is in use. Of an island this
process is rank 0, and the others (`python -m` this module) do as it does.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from skerry.adapters.torch import Learner
from skerry.config import Config, Data, Model, Run, Sync, encode
from skerry.engines.supervisor import LocalRun
from skerry.proof.bench import cores
from skerry.python import module_argv
from skerry.train.data import Corpus, Stream
from skerry.train.gpt import GPT
from skerry.train.inner import Inner, execution_of
from skerry.train.loop import model_of
from skerry.train.shapes import shape_of

FIRST_STEPS = 2  # of each stretch, not counted: caches and queues fill
WARM_STEPS = 20  # before the first stretch: kernels are loaded, and clocks rise


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
    boundary: Spread  # of the attached ones, what `learner.step` takes
    pairs: int
    steps: int
    model: str
    device: str
    node: str
    state: str
    island: str
    ranks: int
    cores: int  # that the loop had for itself; 0: it shared all
    parameters: int
    trainer_plain_bytes: int | None  # resident before the learner joined,
    trainer_attached_bytes: int | None  # and at the end of the last
    node_peak_bytes: int | None  # of a node process
    merges: int
    bytes_up: int
    bytes_down: int


class Job(Struct, frozen=True):
    """What every rank is told; by itself a learner is an island of one."""

    config: Config
    steps: int
    pairs: int
    device: str
    node: str | None = None
    state: str | None = None
    island: Literal["", "ddp", "fsdp"] = ""
    ranks: int = 1
    cores: int = 0  # for the loop alone
    address: str = ""  # of the syncer
    meet: str = ""  # the file by which ranks meet


def measure(
    model_preset: str,
    steps: int,
    pairs: int,
    batch: int,
    device: str,
    node: str | None,
    state: str | None,
    island: Literal["", "ddp", "fsdp"] = "",
    ranks: int = 1,
    own_cores: int = 0,
) -> Attached:
    """Pairs of a plain and an attached stretch of `steps` steps; every second pair has them the other way round."""
    shared = cores.divided(own_cores)
    config = Config(
        run=Run(learners=1, steps=10**9),
        model=Model(preset=model_preset),
        data=Data(batch=batch),
        sync=Sync(num_fragments=24, quorum=1, policy="fixed"),  # one a step, whatever the model's size
    )
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder, _syncer(config, Path(folder), shared) as local:
        where = (f"127.0.0.1:{local.port}", f"{folder}/meet")
        job = Job(config, steps, pairs, device, node, state, island, ranks, own_cores, *where)
        with _other_ranks(job):
            loop, trainer_plain_bytes, plain, attached, seen = take(job, 0)
        local.read_status()
        status = local.status
    ratios = [sum(p) / sum(a) for p, a in zip(plain, attached, strict=True)]
    tokens = ranks * loop.step_tokens * steps
    return Attached(
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        plain_tokens_per_s=statistics.median(tokens / sum(times) for times in plain),
        attached_tokens_per_s=statistics.median(tokens / sum(times) for times in attached),
        plain_step=_spread(plain),
        attached_step=_spread(attached),
        boundary=_spread([loop.boundaries]),
        pairs=pairs,
        steps=steps,
        model=model_preset,
        device=device,
        node=seen.node,
        state=seen.state,
        island=island,
        ranks=ranks,
        cores=own_cores,
        parameters=sum(p.numel() for p in loop.model.parameters()),
        trainer_plain_bytes=trainer_plain_bytes,
        trainer_attached_bytes=seen.trainer_bytes,
        node_peak_bytes=seen.node_bytes,
        merges=status["merges"],
        bytes_up=status["bytes_in"],
        bytes_down=status["bytes_out"],
    )


def take(job: Job, rank: int) -> tuple[_Loop, int | None, list[list[float]], list[list[float]], _Seen]:
    """All stretches, as one rank: the loop, its memory before, the seconds of plain and attached steps, what it saw."""
    loop = _Loop(job, rank)
    plain: list[list[float]] = []
    attached: list[list[float]] = []
    own, others = cores.divided(job.cores)
    with cores.confined(own):
        loop.stretch(WARM_STEPS, None)
    trainer_plain_bytes = cores.memory_bytes(os.getpid(), "VmRSS")
    with cores.confined(others):  # which what runs beside the loop keeps
        learner = Learner(loop.model, loop.inner.optimizer, job.address, name="bench", node=job.node, state=job.state)
    with learner, cores.confined(own):
        loop.stretch(WARM_STEPS, learner)
        loop.boundaries.clear()
        for pair in range(job.pairs):
            for is_attached in (False, True) if pair % 2 == 0 else (True, False):
                took = loop.stretch(job.steps, learner if is_attached else None)
                (attached if is_attached else plain).append(took)
        seen = _seen(learner)
    loop.end()
    return loop, trainer_plain_bytes, plain, attached, seen


@contextmanager
def _other_ranks(job: Job) -> Iterator[None]:
    """Those beside this process, which end when all stretches are over, or with it."""
    words = module_argv(__name__, msgspec.json.encode(job).decode())
    others = [subprocess.Popen([*words, str(rank)]) for rank in range(1, job.ranks)]
    try:
        yield
        for other in others:
            other.wait()
    finally:
        for other in others:
            other.kill()
            other.wait()


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
    def __init__(self, job: Job, rank: int) -> None:
        import torch

        torch.set_num_threads(1)
        config, device = job.config, job.device
        self.model: Any = model_of(config).to(device)
        self._is_island = bool(job.island)
        if job.island:
            self.model = _shared(self.model, job, rank)
        own = config.learner
        self.inner = Inner(self.model, own.lr, own.weight_decay, own.clip, execution_of(own, device))
        corpus = Corpus.open(config.data.path, config.data.bytes_max)
        shape = shape_of(config.model)
        self.stream = Stream(corpus, rank, 0, config.data.batch, shape.context)
        self.step_tokens = config.data.batch * shape.context
        self.boundaries: list[float] = []

    def stretch(self, steps: int, learner: Learner | None) -> list[float]:
        """The seconds of each step."""
        took = []
        for step in range(FIRST_STEPS + steps):
            began = time.perf_counter()
            inputs, targets = next(self.stream)
            self.inner.begin(inputs, targets, 0.5)
            stepped = time.perf_counter()
            if learner is not None:
                learner.step(tokens=inputs.size)
                if step >= FIRST_STEPS:
                    self.boundaries.append(time.perf_counter() - stepped)
            self.inner.end()
            took.append(time.perf_counter() - began)
        return took[FIRST_STEPS:]

    def end(self) -> None:
        if self._is_island:
            import torch.distributed as dist

            dist.destroy_process_group()


def _shared(model: GPT, job: Job, rank: int) -> Any:
    """The model as a rank of an island has it."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from skerry.proof.chaos.ddp_rank import Parallel

    dist.init_process_group("gloo", f"file://{job.meet}", rank=rank, world_size=job.ranks)
    if job.island == "ddp":
        return Parallel(model)
    for module in (*model.blocks, model):
        fully_shard(module)
    return model


class _syncer:
    """A syncer over a fresh run directory, as a child process, on the cores that are not the loop's."""

    def __init__(self, config: Config, folder: Path, shared: cores.Cores) -> None:
        self._others = shared.others
        file = folder / "config.toml"
        file.write_text(_toml(msgspec.json.decode(encode(config))))
        self.local = LocalRun(folder / "run", [], [], syncer_arguments=["--config", str(file)])

    def __enter__(self) -> LocalRun:
        self._ends = self.local.ends_everything()
        self._ends.__enter__()
        with cores.confined(self._others):
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


if __name__ == "__main__":
    take(msgspec.json.decode(sys.argv[1], type=Job), int(sys.argv[2]))
