"""Skerry trains one model on many islands of compute that differ in speed, sit far apart, and come and go.

The public names are few: `skerry.Learner` makes a plain PyTorch loop a learner of a shared run, `skerry.save_genesis`
writes the first version of a model for a syncer. Both need torch, which nothing else here imports. `skerry.data` has
packs of tokens to train on. Errors are `skerry.SkerryError` and those below it (`errors.py`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from skerry.errors import (
    ConfigError,
    JoinTimeout,
    LocalError,
    ModelError,
    ProtocolError,
    RefusedError,
    RemoteError,
    SkerryError,
    StoreError,
    WireError,
)

if TYPE_CHECKING:
    from skerry.adapters.torch import Learner, save_genesis

__version__ = "0.3.0"
__all__ = [
    "ConfigError",
    "JoinTimeout",
    "Learner",
    "LocalError",
    "ModelError",
    "ProtocolError",
    "RefusedError",
    "RemoteError",
    "SkerryError",
    "StoreError",
    "WireError",
    "__version__",
    "save_genesis",
]


def __getattr__(name: str) -> Any:
    if name == "data":
        return importlib.import_module("skerry.data")
    if name in ("Learner", "save_genesis"):
        import skerry.adapters.torch

        return getattr(skerry.adapters.torch, name)
    raise AttributeError(f"module 'skerry' has no attribute {name!r}")
