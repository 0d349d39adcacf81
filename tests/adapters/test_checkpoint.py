"""What a PyTorch learner keeps on its own disk: optimizers, generators and others, over a kill."""

import json
import logging
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import skerry
from e2e.processes import Syncer, until
from skerry.adapters.checkpoint import METADATA, PAIRS, TENSOR, TUPLE, Checkpoint
from skerry.errors import ConfigError, ModelError

OPTIONS = ["--run.tokens=1e9", "--run.learners=1", "--sync.num_fragments=2", "--sync.sync_every=2"]


def tools(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 1))
    optimizers = [
        torch.optim.AdamW(model[0].parameters(), lr=0.1),
        torch.optim.SGD(model[2].parameters(), momentum=0.9),
    ]
    return model, optimizers, torch.optim.lr_scheduler.StepLR(optimizers[0], 2)


def train(model, optimizers, schedule, steps):
    for _ in range(steps):
        noise = random.random() + np.random.random()
        (model(torch.randn(3, 6)).square().mean() * noise).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_loop_goes_on_from_a_checkpoint_with_the_bits_of_one_that_was_not_broken_off(tmp_path):
    path = tmp_path / "here.ckpt"
    model, optimizers, schedule = tools()
    train(model, optimizers, schedule, 5)
    kept = Checkpoint(path, optimizers, [schedule], 60)
    kept.take()
    state = {name: values.clone() for name, values in model.state_dict().items()}
    expected = train(model, optimizers, schedule, 5)  # while it is being written
    kept.wait()

    model, optimizers, schedule = tools(seed=1)
    model.load_state_dict(state)
    random.seed(1), np.random.seed(1)
    assert Checkpoint(path, optimizers, [schedule], 60).restore()
    for ours, theirs in zip(train(model, optimizers, schedule, 5), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert os.listdir(tmp_path) == ["here.ckpt"] and not path.stat().st_mode & 0o077


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    path, (_, optimizers, _) = tmp_path / "a.ckpt", tools()
    for name in ("a.ckpt.0123456789abcdef.tmp", "a.ckpt.tmp", "b.ckpt.0123456789abcdef.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state").touch()
    assert not Checkpoint(path, optimizers, [], 60).restore()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt.tmp", "b.ckpt.0123456789abcdef.tmp"]


def test_one_that_cannot_be_written_is_a_warning_and_the_one_before_it_stays(tmp_path, caplog):
    folder = tmp_path / "disk"
    folder.mkdir()
    _, optimizers, _ = tools()
    kept = Checkpoint(folder / "a.ckpt", optimizers, [], 60)
    kept.take()
    kept.wait()
    folder.rename(tmp_path / "gone")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            kept.take()
            kept.wait()
        (tmp_path / "gone").rename(folder)
        assert kept.restore()
        kept.take()
        kept.wait()
    lost, back = [record.getMessage() for record in caplog.records]  # once, however often it is tried
    assert "a.ckpt could not be written (FileNotFoundError: " in lost and "; the one before it stays from " in lost
    assert back.endswith("a.ckpt is written again")


def test_at_the_end_it_is_said_again_how_old_the_one_is_that_stays(tmp_path, caplog):
    folder = tmp_path / "disk"
    folder.mkdir()
    kept = Checkpoint(folder / "a.ckpt", tools()[1], [], 60)
    kept.take()
    kept.wait()
    folder.rename(tmp_path / "gone")
    for is_last in (False, False, True):
        kept.take()
        kept.wait(is_last)
    first, last = [record.getMessage() for record in caplog.records]
    assert first.endswith("and it is tried again") and re.search(r"the one before it stays from \d+ s ago$", last)


def test_where_none_was_ever_written_the_warning_does_not_speak_of_one_before_it(tmp_path, caplog):
    (tmp_path / "disk").mkdir()
    kept = Checkpoint(tmp_path / "disk" / "a.ckpt", tools()[1], [], 60)
    (tmp_path / "disk").rmdir()
    with caplog.at_level(logging.WARNING):
        kept.take()
        kept.wait()
    assert caplog.records[0].getMessage().endswith("); there is none, and it is tried again")


class Odd:
    def state_dict(self):
        return {"where": {"a": {1, 2}}}

    def load_state_dict(self, state):
        raise AssertionError


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    path, (model, optimizers, schedule) = tmp_path / "a.ckpt", tools()
    kept = Checkpoint(path, optimizers, [schedule], 60)
    kept.take()
    kept.wait()
    with pytest.raises(
        ModelError, match=r"does not fit .* \(it is of AdamW, SGD, StepLR, and AdamW, StepLR are given\)"
    ):
        Checkpoint(path, optimizers[:1], [schedule], 60).restore()
    with pytest.raises(ModelError, match=r"a\.ckpt: does not fit what it is to be loaded into"):
        Checkpoint(path, [torch.optim.SGD(model.parameters()), optimizers[1]], [schedule], 60).restore()
    path.write_bytes(b"junk")
    with pytest.raises(ModelError, match=r"a\.ckpt: is no readable checkpoint"):
        Checkpoint(path, optimizers, [], 60).restore()
    with pytest.raises(ConfigError, match=r"others\.0\.where\.a is a set, which a checkpoint cannot keep"):
        Checkpoint(path, optimizers, [Odd()], 60)
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere: make it first"):
        Checkpoint(tmp_path / "nowhere" / "a.ckpt", optimizers, [], 60)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"checkpoint": ""}, r"checkpoint is given and empty: name a file, or leave it out to keep none"),
        ({"checkpoint": "a", "checkpoint_every_s": 0}, r"checkpoint_every_s = 0: give seconds, more than 0"),
        ({"checkpoint": "a", "checkpoint_every_s": "60"}, r"checkpoint_every_s = '60': give seconds, more than 0"),
        ({"checkpoint": "a", "checkpoint_with": Odd()}, r"checkpoint_with is a Odd: give a list of what is to be kept"),
        ({"checkpoint": "a", "checkpoint_with": [1]}, r"checkpoint_with\[0\] is a int: give what has state_dict and"),
        ({"checkpoint_with": [Odd()]}, r"checkpoint_with is given and checkpoint is not: name the file that all of it"),
        ({"checkpoint_every_s": 5}, r"checkpoint_every_s is given and checkpoint is not: name the file that all of"),
    ],
)
def test_what_is_wrong_in_what_is_said_of_a_checkpoint_is_said_at_once(options, says):
    """Whether there is a syncer or not: who tries a loop alone first hears of it then."""
    with pytest.raises(ConfigError, match=f"^{says}"):
        skerry.Learner(torch.nn.Linear(2, 2), **options)


