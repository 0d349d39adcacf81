"""Whether an adapter carries fragments as a learner needs them: for whoever joins another framework to Skerry.

    from skerry.adapters.arrays import ByElements
    from skerry.proof.conformance import check

    def attach(arrays):                      # name -> float32 array of numpy
        model = MyModel(arrays)
        return ByElements(MyElements(model)), model.to_numpy   # the attachment, and how to look at it from outside

    check(attach)

It goes through what a boundary may ask for, on tensors of every kind that a layout can have, whole and cut, and holds
the outcome against plain numpy. An `AssertionError` says what was asked for, and where the outcome is another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from skerry.adapters.learner import Attachment
from skerry.algo.fragments import F32, Fragment, Tensor, gather, layout_of, scatter, split
from skerry.node.cells import FloatCell

SHAPES = {"a.scalar": (), "b.vector": (131,), "c.matrix": (300, 7), "d.cube": (5, 40, 3), "e.wide": (2, 900)}
ALPHA = 0.25

Arrays = dict[str, F32]
Attach = Callable[[Arrays], tuple[Attachment, Callable[[], Mapping[str, F32]]]]


def check(attach: Attach, seed: int = 0) -> None:
    """Raise AssertionError unless what it attaches reads, adds, writes and blends as numpy does."""
    numbers = np.random.default_rng(seed)
    expected = {name: numbers.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    carrier, look = attach({name: array.copy() for name, array in expected.items()})
    layout = layout_of(Tensor(name, shape) for name, shape in SHAPES.items())
    fragments = split(layout, 4, cut=True)
    assert any(slot.size < expected[slot.name].size for f in fragments for slot in f.slots), "a tensor is cut"
    for mark, fragment in enumerate(fragments, start=1):
        carrier.prepare([fragment])
        _check_read(carrier, fragment, expected, mark)
        for action in (carrier.add, carrier.write):
            values = gather(fragment, {name: numbers.standard_normal(s, np.float32) for name, s in SHAPES.items()})
            before = gather(fragment, expected)
            scatter(fragment, before + values if action == carrier.add else values, expected)
            cell = _cell(values)
            action(fragment, cell, mark)
            _check_marked(cell, mark, action.__name__)
            _check_same(look(), expected, f"after {action.__name__}() of fragment {fragment.index}")
        _check_blend(carrier, fragment, expected, look, mark)
    carrier.reset_optimizer()
    assert carrier.let_go() == "", "the model was not changed, and let_go() says that it was"


def _check_read(carrier: Attachment, fragment: Fragment, expected: Arrays, mark: int) -> None:
    cell = _cell(np.full(fragment.size, np.nan, np.float32))  # so that what is not written shows
    carrier.read(fragment, cell, mark)
    _check_marked(cell, mark, "read")
    np.testing.assert_array_equal(
        cell.load(fragment.size), gather(fragment, expected), f"read() of fragment {fragment.index}, padding included"
    )


def _check_blend(
    carrier: Attachment, fragment: Fragment, expected: Arrays, look: Callable[[], Mapping[str, F32]], mark: int
) -> None:
    live, towards = gather(fragment, expected), np.ones(fragment.size, np.float32)
    cell = _cell(towards)
    carrier.blend(fragment, cell, ALPHA, mark)
    _check_marked(cell, mark, "blend")
    scatter(fragment, live + np.float32(1 - ALPHA) * (towards - live), expected)
    found = look()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-6, err_msg=f"{name} after blend()")
        array[...] = found[name]  # the last bits are the adapter's own


def _check_marked(cell: FloatCell, mark: int, action: str) -> None:
    assert cell.is_marked(mark), f"{action}() did not mark its cell with {mark}"


def _check_same(found: Mapping[str, F32], expected: Arrays, when: str) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, f"{name} {when}")


def _cell(values: F32) -> FloatCell:
    return FloatCell(values.copy(), np.zeros(1, np.int64))
