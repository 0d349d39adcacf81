"""A genesis holds a model's whole state_dict, and an export gives exactly that back."""

import json
import time

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import skerry
from adapters.test_torch import serve
from cli.called import called
from e2e.processes import WAIT_S, facts_of
from skerry.algo.contents import Contents, Fixed
from skerry.algo.fragments import Tensor, encode_layout, layout_of, split
from skerry.config import Config
from skerry.core.facts import Buffered
from skerry.core.messages import PROTOCOL, Hello
from skerry.core.state import state_of
from skerry.errors import ModelError, Refusal, RefusedError
from skerry.node.peers import Learners
from skerry.node.syncer import SyncerNode
from skerry.run import room
from skerry.run.evaluations import read
from skerry.run.genesis import FIXED, begin, create_run, open_genesis, read_genesis
from skerry.shell.repair import make_whole
from skerry.store import Store


class Whole(nn.Module):
    """Of everything that a state_dict can have."""

    def __init__(self, width=5):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(7, width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.base = nn.Linear(width, width, dtype=torch.bfloat16).requires_grad_(False)
        self.base_again = self.base
        self.rough = nn.Linear(width, 3, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("mask", torch.eye(3, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("scratch", torch.ones(4), persistent=False)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        x = x + self.base(x.bfloat16()).float() + self.rough(x.bfloat16()).float().sum()
        return self.head(x)


def run_of(folder, model, name="run"):
    """A run directory that begins with this model."""
    skerry.save_genesis(model, folder / "genesis.safetensors")
    with Store.open(folder / name) as store:
        create_run(store, Config(), *read_genesis(folder / "genesis.safetensors"))
    return folder / name


def equal(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def check_same(found, state_dict):
    assert found.keys() == state_dict.keys()
    assert [name for name, values in state_dict.items() if not equal(found[name], values)] == []


@pytest.mark.parametrize("wrap", [lambda m: m, torch.compile, nn.DataParallel])
def test_an_export_is_the_state_dict_that_made_the_genesis(tmp_path, capsys, wrap):
    model = Whole()
    model.norm(torch.randn(4, 5))  # which counts
    root = run_of(tmp_path, wrap(model))
    assert called(capsys, "export", root)[0] == 0
    exported = load_file(root / "model.safetensors")
    check_same(exported, model.state_dict())
    other = Whole().double()
    other.load_state_dict(exported, strict=True)
    layout, values = read_genesis(root / "model.safetensors")
    first, begun = open_genesis(tmp_path / "genesis.safetensors")
    assert layout == first and values.contents == begun.contents, "an export is a genesis for the next run"


class Counting(nn.Linear):
    """Says more in its state_dict than tensors."""

    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        raise AssertionError("nobody has kept it")


def test_an_export_lacks_what_is_no_tensor_and_nothing_else(tmp_path, capsys):
    model = nn.Sequential(Counting(2, 3), nn.BatchNorm1d(3))
    root = run_of(tmp_path, model)
    assert called(capsys, "export", root)[0] == 0
    exported = load_file(root / "model.safetensors")
    with pytest.raises(RuntimeError, match="_extra_state"):
        model.load_state_dict(exported, strict=True)
    found = model.load_state_dict(exported, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["0._extra_state"], [])


def test_every_tensor_lies_in_a_genesis_once(tmp_path):
    model = Whole()
    skerry.save_genesis(model, tmp_path / "g")
    found = load_file(tmp_path / "g")
    assert set(model.state_dict()) - set(found) == {"head.weight", "base_again.weight", "base_again.bias"}
    layout, _ = open_genesis(tmp_path / "g")
    trained = ["embed.weight", "norm.bias", "norm.weight", "rough.bias", "rough.weight"]
    assert [tensor.name for tensor in layout.tensors] == trained


def test_who_evaluates_is_given_the_whole_state_dict(tmp_path):
    model = Whole()
    arrays = read(run_of(tmp_path, model)).arrays
    found = {name: torch.from_numpy(array) for name, array in arrays.items()}
    assert found.keys() == model.state_dict().keys()
    Whole().load_state_dict(found, strict=True)
    assert all(torch.equal(found[name].to(values.dtype), values) for name, values in model.state_dict().items())


def test_a_plain_file_of_bfloat16_is_trained_whole_and_given_back_as_it_was(tmp_path, capsys):
    tensors = {"w": torch.randn(40, 3).bfloat16(), "v": torch.randn(9), "h": torch.randn(5).half()}
    save_file(tensors, tmp_path / "g")
    with Store.open(tmp_path / "run") as store:
        create_run(store, Config(), *read_genesis(tmp_path / "g"))
    assert not (tmp_path / "run" / FIXED).exists()
    assert called(capsys, "export", tmp_path / "run")[0] == 0
    check_same(load_file(tmp_path / "run" / "model.safetensors"), tensors)


def test_metadata_that_names_what_is_not_there_is_refused(tmp_path):
    told = {"embeddings": [], "trained": ["w"], "aliases": {"v": "gone"}}
    save_file({"w": torch.zeros(3)}, tmp_path / "g", {"skerry": json.dumps(told)})
    with pytest.raises(ModelError, match=r"its metadata 'skerry' names gone, which is not in it$"):
        open_genesis(tmp_path / "g")


def test_what_is_not_trained_is_reckoned_with(tmp_path, monkeypatch):
    skerry.save_genesis(Whole(), tmp_path / "g")
    fixed = open_genesis(tmp_path / "g")[1].fixed_bytes
    assert fixed == 2 * 30 + 2 * 4 * 5 + 8 + 9
    fragments = split(open_genesis(tmp_path / "g")[0], 2)
    needed = sum(room.disk([fragment.size for fragment in fragments], Config().store).values())
    monkeypatch.setattr(room, "free_disk", lambda root: needed + fixed)
    room.check(tmp_path, Config(), fragments, is_new=True, fixed_bytes=fixed)
    with pytest.raises(Refusal, match=" of disk in "):
        room.check(tmp_path, Config(), fragments, is_new=True, fixed_bytes=fixed + 1)


# ------------------------------------------------------------------------------------------ a run


def test_of_a_run_comes_a_state_dict_and_who_has_another_base_is_refused(tmp_path, capsys):
    """Tied, frozen, bfloat16 and BatchNorm in one model; the base of another, with LoRA on it, would spoil the run."""
    model = Whole()
    skerry.save_genesis(model, tmp_path / "genesis.safetensors")
    options = ["--run.steps=40", "--run.learners=1", "--sync.num_fragments=2", "--sync.sync_every=4"]
    codecs = ["--wire.codec_up=fp32", "--wire.codec_down=fp32"]
    syncer, address = serve(tmp_path, tmp_path / "genesis.safetensors", *options, *codecs)
    with syncer:
        other = Whole()
        with torch.no_grad():
            other.base.weight[2, 3] += 1
        with pytest.raises(RefusedError, match=r"frozen parameter base\.weight has other values .*frozen=.any"):
            skerry.Learner(other, None, address, name="other")
        skerry.Learner(other, None, address, name="other", frozen="any").close()
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
        with skerry.Learner(model, optimizer, address, name="here") as learner:
            deadline = time.monotonic() + WAIT_S
            while learner.is_running:
                assert time.monotonic() < deadline
                model(torch.arange(7)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=7)
        assert syncer.wait() == 0, syncer.said
    assert called(capsys, "export", tmp_path / "run")[0] == 0
    exported = load_file(tmp_path / "run" / "model.safetensors")
    first = Whole()
    assert {name: values.dtype for name, values in exported.items()} == {
        name: values.dtype for name, values in first.state_dict().items()
    }
    first.load_state_dict(exported, strict=True)
    for (name, ours), theirs in zip(first.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.01, atol=1e-5, msg=name)
    for (name, ours), theirs in zip(first.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    assert first.norm.num_batches_tracked > 20, "buffers are those of the learner"
    assert not torch.equal(first.rough.weight, Whole().rough.weight), "it was trained"
    assert torch.equal(first.base.weight, model.base.weight)


def test_buffers_of_several_learners_are_averaged_by_tokens_and_counts_are_the_newests(tmp_path, capsys):
    skerry.save_genesis(nn.BatchNorm1d(3), tmp_path / "genesis.safetensors")
    options = [
        "--run.tokens=1e9",
        "--run.learners=2",
        "--sync.num_fragments=1",
        "--sync.quorum=1",
        "--sync.sync_every=2",
    ]
    syncer, address = serve(tmp_path, tmp_path / "genesis.safetensors", *options)
    models = {"a": nn.BatchNorm1d(3), "b": nn.BatchNorm1d(3)}
    with syncer:
        learners = {
            name: skerry.Learner(model, None, address, name=name, node="thread") for name, model in models.items()
        }
        for step in range(6):
            for name, model in models.items():
                model(torch.full((2, 3), 8.0 if name == "a" else -8.0) + torch.arange(2)[:, None] * (step + 1))
                if name == "a" or step % 2:
                    with torch.no_grad():
                        model.weight.add_(0.1)
                    learners[name].step(tokens=30 if name == "a" else 20)
        for name in models:
            learners[name].close()
    given = [fact for fact in facts_of(tmp_path / "run") if isinstance(fact, Buffered)]
    assert [(fact.learner, fact.step, fact.tokens) for fact in given] == [("a", 6, 180), ("b", 3, 60)]
    assert called(capsys, "export", tmp_path / "run")[0] == 0
    exported = load_file(tmp_path / "run" / "model.safetensors")
    a, b = models.values()
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(exported[name], 0.75 * getattr(a, name) + 0.25 * getattr(b, name))
    assert exported["num_batches_tracked"] == b.num_batches_tracked == 6
    nn.BatchNorm1d(3).load_state_dict(exported, strict=True)
    assert called(capsys, "export", tmp_path / "run", "--version", 0)[0] == 0
    check_same(load_file(tmp_path / "run" / "model-0.safetensors"), nn.BatchNorm1d(3).state_dict())
    assert called(capsys, "replay", tmp_path / "run")[0] == 0, "the tape holds up"

    (tmp_path / "run" / "files" / given[0].file).write_bytes(b"rotten")
    assert called(capsys, "export", tmp_path / "run")[0] == 0
    assert torch.equal(load_file(tmp_path / "run" / "model.safetensors")["running_mean"], b.running_mean)


@pytest.mark.parametrize(
    ("run", "said", "says"),
    [
        ({}, None, ""),
        ({"a": b"1"}, None, "like a, and the learner says nothing of its own"),
        ({"a": b"1"}, "any", ""),
        ({"a": b"1"}, {"a": b"1"}, ""),
        ({"a": b"1", "b": b"2"}, {"b": b"2"}, "the run's frozen parameter a is missing"),
        ({"a": b"1"}, {"a": b"1", "c": b"1"}, "the frozen parameter c is not in the run's model"),
        (None, {"a": b"1"}, ""),  # begun from values alone: nobody knows
        (None, None, ""),
    ],
)
def test_whose_frozen_parameters_are_taken_in(tmp_path, run, said, says):
    fixed = tuple(Fixed(name, "F32", (1,), "frozen", digest) for name, digest in (run or {}).items())
    contents, layout = Contents(fixed=fixed, is_whole=run is not None), layout_of([Tensor("w", (3,))])
    with Store.open(tmp_path) as store:
        begin(store, Config(), layout, lambda fragment: np.zeros(fragment.size, np.float32), contents=contents)
    with Store.open(tmp_path) as store:
        learners = Learners()
        learners.node = SyncerNode(store, learners, time.monotonic)
        hello = Hello(PROTOCOL, "a", "p", 0, encode_layout(layout), layout.digest, said)
        refused = learners._objection(hello, "a")
    assert (says in refused.text and refused.is_final) if says else refused is None


# ------------------------------------------------------------------------------------------ other forms


def test_an_export_like_another_file_has_its_names_dtypes_and_order(tmp_path, capsys):
    model = Whole()
    root = run_of(tmp_path, model)
    wanted = {
        name: values.float() if name.startswith("base.") else values for name, values in model.state_dict().items()
    }
    del wanted["embed.weight"], wanted["base_again.weight"], wanted["base_again.bias"]  # one name of a tensor is enough
    wanted["head.weight"] = wanted["head.weight"].half()
    save_file(wanted, tmp_path / "other")
    assert called(capsys, "export", root, "--like", tmp_path / "other", "--out", tmp_path / "out")[0] == 0
    check_same(load_file(tmp_path / "out"), wanted)
    with safe_open(tmp_path / "out", "pt") as ours, safe_open(tmp_path / "other", "pt") as theirs:
        assert ours.offset_keys() == theirs.offset_keys()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"extra": torch.zeros(2)}, "extra is not in the run's model"),
        ({"mask": torch.zeros(2, 2, dtype=torch.bool)}, "mask has shape (2, 2) there, (3, 3) in the run"),
        ({"mask": torch.zeros(3, 3)}, "mask is F32 there and BOOL in the run"),
        ({"norm.weight": None}, "has no norm.weight, which the run's model has"),
    ],
)
def test_what_does_not_fit_another_file_is_refused_by_name(tmp_path, capsys, change, says):
    model = Whole()
    root = run_of(tmp_path, model)
    tensors = {name: values.clone() for name, values in model.state_dict().items()} | change
    save_file({name: values for name, values in tensors.items() if values is not None}, tmp_path / "other")
    code, _, said = called(capsys, "export", root, "--like", tmp_path / "other", "--out", tmp_path / "out")
    assert code == 2 and says in said and len(said.splitlines()) == 1, said
    assert not (tmp_path / "out").exists()


class Config_:
    """As PEFT's and transformers' configurations can be asked."""

    def to_dict(self):
        return {"peft_type": "LORA", "r": 2, "target_modules": {"up", "down"}, "inference_mode": False}

    def to_diff_dict(self):
        return {"model_type": "tiny", "torch_dtype": "float32"}


class Adapted(nn.Module):
    """With the names that PEFT gives the parts of a model that it has adapted."""

    def __init__(self):
        super().__init__()
        layer = nn.Module()
        layer.base_layer = nn.Linear(4, 4).requires_grad_(False)
        layer.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        layer.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})
        score = nn.Module()
        score.original_module = nn.Linear(4, 2).requires_grad_(False)
        score.modules_to_save = nn.ModuleDict({"default": nn.Linear(4, 2)})
        self.base_model = nn.Module()
        self.base_model.model = nn.ModuleDict({"up": layer, "score": score})
        self.peft_config, self.active_adapter = {"default": Config_()}, "default"


