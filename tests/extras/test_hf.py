"""Hugging Face's Trainer as a learner: its tokens, its rate, its end, and a life that is killed and resumed."""

import json
import math
import re
import shutil
from itertools import pairwise

import pytest

pytest.importorskip("transformers", reason="needs transformers: ./run test-extras")
pytest.importorskip("accelerate", reason="needs accelerate: ./run test-extras")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback

import skerry
from e2e.processes import Syncer
from e2e.processes import skerry as command
from extras.runs import OPTIONS, alone, example, killed_and_resumed, of_two_processes, told_to_end
from skerry.core.state import state_of
from skerry.store import Store

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.timeout(300)]
LENGTH = 8


def small():
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=LENGTH, **shape))


def rows(count, padding=0):
    """Sequences of numbers that go up by one, the last tokens of each padding."""
    mask = torch.tensor([1] * (LENGTH - padding) + [0] * padding)
    counting = [(torch.arange(LENGTH) + start) % 16 for start in range(count)]
    return [{"input_ids": row, "attention_mask": mask, "labels": row} for row in counting]


def trainer_of(folder, model, callbacks, *, data=None, **options):
    defaults = {"max_steps": 1_000_000, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no"}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(folder / "trainer"), **defaults | quiet | options)
    return Trainer(model, args, train_dataset=data or rows(10), eval_dataset=rows(2), callbacks=callbacks)


class Rates(TrainerCallback):
    """The rate of each step, and how far the run was when the step began."""

    def __init__(self, callback):
        self.callback, self.seen = callback, []

    def on_step_begin(self, args, state, control, *, optimizer, **_):
        self.seen.append((self.callback.learner.progress, optimizer.param_groups[0]["lr"]))


def served(folder, model, *options):
    skerry.save_genesis(model, folder / "genesis.safetensors")
    return Syncer(folder, genesis=folder / "genesis.safetensors", options=[*options, *OPTIONS])


def account_of(run_dir):
    """The steps and tokens that the run has heard of its first learner's first life."""
    with Store.open(run_dir, readonly=True) as store:
        return state_of(store.records).ledger.account("a", 1)


def test_without_an_address_a_trainer_trains_as_it_would(tmp_path, monkeypatch):
    monkeypatch.delenv("SKERRY_SYNCER", raising=False)
    losses = []
    for callbacks in ([], [skerry.hf.Callback()]):
        trainer = trainer_of(tmp_path, small(), callbacks, max_steps=4, learning_rate=0.1)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[0] == losses[1] and len(losses[0]) == 4


@pytest.mark.parametrize(("count", "of_a_row"), [("no", 8), ("all", 8), ("non_padding", 5)])
def test_tokens_are_counted_over_what_is_accumulated_and_the_run_ends_the_trainer(tmp_path, count, of_a_row):
    """Of ten rows in batches of four and two batches a step, a step is of eight rows and the next of two."""
    model = small()
    with served(tmp_path, model, "--run.steps=30") as syncer:
        callback = skerry.hf.Callback(f"127.0.0.1:{syncer.port}", name="a")
        trainer = trainer_of(
            tmp_path, model, [callback], data=rows(10, padding=3),
            gradient_accumulation_steps=2, include_num_input_tokens_seen=count,
        )  # fmt: skip
        trainer.train()
        assert syncer.wait() == 0, syncer.said
    steps = trainer.state.global_step
    account = account_of(syncer.run_dir)
    assert account.step == steps and account.tokens == of_a_row * (steps // 2 * 10 + steps % 2 * 8)
    assert not callback.learner.is_running


def test_the_schedule_is_drawn_over_the_run_however_many_steps_the_trainer_may_take(tmp_path):
    model = small()
    with served(tmp_path, model, "--run.steps=60") as syncer:
        callback = skerry.hf.Callback(f"127.0.0.1:{syncer.port}", name="a")
        rates = Rates(callback)
        options = {"learning_rate": 0.1, "lr_scheduler_type": "cosine"}
        trainer = trainer_of(tmp_path, model, [callback, rates], **options)
        trainer.train()
        assert syncer.wait() == 0, syncer.said

    def cosine(progress):
        return 0.05 * (1 + math.cos(math.pi * progress))

    assert rates.seen[0] == (0.0, 0.1)
    for (before, _), (now, rate) in pairwise(rates.seen):
        assert cosine(now) - 1e-9 <= rate <= cosine(before) + 1e-9
    assert rates.seen[-1][1] < 0.05, "and it has fallen"
    logged = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
    assert logged[-1] == pytest.approx(rates.seen[-1][1]), "as the Trainer logs it"
    assert trainer.lr_scheduler.lr_lambdas[0](0) == 1.0, "the schedule is left as it was"


def test_what_cannot_be_is_refused_in_a_line(tmp_path):
    class Unnamed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x, labels=None):
            return {"loss": self.layer(x).square().mean()}

    evaluated = {"eval_strategy": "steps", "save_strategy": "steps"}
    refused = [
        (small(), evaluated | {"lr_scheduler_type": "reduce_lr_on_plateau"}, "is no function of the step"),
        (small(), evaluated | {"load_best_model_at_end": True}, "^load_best_model_at_end would hand"),
        (Unnamed(), {}, "^the model is called without input_ids, .* attribute main_input_name"),
    ]
    for number, (model, options, refusal) in enumerate(refused):
        folder = tmp_path / str(number)
        folder.mkdir()
        with served(folder, model, "--run.steps=30") as syncer:
            callback = skerry.hf.Callback(f"127.0.0.1:{syncer.port}", name="a")
            data = [{"x": torch.ones(1)}] if isinstance(model, Unnamed) else rows(4)
            trainer = trainer_of(folder, model, [callback], data=data, **options)
            with pytest.raises(ValueError, match=refusal):
                trainer.train()
            callback.learner.close()


def test_the_example_runs_without_a_syncer(tmp_path):
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", alone(tmp_path, "hf_trainer"))]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5


def test_the_example_is_killed_and_goes_on_from_its_checkpoint_in_the_same_run(tmp_path):
    """It is killed between the checkpoints of steps 50 and 100; one that it was about to write is put away."""

    def put_away():
        for folder in set((tmp_path / "checkpoints-a").iterdir()) - {tmp_path / "checkpoints-a" / "checkpoint-50"}:
            shutil.rmtree(folder)

    first, last, state = killed_and_resumed(
        tmp_path, "hf_trainer", lambda printed: printed.count("'loss'") == 3, put_away
    )
    saved = json.loads((tmp_path / "checkpoints-a" / "checkpoint-100" / "trainer_state.json").read_text())
    assert [line["step"] for line in saved["log_history"]] == [25, 50, 75, 100], "it went on with the Trainer's steps"
    for account in state.ledger.accounts.values():
        assert account.step and account.tokens == account.step * 2 * 8 * 32
    module = example("hf_trainer")
    model, losses = module.small(), []
    for values in (first, last):
        model.load_state_dict(values)
        losses.append(loss_of(model, module.windows()))
    assert losses[1] < losses[0] - 1.5
    exported = command("export", tmp_path / "run", "--folder", tmp_path / "model")
    assert exported.returncode == 0, exported.stderr
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert loss_of(loaded, module.windows()) == pytest.approx(losses[1], abs=1e-5)


def test_two_processes_under_torchrun_are_one_learner(tmp_path):
    account = of_two_processes(tmp_path, "hf_trainer")
    assert account.step >= 40 and account.tokens == account.step * 2 * 2 * 8 * 32


def test_told_to_end_the_trainer_stops_and_all_of_its_work_is_handed_in(tmp_path):
    code, tokens = told_to_end(tmp_path, "hf_trainer", lambda printed: "'loss'" in printed)
    assert code == 143 and tokens["merged"] == tokens["produced"] > 0


@torch.no_grad()
def loss_of(model, rows):
    """On some of the text."""
    windows = torch.stack([row["input_ids"] for row in rows[:64]])
    return model.eval()(input_ids=windows, labels=windows).loss.item()
