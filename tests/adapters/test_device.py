"""A learner whose state is tensors on a device says, holds and learns what one with numpy's arrays does, to the bit.

On the CPU, which is a device like another, and on a GPU if there is one.
"""

import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from node.pair import STEP_S, STEP_TOKENS, Loop, Pair, config_of  # noqa: E402
from skerry.adapters.device import DeviceCell, OnDevice, placed  # noqa: E402
from skerry.adapters.torch import TorchParameters, layout_of_model  # noqa: E402
from skerry.algo import codecs  # noqa: E402
from skerry.algo.fragments import BLOCK, ROW, Tensor, layout_of, split  # noqa: E402
from skerry.errors import ConfigError  # noqa: E402
from skerry.node.algebra import FLOAT32  # noqa: E402
from skerry.node.cells import FloatCell  # noqa: E402
from skerry.node.learner import LearnerNode  # noqa: E402
from skerry.node.mailbox import mailbox  # noqa: E402
from skerry.node.training import TrainingHalf  # noqa: E402
from skerry.shell.home import OnHost  # noqa: E402
from skerry.shell.memory import OwnMemory  # noqa: E402

DEVICES = [
    "cpu",
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")],
    ),
]
on_every_device = pytest.mark.parametrize("device", DEVICES)
every_codec = pytest.mark.parametrize("codec", codecs.CODECS)
(FRAGMENT,) = split(layout_of([Tensor("a", (2 * ROW + 77,)), Tensor("b", (300,)), Tensor("c", (5, 5))]), 1)


def gaussian(seed, scale=1.0):
    return np.random.default_rng(seed).normal(scale=scale, size=FRAGMENT.size).astype(np.float32)


def put(array, device):
    return torch.tensor(array, device=device)


def same(ours, theirs):
    return ours.cpu().numpy().tobytes() == theirs.tobytes()


# ------------------------------------------------------------------------------------------ its algebra and cells


@on_every_device
@every_codec
def test_what_is_encoded_read_and_adopted_has_the_same_bits(device, codec):
    home, values, base, residual = OnDevice(torch.device(device)), gaussian(0, 1e-3), gaussian(1), gaussian(2, 1e-4)
    expected = FLOAT32.encode(codec, values, residual)
    with home.entered():
        drift, rest = put(values, device), put(residual, device)
        payload = home.algebra.encode(codec, drift, rest)
        assert bytes(payload) == bytes(expected)
        assert home.algebra.checksum(payload) == FLOAT32.checksum(expected)
        assert same(home.algebra.decode(codec, payload), FLOAT32.decode(codec, expected))
        for before in (None, residual):
            ours = home.algebra.unsaid(codec, payload, drift, None if before is None else rest)
            assert same(ours, FLOAT32.unsaid(codec, expected, values, before))
        adopted, there = FLOAT32.adopt(codec, expected, base), put(base, device)
        ours = home.algebra.adopt(codec, payload, there)
        assert same(ours.base, adopted.base) and ours[1:] == adopted[1:] and same(there, base)
        assert home.algebra.digest(ours.base) == FLOAT32.digest(adopted.base) == adopted.digest
        assert bytes(home.algebra.whole(there)) == bytes(FLOAT32.whole(base))


@on_every_device
def test_a_payload_outlives_the_next_ones(device):
    """It is sent, and sent again, while others are made."""
    home, values = OnDevice(torch.device(device)), [gaussian(seed) for seed in range(4)]
    with home.entered():
        payloads = [home.algebra.encode("int4", put(each, device)) for each in values]
    assert [bytes(payload) for payload in payloads] == [bytes(FLOAT32.encode("int4", each)) for each in values]


@on_every_device
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_the_first_parameter_that_is_not_finite_is_named(device, poison):
    home, values = OnDevice(torch.device(device)), gaussian(0)
    with home.entered():
        assert home.algebra.first_spoiled(put(values, device), FRAGMENT) == ""
        values[FRAGMENT.slots[2].offset] = poison
        assert home.algebra.first_spoiled(put(values, device), FRAGMENT) == FRAGMENT.slots[2].name
        values[FRAGMENT.slots[1].offset] = poison
        assert home.algebra.first_spoiled(put(values, device), FRAGMENT) == FRAGMENT.slots[1].name
        assert home.algebra.encode("int4", put(values, device)) is None


@on_every_device
def test_a_cell_holds_what_one_on_the_host_does(device):
    to, stood, taken = gaussian(0), gaussian(1), gaussian(2)
    ours = DeviceCell(torch.empty(FRAGMENT.size + BLOCK, device=device))
    theirs = FloatCell(np.empty(FRAGMENT.size + BLOCK, np.float32), np.zeros(1, np.int64))
    for less in ((), (stood,), (stood, taken)):
        ours.store(put(to, device), *(put(each, device) for each in less))
        theirs.store(to, *less)
        assert same(ours.load(FRAGMENT.size), theirs.load(FRAGMENT.size))
        assert same(ours.less(put(taken, device)), theirs.less(taken))
    for cell in (ours, theirs):
        cell.mark(3)
        assert cell.is_marked(3) and not cell.is_marked(2)


@on_every_device
def test_both_halves_have_the_same_cells(device):
    home = OnDevice(torch.device(device))
    cells = home.lay(FRAGMENT.size, 2, 3)
    assert home.lay(FRAGMENT.size, 2, 3) is cells
    assert len(cells.up) == 2 and len(cells.down) == 3 and str(cells.up[0].values.device) == device


@on_every_device
def test_kernels_are_loaded_one_by_one_so_that_who_must_end_can(device):
    uses = []
    home = OnDevice(torch.device(device))
    with home.entered():
        home.warm_up(lambda: None, uses.append)
        assert len(uses) > len(codecs.CODECS)
        for use in uses:
            use()


