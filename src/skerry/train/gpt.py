"""A small GPT for experiments, over bytes where nothing else is said, plain enough to read in one go.

Pre-norm blocks, rotary positions (no parameters), no biases, a head of its own. Initial values depend on the
seed and the shape alone: torch's global generator is neither read nor advanced.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .shapes import BYTE_VALUES, MLP_FACTOR

INIT_STD = 0.02
ROTARY_BASE = 10_000.0


def outline(layers: int, width: int, heads: int, context: int, vocabulary: int = BYTE_VALUES) -> GPT:
    """The model without values: it allocates and draws nothing."""
    with torch.device("meta"):
        return GPT(layers, width, heads, context, vocabulary)


def build(layers: int, width: int, heads: int, context: int, seed: int, vocabulary: int = BYTE_VALUES) -> GPT:
    """The model with its initial values; the same seed gives the same bits."""
    model = outline(layers, width, heads, context, vocabulary)
    model.to_empty(device="cpu")
    initialise(model, seed)
    return model


def initialise(model: GPT, seed: int) -> None:
    """Fill every parameter in name order; what writes to the residual stream starts smaller (GPT-2, §2.3)."""
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * len(model.blocks))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                std = residual_std if name.endswith(("attention.out.weight", "mlp.down.weight")) else INIT_STD
                parameter.normal_(0.0, std, generator=generator)


class GPT(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int = BYTE_VALUES) -> None:
        super().__init__()
        if width % heads or (width // heads) % 2:
            raise ValueError(f"width {width} over {heads} heads must give an even head width")
        self.context = context
        self.head_width = width // heads
        self.tok_emb = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, time] int64 -> [batch, time, vocabulary]
        time = tokens.shape[1]
        assert time <= self.context, f"{time} tokens in a context of {self.context}"
        rotation = rotary(time, self.head_width, tokens.device)
        x = self.tok_emb(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token."""
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            rotate(query, rotation), rotate(key, rotation), value, is_causal=True
        )  # [batch, heads, time, head_width]
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, MLP_FACTOR * width, bias=False)
        self.down = nn.Linear(MLP_FACTOR * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def rotary(time: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position · base^(-2i/d) (RoFormer, arXiv 2104.09864, §3.2.2), each [time, d/2]."""
    frequency = ROTARY_BASE ** (-torch.arange(0, head_width, 2, device=device) / head_width)
    angle = torch.outer(torch.arange(time, device=device), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of features (first half with second half) by its position's angle."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
