"""A learner whose loop tells TensorBoard, now and then, how it does and where the run stands.

python examples/tensorboard_loop.py                                    # alone; then: tensorboard --logdir logs
python examples/tensorboard_loop.py --genesis genesis.safetensors     # write the first values, once
skerry syncer --run runs/mine --genesis genesis.safetensors --run.steps 250 --run.learners 1 &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=a python examples/tensorboard_loop.py
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.tensorboard import SummaryWriter

import skerry


def telling(writer: SummaryWriter):
    """A hook for `on_metrics`: each number of its dict as a curve, by the learner's own steps."""

    def tell(metrics: dict) -> None:
        step = metrics.pop("step")
        for name, value in metrics.items():
            if value is not None:
                writer.add_scalar(f"skerry/{name}", float(value), step)

    return tell


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model gains nothing from more
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    if "--genesis" in sys.argv:
        return skerry.save_genesis(model, sys.argv[-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        SummaryWriter("logs") as writer,
        skerry.Learner(model, optimizer, on_metrics=telling(writer)) as learner,
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