@pytest.mark.parametrize(
    ("momentum", "odd"),
    [
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (TwoTensor(torch.zeros(2), torch.zeros(2)), "a TwoTensor"),
    ],
)
def test_a_state_that_no_file_can_hold_is_refused_as_soon_as_it_is_there(tmp_path, momentum, odd):
    _, optimizers, _ = tools()
    kept = Checkpoint(tmp_path / "a.ckpt", optimizers, [], 60)  # before the first step there is none
    optimizers[0].state[optimizers[0].param_groups[0]["params"][0]]["momentum"] = momentum
    with pytest.raises(ConfigError, match=rf"optimizers\.0\.state\.0\.momentum is {odd}, which .*: use an optimizer"):
        kept.look()
    with pytest.raises(ConfigError, match=rf"momentum is {odd}, which"):
        Checkpoint(tmp_path / "a.ckpt", optimizers, [], 60)
    assert not os.listdir(tmp_path)


def test_its_name_is_made_durable_too(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("skerry.adapters.checkpoint.sync_folder", lambda folder: synced.append(os.listdir(folder)))
    kept = Checkpoint(tmp_path / "a.ckpt", tools()[1], [], 60)
    kept.take()
    kept.wait()
    ((first, *_),) = map(sorted, synced)
    assert first == "a.ckpt", "once it has it"


def test_nothing_is_loaded_of_one_that_does_not_fit(tmp_path):
    path, (model, optimizers, _) = tmp_path / "a.ckpt", tools()
    train(model, optimizers, tools()[2], 2)
    kept = Checkpoint(path, optimizers, [], 60)
    kept.take()
    kept.wait()
    with pytest.raises(ModelError, match=r"it is of AdamW, SGD, and SGD, AdamW are given"):
        Checkpoint(path, optimizers[::-1], [], 60).restore()
    for about in ("[]", "5", "null", "[" * 100_000, '{"format": 1}', '{"format": 1, "kinds": 3}'):
        save_file({}, path, {METADATA: about})
        with pytest.raises(ModelError, match=r"a\.ckpt: (is no readable checkpoint|does not fit)"):
            Checkpoint(path, optimizers, [], 60).restore()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match="it is no plain file"):
        Checkpoint(path, optimizers, [], 60).restore()
    assert all(float(state["step"]) == 2 for state in optimizers[0].state.values()), "as they were"


