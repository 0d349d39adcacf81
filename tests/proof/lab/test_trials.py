"""What is only tried: it does what it says, and nothing of it is done without being asked for."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from proof.lab.test_algebra import fragment_of, gaussian  # noqa: E402
from proof.lab.test_laboratory import job_of, lived  # noqa: E402
from proof.lab.test_stack import LR, ROWS, batches, stacked  # noqa: E402
from skerry.algo.fragments import BLOCK, Tensor, layout_of, split  # noqa: E402
from skerry.proof.lab.algebra import Device  # noqa: E402
from skerry.proof.lab.muon import MOMENTUM, SCALE, orthogonal  # noqa: E402
from skerry.proof.lab.study import Trial  # noqa: E402
from skerry.proof.lab.trials import CHUNK, Trials, largest  # noqa: E402


def held(lab: Device, fragment, *drifts, weights=None):
    contributions = []
    for drift, weight in zip(drifts, weights or [1.0] * len(drifts), strict=True):
        payload = lab.encode("fp32", torch.tensor(drift))
        contributions.append(lab.hold("fp32", payload, weight, lab.inspect("fp32", payload, fragment)))
    return contributions


def test_only_the_largest_are_sent_and_the_rest_stays_behind() -> None:
    x = torch.tensor(gaussian(0))
    payload = Trials("cpu", Trial(kept=0.015)).encode("fp32", x)
    decoded = payload.values
    sent = decoded != 0
    assert torch.equal(decoded[sent], x[sent])
    whole = x[: len(x) // CHUNK * CHUNK].view(-1, CHUNK)
    for chunk, kept in zip(whole, sent[: whole.numel()].view(-1, CHUNK), strict=True):
        assert kept.sum() == round(0.015 * CHUNK)
        assert chunk[kept].abs().min() > chunk[~kept].abs().max()
    dense = Device("cpu").encode("fp32", x)
    assert len(payload) < 0.03 * len(dense)
    assert torch.equal(largest(x, 1.0), x)


def test_rows_are_stretched_each_by_its_own() -> None:
    (fragment,) = split(layout_of([Tensor("m", (3, 2 * BLOCK), "other"), Tensor("v", (5,), "other")]), 1)
    drifts = [gaussian(seed, fragment=fragment) for seed in range(2)]
    for drift in drifts:
        drift[: 2 * BLOCK] *= 10
    lab = Trials("cpu", Trial(norms="row"))
    delta = lab.delta("rda", fragment, held(lab, fragment, *drifts)).numpy()
    matrix = next(slot for slot in fragment.slots if slot.name == "m")
    for row in range(3):
        at = slice(matrix.offset + row * 2 * BLOCK, matrix.offset + (row + 1) * 2 * BLOCK)
        assert np.linalg.norm(delta[at]) == pytest.approx(np.mean([np.linalg.norm(d[at]) for d in drifts]), rel=1e-4)


def test_rows_that_a_cut_leaves_in_part_are_stretched_each_by_its_own() -> None:
    fragments = split(layout_of([Tensor("m", (3, 3 * BLOCK), "other")]), 2)
    lab = Trials("cpu", Trial(norms="row"))
    assert [slot.start for f in fragments for slot in f.slots] == [0, 5 * BLOCK]
    assert [lab.blocks_of(fragment).group for fragment in fragments] == [[0, 0, 0, 1, 1], [0, 1, 1, 1]]


def test_equal_weights_and_stretched_embeddings() -> None:
    fragment = fragment_of(300, 1000)
    drifts = [gaussian(seed, fragment=fragment) for seed in range(2)]
    lab = Trials("cpu", Trial(weights="equal"))
    mean = lab.delta("mean", fragment, held(lab, fragment, *drifts, weights=[9.0, 1.0])).numpy()
    assert np.allclose(mean, (drifts[0] + drifts[1]) / 2, atol=1e-6)
    lab = Trials("cpu", Trial(embeddings="rda"))
    delta = lab.delta("rda", fragment, held(lab, fragment, *drifts)).numpy()
    first = next(slot for slot in fragment.slots if slot.kind == "embedding")
    at = slice(first.offset, first.offset + first.size)
    assert np.linalg.norm(delta[at]) == pytest.approx(np.mean([np.linalg.norm(d[at]) for d in drifts]), rel=1e-4)


def test_a_steered_step_grows_while_merges_point_one_way_and_shrinks_while_they_turn(monkeypatch) -> None:
    (fragment,) = split(layout_of([Tensor("m", (16, 16), "other")]), 1)
    step = torch.ones(fragment.size)
    lengths = {}
    for turn in (1.0, -1.0):
        lab, lengths[turn] = Trials("cpu", Trial(steer=0.5)), []
        for n in range(8):
            monkeypatch.setattr(Device, "delta", lambda *_, n=n, turn=turn: step * turn**n)
            delta = lab.delta("rda", fragment, [])
            lab._deltas[fragment.index] = delta
            lengths[turn].append(float(delta.abs().max()))
        assert float(lab.delta("mean", fragment, []).abs().max()) == 1.0
    assert lengths[1.0] == sorted(lengths[1.0]) and lengths[1.0][-1] == 2.0
    assert lengths[-1.0][1:] == sorted(lengths[-1.0][1:], reverse=True) and lengths[-1.0][-1] == 0.5


def test_an_orthogonal_step_has_singular_values_near_one() -> None:
    x = torch.randn(2, 6, 20, generator=torch.Generator().manual_seed(0))
    for each in (x, x.mT.contiguous()):
        values = torch.linalg.svdvals(orthogonal(each))
        assert values.min() > 0.6 and values.max() < 1.3
    u, _, v = torch.linalg.svd(x[0], full_matrices=False)
    assert torch.cosine_similarity(orthogonal(x)[0].flatten(), (u @ v).flatten(), dim=0) > 0.95


def test_muon_moves_the_matrices_inside_and_adamw_the_rest() -> None:
    plain, muon = stacked(ROWS), stacked(ROWS, Trial(optimizer="muon"))
    ((inputs, targets),) = batches(1)
    before = {name: p.detach().clone() for name, p in muon.parameters.items()}
    for stack in (plain, muon):
        stack.step([0, 2], torch.from_numpy(inputs).long(), torch.from_numpy(targets).long(), [LR, LR])
    for name, parameter in muon.parameters.items():
        moved = parameter - before[name]
        assert not moved[1].any()
        if not name.startswith("blocks.") or parameter.ndim < 3:
            assert torch.equal(parameter, plain.parameters[name])
            continue
        gradient = muon._gradients[name][0]
        step = orthogonal((1 + MOMENTUM) * gradient[None])[0] * SCALE * max(gradient.shape) ** 0.5
        assert torch.allclose(moved[0], -LR * (step + 0.1 * before[name][0]), atol=1e-5)


def test_a_run_with_muon_learns(tmp_path) -> None:
    world = lived(job_of(trial=Trial(optimizer="muon")), tmp_path)
    text = world.feed.held_out(4)
    first, last = (world.stack.held_out(values, text) for values in (world.stack.initial(), world.master()))
    assert last < first - 0.05
