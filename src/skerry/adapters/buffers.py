"""The buffers of a PyTorch model that training changes: BatchNorm's running means, a router's bias.

They are no drift that could be merged, so they go to the run by value. Those that are as they were when the model was
attached are left out.
"""

from __future__ import annotations

import logging

import xxhash
from torch import Tensor, nn

from skerry.adapters.attached import plain_names
from skerry.adapters.genesis import bytes_of, entry_of
from skerry.adapters.shards import is_sharded
from skerry.core.messages import BUFFERS_BYTES_MAX
from skerry.run.tensors import head_of
from skerry.text import size

log = logging.getLogger("skerry.learner")


class ChangedBuffers:
    """Called at a step boundary, it reads them; that waits for the device."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first = {name: _digest(each) for name, each in persistent(model).items()}
        self._has_warned = False

    def __call__(self) -> bytes:
        """A small safetensors file; empty if there is nothing to tell."""
        now = persistent(self._model)
        changed = {name: each for name, each in now.items() if _digest(each) != self._first.get(name)}
        if not changed:
            return b""
        head, placed = head_of((entry_of(name, each) for name, each in changed.items()), {})
        data = b"".join([head, *(bytes_of(changed[name]) for name in placed)])
        if len(data) <= BUFFERS_BYTES_MAX:
            return data
        if not self._has_warned:
            self._has_warned = True
            here, most = size(len(data)), size(BUFFERS_BYTES_MAX)
            log.warning("training changes %s of buffers, and at most %s are sent: the run gets none", here, most)
        return b""


def persistent(model: nn.Module) -> dict[str, Tensor]:
    """By the names that they have where nothing is compiled or wrapped, each once."""
    plain, kept = plain_names(model), model.state_dict().keys()
    here = {name: each for name, each in model.named_buffers() if not each.is_meta and not is_sharded(each)}
    return {plain(name): each for name, each in here.items() if name in kept}


def _digest(each: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(bytes_of(each))
