"""The torch adapter: a model's parameters as fragments, and the four lines that make a plain loop a learner."""

import logging
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import skerry
from e2e.processes import WAIT_S, Running, facts_of, status_of, until
from skerry import algo
from skerry.adapters.torch import TorchParameters, layout_of_model, trainable
from skerry.algo.fragments import gather, split
from skerry.core.facts import Checkpointed, Committed, PhaseChanged
from skerry.core.state import state_of
from skerry.errors import RefusedError
from skerry.node.cells import FloatCell
from skerry.run.export import write_model
from skerry.run.facts import fragments_of
from skerry.run.genesis import read_genesis
from skerry.run.replay import replay
from skerry.store import Store

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_loop.py"


class Odd(nn.Module):
    """Tied, frozen, scalar, transposed and oddly sized parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(11, 7)
        self.bag = nn.EmbeddingBag(3, 5)
        self.frozen = nn.Linear(7, 2)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(129, 3).t())
        self.vector = nn.Parameter(torch.randn(1))

    def forward(self, tokens):
        x = self.embed(tokens) + self.frozen(self.embed(tokens)).sum()
        return self.head(x) * self.temperature + self.turned.mean() + self.vector + self.bag.weight.mean()


NAMES = ["bag.weight", "embed.weight", "temperature", "turned", "vector"]


def values_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------------------ alone


def test_without_an_address_a_learner_does_nothing(monkeypatch):
    monkeypatch.delenv("SKERRY_SYNCER", raising=False)
    threads, model = threading.enumerate(), Odd()
    before = values_of(model)
    with skerry.Learner(model, torch.optim.AdamW(trainable(model).values())) as learner:
        assert threading.enumerate() == threads
        assert [learner.step(tokens=5) for _ in range(3)] == [True] * 3
        assert learner.is_running and learner.progress == 0.0 and learner.ramp == 1.0
        assert learner.config is None and learner.index == 0 and learner.prior_steps == 0
    learner.close()
    assert threading.enumerate() == threads
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_wrong_address_is_given_up_after_a_while(monkeypatch):
    algo.warm_up()  # a thread that compiles cannot be broken off, and would be there at the end
    threads = threading.enumerate()
    with pytest.raises(skerry.JoinTimeout, match=r"127\.0\.0\.1:1 for 0\.1 s: connection refused"):
        skerry.Learner(Odd(), syncer="127.0.0.1:1", join_timeout_s=0.1)
    monkeypatch.setenv("SKERRY_JOIN_TIMEOUT_S", "0.2")
    with pytest.raises(skerry.RemoteError, match=r"for 0\.2 s"):
        skerry.Learner(Odd(), syncer="127.0.0.1:1")
    assert threading.enumerate() == threads


# ------------------------------------------------------------------------------------------ parameters


def test_layout_counts_tied_weights_once_leaves_frozen_ones_out_and_knows_embeddings():
    tensors = layout_of_model(Odd()).tensors
    assert [(t.name, t.shape, t.kind) for t in tensors] == [
        ("bag.weight", (3, 5), "embedding"),
        ("embed.weight", (11, 7), "embedding"),
        ("temperature", (), "other"),
        ("turned", (3, 129), "other"),
        ("vector", (1,), "other"),
    ]


def test_a_weight_tied_to_an_embedding_is_one_whatever_its_name():
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Embedding(6, 4))
    model[1].weight = model[0].weight
    assert [(t.name, t.kind) for t in layout_of_model(model).tensors] == [("0.weight", "embedding")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_parameter_of_another_dtype_is_refused_by_name(dtype):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False, dtype=dtype))
    refusal = f"parameter 1.weight is {dtype}: keep what is trained in torch.float32, torch.bfloat16 or torch.float16"
    for refused in (layout_of_model, lambda m: TorchParameters(m, None), lambda m: skerry.Learner(m, syncer="host:1")):
        with pytest.raises(ValueError, match=refusal):
            refused(model)


def test_a_model_with_nothing_to_train_is_refused():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        layout_of_model(model)


def cell_of(values):
    """A cell that holds these values."""
    return FloatCell(values.copy(), np.zeros(1, np.int64))


def taken(parameters, fragment):
    cell = cell_of(np.full(fragment.size, np.nan, np.float32))
    parameters.read(fragment, cell, 1)
    return cell.values


@pytest.mark.parametrize("num_fragments", [1, 2, 5, 20])
def test_read_add_blend_and_write_are_the_parameters_and_nothing_else(num_fragments):
    model = Odd()
    parameters = TorchParameters(model, None)
    frozen = model.frozen.weight.clone()
    assert not model.turned.is_contiguous()
    draw = np.random.default_rng(4)
    fragments = split(layout_of_model(model), num_fragments)
    assert sorted({slot.name for f in fragments for slot in f.slots}) == NAMES
    for fragment in fragments:
        start = {name: p.detach().numpy().copy() for name, p in trainable(model).items()}
        read = taken(parameters, fragment)
        np.testing.assert_array_equal(read, gather(fragment, start))

        increment = draw.normal(size=fragment.size).astype(np.float32)
        cell = cell_of(np.full(fragment.size, np.nan, np.float32))
        parameters.read(fragment, cell, 3)
        parameters.add(fragment, cell_of(increment), 1)
        assert cell.is_marked(3)
        np.testing.assert_array_equal(cell.values, read, err_msg="a snapshot is of when it was taken")
        shifted = {name: p.detach().numpy() for name, p in trainable(model).items()}
        at = np.concatenate([np.arange(slot.offset, slot.offset + slot.size) for slot in fragment.slots])
        np.testing.assert_array_equal(gather(fragment, shifted)[at], (read + increment)[at])

        towards = cell_of(read)
        parameters.blend(fragment, towards, 0.25, 4)
        assert towards.is_marked(4)
        blended = {name: p.detach().numpy() for name, p in trainable(model).items()}
        np.testing.assert_allclose(gather(fragment, blended)[at], (read + 0.25 * increment)[at], rtol=0, atol=1e-6)
        parameters.write(fragment, cell_of(read), 5)
        np.testing.assert_array_equal(taken(parameters, fragment), read)
        for name, p in trainable(model).items():
            np.testing.assert_array_equal(p.detach().numpy(), start[name])
    assert model.head.weight is model.embed.weight and not model.turned.is_contiguous()
    assert torch.equal(model.frozen.weight, frozen)


def test_written_values_are_not_shared_with_the_model():
    model = nn.Linear(3, 2)
    (fragment,) = split(layout_of_model(model), 1)
    cell = cell_of(np.ones(fragment.size, np.float32))
    TorchParameters(model, None).write(fragment, cell, 1)
    with torch.no_grad():
        model.weight.zero_()
    assert (cell.values == 1).all()


def test_resetting_the_optimizer_forgets_its_state_and_keeps_its_settings():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 2
    TorchParameters(model, optimizer).reset_optimizer()
    assert len(optimizer.state) == 0 and optimizer.param_groups[0]["lr"] == 0.25
    optimizer.step()
    TorchParameters(model, None).reset_optimizer()  # one without an optimizer has nothing to forget


def test_each_of_several_optimizers_is_reset():
    model = nn.Linear(3, 2)
    several = [torch.optim.AdamW([model.weight]), torch.optim.SGD([model.bias], momentum=0.9)]
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in several:
        optimizer.step()
        assert optimizer.state
    TorchParameters(model, several).reset_optimizer()
    assert not any(optimizer.state for optimizer in several)


def test_what_is_no_optimizer_of_the_model_is_refused():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    own = torch.optim.SGD(model.parameters())
    for wrong in ("adam", ["adam"], torch.optim.lr_scheduler.StepLR(own, 1), [own, None], model.parameters()):
        with pytest.raises(TypeError, match=r"^optimizer is a \w+: give a torch\.optim\.Optimizer, a list of them"):
            skerry.Learner(model, wrong, "host:1")
    for wrong in (torch.optim.SGD(other.parameters()), (own, torch.optim.Adam(other.parameters()))):
        with pytest.raises(ValueError, match=r"^optimizer \(\w+\) has none of the model's parameters"):
            skerry.Learner(model, wrong, "host:1")
    with pytest.raises(TypeError, match=r"^model is a OrderedDict: give a torch\.nn\.Module"):
        skerry.Learner(model.state_dict(), own, "host:1")


def test_what_no_optimizer_trains_and_is_shared_all_the_same_is_warned_of(caplog):
    """As a base that somebody forgot to freeze beside an adapter."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    masters = {model[1].bias: model[1].bias.detach().clone()}
    some = torch.optim.SGD([model[1].weight, masters[model[1].bias]])
    skerry.Learner(model, some, "127.0.0.1:1", masters=masters, wait=False).close()
    skerry.Learner(model, torch.optim.SGD(model.parameters()), "127.0.0.1:1", wait=False).close()
    skerry.Learner(model, None, "127.0.0.1:1", wait=False).close()
    (said,) = [text for text in caplog.messages if "optimizer" in text]
    assert said.startswith("no optimizer that is given trains 0.weight and 1 more, which the run shares all the same: ")


