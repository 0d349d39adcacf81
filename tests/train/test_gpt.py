"""The model is what its shape says, looks only backwards, and is the same for the same seed."""

import pytest
import torch

from skerry.train.gpt import GPT, build, rotary, rotate
from skerry.train.shapes import SHAPES

TINY = {"layers": 2, "width": 32, "heads": 2, "context": 32}


def test_the_demo_shape_has_tensors_for_24_fragments():
    shape = SHAPES["1m"]
    model = build(shape.layers, shape.width, shape.heads, shape.context, seed=0)
    assert len(list(model.parameters())) >= 24
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_same_seed_same_bits_and_the_global_generator_is_untouched():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build(**TINY, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = build(**TINY, seed=7).state_dict(), build(**TINY, seed=8).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tok_emb.weight"], other["tok_emb.weight"])


def test_a_byte_changes_no_prediction_before_it():
    model = build(**TINY, seed=0)
    tokens = torch.arange(20).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 12] = 200
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_attention_sees_relative_positions_only():
    query, key = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary(10, 8, torch.device("cpu"))

    def score(i, j):
        return (rotate(query, (cos[i], sin[i])) * rotate(key, (cos[j], sin[j]))).sum()

    assert torch.isclose(score(5, 2), score(9, 6), atol=1e-5)
    assert not torch.isclose(score(5, 2), score(5, 3), atol=1e-3)


def test_an_untrained_model_knows_nothing():
    model = build(**TINY, seed=0)
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    assert model.loss(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(5.545, abs=0.05)  # ln 256


def test_a_width_the_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="width 30 over 4 heads"):
        GPT(layers=1, width=30, heads=4, context=8)
