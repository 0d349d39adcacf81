"""A Lightning Trainer, and the two lines (marked +) that make it a learner of a shared run.

python examples/lightning_loop.py                                   # alone: the two lines do nothing

python examples/lightning_loop.py --genesis genesis.safetensors     # write the first values, once
skerry syncer --run runs/lightning --genesis genesis.safetensors --run.steps 300 --run.learners 2 &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=a python examples/lightning_loop.py &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=b python examples/lightning_loop.py

Started again after a kill, it goes on with Lightning's last checkpoint: optimizer, steps, place in the data.
"""

import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional

import skerry  # +


class NextByte(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        body = (nn.Linear(8 * 32, 256), nn.GELU(), nn.Linear(256, 256))  # a byte from the eight before it
        self.model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), *body)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = functional.cross_entropy(self.model(batch[:, :8]), batch[:, 8])
        if self.global_step % 50 == 0 and batch_idx % 2 == 0:
            print(f"step {self.global_step:4d}  loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.set_num_threads(1)  # so small a model gains nothing from more
    files, module = sorted(Path(os.__file__).parent.glob("*.py"))[:40], NextByte()
    if "--genesis" in sys.argv:
        skerry.save_genesis(module, sys.argv[sys.argv.index("--genesis") + 1])
        return
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    loader = torch.utils.data.DataLoader(text.unfold(0, 9, 3), batch_size=32, shuffle=True)
    folder = f"checkpoints-{os.environ.get('SKERRY_NAME', 'alone')}"
    saves = ModelCheckpoint(folder, save_last=True, every_n_train_steps=50)
    callbacks = [saves, skerry.lightning.Callback()]  # +
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=300, accumulate_grad_batches=2, callbacks=callbacks, **quiet)
    trainer.fit(module, loader, ckpt_path="last")


if __name__ == "__main__":
    main()
