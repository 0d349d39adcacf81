"""A step of the stack is what the built-in trainer does to each learner alone."""

from __future__ import annotations

import numpy as np
import torch

from skerry.algo.fragments import gather, split
from skerry.proof.lab.stack import Stack
from skerry.proof.lab.study import PRODUCT, Trial
from skerry.train.gpt import build
from skerry.train.inner import Inner, held_out_loss, schedule

SHAPE = (2, 32, 2, 24)
LR, PROGRESS, ROWS = 3e-3, 0.3, 3


def stacked(rows: int, trial: Trial = PRODUCT) -> Stack:
    model = build(*SHAPE, seed=1)
    stack = Stack(model, rows, 0.1, "cpu", "float32", trial)
    stack.flat[:] = stack.initial()
    return stack


def batches(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog, again and again; " * 40, np.uint8)
    drawn = []
    for _ in range(count):
        at = random.integers(0, len(text) - SHAPE[3] - 1, (ROWS, 4, 1)) + np.arange(SHAPE[3] + 1)
        drawn.append((text[at][..., :-1], text[at][..., 1:]))
    return drawn


def test_rows_train_as_learners_alone_do_and_those_that_sit_out_are_left_alone() -> None:
    stack, alone = stacked(ROWS), [Inner(build(*SHAPE, seed=1), LR) for _ in range(ROWS)]
    for step, (inputs, targets) in enumerate(batches(12)):
        taking = [row for row in range(ROWS) if row != step % 4]
        rates = [LR * schedule(PROGRESS)] * len(taking)
        losses = stack.step(taking, torch.from_numpy(inputs).long(), torch.from_numpy(targets).long(), rates)
        for row in taking:
            expected = alone[row].step(inputs[row], targets[row], PROGRESS)
            assert abs(losses[row].item() - expected) < 1e-4 * expected
    for row, inner in enumerate(alone):
        for name, parameter in inner.model.named_parameters():
            assert torch.allclose(stack.parameters[name][row], parameter, atol=2e-4), (row, name)


def test_a_row_that_is_reset_begins_with_fresh_moments() -> None:
    stack, inner = stacked(1), Inner(build(*SHAPE, seed=1), LR)
    (inputs, targets), (more, after) = batches(2)
    stack.step([0], torch.from_numpy(inputs[:1]).long(), torch.from_numpy(targets[:1]).long(), [LR])
    inner.step(inputs[0], targets[0], 0.02)
    stack.reset(0)
    inner.optimizer.state.clear()
    stack.step([0], torch.from_numpy(more[:1]).long(), torch.from_numpy(after[:1]).long(), [LR])
    inner.step(more[0], after[0], 0.02)
    for name, parameter in inner.model.named_parameters():
        assert torch.allclose(stack.parameters[name][0], parameter, atol=1e-4), name


def test_the_held_out_loss_is_the_trainers() -> None:
    stack = stacked(2)
    some = [(inputs[0], targets[0]) for inputs, targets in batches(3)]
    there = [(torch.from_numpy(x).long(), torch.from_numpy(y).long()) for x, y in some]
    assert abs(stack.held_out(stack.flat[1], there) - held_out_loss(build(*SHAPE, seed=1), some)) < 1e-5


def test_a_fragment_is_runs_of_a_row_and_fragments_make_the_row_again() -> None:
    stack = stacked(1)
    arrays = {name: p.detach().numpy() for name, p in stack.model.named_parameters()}
    fragments = split(stack.layout, 9)
    assert len({slot.name for f in fragments for slot in f.slots}) < sum(
        len(f.slots) for f in fragments
    )  # some are cut
    flats = [torch.from_numpy(gather(fragment, arrays)) for fragment in fragments]
    assert torch.equal(stack.row_of(fragments, flats), stack.initial())
    for fragment, flat in zip(fragments, flats, strict=True):
        for run, at in stack.runs(stack.flat[0], fragment):
            assert torch.equal(run, flat[at])


def test_how_long_squared_gradients_are_remembered_can_be_tried() -> None:
    ((inputs, targets),) = batches(1)
    kept = {}
    for beta in (0.95, 0.5):
        stack = stacked(ROWS, Trial(beta2=beta))
        stack.step([0], torch.from_numpy(inputs).long(), torch.from_numpy(targets).long(), [LR])
        kept[beta] = stack.moments[1, 0]
    assert torch.allclose(kept[0.5], 10 * kept[0.95], rtol=1e-5) and kept[0.5].any()
