"""The two halves of a learner, and what they say to each other: small records, in order; nobody waits for an answer.

    the training half (node/training.py)   in the trainer's own process and thread: passes boundaries
    the node half (node/learner.py)        beside it, a thread or a process: machine, bases, codecs, wire

They share no state. Arrays travel through cells (`node/cells.py`), and a record says what lies in which. A change of a
fragment is never altered once it is sent, and no second one is sent before the half that trains has said what became of
it. Records may come late and never out of order, so at a boundary both halves know different things:

- A snapshot is of the base that the training half had: the last whose change it had confirmed, in the same or in an
  earlier record. So the node keeps that base until a newer one is confirmed.
- A snapshot that was ordered before a change that overwrites its fragment is taken before it. Else a learner of which
  every step takes longer than a version's making would have nothing to contribute, ever.
- What was ordered may be carried out after it was taken back. A snapshot of any but the newest order is dropped, which
  costs nothing: the drift stays.
- A snapshot that was ordered after a contribution was settled must not have that in it any more. So the order leaves
  behind the change that takes it out.
- A fast-forward is changes of all fragments, more than there are cells for. Between its first and its last the loop
  takes no step: it would be one on half a model, and after a NaN it would spoil what was just put right.
- A blend has to know what of the drift is outstanding. It says how many snapshots of its fragment it knows of, and is
  returned if there are more.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import msgspec

from skerry.core.events import Leave

NO_CELL = -1


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What one half tells the other."""


# ---------------------------------------------------------------------------------------------- the node half says


class Begun(Record, frozen=True):
    """A syncer has taken this learner in: the run's configuration and fragments, and the cells that there are."""

    config: bytes
    fragments: bytes
    index: int
    prior_steps: int
    progress: float
    cell_size: int  # elements
    up_count: int
    down_count: int
    wants_buffers: bool = False  # the run's model has some


class News(Record, frozen=True):
    """How things stand; sent when something of it has changed."""

    progress: float = 0.0
    is_linked: bool = False
    is_stop_asked: bool = False
    is_done: bool = False
    trouble: str = ""  # why no syncer has this learner at present
    steps_merged: int = 0  # of this life, that are known to be in the run
    alone_steps: int = 0  # taken since the link was lost; 0 while there is one


class Want(Record, frozen=True):
    """Take a snapshot, once: at the boundary after `step` steps, or if that is past at the next one with a free cell.

    A later order about the fragment takes this one's place.
    """

    fragment: int
    step: int
    order: int


class Waive(Record, frozen=True):
    """Take no snapshot of the fragment, whatever was ordered before."""

    fragment: int


class Change(Record, frozen=True):
    """Bring the fragment to a version, at the next boundary: add what lies in the cell, or write it over what is there.

    Of a blend a second cell says where the sum is pulled to, and `seen` how many snapshots of it the node knows of.
    Of a fast-forward `further` says how many fragments are still to be written, before which no step may be taken.
    """

    number: int
    fragment: int
    version: int
    cell: int
    is_write: bool
    towards: int = NO_CELL
    seen: int = 0
    further: int = 0
    resets_optimizer: bool = False


class Freed(Record, frozen=True):
    """The node needs nothing more of what lies in this cell."""

    cell: int


class Left(Record, frozen=True):
    """Nothing is left to do; so many of this life's steps are in the run."""

    leave: Leave
    steps_merged: int = 0


# ---------------------------------------------------------------------------------------------- the training half says


class Took(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot: for which order, on which version, and the cell whose mark says that it is there."""

    fragment: int
    version: int
    order: int
    cell: int
    mark: int


class Passed(Record, frozen=True):
    """A boundary: a step's work (none while the loop stands still), the changes made, and the snapshots taken."""

    steps: int
    tokens: int
    step_s: float
    loss: float
    applied: tuple[int, ...]  # numbers of changes
    returned: tuple[int, ...]  # of blends that did not know of every snapshot
    taken: tuple[Took, ...]
    grad_norm: float = 0.0


class Gave(Record, frozen=True):
    """The buffers that training has changed, as they are after the steps told of so far: a small safetensors file."""

    data: bytes


class Closed(Record, frozen=True):
    """No further step is taken."""

    limit_s: float | None


NodeRecord = Begun | News | Want | Waive | Change | Freed | Left
TrainingRecord = Passed | Gave | Closed


class Mailbox(Protocol):
    """One half's end: what it sends is taken from it at once, and what has come is there without waiting."""

    def send(self, record: Record) -> None: ...
    def receive(self) -> list[Record]: ...


class Post:
    """An end of a mailbox within one process; a deque may be read by one thread while another writes."""

    def __init__(self, outgoing: deque[Record], incoming: deque[Record]) -> None:
        self._outgoing, self._incoming = outgoing, incoming

    def send(self, record: Record) -> None:
        self._outgoing.append(record)

    def receive(self) -> list[Record]:
        return [self._incoming.popleft() for _ in range(len(self._incoming))]


def mailbox() -> tuple[Post, Post]:
    """Both ends: the training half's, and the node's."""
    up: deque[Record] = deque()
    down: deque[Record] = deque()
    return Post(up, down), Post(down, up)
