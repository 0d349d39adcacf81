"""A plain PyTorch loop, and the four lines (marked +) that make it a learner of a shared run.

python examples/plain_loop.py                                   # alone: the four lines do nothing
python examples/plain_loop.py --genesis genesis.safetensors     # write the first values, once
skerry syncer --run runs/plain --genesis genesis.safetensors --run.steps 250 --run.learners 2 &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=a python examples/plain_loop.py &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=b python examples/plain_loop.py
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import skerry  # +


def text() -> torch.Tensor:
    """Bytes to learn from: the standard library's files."""
    return torch.tensor(list(b"".join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py"))[:40])))


class NextByte(nn.Module):  # predicts a byte from the eight before it
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.body = nn.Sequential(nn.Linear(8 * 32, 256), nn.GELU(), nn.Linear(256, 256))

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(context).flatten(1))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model gains nothing from more
    data, model = text(), NextByte()
    if "--genesis" in sys.argv:
        return skerry.save_genesis(model, sys.argv[-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with skerry.Learner(model, optimizer) as learner:  # +
        torch.seed()  # every learner draws its own batches
        for step in range(300):
            window = data[torch.randint(len(data) - 9, (64, 1)) + torch.arange(9)]
            loss = functional.cross_entropy(model(window[:, :8]), window[:, 8])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0:
                print(f"step {step:4d}  loss {loss.item():.3f}")
            if not learner.step(tokens=window.shape[0]):  # + False once the run has had enough
                break  # +


if __name__ == "__main__":
    main()
