"""The buffers of a PyTorch model that training changes: BatchNorm's running means, a router's bias.

They are no drift that could be merged, so they go to the run by value. Those that are as they were when the model was
attached are left out. A run has each of them by its first name, as the genesis has (`adapters/genesis.py`): of several
names of one buffer only that is given, and a buffer that is a parameter's memory is none.
"""

from __future__ import annotations

import logging

import xxhash
from torch import Tensor, nn

from skerry.adapters.attached import by_plain_name
from skerry.adapters.genesis import aliases_of, bytes_of, entry_of, state_of, untyped, unwritable
from skerry.adapters.shards import is_sharded
from skerry.core.messages import BUFFERS_BYTES_MAX
from skerry.run.tensors import head_of
from skerry.text import size

log = logging.getLogger("skerry.learner")


class ChangedBuffers:
    """Called at a step boundary, it reads them; that waits for the device."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first = {name: _digest(each) for name, each in followed(model).items()}
        self._has_warned = False
        self._left_out: set[str] = set()  # of which it was said

    def __call__(self) -> bytes:
        """A small safetensors file; empty if there is nothing to tell."""
        now = {name: each for name, each in _here(self._model).items() if name in self._first}
        writable = {name: each for name, each in now.items() if self._can_be(name, each)}
        changed = {name: each for name, each in writable.items() if _digest(each) != self._first[name]}
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

    def _can_be(self, name: str, each: Tensor) -> bool:
        """It can be given; of one that has become what no file can hold, it is said once."""
        if why := unwritable(each) or untyped(each):
            if name not in self._left_out:
                self._left_out.add(name)
                log.warning("buffer %s %s; until then the run does not get it", name, why)
            return False
        return True


def followed(model: nn.Module) -> dict[str, Tensor]:
    """The persistent ones that a run can have, by name, each once."""
    every = state_of(model)
    here = {name: each for name, each in _here(model).items() if name in every}
    for name, each in here.items():
        if why := unwritable(each):
            raise ValueError(f"buffer {name} {why}, or register it with persistent=False")
    aliases = aliases_of(every)
    return {name: each for name, each in here.items() if name not in aliases and not untyped(each)}


def _here(model: nn.Module) -> dict[str, Tensor]:
    every = by_plain_name(model, model.named_buffers(remove_duplicate=False))
    return {name: each for name, each in every.items() if not each.is_meta and not is_sharded(each)}


def _digest(each: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(bytes_of(each))