def test_an_adapter_has_the_names_that_peft_loads(tmp_path, capsys):
    model = Adapted()
    root = run_of(tmp_path, model)
    assert called(capsys, "export", root, "--adapter", tmp_path / "adapter")[0] == 0
    up, score = model.base_model.model["up"], model.base_model.model["score"].modules_to_save["default"]
    check_same(
        load_file(tmp_path / "adapter" / "adapter_model.safetensors"),
        {
            "base_model.model.up.lora_A.weight": up.lora_A["default"].weight,
            "base_model.model.up.lora_B.weight": up.lora_B["default"].weight,
            "base_model.model.score.weight": score.weight,
            "base_model.model.score.bias": score.bias,
        },
    )
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about == {"peft_type": "LORA", "r": 2, "target_modules": ["down", "up"], "inference_mode": True}


def test_a_folder_has_what_from_pretrained_loads(tmp_path, capsys):
    model = Whole()
    model.config = Config_()
    root = run_of(tmp_path, nn.DataParallel(model))
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "model.bin").write_text("")
    assert called(capsys, "export", root, "--folder", tmp_path / "out", "--config-from", source)[0] == 0
    names = {"model.safetensors", "config.json", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about == {"model_type": "tiny", "torch_dtype": "float32", "architectures": ["Whole"]}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    check_same(load_file(tmp_path / "out" / "model.safetensors"), model.state_dict())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--adapter", "x"], "--adapter: "),
        (["--folder", "x"], "the run's genesis has no config.json"),
        (["--folder", "x", "--config-from", "nowhere"], "--config-from nowhere: is not a folder"),
        (["--folder", "x", "--out", "y"], "--out and --folder: both say where to"),
        (["--config-from", "x"], "--config-from: goes with --folder"),
        (["--adapter", "x", "--like", "y"], "--like and --adapter: both say which tensors"),
        (["--like", "nowhere"], "--like nowhere: no such file: name a safetensors file of the same model"),
    ],
)
def test_forms_that_cannot_be_are_refused(tmp_path, capsys, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    code, _, said = called(capsys, "export", run_of(tmp_path, nn.Linear(2, 2)), *words)
    assert code == 2 and says in said and len(said.splitlines()) == 1, said
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("damage", ["flipped", "gone", "cut"])
def test_damage_to_what_is_not_trained_is_named_and_mended_from_the_genesis(tmp_path, capsys, caplog, damage):
    model = Whole()
    root = run_of(tmp_path, model)
    path = root / FIXED
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flipped" else data[:-5])
    code, _, said = called(capsys, "export", root)
    assert code == 2 and FIXED in said and "--repair --genesis" in said and len(said.splitlines()) == 1, said
    assert not (root / "model.safetensors").exists()

    def repaired(genesis):
        with Store.open(root) as store:
            return make_whole(store, ("127.0.0.1", 0, None), False, lambda: False, genesis)

    skerry.save_genesis(Whole(width=6), tmp_path / "another")
    assert repaired(tmp_path / "another") and f"{FIXED} is damaged or missing" in caplog.text
    caplog.clear()
    assert repaired(tmp_path / "genesis.safetensors") and FIXED not in caplog.text
    assert called(capsys, "export", root)[0] == 0
    check_same(load_file(root / "model.safetensors"), model.state_dict())


def test_a_run_that_says_nothing_of_its_model_is_as_it_was(tmp_path):
    save_file({"w": torch.zeros(3)}, tmp_path / "g")
    with Store.open(tmp_path / "run") as store:
        create_run(store, Config(), *read_genesis(tmp_path / "g"))
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert not state_of(store.records).created.fixed
