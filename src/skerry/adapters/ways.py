"""How a fragment gets from a device into a cell, and from a cell to where it can be added.

    way.meet(cells), once, before the first step
    flat = way.room(cell, size); pack θ into it; way.up(cell, size, mark)
    flat = way.down(cell, size, mark); add it to θ; way.done(cell, mark)

Where a cell lies with the parameters, it is itself packed and added from. Between CUDA and the host nothing waits:
copies run on a side stream, which writes the cell's mark behind each, so that the device itself says when a cell is
filled or free. On other devices copies are waited for.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from skerry.adapters.device import DeviceCell
from skerry.node.cells import PAGE, Cell, FloatCell

PORTABLE = 1  # of cudaHostRegister: for every device

log = logging.getLogger("skerry.learner")


class Way(Protocol):
    def meet(self, cells: Sequence[Cell]) -> None: ...
    def room(self, cell: Cell, size: int) -> Tensor: ...
    def up(self, cell: Cell, size: int, mark: int) -> None: ...
    def down(self, cell: Cell, size: int, mark: int) -> Tensor: ...
    def done(self, cell: Cell, mark: int) -> None: ...


def way_for(device: torch.device, cell: Cell) -> Way:
    """To and from such cells."""
    if isinstance(cell, DeviceCell) or device.type == "cpu":
        return NoWay()
    return CudaWay(device) if device.type == "cuda" else SlowWay(device)


class NoWay:
    """The cells lie where the parameters are: nothing is copied."""

    def meet(self, cells: Sequence[Cell]) -> None:
        """There is nothing to make for them."""

    def room(self, cell: Cell, size: int) -> Tensor:
        return torch.as_tensor(cell.load(size))

    def up(self, cell: Cell, size: int, mark: int) -> None:
        cell.mark(mark)

    def down(self, cell: Cell, size: int, mark: int) -> Tensor:
        return torch.as_tensor(cell.load(size))

    def done(self, cell: Cell, mark: int) -> None:
        cell.mark(mark)


class SlowWay:
    """For devices without a stream that we could order copies on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: Tensor | None = None

    def meet(self, cells: Sequence[Cell]) -> None:
        """There is nothing to make for them."""

    def room(self, cell: Cell, size: int) -> Tensor:
        self._flat = torch.empty(size, dtype=torch.float32, device=self._device)
        return self._flat

    def up(self, cell: Cell, size: int, mark: int) -> None:
        assert self._flat is not None
        torch.from_numpy(cell.load(size)).copy_(self._flat)
        cell.mark(mark)

    def down(self, cell: Cell, size: int, mark: int) -> Tensor:
        return torch.from_numpy(cell.load(size)).to(self._device)

    def done(self, cell: Cell, mark: int) -> None:
        cell.mark(mark)


@dataclass
class Stage:
    """What a cell has on the device: room for its values, its next mark, and when the values were last read there."""

    values: Tensor
    mark: Tensor
    host_values: Tensor
    host_mark: Tensor
    used: torch.cuda.Event


class CudaWay:
    """The memory of each cell is registered with CUDA once, and each has as much on the device, which is kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._stages: dict[int, Stage] = {}  # by the address of the cell's mark
        self._registered: dict[int, Any] = {}  # address -> the memory, which has to outlive its registration
        weakref.finalize(self, _let_go, self._side, self._registered)

    def meet(self, cells: Sequence[Cell]) -> None:
        """To register memory takes milliseconds, and so does a kernel's first use, for which CUDA loads it."""
        stages = [self._stage(cell) for cell in cells]
        few, mark = stages[0].values[:1], stages[0].mark.clone()
        for change in (torch._foreach_copy_, torch._foreach_add_):
            change([few], [torch.zeros_like(few)])
        mark.fill_(0)
        torch.cuda.current_stream(self._device).synchronize()

    def room(self, cell: Cell, size: int) -> Tensor:
        """Free: its last copy is over, because the cell was filled, read and freed since."""
        return self._stage(cell).values[:size]

    def up(self, cell: Cell, size: int, mark: int) -> None:
        stage = self._stage(cell)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            stage.host_values[:size].copy_(stage.values[:size], non_blocking=True)
            self._mark(stage, mark)

    def down(self, cell: Cell, size: int, mark: int) -> Tensor:
        stage = self._stage(cell)
        self._side.wait_event(stage.used)
        with torch.cuda.stream(self._side):
            stage.values[:size].copy_(stage.host_values[:size], non_blocking=True)
            self._mark(stage, mark)
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        return stage.values[:size]

    def done(self, cell: Cell, mark: int) -> None:
        """The cell is marked by the side stream; what it has on the device is free once the training stream is here."""
        self._stage(cell).used.record(torch.cuda.current_stream(self._device))

    def _mark(self, stage: Stage, mark: int) -> None:
        stage.mark.fill_(mark)
        stage.host_mark.copy_(stage.mark, non_blocking=True)

    def _stage(self, cell: Cell) -> Stage:
        assert isinstance(cell, FloatCell)
        key = cell.word.ctypes.data
        if key not in self._stages:
            self._register(cell.values)
            self._register(cell.word)
            values = torch.empty(cell.values.size, dtype=torch.float32, device=self._device)
            mark = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._side.wait_stream(torch.cuda.current_stream(self._device))  # which had this memory before
            host = (torch.from_numpy(cell.values), torch.from_numpy(cell.word))
            self._stages[key] = Stage(values, mark, *host, torch.cuda.Event())
        return self._stages[key]

    def _register(self, array: np.ndarray[Any, Any]) -> None:
        """The pages that the array lies on; marks share theirs. Copies from other memory would be waited for."""
        begin = array.ctypes.data // PAGE * PAGE
        end = -(-(array.ctypes.data + array.nbytes) // PAGE) * PAGE
        if begin in self._registered:
            return
        self._registered[begin] = array
        error = torch.cuda.cudart().cudaHostRegister(begin, end - begin, PORTABLE)
        if int(error) != 0:
            log.warning("CUDA does not take the learner's cells (%s): copies to them are waited for", error)
            with contextlib.suppress(RuntimeError):  # else it is raised where it does not belong
                torch.zeros(1, device=self._device)


def _let_go(side: torch.cuda.Stream, registered: dict[int, Any]) -> None:
    side.synchronize()
    for address in registered:
        torch.cuda.cudart().cudaHostUnregister(address)
    registered.clear()
