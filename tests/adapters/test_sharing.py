"""Which tensors share memory is decided exactly, and no slower than a sort where there are many."""

import itertools
import random

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided
from torch import nn

from skerry.adapters.arrays import ByElements, NumpyElements, layout_of_arrays
from skerry.adapters.attached import Attached, filled
from skerry.adapters.claims import Claim
from skerry.adapters.sharing import memory_of, pairs, shared
from skerry.errors import ModelError


def model_of(**tensors):
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor))
    return model


def flat(size=6000):
    return torch.zeros(size)


def test_columns_of_one_matrix_share_nothing():
    q, k, v = torch.zeros(40, 96).split(32, dim=1)
    assert filled(model_of(q=q, k=k, v=v)).keys() == {"q", "k", "v"}
    layout_of_arrays({"q": q.numpy(), "k": k.numpy()[::-1], "v": v.numpy().T})
    x = flat()
    assert filled(model_of(even=x[::2], odd=x[1::2]))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (lambda x: {"a": x, "b": x}, "s a and b share memory"),
        (lambda x: {"a": x[:4000], "b": x[2000:]}, "s a and b share memory"),
        (lambda x: {"a": x[10:20], "b": x}, "s a and b share memory"),
        (lambda x: {"b": x.reshape(60, 100).T, "c": x[5999:]}, "s b and c share memory"),
        (lambda x: {"q": x.reshape(60, 100)[:, :51], "k": x.reshape(60, 100)[:, 50:]}, "s q and k share memory"),
    ],
)
def test_overlapping_memory_is_refused_by_name(tensors, says):
    with pytest.raises(ValueError, match=rf"^parameter{says}: give "):
        filled(model_of(**tensors(flat())))
    with pytest.raises(ModelError, match=rf"^array{says}: give each a copy"):
        layout_of_arrays(tensors(flat().numpy()))


def test_a_tensor_that_overlaps_itself_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^parameter a has elements that share memory"):
        filled(model_of(a=flat().as_strided((2000, 2000), (1, 1))))
    with pytest.raises(ModelError, match=r"^array a has elements that share memory"):
        layout_of_arrays({"a": as_strided(np.zeros(6000, np.float32), (2000, 2000), (4, 4), writeable=True)})
    assert filled(model_of(a=flat().as_strided((2, 3), (3, 2)))), "its strides cross, and no two elements meet"


def test_it_is_what_marking_every_element_says():
    draw = random.Random(5)
    found = set()
    for _ in range(2000):
        views = {}
        for name in "ab":
            shape, steps = [tuple(draw.choices((1, 2, 3, 4, 5), k=2)) for _ in range(2)]
            views[name] = torch.zeros(60).as_strided(shape, steps, draw.randrange(20))
        whole = torch.zeros(60)
        views = {name: whole.as_strided(v.shape, v.stride(), v.storage_offset()) for name, v in views.items()}
        places = {
            name: [v.storage_offset() + i * v.stride(0) + j * v.stride(1) for i, j in np.ndindex(*v.shape)]
            for name, v in views.items()
        }
        folded = [name for name, at in places.items() if len(set(at)) < len(at)]
        truth = (folded[0],) if folded else ("a", "b") if set(places["a"]) & set(places["b"]) else ()
        assert shared(views) == truth, views
        found.add(truth)
    assert len(found) == 4


def test_many_tensors_are_told_apart_without_comparing_each_with_each():
    whole = np.zeros((20_000, 4), np.float32)
    assert shared({f"{n}": row for n, row in enumerate(whole)}) == ()
    assert list(itertools.islice(pairs([memory_of(whole)] * 20_000), 1)) == [(0, 1)]


# ------------------------------------------------------------------------------------------ while it trains


def test_memory_that_comes_to_be_shared_while_it_trains_is_refused_and_not_used():
    model = model_of(a=torch.zeros(300), b=torch.ones(300), c=torch.ones(3))
    attached = Attached(model)
    model.a.data = model.b.data
    for _ in range(2):
        with pytest.raises(ModelError, match=r"^parameters a and b share memory since the model was attached"):
            attached.look(["a"])
    assert "parameters a and b share memory" in attached.let_go()
    assert attached["a"].sum() == 0, "as it was last"


def test_a_parameter_that_is_expanded_while_it_trains_is_refused_by_name():
    model = model_of(w=torch.zeros(300))
    attached = Attached(model)
    model.w.data = torch.zeros(1).expand(300)
    with pytest.raises(ModelError, match=r"^parameter w has elements that share memory, .* since the model was"):
        attached.look(["w"])


def test_two_parameters_may_change_places():
    model = model_of(a=torch.zeros(300), b=torch.ones(300))
    attached = Attached(model)
    model.a.data, model.b.data = model.b.data, model.a.data
    attached.look(["a"])
    attached.look(["b"])
    assert attached["a"].sum() == 300 and attached["b"].sum() == 0


@pytest.mark.parametrize(
    ("put", "says"),
    [
        (lambda arrays: arrays["b"], "arrays a and b share memory since"),
        (lambda arrays: [0.0] * 10, "array a is a list by now: put a numpy array there"),
        (lambda arrays: torch.zeros(10), "array a is a Tensor by now"),
    ],
)
def test_an_array_put_in_the_place_of_another_is_looked_at(put, says):
    arrays = {"a": np.zeros(10, np.float32), "b": np.zeros(10, np.float32)}
    elements = NumpyElements(arrays)
    arrays["a"] = np.ones(10, np.float32)
    elements.prepare(["a", "b"])
    arrays["a"] = put(arrays)
    with pytest.raises(ModelError, match=rf"^{says}"):
        elements.prepare(["b", "a"])


def test_a_matrix_and_a_masked_array_are_carried_whole():
    arrays = {
        "m": np.zeros((3, 5000), np.float32).view(np.matrix),
        "x": np.ma.masked_array(np.zeros(4096, np.float32), mask=np.arange(4096) % 2),
    }
    elements = ByElements(NumpyElements(arrays)).elements
    for name, start in (("m", 4990), ("x", 3)):
        elements.add(name, start, np.ones(20, np.float32))
        out = np.empty(22, np.float32)
        elements.read(name, start - 1, out)
        assert out.tolist() == [0.0] + [1.0] * 20 + [0.0]


# ------------------------------------------------------------------------------------------ of two learners


def test_memory_is_of_one_learner_at_a_time():
    x = np.zeros(10, np.float32)
    mine = Claim({"a": x})
    with pytest.raises(ModelError, match=r"^a is attached to another learner of this process"):
        Claim({"b": x[5:]})
    mine.let_go()
    Claim({"b": x[5:]}).let_go()
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    theirs = Claim(dict(one.named_parameters()))
    other.weight.data = one.weight.data
    with pytest.raises(ModelError, match=r"^weight is attached to another"):
        Claim(dict(other.named_parameters()))
    one.weight.data = one.weight.data.clone()
    Claim(dict(other.named_parameters())).let_go()
    theirs.let_go()
