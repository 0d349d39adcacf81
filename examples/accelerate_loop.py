"""A loop with Hugging Face Accelerate, and the four lines (marked +) that make it a learner of a shared run.

python examples/accelerate_loop.py                                   # alone: the four lines do nothing

python examples/accelerate_loop.py --genesis genesis.safetensors     # write the first values, once
skerry syncer --run runs/accelerate --genesis genesis.safetensors --run.steps 300 --run.learners 2 &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=a python examples/accelerate_loop.py &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=b python examples/accelerate_loop.py
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional

import skerry  # +


def next_byte() -> nn.Module:
    """Predicts a byte from the eight before it."""
    body = (nn.Linear(8 * 32, 256), nn.GELU(), nn.Linear(256, 256))
    return nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), *body)


def main() -> None:
    torch.set_num_threads(1)  # so small a model gains nothing from more
    files, model = sorted(Path(os.__file__).parent.glob("*.py"))[:40], next_byte()
    if "--genesis" in sys.argv:
        skerry.save_genesis(model, sys.argv[sys.argv.index("--genesis") + 1])
        return
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    loader = torch.utils.data.DataLoader(text.unfold(0, 9, 3), batch_size=64, shuffle=True)
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)

    with skerry.Learner(model, optimizer) as learner:  # +
        for step, window in zip(range(300), loader, strict=False):
            loss = functional.cross_entropy(model(window[:, :8]), window[:, 8])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0:
                accelerator.print(f"step {step:4d}  loss {loss.item():.3f}")
            if not learner.step(tokens=window.numel()):  # + False once the run has had enough
                break  # +


if __name__ == "__main__":
    main()
