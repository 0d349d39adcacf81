"""A model's tensors, found without torch: the same that a learner would describe."""

import pytest

from skerry.plan import layouts
from skerry.train.shapes import SHAPES


@pytest.mark.parametrize("name", SHAPES)
def test_the_built_in_model_is_the_one_that_is_trained(name):
    torch = pytest.importorskip("torch")
    from skerry.adapters.torch import layout_of_model
    from skerry.train.gpt import GPT

    shape = SHAPES[name]
    with torch.device("meta"):  # the largest would not fit everywhere
        model = GPT(shape.layers, shape.width, shape.heads, shape.context)
    assert layouts.built_in(shape) == layout_of_model(model)


def test_presets_have_about_the_parameters_of_their_names():
    """Shapes of GPT-2's and GPT-3's family; with 256 tokens instead of 50,000 they are a little smaller than those."""
    counts = {name: layouts.built_in(shape).param_count for name, shape in SHAPES.items()}
    assert (counts["100m"], counts["300m"], counts["1b"]) == (85_347_072, 302_564_352, 1_209_108_480)


def test_a_size_alone_is_even():
    layout = layouts.even(1000, 7)
    assert len(layout.tensors) == 7 and {t.size for t in layout.tensors} == {142, 143}
    assert layout.param_count == 1000
    assert layouts.even(5e9, 24).param_count == 5 * 10**9
