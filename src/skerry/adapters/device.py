"""A learner's state on the device that trains: a node whose arrays are flat float32 tensors.

Rules that hold here: the node's thread has a stream of its own, and all that it does to tensors is in order on it.
Cells are the only tensors that the training stream sees too; each use of one waits, on the device, for the use before
it, and the host waits for neither. What crosses the bus is encoded, through one pinned buffer that is kept, and a
thread that waits for it does so without the interpreter. The bits are those of `algo/` (`adapters/kernels.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from skerry.adapters import kernels
from skerry.algo import Use, codecs, digests
from skerry.algo.codecs import U8
from skerry.algo.fragments import BLOCK, ROW, Fragment
from skerry.errors import ConfigError
from skerry.memory import Arrays
from skerry.node.algebra import FLOAT32, Adopted, Payload
from skerry.node.cells import Cells
from skerry.shell.beside import Kind
from skerry.shell.learner import asked_for, node_kind, state_kind
from skerry.text import size

STAGING_BYTES = 8 << 20  # an int4 fragment of fifteen million parameters at once
WARM_SIZE = 64 * ROW + BLOCK  # elements for which the kernels are those of larger fragments
STATE_BYTES = 14  # a parameter: base, residual, drift, and what is on its way
DEVICES = ("cuda", "cpu")  # that have every kernel
NO_PROCESS = 'a process beside the trainer cannot have it: give node (SKERRY_NODE) = "thread", or leave it out'
SHARE_MAX = 0.5  # of what is free on the device: optimizer and activations may be yet to come

log = logging.getLogger("skerry.learner")


class DeviceCell:
    """A cell that lies where the parameters are; see `node/cells.py`."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._number = 0
        self._last_use = torch.cuda.Event() if values.is_cuda else None

    def store(self, values: Tensor, *less: Tensor) -> None:
        out = self.load(values.numel())
        if not less:
            out.copy_(values)
        else:
            torch.sub(values, less[0], out=out)
        for each in less[1:]:
            out.sub_(each)
        self._used()

    def load(self, size: int) -> Tensor:
        if self._last_use is not None:
            self._last_use.wait(torch.cuda.current_stream(self.values.device))
        return self.values[:size]

    def less(self, base: Tensor) -> Tensor:
        difference = self.load(base.numel()) - base
        self._used()
        return difference

    def mark(self, number: int) -> None:
        """Who hears of it later may use the cell at once, for that use waits on the device."""
        self._used()
        self._number = number

    def is_marked(self, number: int) -> bool:
        return self._number == number

    def _used(self) -> None:
        if self._last_use is not None:
            self._last_use.record(torch.cuda.current_stream(self.values.device))


