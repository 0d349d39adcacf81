"""Held-out loss: what a run's model is worth on text that no learner has seen.

Torch is imported where it is used: whoever starts a local run and is refused does not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from skerry import config as configs
from skerry.algo.fragments import fragments_max
from skerry.core.state import state_of
from skerry.run.export import read_model
from skerry.run.genesis import GENESIS, read_genesis
from skerry.store.store import Store
from skerry.train.data import Corpus
from skerry.train.shapes import shape_of


class HeldOut:
    """Holds the held-out text and a model to pour values into; the only part of a local run that needs torch."""

    def __init__(self, config: configs.Config, corpus: Corpus) -> None:
        import torch

        from skerry.adapters.torch import layout_of_model
        from skerry.train.data import held_out_batches
        from skerry.train.loop import model_of

        torch.set_num_threads(1)
        self.model = model_of(config)
        layout = layout_of_model(self.model)
        self.fragment_count = min(config.sync.num_fragments, fragments_max(layout, config.sync.cut_tensors))
        self.batches = held_out_batches(corpus, 8, shape_of(config.model).context, config.data.held_out_batches)

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def loss_of(self, run_dir: Path, before_close: bool = False) -> float:
        """Held-out loss of the global model in a run directory."""
        with Store.open(run_dir, readonly=True) as store:
            arrays = read_model(store, state_of(store.records), before_close)
        return self._loss(arrays)

    def loss_at_first(self, run_dir: Path) -> float:
        """Held-out loss of the values the run began with."""
        return self._loss(read_genesis(run_dir / GENESIS)[1])

    def _loss(self, arrays: Mapping[str, npt.NDArray[Any]]) -> float:
        import torch

        from skerry.train.inner import held_out_loss

        values = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        self.model.load_state_dict(values, strict=True)
        return held_out_loss(self.model, self.batches)
