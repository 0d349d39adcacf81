"""Lightning's Trainer as a learner: its tokens, its end, and a life that is killed and resumed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="needs lightning: ./run test-extras")

import lightning
import torch
from torch import nn
from torch.nn import functional

import skerry
from e2e.processes import Syncer
from extras.runs import OPTIONS, alone, example, killed_and_resumed, told_to_end
from skerry.core.state import state_of
from skerry.store import Store

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.timeout(300)]


def small(base=lightning.LightningModule):
    class Small(base):
        """Learns to say one; batches are of any kind that has ones in it."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            ones = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
            return (self.layer(ones) - 1).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Small()


def fit(module, callback, batches, trainer=lightning.Trainer, **options):
    defaults = {"max_epochs": -1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer = trainer(**defaults | quiet | options, callbacks=[callback])
    trainer.fit(module, loader)
    return trainer


def served(folder, module):
    skerry.save_genesis(module, folder / "genesis.safetensors")
    return Syncer(folder, genesis=folder / "genesis.safetensors", options=["--run.steps=30", *OPTIONS])


def account_of(run_dir):
    """The steps and tokens that the run has heard of its learner."""
    with Store.open(run_dir, readonly=True) as store:
        return state_of(store.records).ledger.account("a", 1)


def test_without_an_address_a_trainer_trains_as_it_would(monkeypatch):
    monkeypatch.delenv("SKERRY_SYNCER", raising=False)
    weights = []
    for callback in (lightning.Callback(), skerry.lightning.Callback()):
        torch.manual_seed(0)
        module = small()
        trainer = fit(module, callback, [{"x": torch.ones(2, 3)}] * 5, max_steps=7)
        assert trainer.global_step == 7
        weights.append(module.layer.weight)
    assert torch.equal(*weights)


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("batch", "tokens", "of_a_batch"),
    [
        (ONES, "input_ids", 6),
        ([ONES, ONES[0]], "input_ids", 6),
        ({"x": ONES, "y": ONES}, "x", 6),
        ({"x": ONES}, lambda batch: len(batch["x"]), 2),
    ],
    ids=["a tensor", "several", "a dict", "a function"],
)
def test_tokens_are_counted_over_what_is_accumulated_and_the_run_ends_the_trainer(tmp_path, batch, tokens, of_a_batch):
    """Of five batches and two a step, every third step of an epoch is of one."""
    module = small()
    with served(tmp_path, module) as syncer:
        callback = skerry.lightning.Callback(f"127.0.0.1:{syncer.port}", tokens=tokens, name="a")
        trainer = fit(module, callback, [batch] * 5, accumulate_grad_batches=2, log_every_n_steps=1)
        assert syncer.wait() == 0, syncer.said
    steps, account = trainer.global_step, account_of(syncer.run_dir)
    assert account.step == steps
    assert account.tokens == of_a_batch * (steps // 3 * 5 + steps % 3 * 2)


def test_a_batch_of_unknown_tokens_is_refused_and_the_learner_leaves(tmp_path):
    module = small()
    with served(tmp_path, module) as syncer:
        callback = skerry.lightning.Callback(f"127.0.0.1:{syncer.port}", name="a")
        with pytest.raises(TypeError, match=r"^a batch is a dict, and its tokens are not known: say what counts"):
            fit(module, callback, [{"x": ONES}] * 5)
        with pytest.raises(RuntimeError, match="after close"):
            callback.learner.step(1)


EARLIER_NAME = """
import sys
sys.path.insert(0, {tests!r})
import pytorch_lightning, skerry, torch
from extras.test_lightning import ONES, fit, small
module = small(pytorch_lightning.LightningModule)
callback = skerry.lightning.Callback({address!r}, name="a")
print(fit(module, callback, [ONES] * 5, trainer=pytorch_lightning.Trainer).global_step)
"""


def test_the_trainer_of_pytorch_lightning_takes_the_same_callback(tmp_path):
    with served(tmp_path, small()) as syncer:
        code = EARLIER_NAME.format(tests=str(Path(__file__).parents[1]), address=f"127.0.0.1:{syncer.port}")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
        assert syncer.wait() == 0, syncer.said
    assert account_of(syncer.run_dir).step == int(done.stdout) >= 30


def test_the_example_runs_without_a_syncer(tmp_path):
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", alone(tmp_path, "lightning_loop"))]
    assert len(losses) == 6 and losses[-1] < losses[0] - 1


def test_the_example_is_killed_and_goes_on_from_its_checkpoint_in_the_same_run(tmp_path):
    first, last, state = killed_and_resumed(tmp_path, "lightning_loop", lambda printed: "step  100" in printed)
    steps = [int(step) for step in re.findall(r"step +(\d+)", (tmp_path / "life-2.txt").read_text())]
    assert steps and steps[0] >= 100, "it went on with Lightning's steps"
    for account in state.ledger.accounts.values():
        missing = account.step * 2 * 32 * 9 - account.tokens
        assert account.step and missing in (0, 32 * 9), "after a resume, Lightning 2.4 has a step of one batch"
    module = example("lightning_loop").NextByte()
    losses = []
    for values in (first, last):
        module.load_state_dict(values)
        losses.append(loss_of(module))
    assert losses[1] < losses[0] - 1


def test_told_to_end_lightning_ends_as_it_does_and_all_of_its_work_is_handed_in(tmp_path):
    _, tokens = told_to_end(tmp_path, "lightning_loop", lambda printed: "step   50" in printed)
    assert tokens["merged"] == tokens["produced"] > 0


@torch.no_grad()
def loss_of(module):
    """On this file's own bytes."""
    windows = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 9, 9)
    return functional.cross_entropy(module.model(windows[:, :8]), windows[:, 8]).item()
