"""`skerry.jax.Learner` makes a JAX loop a learner of a shared run, `save_genesis` writes its first values."""

from importlib.util import find_spec

if find_spec("jax") is None:
    raise ImportError("skerry.jax needs JAX: pip install 'skerry[jax]'")

from skerry.adapters.jax import Learner, save_genesis

__all__ = ["Learner", "save_genesis"]
