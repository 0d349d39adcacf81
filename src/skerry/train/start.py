"""A local run's beginning: its directory, with the first versions of the built-in model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skerry import config as configs
from skerry.algo.fragments import split
from skerry.run import room
from skerry.run.genesis import GENESIS, create_run, read_genesis
from skerry.store.store import Store
from skerry.train.shapes import shape_of

if TYPE_CHECKING:
    from torch import nn


def check_room(run_dir: Path, config: configs.Config, is_new: bool) -> None:
    """Refuse a model that this machine cannot hold, before a value of it is made or a process is started."""
    from skerry.adapters.torch import layout_of_model
    from skerry.train.gpt import outline

    shape = shape_of(config.model)
    layout = layout_of_model(outline(shape.layers, shape.width, shape.heads, shape.context, shape.vocabulary))
    fragments = split(layout, config.sync.num_fragments, config.sync.cut_tensors)
    room.check(run_dir, config, fragments, is_new)


def create(run_dir: Path, config: configs.Config, model: nn.Module) -> None:
    """The run's directory with its first versions, made here because the model is at hand."""
    from skerry.adapters.genesis import save_genesis

    with Store.open(run_dir) as store:
        genesis = run_dir / GENESIS
        save_genesis(model, genesis)
        create_run(store, config, *read_genesis(genesis))
