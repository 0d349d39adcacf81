"""`skerry.jax.Learner` makes a JAX loop a learner of a shared run, `save_genesis` writes its first values."""

try:
    import jax  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("skerry.jax needs JAX: pip install 'skerry[jax]'") from error

from skerry.adapters.jax import Learner, save_genesis

__all__ = ["Learner", "save_genesis"]
