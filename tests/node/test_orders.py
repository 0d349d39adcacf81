"""What is on its way to the training half: changes one at a time, snapshots behind them; values are plain numbers."""

import pytest

from skerry.node.cells import Box
from skerry.node.mailbox import Change, Passed, Took, Waive, Want, mailbox
from skerry.node.orders import Orders, Version


class Desk:
    """Orders of a learner with two fragments, and the training half played by hand."""

    def __init__(self, cell_count=4, can_blend=False):
        self.training, node = mailbox()
        self.cells = [Box() for _ in range(cell_count)]
        self.orders = Orders(node)
        self.orders.begin(self.cells, 2, can_blend)

    def send(self, to, towards=None):
        """All that can be, to these versions by fragment; what was sent."""
        for p in self.orders.sendable():
            self.orders.send(p, to[p], towards)
        self.orders.send_wants()
        return self.training.receive()

    def settle_on(self, version, *fragments):
        """Bring fragments to a version, and hear that they are there."""
        for p in fragments:
            self.orders.owe(p, None, is_write=True, settles=False)
        return self.made(self.send(dict.fromkeys(fragments, version)))

    def made(self, changes):
        self.mark(changes)
        return self.passed(applied=tuple(change.number for change in changes))

    def mark(self, changes):
        for change in changes:
            for cell in {change.cell, change.towards} - {-1}:
                self.cells[cell].mark(change.number)

    def passed(self, applied=(), returned=(), taken=()):
        return self.orders.passed(Passed(1, 10, 0.5, 0.0, applied, returned, taken))


@pytest.fixture
def desk():
    desk = Desk()
    assert desk.settle_on(Version(1, 100), 0, 1).overwritten == (0, 1)
    return desk


def test_a_change_is_from_the_version_it_stands_on_less_what_is_settled(desk):
    desk.orders.owe(0, 5, is_write=False, settles=True)
    (change,) = desk.send({0: Version(2, 130)})
    assert isinstance(change, Change) and (change.fragment, change.version, change.is_write) == (0, 2, False)
    assert desk.cells[change.cell].values == 130 - 100 - 5
    assert desk.orders.stands[0].version == 1, "nobody has said that it was made"
    assert desk.made([change]).overwritten == () and desk.orders.stands[0] == Version(2, 130)


def test_what_comes_due_while_a_change_is_under_way_goes_with_the_next(desk):
    desk.orders.owe(0, 5, is_write=False, settles=True)
    (first,) = desk.send({0: Version(2, 130)})
    for taken in (7, None, 2):
        desk.orders.owe(0, taken, is_write=False, settles=taken is not None)
    assert desk.send({0: Version(5, 190)}) == []
    desk.made([first])
    (second,) = desk.send({0: Version(5, 190)})
    assert desk.cells[second.cell].values == 190 - 130 - 7 - 2


def test_a_snapshot_is_ordered_behind_the_change_that_takes_out_what_is_settled(desk):
    desk.orders.owe(0, 5, is_write=False, settles=True)
    (first,) = desk.send({0: Version(2, 130)})
    desk.orders.owe(0, 7, is_write=False, settles=True)
    desk.orders.want(0, 20)
    desk.orders.want(1, 30)
    assert [(want.fragment, want.step) for want in desk.send({})] == [(1, 30)]
    desk.made([first])
    change, want = desk.send({0: Version(3, 140)})
    assert isinstance(change, Change) and isinstance(want, Want) and (want.fragment, want.step) == (0, 20)


def test_only_the_newest_order_is_answered_and_none_that_was_taken_back(desk):
    desk.orders.want(0, 20)
    (old,) = desk.send({})
    desk.orders.want(0, 25)
    (new,) = desk.send({})
    stale, asked = (Took(0, 1, want.order, 0, 1) for want in (old, new))
    assert desk.passed(taken=(stale,)).wanted == () and desk.passed(taken=(asked,)).wanted == (asked,)
    desk.orders.want(0, 30)
    (taken_back,) = desk.send({})
    desk.orders.waive(0)
    assert desk.training.receive() == [Waive(0)]
    assert desk.passed(taken=(Took(0, 1, taken_back.order, 0, 2),)).wanted == ()


def test_a_snapshot_from_before_its_fragment_was_overwritten_is_of_the_version_it_had(desk):
    desk.orders.want(0, 20)
    (want,) = desk.send({})
    desk.orders.owe(0, None, is_write=True, settles=False)
    (change,) = desk.send({0: Version(2, 130)})
    took = Took(0, 1, want.order, 0, 1)
    outcome = desk.passed(applied=(change.number,), taken=(took,))
    assert outcome == ((0,), (took,), (Version(1, 100),)) and desk.orders.stands[0] == Version(2, 130)


def test_a_cell_is_filled_again_when_the_device_has_marked_it():
    desk = Desk(cell_count=1)
    for p in (0, 1):
        desk.orders.owe(p, None, is_write=True, settles=False)
    (first,) = desk.send({0: Version(1, 100), 1: Version(1, 200)})
    desk.passed(applied=(first.number,))
    assert desk.send({1: Version(1, 200)}) == [] and desk.orders.is_waiting
    desk.mark([first])
    (second,) = desk.send({1: Version(1, 200)})
    assert (second.fragment, second.cell) == (1, first.cell) and not desk.orders.is_waiting


def test_a_fast_forward_writes_every_fragment_and_the_last_resets_the_optimizer(desk):
    desk.orders.owe(0, 5, is_write=False, settles=True)
    (before,) = desk.send({0: Version(2, 130)})
    desk.orders.forward([0, 1], resets_optimizer=True)
    (first,) = desk.send({1: Version(2, 230)})
    assert (first.fragment, first.is_write, first.further, first.resets_optimizer) == (1, True, 1, False)
    assert desk.made([before, first]).overwritten == (1,)
    (last,) = desk.send({0: Version(2, 130)})
    assert (last.fragment, last.is_write, last.further, last.resets_optimizer) == (0, True, 0, True)
    assert desk.made([last]).overwritten == (0,)


def test_a_blend_that_is_returned_is_due_again_with_what_it_takes_out():
    desk = Desk(can_blend=True)
    desk.settle_on(Version(1, 100), 0)
    desk.orders.owe(0, 5, is_write=False, settles=True)
    assert desk.orders.blends(0)
    (change,) = desk.send({0: Version(2, 130)}, towards=133)
    assert desk.cells[change.towards].values == 133
    desk.mark([change])
    desk.passed(returned=(change.number,))
    desk.orders.owe(0, 7, is_write=False, settles=True)
    (again,) = desk.send({0: Version(3, 140)}, towards=143)
    assert desk.cells[again.cell].values == 140 - 100 - 5 - 7 and desk.cells[again.towards].values == 143