def test_a_genesis_that_no_run_could_begin_with_is_refused_before_anything_is_written(tmp_path):
    path, model = tmp_path / "genesis.safetensors", nn.Linear(2, 2)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*/none: make it first$"):
        skerry.save_genesis(model, tmp_path / "none" / "genesis.safetensors")
    with torch.no_grad():
        model.bias[1] = torch.nan
    with pytest.raises(ValueError, match=r"^parameter bias holds values that are not finite"):
        skerry.save_genesis(model, path)
    with pytest.raises(ValueError, match=r"^parameter weight is on the meta device"):
        skerry.save_genesis(model.to("meta"), path)
    assert not path.exists()


def test_the_genesis_of_a_compiled_model_is_that_of_the_plain_one(tmp_path):
    model = Odd()
    skerry.save_genesis(model, tmp_path / "plain.safetensors")
    skerry.save_genesis(torch.compile(model), tmp_path / "compiled.safetensors")
    assert (tmp_path / "plain.safetensors").read_bytes() == (tmp_path / "compiled.safetensors").read_bytes()


def test_a_saved_genesis_is_the_model(tmp_path):
    model = Odd()
    skerry.save_genesis(model, tmp_path / "genesis.safetensors")
    layout, arrays = read_genesis(tmp_path / "genesis.safetensors")
    assert layout == layout_of_model(model) and sorted(arrays) == NAMES
    for name, p in trainable(model).items():
        assert arrays[name].dtype == np.float32 and arrays[name].shape == tuple(p.shape)
        np.testing.assert_array_equal(arrays[name], p.detach().numpy())


