"""`skerry.hf.Callback` makes a Hugging Face Trainer a learner of a shared run."""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ImportError("skerry.hf needs transformers: pip install 'skerry[hf]'")

from skerry.adapters.hf import Callback

__all__ = ["Callback"]
