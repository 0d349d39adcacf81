"""Where a job stands, kept on the disk, so that it goes on another time and ends with the bits of an unbroken one.

What learners and syncer decide hangs on no value: nothing but the loss is ever looked at. So a job goes on by being run
again from its beginning without training, up to the tick at which it was saved. Every object is then where it was, and
the saved values are put in the places of those that were not trained.

A save is a safetensors file: all tensors that are alive, in the order in which they are found, and a few words on whose
they are. It is written whole or not at all, and one that is damaged or another's is refused.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from skerry.errors import StudyError
from skerry.proof.lab.feed import Feed
from skerry.proof.lab.stack import Stack
from skerry.proof.lab.study import Point, Stint
from skerry.store.files import temporary
from skerry.store.store import Store

SAVE_S = 600.0  # between two saves of a job whose time is not up
HOLD_NONE = (str, bytes, int, float, type, np.ndarray, ModuleType, Feed, Store)  # no tensor that training changes


class TimeUpError(Exception):
    """The job is saved, and goes on another time."""


class Origin(Struct, frozen=True, forbid_unknown_fields=True):
    """Whose values these are; with those of another nobody goes on."""

    key: str
    device: str
    versions: dict[str, str]


class Head(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    origin: Origin
    ticks: int = 0
    mark: str = ""  # how things stood then
    points: tuple[Point, ...] = ()
    seconds: float = 0.0  # that the job has taken


class Course:
    """A job's way: what was done before is rehearsed, then it trains, and is saved now and then and when time is up."""

    def __init__(self, origin: Origin, stint: Stint | None = None) -> None:
        self.origin, self.stint = origin, stint
        self.ticks = 0
        self._began = self._saved_at = time.monotonic()
        self._head, self._arrays = Head(origin=origin), list[np.ndarray]()
        if stint is not None and stint.file.exists():
            self._head, self._arrays = read(stint.file, origin)

    @property
    def is_rehearsal(self) -> bool:
        return self.ticks < self._head.ticks

    @property
    def points(self) -> tuple[Point, ...]:
        """Of the curve, as far as it is rehearsed."""
        return self._head.points

    @property
    def seconds(self) -> float:
        """That the job has taken, this time and before."""
        return self._head.seconds + time.monotonic() - self._began

    def passed(self, root: object, points: Sequence[Point], mark: Callable[[], str] = str) -> None:
        """A tick is over; all that counts can be reached from `root`, and `mark` says how things stand.

        However short its time is, a job trains for a tick, so that it gets on.
        """
        was_rehearsal = self.is_rehearsal
        self.ticks += 1
        if was_rehearsal:
            if not self.is_rehearsal:
                self._take_up(root, mark())
            return
        if self.stint is None:
            return
        is_over = time.monotonic() >= self.stint.until
        if is_over or time.monotonic() - self._saved_at >= SAVE_S:
            self._save(self.stint.file, root, points, mark())
        if is_over:
            raise TimeUpError

    def _take_up(self, root: object, mark: str) -> None:
        """Put the saved values in their places."""
        assert self.stint is not None
        found = tensors_of(root)
        shapes = [tuple(tensor.shape) for tensor in found]
        if mark != self._head.mark or shapes != [array.shape for array in self._arrays]:
            raise _refusal(self.stint.file, "the way there is another now")
        for tensor in found:
            tensor.copy_(torch.from_numpy(self._arrays.pop(0)))

    def _save(self, file: Path, root: object, points: Sequence[Point], mark: str) -> None:
        arrays = [tensor.cpu().contiguous().numpy() for tensor in tensors_of(root)]
        head = Head(origin=self.origin, ticks=self.ticks, mark=mark, points=tuple(points), seconds=self.seconds)
        write(file, head, arrays)
        self._saved_at = time.monotonic()


# ---------------------------------------------------------------------------------------------- what is alive


def tensors_of(root: object) -> list[Tensor]:
    """Every tensor that can be reached, once, in an order that is the same wherever the same has happened."""
    found: list[Tensor] = []
    seen: dict[int, object] = {}  # kept alive, or an id might be another's by the time it comes again
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if one is None or isinstance(one, HOLD_NONE) or id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            found.append(one)
        else:
            waiting += reversed(list(_parts_of(one)))
    return found


def _parts_of(one: object) -> Iterable[object]:
    match one:
        case Stack():
            return one.state
        case dict():
            return one.values()
        case list() | tuple() | deque():
            return one
        case partial():
            return (one.func, one.args, one.keywords)
        case MethodType():
            return (one.__self__,)
        case FunctionType():
            return [cell.cell_contents for cell in one.__closure__ or ()]
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*(getattr(one, name, None) for name in slots), *getattr(one, "__dict__", {}).values()]


# ---------------------------------------------------------------------------------------------- the file


def write(file: Path, head: Head, arrays: Sequence[np.ndarray]) -> None:
    """On the disk when this returns, in place of the one before."""
    said = msgspec.json.encode(head)
    metadata = {"head": said.decode(), "digest": _digest(said, arrays)}
    file.parent.mkdir(parents=True, exist_ok=True)
    anew = temporary(file)
    try:
        save_file({f"{place:06d}": array for place, array in enumerate(arrays)}, anew, metadata)
        with anew.open("rb") as written:
            os.fsync(written.fileno())
        anew.replace(file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            anew.unlink()


def read(file: Path, origin: Origin) -> tuple[Head, list[np.ndarray]]:
    """What was written; refused if a bit of it is another, or it is another's."""
    try:
        with safe_open(file, framework="numpy") as saved:
            metadata = saved.metadata() or {}
            arrays = [saved.get_tensor(name) for name in sorted(saved.keys())]
        said = metadata["head"].encode()
        head = msgspec.json.decode(said, type=Head)
    except (OSError, SafetensorError, KeyError, msgspec.DecodeError) as error:
        raise _refusal(file, f"is no save of this version ({str(error).splitlines()[0]})") from None
    if metadata.get("digest") != _digest(said, arrays):
        raise _refusal(file, "is damaged")
    for name in Origin.__struct_fields__:
        theirs, ours = getattr(head.origin, name), getattr(origin, name)
        if theirs != ours:
            raise _refusal(file, f"is another's: {name} was {theirs}, is {ours}")
    return head, arrays


def _refusal(file: Path, why: str) -> StudyError:
    return StudyError(f"{file}: {why}: remove it, and its job begins anew")


def _digest(said: bytes, arrays: Iterable[np.ndarray]) -> str:
    state = xxhash.xxh3_128(said)
    for array in arrays:
        state.update(array.reshape(-1).view(np.uint8).data)
    digest: str = state.hexdigest()
    return digest