# ------------------------------------------------------------------------------------------ attached


def serve(folder, genesis, *options):
    """A real syncer of this genesis, left running, and its address."""
    syncer = Running(folder, "syncer", "--run", folder / "run", "--port", "0", "--genesis", genesis, *options)
    try:
        until(lambda: syncer.process.poll() is not None or status_of(folder / "run"), "the syncer to come up")
        assert syncer.process.poll() is None, syncer.said
    except BaseException:
        syncer.__exit__()
        raise
    return syncer, status_of(folder / "run")["address"]


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
    return kept | changes


def run_example(*words, **changes):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *map(str, words)],
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("state", ["host", "device"])
def test_a_learner_in_this_process_joins_steps_and_closes(tmp_path, monkeypatch, state):
    """What the syncer has replaces what the model had; after the close both have the same."""
    genesis, model = tmp_path / "genesis.safetensors", Odd()
    skerry.save_genesis(model, genesis)
    _, first = read_genesis(genesis)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(1.0)
    frozen = model.frozen.weight.clone()
    options = [
        "--run.steps=40", "--run.learners=1", "--sync.num_fragments=3", "--sync.sync_every=4",
        "--wire.codec_up=fp32", "--wire.codec_down=fp32",
    ]  # fmt: skip
    threads = threading.enumerate()
    syncer, address = serve(tmp_path, genesis, *options)
    with syncer:
        with pytest.raises(RefusedError, match=r"the model differs from the run's: 0\.weight is missing there"):
            skerry.Learner(nn.Sequential(nn.Linear(2, 2, bias=False)), syncer=address, name="other")
        for name, why in (("frozen.weight", "trained here, and frozen there"), ("vector", "frozen here, and trained")):
            other = Odd()
            other.get_parameter(name).requires_grad_(name not in NAMES)
            with pytest.raises(RefusedError, match=f"the model differs from the run's: {name} is {why}"):
                skerry.Learner(other, syncer=address, name="other")
        monkeypatch.setenv("SKERRY_SYNCER", f"skerry://{address}")
        optimizer = torch.optim.AdamW(trainable(model).values(), lr=0.01)
        learner = skerry.Learner(model, optimizer, name="here", state=state)
        assert learner.state == state
        for name, parameter in trainable(model).items():
            np.testing.assert_array_equal(parameter.detach().numpy(), first[name])
        assert learner.progress == 0.0 and learner.index == 0 and learner.prior_steps == 0 and learner.ramp == 1.0
        assert learner.config.sync.num_fragments == 3
        for tokens in (0, -3):
            with pytest.raises(ValueError, match=r"^tokens = -?\d: a step is of at least one token"):
                learner.step(tokens=tokens)
        for tokens in (1.0, math.nan, "4", None, True, torch.tensor(4), np.ones(2)):
            with pytest.raises(TypeError, match=r"^tokens is a \w+: give a whole number .* like batch\.numel\(\)$"):
                learner.step(tokens=tokens)
        with pytest.raises(TypeError, match=r"give a number, like loss\.item\(\)"):
            learner.step(tokens=1, loss=torch.tensor(1.0))
        with pytest.raises(ValueError, match=r"^loss: is larger than a float can be"):
            learner.step(tokens=1, loss=10**400)
        seen, deadline = [], time.monotonic() + WAIT_S
        while learner.is_running:
            assert time.monotonic() < deadline
            model(torch.arange(11)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(learner.progress)
            if not learner.step(tokens=11):
                break
        learner.close()
        assert syncer.wait() == 0, syncer.said
    until(lambda: threading.enumerate() == threads, "its threads to end")
    assert seen == sorted(seen) and learner.progress == 1.0 and not learner.is_running
    assert torch.equal(model.frozen.weight, frozen) and model.head.weight is model.embed.weight
    with Store.open(tmp_path / "run", readonly=True) as store:
        state = state_of(store.records)
        write_model(store, state, tmp_path / "model.safetensors")
    assert state.phase == "closed" and state.ledger.totals().discarded == {} and state.ledger.totals().pending == 0
    _, final = read_genesis(tmp_path / "model.safetensors")
    for name, parameter in trainable(model).items():
        assert parameter.shape == final[name].shape
        np.testing.assert_allclose(parameter.detach().numpy(), final[name], rtol=0, atol=1e-5)
    assert all((final[name] != first[name]).any() for name in NAMES), "it has learnt"


def halved(model):
    model.bfloat16()


def loaded(model):
    model.load_state_dict({name: torch.zeros_like(values) for name, values in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [halved, loaded])
@pytest.mark.parametrize("is_seen", ["while it steps", "when it closes"])
def test_of_a_model_that_was_changed_what_was_learned_before_is_handed_in(tmp_path, caplog, change, is_seen):
    """Every step after the change is refused and booked nowhere; the learner leaves in order."""
    genesis, model = tmp_path / "genesis.safetensors", nn.Linear(5, 3)
    skerry.save_genesis(model, genesis)
    options = ["--run.tokens=1e9", "--run.learners=1", "--sync.num_fragments=2", "--sync.sync_every=2"]
    syncer, address = serve(tmp_path, genesis, *options, "--learner.leave_timeout_s=60")
    with syncer:
        learner = skerry.Learner(model, None, address, name="here")
        for _ in range(5):
            with torch.no_grad():
                model.weight.add_(1.0)
            assert learner.step(tokens=7)
        change(model)
        if is_seen == "while it steps":
            with pytest.raises(skerry.ModelError, match=r"^parameter \w+ is .* since the model was attached"):
                while learner.step(tokens=7):
                    pass
            for _ in range(3):
                with pytest.raises(skerry.ModelError):
                    learner.step(tokens=7)
        with caplog.at_level(logging.WARNING):
            learner.close()
        assert ("does not get the run's last values" in caplog.text) == (is_seen == "when it closes")
        until(
            lambda: status_of(tmp_path / "run")["learners"].get("here", {}).get("state") == "left",
            "the syncer to hear that it left",
        )
        totals = status_of(tmp_path / "run")["tokens"]
    assert totals["produced"] == totals["merged"] and not totals["discarded"]
    if is_seen == "when it closes":
        assert totals["merged"] == 35


def test_a_model_whose_embedding_is_cut_trains_is_replayed_and_exported_whole(tmp_path):
    genesis = tmp_path / "genesis.safetensors"
    model = nn.Sequential(nn.Embedding(900, 16), nn.Linear(16, 4))
    skerry.save_genesis(model, genesis)
    options = ["--run.steps=40", "--run.learners=1", "--sync.num_fragments=5", "--sync.sync_every=4"]
    options += ["--sync.cut_tensors=true"]
    syncer, address = serve(tmp_path, genesis, *options, "--store.record=full")
    with syncer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with skerry.Learner(model, optimizer, address, name="here") as learner:
            deadline = time.monotonic() + WAIT_S
            while learner.is_running:
                assert time.monotonic() < deadline
                model(torch.arange(900)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=900)
        assert syncer.wait() == 0, syncer.said
    with Store.open(tmp_path / "run", readonly=True) as store:
        state = state_of(store.records)
        slots = [slot for fragment in fragments_of(state.created) for slot in fragment.slots]
        write_model(store, state, tmp_path / "model.safetensors")
        assert replay(store).identical
    assert sum(slot.name == "0.weight" for slot in slots) == 5
    assert state.phase == "closed" and all(fragment.version > 1 for fragment in state.fragments)
    _, final = read_genesis(tmp_path / "model.safetensors")
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), final[name], rtol=0, atol=1e-5)


