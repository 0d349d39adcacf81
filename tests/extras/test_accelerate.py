"""Accelerate: its example alone, and as a learner that is killed and comes back."""

import re
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="needs accelerate: ./run test-extras")

import torch
from torch.nn import functional

from extras.runs import alone, example, killed_and_resumed, of_two_processes

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_example_runs_without_a_syncer(tmp_path):
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", alone(tmp_path, "accelerate_loop"))]
    assert len(losses) == 6 and losses[-1] < losses[0] - 1


@torch.no_grad()
def test_the_example_is_killed_and_comes_back(tmp_path):
    first, last, state = killed_and_resumed(tmp_path, "accelerate_loop", lambda printed: "step   50" in printed)
    for account in state.ledger.accounts.values():
        assert account.step and account.tokens == account.step * 64 * 9
    model, losses = example("accelerate_loop").next_byte(), []
    windows = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 9, 9)
    for values in (first, last):
        model.load_state_dict(values)
        losses.append(functional.cross_entropy(model(windows[:, :8]), windows[:, 8]).item())
    assert losses[1] < losses[0] - 1


def test_two_processes_under_torchrun_are_one_learner(tmp_path):
    account = of_two_processes(tmp_path, "accelerate_loop")
    assert account.step >= 40 and account.tokens == account.step * 2 * 64 * 9
