"""How a fragment gets from a device into a cell, and from a cell to where it can be added.

    way.meet(cells), once, before the first step
    flat = way.room(cell, size); pack θ into it; way.up(cell, size, mark)
    flat = way.down(cell, size, mark); add it to θ; way.done(cell, mark)

Where a cell lies with the parameters, it is itself packed and added from. Between CUDA and the host nothing waits:
copies run on a side stream, which writes the cell's mark behind each, so that the device itself says when a cell is
filled or free. On other devices copies are waited for.

Each operation on a GPU costs the training loop some 15 microseconds of Python, and so does each view of a tensor. So
what can be made once is kept: views, events, and the numbers that marks are.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from skerry.adapters.device import DeviceCell
from skerry.node.cells import PAGE, Cell, FloatCell

PORTABLE = 1  # of cudaHostRegister: for every device
NUMBERS = 1 << 16  # half a megabyte of them

log = logging.getLogger("skerry.learner")


@dataclass
class Flat:
    """A fragment's values in a row; and the views of it that were made, with whom they were made for."""

    values: Tensor
    views: dict[tuple[str, int], tuple[object, list[Tensor]]] = field(default_factory=dict)


class Way(Protocol):
    def meet(self, cells: Sequence[Cell]) -> None: ...
    def room(self, cell: Cell, size: int) -> Flat: ...
    def up(self, cell: Cell, size: int, mark: int) -> None: ...
    def down(self, cell: Cell, size: int, mark: int) -> Flat: ...
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

    def room(self, cell: Cell, size: int) -> Flat:
        return Flat(torch.as_tensor(cell.load(size)))

    def up(self, cell: Cell, size: int, mark: int) -> None:
        cell.mark(mark)

    def down(self, cell: Cell, size: int, mark: int) -> Flat:
        return Flat(torch.as_tensor(cell.load(size)))

    def done(self, cell: Cell, mark: int) -> None:
        cell.mark(mark)


class SlowWay:
    """For devices without a stream that we could order copies on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: Tensor | None = None

    def meet(self, cells: Sequence[Cell]) -> None:
        """There is nothing to make for them."""

    def room(self, cell: Cell, size: int) -> Flat:
        self._flat = torch.empty(size, dtype=torch.float32, device=self._device)
        return Flat(self._flat)

    def up(self, cell: Cell, size: int, mark: int) -> None:
        assert self._flat is not None
        torch.from_numpy(cell.load(size)).copy_(self._flat)
        cell.mark(mark)

    def down(self, cell: Cell, size: int, mark: int) -> Flat:
        return Flat(torch.from_numpy(cell.load(size)).to(self._device))

    def done(self, cell: Cell, mark: int) -> None:
        cell.mark(mark)


@dataclass
class Stage:
    """What a cell has on the device, and what copies between the two go by."""

    cell: FloatCell
    values: Tensor
    host_mark: Tensor
    used: torch.cuda.Event  # the training stream has read the values
    passed: torch.cuda.Event  # from one stream to the other: what was done before this is done
    flats: dict[int, Flat] = field(default_factory=dict)  # by size
    hosts: dict[int, Tensor] = field(default_factory=dict)

    def flat(self, size: int) -> Flat:
        if size not in self.flats:
            self.flats[size] = Flat(self.values[:size])
        return self.flats[size]

    def host(self, size: int) -> Tensor:
        if size not in self.hosts:
            self.hosts[size] = torch.from_numpy(self.cell.values[:size])
        return self.hosts[size]


class Numbers:
    """Whole numbers that lie on a device, by themselves: to write one there and to copy it would be two operations."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block = -1
        self._numbers: Tensor | None = None

    def __getitem__(self, number: int) -> Tensor:
        """For the stream that is current, which has to be the same one always; numbers mostly grow."""
        block, at = divmod(number, NUMBERS)
        if self._numbers is None or block != self._block:
            self._block, first = block, block * NUMBERS
            self._numbers = torch.arange(first, first + NUMBERS, dtype=torch.int64, device=self._device)
        return self._numbers[at : at + 1]


class CudaWay:
    """The memory of each cell is registered with CUDA once, and each has as much on the device, which is kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._stages: dict[int, Stage] = {}  # by the cell's id, which it has as long as its stage has it
        self._numbers_up, self._numbers_down = Numbers(device), Numbers(device)
        self._registered: dict[int, Any] = {}  # address -> the memory, which has to outlive its registration
        weakref.finalize(self, _let_go, self._side, self._registered)

    def meet(self, cells: Sequence[Cell]) -> None:
        """To register memory takes milliseconds, and so does a kernel's first use, for which CUDA loads it.

        Cells of an earlier life are over.
        """
        _let_go(self._side, self._registered)
        self._stages.clear()
        stages = [self._stage(cell) for cell in cells]
        few = stages[0].values[:1]
        few.zero_()
        for change in (torch._foreach_copy_, torch._foreach_add_):
            change([few], [torch.zeros_like(few)])
        with torch.cuda.stream(self._side):
            self._mark(stages[0], self._numbers_up[0])
            self._mark(stages[0], self._numbers_down[0])
        self._side.synchronize()
        torch.cuda.current_stream(self._device).synchronize()

    def room(self, cell: Cell, size: int) -> Flat:
        """Free: its last copy is over, because the cell was filled, read and freed since."""
        return self._stage(cell).flat(size)

    def up(self, cell: Cell, size: int, mark: int) -> None:
        stage = self._stage(cell)
        stage.passed.record(torch.cuda.current_stream(self._device))
        self._side.wait_event(stage.passed)
        with torch.cuda.stream(self._side):
            stage.host(size).copy_(stage.flat(size).values, non_blocking=True)
            self._mark(stage, self._numbers_up[mark])

    def down(self, cell: Cell, size: int, mark: int) -> Flat:
        stage = self._stage(cell)
        flat = stage.flat(size)
        self._side.wait_event(stage.used)
        with torch.cuda.stream(self._side):
            flat.values.copy_(stage.host(size), non_blocking=True)
            stage.passed.record(self._side)
            self._mark(stage, self._numbers_down[mark])
        torch.cuda.current_stream(self._device).wait_event(stage.passed)
        return flat

    def done(self, cell: Cell, mark: int) -> None:
        """The cell is marked by the side stream; what it has on the device is free once the training stream is here."""
        self._stage(cell).used.record(torch.cuda.current_stream(self._device))

    def _mark(self, stage: Stage, number: Tensor) -> None:
        stage.host_mark.copy_(number, non_blocking=True)

    def _stage(self, cell: Cell) -> Stage:
        assert isinstance(cell, FloatCell)
        if (stage := self._stages.get(id(cell))) is not None:
            return stage
        self._register(cell.values)
        self._register(cell.word)
        values = torch.empty(cell.values.size, dtype=torch.float32, device=self._device)
        self._side.wait_stream(torch.cuda.current_stream(self._device))  # which had this memory before
        stage = Stage(cell, values, torch.from_numpy(cell.word), torch.cuda.Event(), torch.cuda.Event())
        return self._stages.setdefault(id(cell), stage)

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
