"""PEFT: an adapter beside a frozen base, alone, and as a learner that is killed and comes back."""

import re
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="needs peft: ./run test-extras")
pytest.importorskip("transformers", reason="needs transformers: ./run test-extras")

import torch

from extras.runs import alone, example, killed_and_resumed

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_example_runs_without_a_syncer(tmp_path):
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", alone(tmp_path, "peft_loop"))]
    assert len(losses) == 6 and losses[-1] < losses[0] - 1


@torch.no_grad()
def test_the_adapter_of_the_example_is_killed_and_comes_back(tmp_path):
    first, last, state = killed_and_resumed(tmp_path, "peft_loop", lambda printed: "step   50" in printed)
    for account in state.ledger.accounts.values():
        assert account.step and account.tokens == account.step * 16 * 32
    model, losses = example("peft_loop").adapted().eval(), []
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained) and trained <= set(last)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text[: len(text) // 32 * 32].view(-1, 32)
    for values in (first, last):
        assert model.load_state_dict(values, strict=False).unexpected_keys == []
        losses.append(model(input_ids=windows, labels=windows).loss.item())
    assert losses[1] < losses[0] - 1
