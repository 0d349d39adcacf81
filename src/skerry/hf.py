"""`skerry.hf.Callback` makes a Hugging Face Trainer a learner of a shared run."""

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("skerry.hf needs transformers: pip install 'skerry[hf]'") from error

from skerry.adapters.hf import Callback

__all__ = ["Callback"]