def written(path, model, optimizer):
    """A checkpoint of what has taken a step, and what its metadata says and its tensors are."""
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    kept = Checkpoint(path, [optimizer], [], 60, dict(model.named_parameters()))
    kept.take()
    kept.wait()
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()[METADATA]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def of_width(width):
    return nn.Sequential(nn.Linear(6, width), nn.Linear(width, 6))


@pytest.mark.parametrize("knows_names", [True, False], ids=["", "of an earlier build"])
def test_a_checkpoint_of_other_shapes_is_refused_before_anything_is_loaded(tmp_path, knows_names):
    path, model = tmp_path / "a.ckpt", of_width(4)
    about, tensors = written(path, model, torch.optim.AdamW(model.parameters()))
    if not knows_names:
        about.pop("parameters", None)
        save_file(tensors, path, {METADATA: json.dumps(about)})
    assert Checkpoint(path, [torch.optim.AdamW(of_width(4).parameters())], [], 60).restore()
    other = of_width(3)
    optimizer = torch.optim.AdamW(other.parameters())
    before = random.getstate()
    with pytest.raises(ModelError, match=r"does not fit .* \(it has .* of \[4, 6\].* of \[3, 6\]") as refusal:
        Checkpoint(path, [optimizer], [], 60, dict(other.named_parameters())).restore()
    assert str(refusal.value).endswith("give what it was made with, or remove it to begin anew")
    assert not optimizer.state and random.getstate() == before
    with pytest.raises(ModelError, match=r"its groups are of \[4\] parameters, and groups of \[2\] are given"):
        Checkpoint(path, [torch.optim.AdamW(other[0].parameters())], [], 60).restore()


def test_a_checkpoint_of_parameters_in_another_order_is_refused_by_their_names(tmp_path):
    path, model = tmp_path / "a.ckpt", of_width(6)
    written(path, model, torch.optim.AdamW(model.parameters()))
    turned = torch.optim.AdamW([*model[1].parameters(), *model[0].parameters()])
    with pytest.raises(ModelError, match=r"it has 0\.weight of \[6, 6\] where 1\.weight of \[6, 6\] is given"):
        skerry.Learner(model, turned, "127.0.0.1:7077", checkpoint=path, join_timeout_s=1)


@pytest.mark.parametrize(
    "harm",
    [
        lambda state: state["python"].update({TUPLE: [3, {TUPLE: [10**400] * 625}, None]}),
        lambda state: state["numpy"][TUPLE].__setitem__(2, 10**400),
        lambda state: state.update(torch={TENSOR: state["numpy"][TUPLE][1][TENSOR]}),
    ],
    ids=["python", "numpy", "torch"],
)
def test_nothing_is_loaded_where_the_generators_state_is_none(tmp_path, harm):
    path, model = tmp_path / "a.ckpt", of_width(4)
    about, tensors = written(path, model, torch.optim.AdamW(model.parameters()))
    state = dict(about["generators"][0][PAIRS])
    harm(state)
    about["generators"][0][PAIRS] = list(state.items())
    save_file(tensors, path, {METADATA: json.dumps(about)})
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ModelError, match=r"a\.ckpt: does not fit what it is to be loaded into"):
        Checkpoint(path, [optimizer], [], 60).restore()
    assert not optimizer.state


