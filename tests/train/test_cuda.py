"""The trainer on a GPU: bf16, torch.compile and CUDA graphs beside a learner, which adds to parameters in place.

    python -m pytest -m cuda tests

A graph replays on addresses. A boundary adds to the parameters where they lie, so what was captured or compiled before
stays right. Tolerances are those of bf16 and of other orders of sums.
"""

import json

import pytest

torch = pytest.importorskip("torch")

from e2e.processes import skerry  # noqa: E402
from skerry.config import Learner  # noqa: E402
from skerry.train.data import Corpus, Stream  # noqa: E402
from skerry.train.gpt import build  # noqa: E402
from skerry.train.inner import Execution, Inner, execution_of  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
STEPS = 12
MODES = ("default", "reduce-overhead")


@pytest.fixture(scope="module")
def corpus():
    return Corpus.open("stdlib", max_bytes=1 << 20)


def inner_of(execution):
    model = build(layers=2, width=64, heads=2, context=64, seed=0).to("cuda")
    return Inner(model, 1e-3, execution=execution)


def add_in_place(model, step):
    """As a boundary does with a new version; the same for every model of this shape."""
    draws = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=draws).to("cuda"))


def trained(corpus, execution):
    """Losses of a few steps with an addition between them, and where the parameters lay."""
    inner, stream = inner_of(execution), Stream(corpus, learner=0, seed=0, batch=8, context=64)
    inner.prepare(batch=8, context=64)
    losses, places = [], set()
    for step in range(STEPS):
        losses.append(inner.step(*next(stream), progress=0.5))
        add_in_place(inner.model, step)
        places.add(tuple(p.data_ptr() for p in inner.model.parameters()))
    return losses, places


@pytest.mark.parametrize("micro_batch", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_loop_sees_what_is_added_between_its_steps(corpus, mode, micro_batch):
    expected, _ = trained(corpus, Execution())
    losses, places = trained(corpus, Execution(compile=mode, micro_batch=micro_batch))
    assert losses == pytest.approx(expected, rel=2e-3)
    assert len(places) == 1, "parameters moved, and no graph of them would be right"


@pytest.mark.parametrize("mode", ["off", *MODES])
def test_bf16_trains_as_well(corpus, mode):
    expected, _ = trained(corpus, Execution())
    losses, _ = trained(corpus, Execution(autocast=torch.bfloat16, compile=mode))
    assert losses == pytest.approx(expected, rel=2e-2)


def test_a_graph_captured_by_hand_sees_what_is_added(corpus):
    inner, stream = inner_of(Execution()), Stream(corpus, learner=0, seed=0, batch=8, context=64)
    inputs, targets = (torch.from_numpy(array).to("cuda", torch.int64) for array in next(stream))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # capture wants warm libraries
        inner.model.loss(inputs, targets).backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    inner.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = inner.model.loss(inputs, targets)
        loss.backward()
    for step in range(3):
        add_in_place(inner.model, step)
        graph.replay()
        with torch.no_grad():
            assert loss.item() == pytest.approx(inner.model.loss(inputs, targets).item(), rel=1e-4)


def test_what_is_left_open_is_bf16_on_a_gpu_that_has_it():
    has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    assert execution_of(Learner(), "cuda").autocast == (torch.bfloat16 if has_it else None)
    assert execution_of(Learner(precision="fp32"), "cuda").autocast is None


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_compiled_learners_learns_and_its_books_balance(tmp_path, mode):
    done = skerry(
        "train", "--learners", 2, "--model", "tiny", "--step-s", 0, "--steps", 200, "--sync.sync_every", 8,
        "--learner.compile", mode, "--out", tmp_path / "run", "--json", timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["merges"] > 0 and summary["ledger"]["balance"] == 0
    assert summary["val_loss_end"] < summary["val_loss_start"] - 1.0