# ------------------------------------------------------------------------------------------ a run


class Trained(Loop):
    """Trains a small model with AdamW, its node in the same thread; losses are kept."""

    state, device = "host", "cpu"

    def __post_init__(self):
        super().__post_init__()
        home = OnDevice(torch.device(self.device)) if self.state == "device" else OnHost(OwnMemory())
        self.model = small_model().to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.losses = []
        ours, theirs = mailbox()
        carrier = TorchParameters(self.model, self.optimizer)
        who = (self.name, self.pair.layout, self, f"of-{self.name}", lambda: self.pair.now)
        self.training = TrainingHalf(self.pair.layout, carrier, ours, home.lay)
        self.node = LearnerNode(*who, theirs, home.lay, home.algebra)

    def step(self):
        inputs = torch.tensor(self.draw.normal(size=(16, 12)), dtype=torch.float32, device=self.device)
        loss = (self.model(inputs) - inputs.sin()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.boundary(1, STEP_TOKENS, self.every * STEP_S)

    def boundary(self, *step):
        self.training.boundary(*step or (0, 0, 0.0))
        if self.device != "cpu":
            torch.cuda.synchronize()  # copies to the host are over when the node looks, in every run alike
        self.node.catch_up()


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 12))


def run(folder, config, state, device):
    """Losses, last parameters and merges of two learners at different speeds."""
    kind = type("Placed", (Trained,), {"state": state, "device": device})
    with Pair(folder, config, layout_of_model(small_model()).tensors) as pair:
        loops = [pair.join(name, every, kind=kind) for name, every in (("a", 1), ("b", 2))]
        pair.run(60)
        losses = [loop.losses for loop in loops]
        last = [p.detach().cpu().numpy().tobytes() for loop in loops for p in loop.model.parameters()]
        digests = [commit.result.digest for commit in pair.commits]
    return losses, last, digests


@on_every_device
@pytest.mark.parametrize(
    "codec, adopt, residual",
    [
        ("int4", "rebase", "buffer"),
        ("int4", "rebase", "theta"),
        ("int4", "blend", "buffer"),
        ("int4", "overwrite", "buffer"),
        ("int8", "rebase", "buffer"),
        ("int2", "rebase", "buffer"),
        ("bf16", "rebase", "buffer"),
    ],
)
def test_a_runs_losses_are_the_same_to_the_bit_wherever_its_state_is(tmp_path, device, codec, adopt, residual):
    tables = {"wire": {"codec_up": codec, "codec_down": codec}, "learner": {"adopt": adopt, "residual": residual}}
    rule = {"merge": {"rule": "rda"}, "outer": {"rule": "nesterov", "lr": 0.3, "momentum": 0.9}}
    config = config_of(learners=2, sync={"quorum": 1}, **rule, **tables)
    ours, theirs = (run(tmp_path / state, config, state, device) for state in ("device", "host"))
    assert ours == theirs
    losses, _, digests = ours
    assert len(digests) > 20 and min(map(len, losses)) >= 30 and all(each[-1] < each[0] for each in losses)


# ------------------------------------------------------------------------------------------ where it is


@pytest.fixture(autouse=True)
def nobody_says(monkeypatch):
    for name in ("SKERRY_NODE", "SKERRY_STATE"):
        monkeypatch.delenv(name, raising=False)


PARAMETERS = [torch.zeros(3), torch.zeros(4)]


def test_it_is_on_the_host_unless_somebody_says_otherwise(monkeypatch):
    assert placed(None, None, PARAMETERS) == ("process", None)
    assert placed("host", "thread", PARAMETERS) == ("thread", None)
    monkeypatch.setenv("SKERRY_STATE", "device")
    kind, home = placed(None, None, PARAMETERS)
    assert kind == "thread" and isinstance(home, OnDevice)
    assert placed("host", None, PARAMETERS) == ("process", None)


def test_a_process_cannot_have_it_on_the_device(monkeypatch):
    refusal = r"state \(SKERRY_STATE\) = device: a process beside the trainer cannot have it: give node \(SKERRY_NODE\)"
    with pytest.raises(ConfigError, match=refusal):
        placed("device", "process", PARAMETERS)
    monkeypatch.setenv("SKERRY_NODE", "process")
    with pytest.raises(ConfigError, match=refusal):
        placed("device", None, PARAMETERS)
    assert placed("auto", None, PARAMETERS) == ("process", None)


def test_words_and_devices_that_it_does_not_know_are_refused():
    with pytest.raises(ConfigError, match=r'state .* = gpu: give "host", "device" or "auto"'):
        placed("gpu", None, PARAMETERS)
    meta = torch.zeros(2, device="meta")
    with pytest.raises(ConfigError, match="there are no kernels for it on meta"):
        placed("device", None, [meta])
    with pytest.raises(ConfigError, match="the model is on cpu and meta, and it can be on one device only"):
        placed("device", None, [*PARAMETERS, meta])


def test_auto_is_the_host_where_no_gpu_has_the_model():
    assert placed("auto", None, PARAMETERS) == ("process", None)
    assert placed("auto", "thread", [torch.zeros(2, device="meta")]) == ("thread", None)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_auto_is_a_gpu_that_has_room_and_says_so(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "skerry.learner")
    parameters = [torch.zeros(1000, device="cuda")]
    assert isinstance(placed("auto", None, parameters)[1], OnDevice)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    assert placed("auto", None, parameters) == ("process", None)
    assert [line.split(":")[0] for line in caplog.messages] == [
        "the learner's state is on cuda",
        "the learner's state is on the host",
    ]
