"""A model that is not what was attached is refused by name; whatever leaves its parameters the same ones is not."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize, prune

from skerry.adapters.attached import MODULES_AT_ONCE, Attached, filled, trainable, unwrapped
from skerry.errors import ModelError


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def model_of(depth=2):
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(depth)], nn.Linear(3, 3, bias=False))
    model[0].bias.requires_grad_(False)
    return model


NAMES = ["0.weight", "1.weight", "1.bias"]


def looked(model, attached):
    """As many boundaries as all modules need for their turn, each of which touches every parameter."""
    for _ in range(len(list(model.modules())) // MODULES_AT_ONCE + 1):
        attached.look(NAMES)


def assigned(model):
    model.load_state_dict({name: values.clone() for name, values in model.state_dict().items()}, assign=True)


def replaced(model):
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())


def replaced_by_an_equal_module(model):
    model[1] = nn.Linear(3, 3)


def given_a_bias(model):
    model[2].bias = nn.Parameter(torch.zeros(3))


def given_other_data(model):
    model[1].weight.data = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (assigned, "parameter 0.weight is another tensor since"),
        (replaced, "parameter 1.weight is another tensor since"),
        (replaced_by_an_equal_module, "parameter 1.weight is another tensor since"),
        (given_a_bias, "parameter 2.bias is to be trained, which it was not, since"),
        (given_other_data, "parameter 1.weight is of shape (4, 3) instead of (3, 3) since"),
        (lambda m: m.append(nn.Linear(2, 2)), "parameter 3.weight is to be trained, which it was not, since"),
        (lambda m: m.pop(1), "parameter 1.weight is "),
        (lambda m: m.to("meta"), "parameter 0.weight is "),
        (lambda m: m[1].requires_grad_(False), "parameter 1.weight is frozen since"),
        (lambda m: m[0].requires_grad_(True), "parameter 0.bias is to be trained, which it was not, since"),
        (lambda m: m.bfloat16(), "parameter 0.weight is torch.bfloat16 instead of torch.float32 since"),
        (lambda m: m.double(), "parameter 0.weight is torch.float64 instead of torch.float32 since"),
        (lambda m: m.to(torch.complex64), "parameter 0.weight is torch.complex64 instead of torch.float32 since"),
    ],
)
def test_a_model_that_was_changed_is_refused_by_name(change, says):
    model = model_of()
    attached = Attached(model)
    looked(model, attached)
    change(model)
    with pytest.raises(ModelError) as refused:
        looked(model, attached)
    assert str(refused.value).startswith(says) and "\n" not in str(refused.value)
    assert "copy_()" in str(refused.value) and "attach" in str(refused.value)


@pytest.mark.parametrize("change", [replaced, replaced_by_an_equal_module, lambda m: m.append(nn.Linear(2, 2))])
def test_of_a_model_with_many_modules_all_have_their_turn(change):
    model = model_of(3 * MODULES_AT_ONCE)
    attached = Attached(model)
    change(model)
    with pytest.raises(ModelError, match="since the model was attached"):
        looked(model, attached)


def compiled_block(model):
    model[1] = torch.compile(model[1])


@pytest.mark.parametrize(
    "change",
    [
        compiled_block,
        lambda m: torch.compile(m),
        lambda m: m.append(nn.Dropout()),
        lambda m: m.eval(),
        lambda m: m.load_state_dict(model_of().state_dict()),
        lambda m: prune.l1_unstructured(m[1], "weight", 0.5),  # the same tensor under another name
        lambda m: parametrize.register_parametrization(m[1], "weight", Doubled()),
        lambda m: m.register_buffer("mean", torch.zeros(3)),
    ],
)
def test_what_leaves_the_parameters_the_same_ones_is_nothing_to_refuse(change):
    model = model_of()
    attached = Attached(model)
    change(model)
    looked(model, attached)
    assert attached.let_go() == ""


def test_weights_that_are_tied_or_untied_are_not_the_same_model():
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    apart = Attached(model)
    model[1].weight = model[0].weight
    with pytest.raises(ModelError, match=r"^parameter 1\.weight is gone since"):
        apart.look(["0.weight"])
    tied = Attached(model)
    tied.look(["0.weight"])
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.raises(ModelError, match=r"^parameter 1\.weight is to be trained, which it was not, since"):
        tied.look(["0.weight"])


def test_a_loop_may_give_a_parameter_other_memory():
    model = model_of()
    attached = Attached(model)
    model[1].weight.data = model[1].weight.data - 1.0
    attached.look(["1.weight"])
    assert torch.equal(attached["1.weight"], model[1].weight)
    model[1].weight.data = model[1].weight.data.t()  # the same memory, seen in another way
    attached.look(["1.weight"])
    assert torch.equal(attached["1.weight"], model[1].weight)


def test_what_is_let_go_keeps_its_last_values_whatever_becomes_of_the_model():
    model = model_of()
    attached = Attached(model)
    with torch.no_grad():
        model[1].weight.fill_(1 / 3)
    learned = model[1].weight.detach().clone()
    model.bfloat16()
    assert "parameter 0.weight is torch.bfloat16" in attached.let_go()
    looked(model, attached)
    assert torch.equal(attached["1.weight"], learned)


# ------------------------------------------------------------------------------------------ what takes part


def test_a_compiled_model_has_the_names_of_the_plain_one():
    model = model_of()
    names = list(trainable(model))
    assert list(trainable(torch.compile(model))) == names
    model[1] = torch.compile(model[1])
    assert list(trainable(model)) == names and not any("_orig_mod" in name for name in names)


def test_only_a_whole_part_of_a_name_is_the_compilers():
    model = nn.Module()
    model.my_orig_mod, model._orig_module = nn.Linear(2, 2), nn.Linear(2, 2)
    model._orig_module._orig_mod = nn.Parameter(torch.zeros(1))
    names = [name for name, _ in model.named_parameters()]
    assert list(trainable(model)) == list(trainable(torch.compile(model))) == names
    assert "my_orig_mod.weight" in names and "_orig_module._orig_mod" in names


def test_two_parameters_that_come_to_one_name_are_refused_by_it():
    model = nn.Module()
    model.inner = nn.Module()
    model.inner._orig_mod = nn.Linear(2, 2, bias=False)
    model.inner.weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"^two tensors of the model are called inner\.weight, one of them inner\._"):
        trainable(model)


class Named(nn.Module):
    """A submodule that happens to be called as wrappers call theirs."""

    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "wrap",
    [
        nn.parallel.DistributedDataParallel,
        nn.DataParallel,
        lambda m: torch.compile(nn.parallel.DistributedDataParallel(m)),
        lambda m: nn.parallel.DistributedDataParallel(torch.compile(m)),
        lambda m: nn.DataParallel(nn.DataParallel(m)),
    ],
)
def test_a_wrapped_model_has_the_names_of_the_plain_one(group, wrap):
    for model in (model_of(), Named()):
        names = list(trainable(model))
        wrapped = wrap(model)
        assert list(trainable(wrapped)) == names
        assert unwrapped(wrapped) is model
    assert names[0] == "module.0.weight"


def test_a_part_that_is_wrapped_has_its_plain_names():
    model = Named()
    names = list(trainable(model))
    model.module[1] = nn.DataParallel(model.module[1])
    assert list(trainable(model)) == names


def with_parameter(parameter):
    model = nn.Linear(2, 2)
    model.odd = parameter
    return model


def overlapping():
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(model.weight.detach())
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), "parameter 0.weight has no shape yet: run a batch"),
        (lambda: nn.Linear(2, 2, device="meta"), "parameter weight is on the meta device, without values"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "parameter weight is torch.complex64"),
        (lambda: with_parameter(nn.Parameter(torch.zeros(0, 3))), "parameter odd is empty, of shape (0, 3)"),
        (lambda: with_parameter(nn.Parameter(torch.eye(3).to_sparse())), "parameter odd is torch.sparse_coo"),
        (
            lambda: with_parameter(nn.Parameter(torch.ones(1).expand(5))),
            "parameter odd has elements that share",
        ),
        (overlapping, "parameters weight and odd share memory"),
    ],
)
def test_what_cannot_take_part_is_refused_by_name(model, says):
    with pytest.raises(ValueError) as refused:
        filled(model())
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize("given", [nn.Linear(2, 2).state_dict(), list(nn.Linear(2, 2).parameters()), None, "model"])
def test_what_is_no_module_is_refused(given):
    with pytest.raises(TypeError, match=r"^model is a \w+: give a torch\.nn\.Module$"):
        trainable(given)
