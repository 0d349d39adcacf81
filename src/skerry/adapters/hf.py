"""Hugging Face's Trainer: a callback that makes it a learner.

    trainer = Trainer(..., callbacks=[skerry.hf.Callback()])

The Trainer's hooks are a learner's life: it joins when training begins, which is after the Trainer has loaded its own
checkpoint, so the model has the run's values and the optimizer the checkpoint's moments; it steps after each optimizer
step, however many batches were accumulated for it; it hands over at the end. Nothing here waits for the device: a
batch's shape is known without, and a loss is passed on where the Trainer has logged it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from skerry.adapters.torch import Learner


class Callback(TrainerCallback):
    """Makes a Trainer a learner of a shared run; without a syncer's address it does nothing.

    The Trainer stops when the run has had enough; its own `max_steps` or epochs only bound what this learner does.
    With `follow_rate` the schedule of `lr_scheduler_type` is drawn over the whole run: where it asks for the step, it
    gets the run's progress times `max_steps`, so a warm-up is a share of the run, and the rate is at its end when
    the budget is spent, whoever has spent it. A newcomer's rate is ramped. `syncer` and the options are those of
    `skerry.Learner`, and `learner` is that learner, from the beginning of training on.
    """

    def __init__(self, syncer: str | None = None, *, follow_rate: bool = True, **options: Any) -> None:
        self.learner: Learner | None = None
        self._life = ExitStack()
        self._syncer, self._follow_rate, self._options = syncer, follow_rate, options
        self._tokens: Tokens | None = None
        self._loss = self._grad_norm = 0.0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        **_: Any,
    ) -> None:
        self._life.close()  # a Trainer that looks for a batch size that fits begins anew
        options = self._options
        if args.world_size > 1:  # the Trainer has wrapped the model, and shows it without
            options = {"group": dist.group.WORLD, **options}
        with ExitStack() as life:
            self.learner = life.enter_context(Learner(model, optimizer, self._syncer, **options))
            self._tokens = Tokens(model, state)
            life.callback(self._tokens.end)
            if self._is_in_run and args.load_best_model_at_end:
                raise ValueError(
                    "load_best_model_at_end would hand an earlier model of this machine to the run as its last work: "
                    "turn it off, and take the run's model from skerry export"
                )
            if self._is_in_run and self._follow_rate:
                life.enter_context(followed(lr_scheduler, self.learner, state.max_steps))
            self._life = life.pop_all()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: torch.optim.Optimizer,
        **_: Any,
    ) -> None:
        assert self.learner is not None and self._tokens is not None
        tokens = self._tokens.of_step(state, args.world_size)
        if self._is_in_run and not tokens:
            raise ValueError(
                f"the model is called without {self._tokens.name}, whose elements are the tokens of a step: give the "
                "model an attribute main_input_name with the name of the input to count"
            )
        if getattr(optimizer, "step_was_skipped", False):  # by the gradients' scaler: nothing was learned
            return
        if not self.learner.step(tokens, self._loss, self._grad_norm):
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **_: Any,
    ) -> None:
        self._loss = logs.get("loss", self._loss)
        norm = logs.get("grad_norm", self._grad_norm)
        self._grad_norm = norm if isinstance(norm, float) else 0.0  # some versions leave it on the device

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._life.close()

    @property
    def _is_in_run(self) -> bool:
        return self.learner is not None and self.learner.config is not None


class Tokens:
    """Counts what each optimizer step is of: the elements of the model's main input, over all batches accumulated.

    Padding is among them, because to look at a mask is to wait for the device. A Trainer that counts by itself
    (`include_num_input_tokens_seen`, "non_padding" too) has waited already, and is believed.
    """

    def __init__(self, model: nn.Module, state: TrainerState) -> None:
        self.name = getattr(model, "main_input_name", "input_ids")
        self._batches: list[int] = []  # since the last step
        self._seen = state.num_input_tokens_seen  # by the Trainer
        self.end = model.register_forward_pre_hook(self._count, with_kwargs=True).remove

    def of_step(self, state: TrainerState, ranks: int) -> int:
        """Of this process: the Trainer's count is of all `ranks` that are one learner, and each tells its own part."""
        seen, self._seen = state.num_input_tokens_seen - self._seen, state.num_input_tokens_seen
        tokens, self._batches = sum(self._batches), []
        return int(seen) // ranks or tokens

    def _count(self, model: nn.Module, _: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        if model.training and self.name in inputs:  # and not in an evaluation
            self._batches.append(inputs[self.name].numel())


@contextmanager
def followed(scheduler: Any, learner: Learner, max_steps: int) -> Iterator[None]:
    """Have a schedule drawn over the whole run, wherever this learner's own steps are."""
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"the learning rate is set by a {type(scheduler).__name__}, which is no function of the step alone: choose "
            "another lr_scheduler_type, or leave the rate to it with skerry.hf.Callback(follow_rate=False)"
        )
    shapes = scheduler.lr_lambdas
    scheduler.lr_lambdas = [over_run(shape, learner, max_steps) for shape in shapes]
    rates = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, rate, share in rates:  # of the first step; the scheduler sets it for those after it
        group["lr"] = rate * share(0)
    try:
        yield
    finally:
        scheduler.lr_lambdas = shapes


def over_run(shape: Any, learner: Learner, max_steps: int) -> Any:
    """The share of the rate at the run's progress, for a newcomer its share of that."""
    return lambda _: shape(learner.progress * max_steps) * learner.ramp
