"""Sizes of the small GPT, for those who plan without torch: the syncer, the command line."""

from __future__ import annotations

import msgspec

from skerry.config import Model
from skerry.errors import ConfigError

BYTE_VALUES = 256  # the vocabulary: a token is a byte
MLP_FACTOR = 4  # hidden width of the MLP over the model's width


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Depth, width, attention heads and the longest sequence, in tokens."""

    layers: int
    width: int
    heads: int
    context: int


SHAPES: dict[str, Shape] = {
    "tiny": Shape(layers=2, width=56, heads=2, context=64),
    "1m": Shape(layers=4, width=160, heads=5, context=128),
    "3m": Shape(layers=4, width=256, heads=4, context=128),
    "10m": Shape(layers=6, width=384, heads=6, context=256),
}


def shape_of(model: Model) -> Shape:
    """The preset's shape with the numbers that were set in its place."""
    if model.preset not in SHAPES:
        raise ConfigError(f"model.preset = {model.preset!r}: known are {', '.join(SHAPES)}")
    changes = {key: getattr(model, key) for key in Shape.__struct_fields__ if getattr(model, key)}
    shape = msgspec.structs.replace(SHAPES[model.preset], **changes)
    if shape.width % (2 * shape.heads):
        raise ConfigError(
            f"model.width = {shape.width}: must be a multiple of twice model.heads = {shape.heads} (rotary positions)"
        )
    return shape
