"""A learner whose loop tells Weights & Biases, now and then, how it does and where the run stands.

python examples/wandb_loop.py                                    # alone, offline; `wandb sync` uploads it if you wish
python examples/wandb_loop.py --genesis genesis.safetensors     # write the first values, once
skerry syncer --run runs/mine --genesis genesis.safetensors --run.steps 250 --run.learners 1 &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=a python examples/wandb_loop.py

WANDB_MODE=online sends it as it comes.
"""

import os
import sys

import torch
import wandb
from torch import nn
from torch.nn import functional

import skerry


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model gains nothing from more
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    if "--genesis" in sys.argv:
        return skerry.save_genesis(model, sys.argv[-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mode = os.environ.get("WANDB_MODE", "offline")
    with (
        wandb.init(project="skerry", mode=mode) as board,
        skerry.Learner(
            model, optimizer, on_metrics=lambda metrics: board.log(metrics, step=metrics["step"])
        ) as learner,
    ):
        for _ in range(300):
            x = torch.randn(64, 8)
            loss = functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not learner.step(tokens=len(x), loss=loss.item()):
                break


if __name__ == "__main__":
    main()
