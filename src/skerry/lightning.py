"""`skerry.lightning.Callback` makes a Lightning Trainer a learner of a shared run."""

from importlib.util import find_spec

if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    raise ImportError("skerry.lightning needs Lightning: pip install 'skerry[lightning]'")

from skerry.adapters.lightning import Callback

__all__ = ["Callback"]
