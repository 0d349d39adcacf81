"""A learner gives the buffers that training changed by the names that a genesis has, and no other ones."""

import logging

import pytest
import torch
from safetensors.torch import load, load_file
from torch import nn

import skerry
from adapters.test_torch import serve
from skerry.adapters.buffers import ChangedBuffers
from skerry.run.genesis import open_genesis


class Counting(nn.Module):
    """Two parts count with one buffer; another buffer is a weight's memory, and a third a part of that."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.x, self.y = nn.Module(), nn.Module()
        count = torch.zeros(1)
        self.x.register_buffer("seen", count)
        self.y.register_buffer("seen", count.view(1))  # another object of the same memory
        self.register_buffer("tied", self.norm.weight.data)
        self.register_buffer("part", self.norm.weight.data[:2])

    def learn(self):
        with torch.no_grad():
            self.norm.weight.add_(1)
        self.norm(torch.randn(4, 3))
        self.x.seen += 1


def given_by(model, change):
    buffers = ChangedBuffers(model)
    assert buffers() == b""
    change(model)
    data = buffers()
    return load(data) if data else {}


def buffers_of_genesis(folder, model):
    skerry.save_genesis(model, folder / "g")
    return {fixed.name for fixed in open_genesis(folder / "g")[1].contents.fixed if fixed.kind == "buffer"}


def test_what_a_learner_gives_are_buffers_of_the_genesis_of_its_model(tmp_path):
    known = buffers_of_genesis(tmp_path, Counting())
    assert "tied" not in known and "y.seen" not in known
    assert given_by(Counting(), Counting.learn).keys() == known


def test_a_buffer_whose_names_part_while_it_trains_is_given_by_the_first_one(tmp_path):
    known = buffers_of_genesis(tmp_path, Counting())

    def split(model):
        model.double().float()  # as a move to a device does
        model.learn()

    assert given_by(Counting(), split).keys() <= known


def test_names_that_come_together_while_it_trains_are_both_given():
    def tied(model):
        model.y.seen = model.x.seen
        model.learn()

    model = Counting()
    model.y.seen = torch.zeros(1)
    given = given_by(model, tied)
    assert torch.equal(given["x.seen"], given["y.seen"])


STRANGE = {
    "sparse": (lambda: torch.eye(3).to_sparse(), r"is torch\.sparse_coo, which a run's files cannot hold"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), r"is torch\.sparse_csr, which"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is nested, which"),
    "lazy": (lambda: nn.UninitializedBuffer(), "has no shape yet: run a batch"),
}


@pytest.mark.parametrize("kind", [*STRANGE, "complex128"])
def test_a_buffer_that_no_file_can_hold_any_more_costs_one_warning_and_itself_alone(kind, caplog):
    caplog.set_level(logging.WARNING, "skerry")
    model = nn.BatchNorm1d(3)
    model.register_buffer("odd", torch.zeros(3))
    buffers = ChangedBuffers(model)
    model(torch.randn(4, 3))
    model.odd = STRANGE[kind][0]() if kind in STRANGE else torch.zeros(3, dtype=torch.complex128)
    for _ in range(2):
        assert load(buffers()).keys() == {"running_mean", "running_var", "num_batches_tracked"}
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("buffer odd ") and "\n" not in said


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("frozen", ["same", "any"])
def test_a_model_with_a_buffer_that_no_file_can_hold_is_refused_by_its_name(tmp_path, kind, frozen):
    model = nn.Linear(2, 2)
    model.register_buffer("odd", STRANGE[kind][0]())
    with pytest.raises(ValueError, match=rf"^buffer odd {STRANGE[kind][1]}"):
        skerry.Learner(model, None, "127.0.0.1:1", frozen=frozen)
    with pytest.raises(ValueError, match=rf"^tensor odd {STRANGE[kind][1]}"):
        skerry.save_genesis(model, tmp_path / "g")
    model.register_buffer("odd", STRANGE[kind][0](), persistent=False)
    assert ChangedBuffers(model)() == b""
    skerry.save_genesis(model, tmp_path / "g")


def test_of_a_conjugate_view_the_values_count(tmp_path):
    values = torch.tensor([1 + 2j, 3 - 4j])
    model = nn.Linear(2, 2)
    model.register_buffer("plain", values.clone())
    model.register_buffer("turned", model.plain.conj())
    skerry.save_genesis(model, tmp_path / "g")
    kept = load_file(tmp_path / "g")
    assert torch.equal(kept["plain"], values) and torch.equal(kept["turned"], values.conj().resolve_conj())

    def turned(model):
        model.plain = model.plain.conj()

    assert torch.equal(given_by(model, turned)["plain"], values.conj().resolve_conj())


def test_the_last_work_is_handed_over_whatever_a_buffer_has_become(tmp_path, caplog):
    model = nn.BatchNorm1d(2000)
    model.register_buffer("odd", torch.zeros(3))
    skerry.save_genesis(model, tmp_path / "genesis.safetensors")
    syncer, address = serve(tmp_path, tmp_path / "genesis.safetensors", "--run.steps=100000", "--sync.sync_every=40")
    with syncer:
        with skerry.Learner(model, None, address, name="here", node="thread") as learner:
            for _ in range(10):
                with torch.no_grad():
                    model.weight.add_(0.1)
                model.odd = torch.eye(3).to_sparse()
                learner.step(tokens=1)
        assert learner.close().steps_merged == 10, learner.close()
    assert sum("buffer odd is torch.sparse_coo" in record.getMessage() for record in caplog.records) == 1


def test_a_lazy_norm_without_weights_is_refused_by_its_name(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(ValueError, match=r"^tensor 1\.running_mean has no shape yet: run a batch"):
        skerry.save_genesis(model, tmp_path / "g")
    with pytest.raises(ValueError, match=r"^buffer 1\.running_mean has no shape yet: run a batch"):
        skerry.Learner(model, None, "127.0.0.1:1")


class Failing(nn.BatchNorm1d):
    """Somebody's module, which ends with an error when its buffers are asked for."""

    fails = False

    def named_buffers(self, *words, **options):
        if self.fails:
            raise KeyError("lost")
        return super().named_buffers(*words, **options)


def test_of_a_closing_that_an_error_ended_nothing_else_is_said_later(tmp_path):
    model = Failing(4)
    skerry.save_genesis(model, tmp_path / "genesis.safetensors")
    syncer, address = serve(tmp_path, tmp_path / "genesis.safetensors", "--run.steps=1000", "--sync.sync_every=40")
    with syncer:
        learner = skerry.Learner(model, None, address, name="here", node="thread")
        learner.step(tokens=1)
        model.fails = True
        with pytest.raises(KeyError, match="lost"):
            learner.close()
        assert str(learner.close()) == "0 steps merged, 1 not: an error ended its closing before all was handed over"