def test_the_example_adds_four_lines_to_a_plain_loop_and_runs_without_a_syncer():
    lines = [line for line in EXAMPLE.read_text().splitlines() if "# +" in line]
    assert 0 < len(lines) <= 4
    said = run_example().stdout.splitlines()
    assert [line.split()[1] for line in said] == [str(step) for step in range(0, 300, 50)]
    assert float(said[-1].split()[-1]) < float(said[0].split()[-1])


JOINS = """
import torch, skerry
from skerry.algo import kernels
model = torch.nn.Linear(4, 4)
skerry.Learner(model, torch.optim.SGD(model.parameters()))
print([len(kernel.signatures) for kernel in (kernels.encode, kernels.decode)], flush=True)
"""


def test_kernels_are_there_before_the_first_step(tmp_path):
    """To compile them, or to load them from the disk, takes longer than many a round."""
    genesis = tmp_path / "genesis.safetensors"
    skerry.save_genesis(nn.Linear(4, 4), genesis)
    syncer, address = serve(tmp_path, genesis, "--run.steps=40", "--run.learners=1")
    with syncer:
        env = environment(SKERRY_SYNCER=address, SKERRY_NAME="a", SKERRY_NODE="thread")
        joined = subprocess.Popen([sys.executable, "-c", JOINS], env=env, stdout=subprocess.PIPE, text=True)
        with joined:
            said = joined.stdout.readline()
            joined.kill()
    assert said.strip() == "[1, 1]"


@pytest.mark.slow
def test_the_example_is_a_learner_of_a_real_syncer(tmp_path):
    genesis = tmp_path / "genesis.safetensors"
    run_example("--genesis", genesis)
    options = ["--run.steps=120", "--run.learners=1", "--sync.num_fragments=3"]
    syncer, address = serve(tmp_path, genesis, *options)
    with syncer:
        said = run_example(SKERRY_SYNCER=address, SKERRY_NAME="a").stdout.splitlines()
        assert syncer.wait() == 0, syncer.said
    assert len(said) < 6, "it stopped when the budget was spent, not after its 300 steps"
    facts = facts_of(tmp_path / "run")
    merged = [row for fact in facts if isinstance(fact, Committed) for row in fact.decision.rows]
    assert {(row.learner, row.fate) for row in merged} == {("a", "merged")}
    *_, last = (fact for fact in facts if not isinstance(fact, Checkpointed))
    assert isinstance(last, PhaseChanged) and last.phase == "closed"
