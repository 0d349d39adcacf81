"""Lightning's Trainer: a callback that makes it a learner.

    trainer = Trainer(..., callbacks=[skerry.lightning.Callback()])

It joins when training starts, which is after Lightning has restored its own checkpoint: the model has the run's values
and the optimizers the checkpoint's moments. A batch is a step where an optimizer has stepped since the last one: with
`accumulate_grad_batches` several make one. Parameters have the names that they have in the LightningModule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from skerry.adapters.torch import Learner

try:
    from lightning.pytorch import Callback as LightningCallback
except ModuleNotFoundError:  # the same under its earlier name
    from pytorch_lightning import Callback as LightningCallback


class Callback(LightningCallback):
    """Makes a Lightning Trainer a learner of a shared run; without a syncer's address it does nothing.

    The Trainer stops when the run has had enough; its own `max_steps` or epochs only bound what this learner does.
    `tokens` says what a batch is of: a function of it, or the key, in a batch that is a dict, of the tensor whose
    elements are counted. Of any other batch that is the tensor itself, or the first of several. `syncer` and the
    options are those of `skerry.Learner`, and `learner` is that learner, from the start of training on.
    """

    def __init__(
        self, syncer: str | None = None, *, tokens: str | Callable[[Any], int] = "input_ids", **options: Any
    ) -> None:
        self.learner: Learner | None = None
        self._life = ExitStack()
        self._syncer, self._tokens_of, self._options = syncer, tokens, options
        self._tokens = 0  # since the last step
        self._steps = 0  # of the optimizers, by Lightning's count
        self._loss = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        learner = Learner(trainer.model, trainer.optimizers, self._syncer, **self._options)
        self.learner = self._life.enter_context(learner)
        self._tokens, self._steps = 0, trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.learner is not None
        self._tokens += self._count(batch)
        if trainer.global_step == self._steps:
            return  # gradients are being accumulated
        self._steps = trainer.global_step
        if trainer.log_every_n_steps and self._steps % trainer.log_every_n_steps == 0:
            self._loss = _loss(outputs, self._loss)  # Lightning waits for the device here too, for its loggers
        tokens, self._tokens = self._tokens, 0
        if not tokens and self.learner.config is not None:  # else there is no run that would want to know
            raise TypeError(
                f"a batch is a {type(batch).__name__}, and its tokens are not known: say what counts, as in "
                "skerry.lightning.Callback(tokens=lambda batch: batch['text'].numel())"
            )
        if not self.learner.step(tokens, self._loss):
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._life.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._life.__exit__(type(exception), exception, exception.__traceback__)

    def _count(self, batch: Any) -> int:
        if not isinstance(self._tokens_of, str):
            return self._tokens_of(batch)
        part = batch
        if isinstance(batch, Mapping):
            part = batch.get(self._tokens_of)
        elif isinstance(batch, list | tuple) and batch:
            part = batch[0]
        return part.numel() if isinstance(part, Tensor) else 0


def _loss(outputs: Any, last: float) -> float:
    """What a training step returned, if it is a loss."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else last
