"""Held-out loss of the built-in model: what it is worth on data that no learner has seen.

It is computed in float32, on the device that a learner would take, and with every core where that is the CPU. The model
lies on the device only while it is evaluated, so that it takes nothing from learners afterwards.

Torch is imported where it is used: whoever starts a local run and is refused does not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt

from skerry import config as configs
from skerry.algo.fragments import fragment_count
from skerry.data.windows import Source, held_out_batches
from skerry.train.shapes import shape_of

ROWS = 8  # sequences of a batch


class HeldOut:
    """Holds the held-out batches and a model to pour values into; the only part of a local run that needs torch."""

    def __init__(self, config: configs.Config, data: Source, device: str | None = None, threads: int = 0) -> None:
        import torch

        from skerry.adapters.torch import layout_of_model
        from skerry.train.device import device_of
        from skerry.train.loop import check_size, model_of

        check_size(config, is_trained=False)
        torch.set_num_threads(1)
        self.device = device_of(device)
        self._threads = (threads or len(os.sched_getaffinity(0))) if self.device == "cpu" else 1
        self.model = model_of(config)
        layout, sync = layout_of_model(self.model), config.sync
        self.fragment_count = fragment_count(layout, sync.num_fragments, sync.cut_tensors)
        self.batches = held_out_batches(data, ROWS, shape_of(config.model).context, config.data.held_out_batches)

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def loss(self, arrays: Mapping[str, npt.NDArray[Any]], told: Callable[[int, int], None] | None = None) -> float:
        """Of a model with these values; `told` hears how many of how many batches are done."""
        import torch

        from skerry.train.inner import held_out_loss, unheard

        self.model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()}, strict=True)
        self.model.to(self.device)
        try:
            return held_out_loss(self.model, self.batches, told or unheard, self._threads)
        finally:
            self.model.to("cpu")
            torch.cuda.empty_cache()
