"""Skerry trains one model on many islands of compute that differ in speed, sit far apart, and come and go.

The public names are few: `skerry.Learner` makes a plain PyTorch loop a learner of a shared run, `skerry.save_genesis`
writes the first version of a model for a syncer. `skerry.jax` has the same for JAX; `skerry.ArrayLearner` and
`skerry.save_arrays` for numpy arrays, and so for any framework; `skerry.hf` and `skerry.lightning` have callbacks for
those trainers. What needs a framework imports it when it is asked for, and nothing else does. `skerry.data` has packs
of tokens to train on. Errors are `skerry.SkerryError` and those below it (`errors.py`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from skerry.errors import (
    ConfigError,
    IslandError,
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
    from skerry.adapters.arrays import ArrayLearner, save_arrays
    from skerry.adapters.genesis import save_genesis
    from skerry.adapters.torch import Learner
    from skerry.shell.learner import Handover, Standing

__version__ = "0.3.0"
__all__ = [
    "ArrayLearner",
    "ConfigError",
    "Handover",
    "IslandError",
    "JoinTimeout",
    "Learner",
    "LocalError",
    "ModelError",
    "ProtocolError",
    "RefusedError",
    "RemoteError",
    "SkerryError",
    "Standing",
    "StoreError",
    "WireError",
    "__version__",
    "save_arrays",
    "save_genesis",
]

_MODULES = ("data", "hf", "jax", "lightning")
_PLACES = {
    "ArrayLearner": "skerry.adapters.arrays",
    "Handover": "skerry.shell.learner",
    "Learner": "skerry.adapters.torch",
    "Standing": "skerry.shell.learner",
    "save_arrays": "skerry.adapters.arrays",
    "save_genesis": "skerry.adapters.genesis",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"skerry.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'skerry' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_PLACES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"skerry.{name} needs PyTorch: pip install 'skerry[torch]'") from None
