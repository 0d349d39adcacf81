"""Muon inside the stack, to be measured against AdamW: every row's matrices at once.

The matrices between embedding and head step along the nearest orthogonal matrix to their momentum; everything else is
AdamW's, as is the weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

MOMENTUM = 0.95
SCALE = 0.2  # an orthogonal step of this size is about as large as one of AdamW's, so both want the same rate


class Muon:
    """Muon for the matrices inside the model: momentum, then the nearest orthogonal matrix as the step."""

    def __init__(self, parameters: dict[str, Tensor], device: torch.device) -> None:
        self.matrices = {name: p for name, p in parameters.items() if name.startswith("blocks.") and p.ndim == 3}
        self.momenta = {name: torch.zeros_like(p) for name, p in self.matrices.items()}
        self._orthogonal: Callable[[Tensor], Tensor] = orthogonal
        if device.type == "cuda":
            self._orthogonal = torch.compile(orthogonal)

    @torch.no_grad()
    def instead(self, adamw: Callable[[], None], gradients: dict[str, Tensor], rates: Tensor, decay: float) -> None:
        """Let AdamW step, then put these matrices where Muon would have them; rows of rate 0 stay as they are."""
        before = {name: matrix.clone() for name, matrix in self.matrices.items()}
        adamw()
        rate = rates[:, None, None]
        for name, matrix in self.matrices.items():
            momentum = torch.where(rate > 0, MOMENTUM * self.momenta[name] + gradients[name], self.momenta[name])
            self.momenta[name] = momentum
            step = self._orthogonal(gradients[name] + MOMENTUM * momentum)
            step = step * (SCALE * math.sqrt(max(matrix.shape[1:])))
            matrix.copy_(before[name] * (1 - rate * decay) - rate * step)

    def reset(self, row: int) -> None:
        for momentum in self.momenta.values():
            momentum[row].zero_()


def orthogonal(x: Tensor, rounds: int = 5) -> Tensor:
    """About the nearest (semi-)orthogonal matrix to each of these, by Newton and Schulz's iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315  # steep at zero: singular values end between 0.7 and 1.2
    y = x.bfloat16() if x.is_cuda else x
    y = y / (torch.linalg.matrix_norm(y, keepdim=True) + 1e-7)
    is_tall = y.shape[1] > y.shape[2]
    if is_tall:
        y = y.mT
    for _ in range(rounds):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if is_tall else y).to(x.dtype)
