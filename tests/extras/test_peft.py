"""PEFT: an adapter beside a frozen base, alone, and as a learner that is killed and comes back."""

import re
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="needs peft: ./run test-extras")
pytest.importorskip("transformers", reason="needs transformers: ./run test-extras")

import torch
from peft import PeftModel

from e2e.processes import skerry
from extras.runs import alone, example, killed_and_resumed

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_example_runs_without_a_syncer(tmp_path):
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", alone(tmp_path, "peft_loop"))]
    assert len(losses) == 6 and losses[-1] < losses[0] - 1


@torch.no_grad()
def test_the_adapter_of_the_example_is_killed_comes_back_and_is_loaded_by_peft(tmp_path):
    first, last, state = killed_and_resumed(tmp_path, "peft_loop", lambda printed: "step   50" in printed)
    for account in state.ledger.accounts.values():
        assert account.step and account.tokens == account.step * 16 * 32
    module = example("peft_loop")
    model, losses = module.adapted().eval(), []
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text[: len(text) // 32 * 32].view(-1, 32)
    for values in (first, last):
        model.load_state_dict(values)
        losses.append(model(input_ids=windows, labels=windows).loss.item())
    assert losses[1] < losses[0] - 1

    exported = skerry("export", tmp_path / "run", "--adapter", tmp_path / "adapter")
    assert exported.returncode == 0, exported.stderr
    base = module.adapted().unload()
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert loaded(input_ids=windows, labels=windows).loss.item() == pytest.approx(losses[1], abs=1e-5)
