"""A model's tensors, found without torch: the same that a learner would describe."""

import pytest

from skerry.plan import layouts
from skerry.train.shapes import SHAPES


@pytest.mark.parametrize("name", SHAPES)
def test_the_built_in_model_is_the_one_that_is_trained(name):
    gpt = pytest.importorskip("skerry.train.gpt")
    from skerry.adapters.torch import layout_of_model

    shape = SHAPES[name]
    layout = layouts.built_in(shape)
    assert layout == layout_of_model(gpt.build(shape.layers, shape.width, shape.heads, shape.context, seed=0))


def test_a_size_alone_is_even():
    layout = layouts.even(1000, 7)
    assert len(layout.tensors) == 7 and {t.size for t in layout.tensors} == {142, 143}
    assert layout.param_count == 1000
    assert layouts.even(5e9, 24).param_count == 5 * 10**9
