"""A local run's beginning: its directory, with the first versions of the built-in model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skerry import config as configs
from skerry.algo.fragments import Layout, split
from skerry.errors import Refusal
from skerry.run import room
from skerry.run.genesis import GENESIS, create_run, read_genesis
from skerry.store.store import Store
from skerry.text import size

if TYPE_CHECKING:
    from torch import nn


def check_room(run_dir: Path, config: configs.Config, layout: Layout, made_in: Path | None) -> None:
    """Refuse a built-in model that this machine cannot hold, before a value of it is made or a process is started.

    Its first values are a file in the folder `made_in`; None: they are there already. To make them takes less memory
    than to serve them.
    """
    room.check_memory(layout.param_count, room.STATE_BYTES * layout.param_count)  # for to split it takes memory, too
    fragments = split(layout, config.sync.num_fragments, config.sync.cut_tensors)
    if made_in is None:
        room.check(run_dir, config, fragments, is_new=False)
        return
    made = room.GENESIS_BYTES * layout.param_count
    is_one = room.is_one_disk(run_dir, made_in)
    room.check(run_dir, config, fragments, is_new=True, fixed_bytes=made if is_one else 0)
    if not is_one and made > (free := room.free_disk(made_in)):
        raise Refusal(
            f"the first values of a model of {layout.param_count:,} parameters need {size(made)} of disk in {made_in}, "
            f"{size(free)} are free: name another folder by TMPDIR"
        )


def create(run_dir: Path, config: configs.Config, model: nn.Module) -> None:
    """The run's directory with its first versions, made here because the model is at hand."""
    from skerry.adapters.genesis import save_genesis

    with Store.open(run_dir) as store:
        genesis = run_dir / GENESIS
        save_genesis(model, genesis)
        create_run(store, config, *read_genesis(genesis))
