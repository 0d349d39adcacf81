"""Parameters in bfloat16 and float16 take part in a run of float32 without losing what they cannot hold."""

import numpy as np
import pytest
import torch
from torch import nn

from adapters.test_torch import cell_of, taken
from skerry.adapters.torch import TorchParameters, layout_of_model
from skerry.algo.fragments import split
from skerry.errors import ConfigError, ModelError

LOW = [torch.bfloat16, torch.float16]


class Mixed(nn.Module):
    """Of two dtypes, one parameter transposed, and cut where there are many fragments."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(1)
        self.low = nn.Parameter(torch.randn(600, 3, dtype=dtype).t())
        self.full = nn.Parameter(torch.randn(40, 7))


def at_of(fragment):
    """Where its values are, without what lies between them."""
    return np.concatenate([np.arange(slot.offset, slot.offset + slot.size) for slot in fragment.slots])


@pytest.mark.parametrize("num_fragments", [1, 5])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("has_masters", [False, True])
def test_what_is_written_added_and_blended_is_read_again_to_the_bit(dtype, num_fragments, has_masters):
    model, draw = Mixed(dtype), np.random.default_rng(2)
    masters = {model.low: model.low.detach().float()} if has_masters else None
    parameters = TorchParameters(model, None, masters)
    for fragment in split(layout_of_model(model), num_fragments):
        at = at_of(fragment)
        exact, more = (draw.normal(size=fragment.size).astype(np.float32) for _ in range(2))
        parameters.write(fragment, cell_of(exact), 1)
        np.testing.assert_array_equal(taken(parameters, fragment)[at], exact[at])
        parameters.add(fragment, cell_of(more), 2)
        np.testing.assert_array_equal(taken(parameters, fragment)[at], (exact + more)[at])
        parameters.blend(fragment, cell_of(exact), 0.25, 3)
        blended = taken(parameters, fragment)[at]
        np.testing.assert_allclose(blended, (exact + 0.25 * more)[at], rtol=0, atol=1e-6)
    kept = masters[model.low] if has_masters else None
    assert model.low.dtype == dtype
    if kept is not None:
        assert torch.equal(model.low, kept.to(dtype)), "the parameter is what its dtype can hold of the master"


@pytest.mark.parametrize("dtype", LOW)
def test_many_updates_below_half_of_the_last_place_add_up(dtype):
    """And none of them comes back as drift: what is read is what the run has published, while nothing is trained."""
    model = nn.Linear(64, 4, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    parameters = TorchParameters(model, None)
    (fragment,) = split(layout_of_model(model), 1)
    at, step = at_of(fragment), np.float32(2.0**-13)  # the last place of 1 is 2**-7 in bfloat16, 2**-10 in float16
    assert torch.equal(model.weight + step.item(), model.weight), "one such update is lost to rounding"
    published = taken(parameters, fragment)
    for _ in range(256):
        increment = np.full(fragment.size, step, np.float32)
        published += increment
        parameters.add(fragment, cell_of(increment), 1)
        np.testing.assert_array_equal(taken(parameters, fragment)[at], published[at])
    assert (model.weight == 1 + 2**-5).all()


def test_steps_of_the_optimizer_stay_beside_the_rest():
    model = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    parameters = TorchParameters(model, None)
    (fragment,) = split(layout_of_model(model), 1)
    exact = np.full(fragment.size, 1 + 2**-12, np.float32)
    parameters.write(fragment, cell_of(exact), 1)
    with torch.no_grad():
        model.weight.add_(0.5)
    assert (taken(parameters, fragment)[at_of(fragment)] == np.float32(1.5 + 2**-12)).all()


class WithMasters(torch.optim.Optimizer):
    """Trains float32 copies, which it makes at its first step."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.detach().float()
            state["master"].sub_(parameter.grad.float())
            parameter.copy_(state["master"])


def test_a_master_that_comes_and_goes_with_the_optimizers_state_loses_nothing():
    model = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    optimizer = WithMasters(model.parameters())
    parameters = TorchParameters(model, optimizer, lambda parameter: optimizer.state[parameter].get("master"))
    (fragment,) = split(layout_of_model(model), 1)
    tiny = 2**-12
    parameters.write(fragment, cell_of(np.full(fragment.size, 1 + tiny, np.float32)), 1)

    def stepped(value):
        model.weight.grad = torch.full_like(model.weight, -value)
        optimizer.step()
        return set(taken(parameters, fragment)[at_of(fragment)].tolist())

    assert stepped(0.5) == {1.5 + tiny}, "a master that is made from the parameter gets what that could not hold"
    assert stepped(tiny) == {1.5 + 2 * tiny}
    parameters.reset_optimizer()
    assert not optimizer.state[model.weight]
    assert set(taken(parameters, fragment)[at_of(fragment)].tolist()) == {1.5 + 2 * tiny}
    assert stepped(0.25) == {1.75 + 2 * tiny}
    assert (model.weight == 1.75).all()


def test_an_optimizer_of_masters_is_the_models_and_a_master_that_cannot_be_is_refused():
    model = nn.Linear(2, 2, bias=False, dtype=torch.float16)
    master = model.weight.detach().float()
    TorchParameters(model, torch.optim.SGD([master]), {model.weight: master})
    for wrong in (model.weight.detach().double(), torch.zeros(4), torch.zeros(2, 2, device="meta")):
        with pytest.raises(ModelError, match=r"^the master of parameter weight is .* it has to be torch\.float32"):
            TorchParameters(model, None, {model.weight: wrong})


@pytest.mark.parametrize(
    ("masters", "says"),
    [
        (3, "masters is a int: give a table from each parameter to its float32 copy, or a function of the parameter"),
        (
            {"weight": torch.zeros(2, 2)},
            "masters speaks of 'weight', which is no parameter of the model: give a table ",
        ),
        ({nn.Parameter(torch.zeros(1)): torch.zeros(1)}, "masters speaks of a Parameter, which is no parameter of the"),
    ],
)
def test_what_is_no_table_of_the_models_parameters_is_refused(masters, says):
    with pytest.raises(ConfigError) as refused:
        TorchParameters(nn.Linear(2, 2, dtype=torch.bfloat16), None, masters)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(("word", "lines"), [("master", 0), ("mster", 1)])
def test_masters_that_are_not_found_once_the_optimizer_has_stepped_are_a_warning(caplog, word, lines):
    """An optimizer with copies that the run does not know of would undo whatever that changes, without a word."""
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = WithMasters(model.parameters())
    parameters = TorchParameters(model, optimizer, lambda parameter: optimizer.state[parameter].get(word))
    parameters.stepped()  # as of a step that a GradScaler left out
    assert not caplog.messages
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        optimizer.step()
        parameters.stepped()
    assert len(caplog.messages) == lines
    assert all("masters says none of parameter weight and 1 more, and its optimizer" in m for m in caplog.messages)
