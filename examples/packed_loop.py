"""A loop of one's own on a pack: every learner has its own windows, and goes on where it was after a restart.

skerry data pack stdlib --out pack                              # once; copy it to each machine
python examples/packed_loop.py pack                             # alone

python examples/packed_loop.py pack --genesis genesis.safetensors
skerry syncer --run runs/packed --genesis genesis.safetensors --run.steps 300 --run.learners 2 &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=a python examples/packed_loop.py pack &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=b python examples/packed_loop.py pack
"""

import sys

import torch
from torch import nn
from torch.nn import functional

import skerry

SEED, BATCH, CONTEXT, LEARNERS = 0, 16, 32, 2  # the same for every learner of the run


class NextToken(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 64)
        self.body = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens))[0])


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # so small a model gains nothing from more
    pack = skerry.data.Pack(sys.argv[1])
    model = NextToken(pack.vocabulary)
    if "--genesis" in sys.argv:
        skerry.save_genesis(model, sys.argv[sys.argv.index("--genesis") + 1])
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with skerry.Learner(model, optimizer) as learner:
        start = learner.prior_steps  # those that earlier processes of this name have taken
        batches = pack.batches(learner.index, SEED, BATCH, CONTEXT, start=start, learners=LEARNERS)
        for step, (inputs, targets) in zip(range(start, 300), batches, strict=False):
            logits = model(torch.from_numpy(inputs))
            loss = functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                print(f"step {step:4d}  loss {loss.item():.3f}")
            if not learner.step(tokens=inputs.size):
                break


if __name__ == "__main__":
    main()
