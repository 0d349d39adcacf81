"""Two processes that train one model with DistributedDataParallel, and the lines (marked +) that make them one learner.

torchrun --nproc-per-node 2 examples/ddp_loop.py                # alone: the lines do nothing

python examples/ddp_loop.py --genesis genesis.safetensors       # write the first values, once
skerry syncer --run runs/ddp --genesis genesis.safetensors --run.steps 300 --run.learners 2 &
export SKERRY_SYNCER=localhost:7077 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a restart may fail: pytorch #135712
SKERRY_NAME=a torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/ddp_loop.py &
SKERRY_NAME=b torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/ddp_loop.py
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import skerry  # +


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
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.tensor(list(b"".join(p.read_bytes() for p in sorted(Path(torch.__file__).parent.glob("_*.py")))))

    with skerry.Learner(model, optimizer) as learner:  # + on every rank: they are one learner
        torch.seed()  # every rank draws its own batches
        for step in range(300):
            window = data[torch.randint(len(data) - 9, (64, 1)) + torch.arange(9)]
            loss = functional.cross_entropy(model(window[:, :8]), window[:, 8])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0 and dist.get_rank() == 0:
                print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
            if not learner.step(tokens=window.shape[0]):  # + of this rank's batch; all ranks get the same answer
                break  # +
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
