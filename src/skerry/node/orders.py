"""What a learner's node has ordered of its training half and has not heard back about: snapshots, and changes.

    orders.owe(p, taken, ...)                  a newer version of a fragment is there: a change is due
    for p in orders.sendable(): orders.send(p, to, towards)
    orders.send_wants()
    overwritten, wanted, on = orders.passed(record)   what became of them at a boundary

Rules that hold here (why: `node/mailbox.py`): one change of a fragment is under way at a time, and what comes due
meanwhile goes with the next; an order for a snapshot leaves behind the change that takes out what was settled; a cell
is filled again only when it is marked.

It holds the base that θ stands on, and fills cells. It does not know what the newest version is, what is outstanding or
how anything is encoded: that is handed in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from skerry.node.algebra import Array
from skerry.node.cells import Cell
from skerry.node.mailbox import NO_CELL, Change, Mailbox, Passed, Took, Waive, Want


class Version(NamedTuple):
    version: int
    base: Array


@dataclass
class Due:
    """How a fragment gets from the version that θ stands on to the newest; not sent yet."""

    taken: Array | None = None  # what settled contributions take out
    is_write: bool = False  # whatever it holds is given up
    settles: bool = False  # there is something to take out, or there would be if it were not given up


class Sent(NamedTuple):
    """A change of which the training half has not yet said what became of it."""

    change: Change
    to: Version
    taken: Array | None  # of a blend, which may be returned
    forwards: bool  # it is the fragment's part of a fast-forward


class Outcome(NamedTuple):
    """Of what was ordered, at a boundary: fragments overwritten for good, and snapshots of the newest orders."""

    overwritten: tuple[int, ...]
    wanted: tuple[Took, ...]
    on: tuple[Version, ...]  # what θ stood on when each of them was taken


class Orders:
    """One learner's, from its first welcome on."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.stands: dict[int, Version] = {}  # fragment -> what θ stands on, as of the last boundary that is known
        self.due: dict[int, Due] = {}  # by fragment, the longest due first
        self.under_way: dict[int, Sent] = {}  # by fragment
        self._mailbox = mailbox
        self._cells: Sequence[Cell] = ()  # for changes
        self._free: list[int] = []
        self._returning: list[tuple[int, int]] = []  # such cells, and the mark that says that each is free
        self._can_blend = False
        self._wanted: dict[int, Want] = {}  # by fragment, the snapshot that is ordered,
        self._unsaid: dict[int, Want] = {}  # and those of them that are not sent yet
        self._orders = self._changes = 0
        self._seen: list[int] = []  # by fragment, how many snapshots have come
        self._forwarding: set[int] = set()  # fragments of a fast-forward that are not known to be written,
        self._unsent: set[int] = set()  # and of those the ones of which no change is sent
        self._resets_optimizer = False

    def begin(self, cells: Sequence[Cell], fragment_count: int, can_blend: bool) -> None:
        self._cells, self._can_blend = cells, can_blend
        self._free = list(range(len(cells)))
        self._seen = [0] * fragment_count

    @property
    def is_waiting(self) -> bool:
        """A device is yet to copy something out of a cell."""
        return bool(self._returning)

    # ------------------------------------------------------------------------------------------ what is to be done

    def want(self, p: int, step: int) -> None:
        """A snapshot, at the boundary after so many steps."""
        self._orders += 1
        self._wanted[p] = self._unsaid[p] = Want(p, step, self._orders)

    def waive(self, p: int) -> None:
        """None, though one was ordered."""
        del self._wanted[p]
        self._unsaid.pop(p, None)
        self._mailbox.send(Waive(p))

    def owe(self, p: int, taken: Array | None, is_write: bool, settles: bool) -> None:
        """The way to a newer version, less what a settled contribution takes out."""
        before = self.due.get(p, Due())
        is_write = before.is_write or is_write
        self.due[p] = Due(None if is_write else _sum(before.taken, taken), is_write, before.settles or settles)

    def forward(self, fragments: Collection[int], resets_optimizer: bool) -> None:
        """A fast-forward: these are all written, whatever else was due."""
        self._forwarding, self._unsent = set(fragments), set(fragments)
        self._resets_optimizer = resets_optimizer
        self.due = {p: Due(is_write=True) for p in sorted(fragments)}

    # ------------------------------------------------------------------------------------------ on its way

    def sendable(self) -> Iterator[int]:
        """What is due, as far as there are cells for it; one change of a fragment at a time."""
        self._reclaim()
        for p in [p for p in self.due if p not in self.under_way]:
            cells_needed = 2 if self.blends(p) else 1
            if len(self._free) < cells_needed:
                break
            yield p

    def _reclaim(self) -> None:
        there = [(cell, mark) for cell, mark in self._returning if self._cells[cell].is_marked(mark)]
        for pair in there:
            self._returning.remove(pair)
            self._free.append(pair[0])

    def blends(self, p: int) -> bool:
        """What is due of the fragment pulls θ towards something."""
        return self._can_blend and not self.due[p].is_write

    def send(self, p: int, to: Version, towards: Array | None) -> None:
        """What is due of a sendable fragment, to its newest version; `towards` is where a blend pulls θ."""
        due = self.due.pop(p)
        cell, pull = self._free.pop(), NO_CELL
        less = () if due.is_write else (self.stands[p].base, *(() if due.taken is None else (due.taken,)))
        self._cells[cell].store(to.base, *less)
        if towards is not None:
            pull = self._free.pop()
            self._cells[pull].store(towards)
        self._changes += 1
        change = Change(self._changes, p, to.version, cell, due.is_write, pull, self._seen[p], *self._forward(p))
        kept = None if pull == NO_CELL else due.taken
        self.under_way[p] = Sent(change, to, kept, p in self._forwarding)
        self._mailbox.send(change)

    def _forward(self, p: int) -> tuple[int, bool]:
        """How many fragments of a fast-forward follow this one, and whether the optimizer is reset with it."""
        if p not in self._unsent:
            return len(self._unsent), False
        self._unsent.discard(p)
        return len(self._unsent), self._resets_optimizer and not self._unsent

    def send_wants(self) -> None:
        """Orders for snapshots, behind the changes that they must not overtake."""
        for p in [p for p in self._unsaid if not self._settles(p)]:
            self._mailbox.send(self._unsaid.pop(p))

    def _settles(self, p: int) -> bool:
        """θ still has in it what the machine knows to be settled."""
        return p in self.due and self.due[p].settles

    # ------------------------------------------------------------------------------------------ what became of it

    def passed(self, record: Passed) -> Outcome:
        """A boundary, with the changes made and the snapshots after them."""
        numbers = {sent.change.number: p for p, sent in self.under_way.items()}
        stood = {took.fragment: self.stands[took.fragment] for took in record.taken if took.fragment in self.stands}
        overwritten = tuple(p for number in record.applied if self._applied(p := numbers[number]))
        for number in record.returned:
            self._returned(numbers[number])
        wanted = tuple(took for took in record.taken if self._is_wanted(took))
        return Outcome(overwritten, wanted, tuple(self._on(took, stood) for took in wanted))

    def _on(self, took: Took, stood: Mapping[int, Version]) -> Version:
        """What a snapshot was taken on: the version there is after the boundary's changes, or the one before them."""
        after = self.stands[took.fragment]
        on = after if after.version == took.version else stood[took.fragment]
        assert on.version == took.version, (took, on.version)
        return on

    def _applied(self, p: int) -> bool:
        """θ stands on the version that was sent; whether that has overwritten it for good.

        One that was on its way when a fast-forward was decided has not: the fragment will be written once more.
        """
        sent = self._back(p)
        self.stands[p] = sent.to
        if sent.forwards:
            self._forwarding.discard(p)
        return sent.change.is_write and p not in self._forwarding

    def _returned(self, p: int) -> None:
        """A blend that did not know of a snapshot: it is due again, with what has become due since."""
        sent, later = self._back(p), self.due.pop(p, Due())
        self.due[p] = Due(_sum(sent.taken, later.taken), later.is_write, later.settles or sent.taken is not None)

    def _back(self, p: int) -> Sent:
        """A change is done with; its cells are free as soon as they are marked."""
        sent = self.under_way.pop(p)
        change = sent.change
        self._returning += [(cell, change.number) for cell in (change.cell, change.towards) if cell != NO_CELL]
        return sent

    def _is_wanted(self, took: Took) -> bool:
        """By the newest order, and what is settled is not in it any more, as it is where a blend was returned."""
        p = took.fragment
        self._seen[p] += 1
        want = self._wanted.get(p)
        if want is None or want.order != took.order:
            return False
        if self._settles(p):
            self._unsaid[p] = want
            return False
        del self._wanted[p]
        return True


def _sum(a: Array | None, b: Array | None) -> Array | None:
    return b if a is None else a if b is None else a + b
