"""One loop for every kind of island: by itself it is one process, under torchrun several that train with DDP.

python examples/island_loop.py                                        # alone: 300 steps
torchrun --standalone --nproc-per-node 2 examples/island_loop.py      # the same, two processes

python examples/island_loop.py --genesis examples/genesis.safetensors    # write the first values, once
skerry launch examples/run-local.toml                                 # then a run: four islands on this machine
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import skerry


def next_byte() -> nn.Module:
    """Predicts a byte from the eight before it."""
    embed = nn.Sequential(nn.Embedding(256, 32), nn.Flatten())
    return nn.Sequential(embed, nn.Linear(8 * 32, 256), nn.GELU(), nn.Linear(256, 256))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model gains nothing from more
    model = next_byte()
    if "--genesis" in sys.argv:
        skerry.save_genesis(model, sys.argv[sys.argv.index("--genesis") + 1])
        return
    if "RANK" in os.environ:  # said by torchrun
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.tensor(list(b"".join(p.read_bytes() for p in sorted(Path(torch.__file__).parent.glob("_*.py")))))
    steps = 300 if "SKERRY_SYNCER" not in os.environ else sys.maxsize  # in a run, the syncer says when it is enough

    with skerry.Learner(model, optimizer) as learner:
        torch.seed()  # every process draws its own batches
        for step in range(steps):
            window = data[torch.randint(len(data) - 9, (64, 1)) + torch.arange(9)]
            loss = functional.cross_entropy(model(window[:, :8]), window[:, 8])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 100 == 0 and os.environ.get("RANK", "0") == "0":
                print(f"step {step:5d}  loss {loss.item():.3f}", flush=True)
            if not learner.step(tokens=window.shape[0]):
                break
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
