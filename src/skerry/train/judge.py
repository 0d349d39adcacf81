"""A local run's beginning and its verdict: the first versions, and the held-out loss of what came out.

Torch is imported where it is used: whoever starts a local run and is refused does not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from skerry import config as configs
from skerry.node import model
from skerry.shell.local import LOCAL, Local
from skerry.shell.syncer import write_json
from skerry.store.store import Store
from skerry.train.data import Corpus
from skerry.train.shapes import shape_of

GENESIS = "genesis.safetensors"


class Judge:
    """Holds the held-out text and a model to pour values into; the only part of a local run that needs torch."""

    def __init__(self, config: configs.Config, corpus: Corpus) -> None:
        import torch

        from skerry.train.data import held_out_batches
        from skerry.train.loop import model_of

        torch.set_num_threads(1)
        self.model = model_of(config)
        self.fragment_count = min(config.sync.num_fragments, len(list(self.model.parameters())))
        self.batches = held_out_batches(corpus, 8, shape_of(config.model).context, config.data.held_out_batches)

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def loss_of(self, run_dir: Path, before_close: bool = False) -> float:
        """Held-out loss of the global model in a run directory."""
        with Store.open(run_dir, readonly=True) as store:
            arrays = model.read_model(store, model.state_of(store), before_close)
        return self._loss(arrays)

    def loss_at_first(self, run_dir: Path) -> float:
        """Held-out loss of the values the run began with."""
        return self._loss(model.read_genesis(run_dir / GENESIS)[1])

    def _loss(self, arrays: Mapping[str, npt.NDArray[Any]]) -> float:
        import torch

        from skerry.train.inner import held_out_loss

        values = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        self.model.load_state_dict(values, strict=True)
        return held_out_loss(self.model, self.batches)


def create(run_dir: Path, config: configs.Config, speeds: list[float], judge: Judge) -> None:
    """The run's directory with its first versions, made here because the model is at hand."""
    from skerry import save_genesis

    with Store.open(run_dir) as store:
        genesis = run_dir / GENESIS
        save_genesis(judge.model, genesis)
        model.create_run(store, config, *model.read_genesis(genesis), time.time())
    write_json(run_dir / LOCAL, Local(speeds))