@pytest.mark.parametrize(
    ("was", "edited", "says"),
    [
        (
            '["lr", 0.001]',
            '["lr", "\\u001b[2J"]',
            r"it has '\\x1b\[2J' as the lr of an optimizer, where 0\.001 is",
        ),
        ('["lr", 0.001]', '["lr", [1]]', r"it has \[1\] as the lr"),
        ('["lr", 0.001]', '["lr", true]', r"it has True as the lr"),
        ('["lr", 0.001], ', "", r"it has nothing as the lr"),
        ('{"$tuple": [0.9, 0.999]}', "5", r"it has 5 as the betas of an optimizer, where \(0\.9, 0\.999\) is given"),
        ('"format": 1', '"format": "\\u001b[2J"', r"is of format \\x1b\[2J, and this version reads 1"),
    ],
)
def test_a_checkpoint_that_was_edited_to_other_kinds_is_refused_before_anything_is_loaded(tmp_path, was, edited, says):
    path, model = tmp_path / "a.ckpt", of_width(4)
    about, tensors = written(path, model, torch.optim.AdamW(model.parameters()))
    text = json.dumps(about)
    assert was in text
    save_file(tensors, path, {METADATA: text.replace(was, edited)})
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ModelError, match=says) as refusal:
        Checkpoint(path, [optimizer], [], 60).restore()
    assert not optimizer.state and str(refusal.value).isprintable()


def test_a_checkpoint_with_other_numbers_or_without_a_switch_is_taken(tmp_path):
    path, model = tmp_path / "a.ckpt", of_width(4)
    about, tensors = written(path, model, torch.optim.AdamW(model.parameters()))
    text = json.dumps(about).replace('["lr", 0.001]', '["lr", 1]').replace('["foreach", null], ', "")
    save_file(tensors, path, {METADATA: text})
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), capturable=True)
    assert "foreach" not in text and Checkpoint(path, [optimizer], [], 60).restore()
    assert optimizer.param_groups[0]["lr"] == 1


class Fickle(Odd):
    """Has a state once."""

    def __init__(self):
        self.states = [{}]

    def state_dict(self):
        return self.states.pop()


def test_a_state_that_cannot_be_had_costs_a_warning_and_a_fork_writes_nothing(tmp_path, caplog):
    path, (_, optimizers, _) = tmp_path / "a.ckpt", tools()
    with caplog.at_level(logging.WARNING):
        Checkpoint(path, optimizers, [Fickle()], 60).take()
    assert "could not be written (IndexError: pop from empty list)" in caplog.text
    kept = Checkpoint(path, optimizers, [], 60)
    if not (child := os.fork()):
        kept.take()
        kept.wait()
        os._exit(0)
    os.waitpid(child, 0)
    assert not path.exists()


LOOP = """
import sys, torch, skerry
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[1] == "genesis":
    skerry.save_genesis(model, sys.argv[2])
    sys.exit()
options = {"checkpoint": sys.argv[2], "checkpoint_every_s": 1e-3, "required": True}
with skerry.Learner(model, optimizer, **options) as learner:
    steps = [int(each["step"]) for each in optimizer.state.values()]
    print(steps[0] if steps else 0, learner.ramp, flush=True)
    while learner.step(tokens=4):
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_learner_that_was_killed_goes_on_with_its_optimizer(tmp_path):
    genesis, kept = tmp_path / "genesis.safetensors", tmp_path / "a.ckpt"
    subprocess.run([sys.executable, "-c", LOOP, "genesis", str(genesis)], check=True)
    with Syncer(tmp_path, genesis=genesis, options=OPTIONS) as syncer:
        env = os.environ | {"SKERRY_SYNCER": f"127.0.0.1:{syncer.port}", "SKERRY_NAME": "a"}
        begins = []
        for _ in range(2):
            with subprocess.Popen(
                [sys.executable, "-c", LOOP, "train", str(kept)], env=env, stdout=subprocess.PIPE, text=True
            ) as loop:
                begins.append(loop.stdout.readline().split())
                first = kept.stat().st_mtime_ns if kept.exists() else 0
                until(lambda: kept.exists() and kept.stat().st_mtime_ns > first, "a checkpoint")  # noqa: B023
                until(lambda: syncer.status["progress"] > 0, "the run to begin")
                loop.kill()
    assert begins[0] == ["0", "1.0"]
    assert int(begins[1][0]) > 0 and begins[1][1] == "1.0", "no ramp: the optimizer remembers"


def test_without_a_syncer_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("SKERRY_SYNCER", raising=False)
    model, optimizers, _ = tools()
    with skerry.Learner(model, optimizers, checkpoint=tmp_path / "a.ckpt"):
        pass
    assert list(Path(tmp_path).iterdir()) == []