class OnDevice:
    """A node's home on the device of the model; made by the thread that trains."""

    def __init__(self, device: torch.device) -> None:
        self.algebra = DeviceAlgebra(device)
        self._device = device
        self._cells: Cells | None = None
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(device))  # which may have used what is used again now

    def entered(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def lay(self, size: int, up_count: int, down_count: int) -> Cells:
        """By the node first, on its stream."""
        if self._cells is None:
            cells = [DeviceCell(self.algebra.empty(size)) for _ in range(up_count + down_count)]
            self._cells = Cells(cells[:up_count], cells[up_count:])
        return self._cells

    def warm_up(self, tell: Callable[[], None], each: Callable[[Use], object]) -> None:
        """A device loads a kernel at its first use, and may halt for it."""
        values = self.algebra.empty(WARM_SIZE).fill_(1.0)
        for codec in codecs.CODECS:
            each(partial(self._round_trip, codec, values))
        each(partial(self.algebra.digest, values))
        each(partial(self.algebra.is_finite, values))

    def _round_trip(self, codec: str, values: Tensor) -> None:
        self.algebra.adopt(codec, self.algebra.encode(codec, values), values)


class DeviceAlgebra:
    """What a learner's node computes with, on tensors; payloads are bytes on the host, as everywhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._factors = kernels.factors_on(device)
        self._bus = CudaBus(device) if device.type == "cuda" else HostBus()

    def empty(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)

    def encode(self, codec: str, drift: Tensor, residual: Tensor | None = None) -> memoryview | None:
        u = drift if residual is None else drift + residual
        payload = self.empty(codecs.payload_bytes(codec, u.numel()), torch.uint8)
        kernels.encode(codec, u, payload)
        return self._bus.fetch(payload).data if self.is_finite(u) else None

    def unsaid(self, codec: str, payload: Payload, drift: Tensor, residual: Tensor | None) -> Tensor:
        said = self.decode(codec, payload)
        return torch.sub(drift if residual is None else drift + residual, said, out=said)

    def decode(self, codec: str, payload: Payload) -> Tensor:
        brought = self._bus.bring(payload)
        if codec == "fp32":
            return brought.view(torch.float32)
        values = self.empty(brought.numel() // codecs.payload_bytes(codec, BLOCK) * BLOCK)
        kernels.decode(codec, brought, values)
        return values

    def adopt(self, codec: str, payload: Payload, base: Tensor | None) -> Adopted:
        values = self.decode(codec, payload)
        new = values if base is None else values.add_(base)
        return Adopted(new, self.digest(new), self.is_finite(new))

    def first_spoiled(self, values: Tensor, fragment: Fragment) -> str:
        """The first parameter with a value that is not finite; empty if all are."""
        if self.is_finite(values):
            return ""
        slots = fragment.slots
        return next(s.name for s in slots if not self.is_finite(values[s.offset : s.offset + s.size]))

    def is_finite(self, values: Tensor) -> bool:
        largest = self._bus.fetch(kernels.largest(values).view(1).view(torch.uint8)).view(np.float32)
        return math.isfinite(largest[0])

    def whole(self, theta: Tensor) -> memoryview:
        return self._bus.fetch(theta.view(torch.uint8)).data

    def digest(self, theta: Tensor) -> bytes:
        sums = kernels.row_sums(theta, self._factors)
        return digests.of_row_sums(self._bus.fetch(sums.view(torch.uint8)).view(np.uint64))

    def checksum(self, payload: Payload) -> bytes:
        return FLOAT32.checksum(payload)

    def payload_bytes(self, codec: str, fragment: Fragment) -> int:
        return FLOAT32.payload_bytes(codec, fragment)


class HostBus:
    """To and from tensors on the host."""

    def fetch(self, there: Tensor) -> U8:
        return there.numpy()

    def bring(self, payload: Payload) -> Tensor:
        return torch.from_numpy(np.frombuffer(payload, np.uint8).copy())


class CudaBus:
    """Bytes to and from the device, a piece at a time, in order on the stream of the thread that asks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self._is_over = torch.cuda.Event(blocking=True)  # the last copy; to wait for it takes no processor
        self._arrays = Arrays()

    def fetch(self, there: Tensor) -> U8:
        """Waits until it is here."""
        here = self._arrays.take(there.numel(), np.uint8)
        for at, staged in self._pieces(there.numel()):
            staged.copy_(there[at], non_blocking=True)
            self._is_over.record()
            self._is_over.synchronize()
            here[at] = staged.numpy()
        return here

    def bring(self, payload: Payload) -> Tensor:
        """Waits until the last of it is on its way."""
        here = np.frombuffer(payload, np.uint8)
        there = torch.empty(here.size, dtype=torch.uint8, device=self._device)
        for at, staged in self._pieces(here.size):
            staged.numpy()[:] = here[at]
            there[at].copy_(staged, non_blocking=True)
            self._is_over.record()
        return there

    def _pieces(self, size: int) -> Iterator[tuple[slice, Tensor]]:
        """A part of so many bytes, and as much of the pinned buffer, when that is free."""
        for start in range(0, size, STAGING_BYTES):
            stop = min(start + STAGING_BYTES, size)
            self._is_over.synchronize()
            yield slice(start, stop), self._staging[: stop - start]


# ---------------------------------------------------------------------------------------------- where it is


def placed(state: str | None, node: str | None, parameters: Sequence[Tensor]) -> tuple[Kind, OnDevice | None]:
    """Where a learner's node runs, and its home if that is the model's device; refused where it cannot be."""
    word, kind, obstacle = state_kind(state), node_kind(node), _obstacle(node, parameters)
    if word == "device" and obstacle:
        raise ConfigError(f"state (SKERRY_STATE) = device: {obstacle}")
    if word == "device" or (word == "auto" and not obstacle and _suits(parameters)):
        return "thread", OnDevice(parameters[0].device)
    return kind, None


def check_together(state: str | None, node: str | None) -> None:
    """Refuse words for state and node that cannot go together, of whatever model."""
    if state_kind(state) == "device" and asked_for(node) == "process":
        raise ConfigError(f"state (SKERRY_STATE) = device: {NO_PROCESS}")


def _obstacle(node: str | None, parameters: Sequence[Tensor]) -> str:
    """Why the state cannot be where the model is; empty if it can."""
    devices = sorted({str(parameter.device) for parameter in parameters})
    if asked_for(node) == "process":
        return NO_PROCESS
    if len(devices) > 1:
        return f"the model is on {' and '.join(devices)}, and it can be on one device only"
    if parameters[0].device.type not in DEVICES:
        return f"there are no kernels for it on {devices[0]}"
    return ""


def _suits(parameters: Sequence[Tensor]) -> bool:
    """What `auto` means: the device if it is a GPU that has room for it, and for as much again."""
    device = parameters[0].device
    if device.type != "cuda":
        return False
    needed = STATE_BYTES * sum(parameter.numel() for parameter in parameters)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for whoever asks
    free = torch.cuda.mem_get_info(device)[0] + kept
    has_room = needed <= SHARE_MAX * free
    where = device if has_room else "the host"
    log.info("the learner's state is on %s: it takes %s, and %s has %s free", where, size(needed), device, size(free))
    return has_room
