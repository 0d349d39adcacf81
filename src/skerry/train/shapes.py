"""Sizes of the built-in GPT, for those who plan without torch: the syncer, the command line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from skerry.config import Config, Model, Pack, resolve
from skerry.data.pack import Index, is_pack, read_index
from skerry.errors import ConfigError

BYTE_VALUES = 256  # the vocabulary of text: a token is a byte
MLP_FACTOR = 4  # hidden width of the MLP over the model's width


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Depth, width, attention heads, the longest sequence, in tokens, and how many tokens there are."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = BYTE_VALUES


SHAPES: dict[str, Shape] = {
    "tiny": Shape(layers=2, width=56, heads=2, context=64),
    "1m": Shape(layers=4, width=160, heads=5, context=128),
    "3m": Shape(layers=4, width=256, heads=4, context=128),
    "10m": Shape(layers=6, width=384, heads=6, context=256),
    "100m": Shape(layers=12, width=768, heads=12, context=1024),
    "300m": Shape(layers=24, width=1024, heads=16, context=1024),
    "1b": Shape(layers=24, width=2048, heads=16, context=1024),
}
SUITED: dict[
    str, tuple[tuple[str, Any], ...]
] = {  # rates of GPT-3's models of these sizes (arXiv 2005.14165, Table 2.1)
    "100m": (("learner.lr", 6e-4), ("data.batch", 16)),
    "300m": (("learner.lr", 3e-4), ("data.batch", 16)),
    "1b": (("learner.lr", 2e-4), ("data.batch", 16)),
}


def resolved(base: Config, file: Path | None = None, overrides: Iterable[tuple[str, Any]] = ()) -> Config:
    """`config.resolve`, with what suits the model's preset in place of the defaults, below whatever is said.

    If the data is a pack, the configuration has what is needed to know it again.
    """
    said = list(overrides)
    preset = resolve(base, file, said).model.preset
    return with_pack(resolve(resolve(base, None, SUITED.get(preset, ())), file, said))


def with_pack(config: Config) -> Config:
    """The configuration with what its pack's index says; the index alone may lie here, without the shards."""
    if not is_pack(config.data.path):
        return config
    table = pack_table(*read_index(Path(config.data.path)))
    vocabulary = config.model.vocabulary or table.vocabulary
    if vocabulary < table.vocabulary:
        raise ConfigError(f"model.vocabulary = {vocabulary}: {config.data.path} has a vocabulary of {table.vocabulary}")
    model = msgspec.structs.replace(config.model, vocabulary=vocabulary)
    return msgspec.structs.replace(config, model=model, pack=table)


def pack_table(index: Index, digest: str) -> Pack:
    return Pack(
        dtype=index.dtype, vocabulary=index.vocabulary, tokenizer=index.tokenizer, tokens=index.tokens, digest=digest
    )


def bytes_needed(config: Config, is_trained: bool = True) -> int:
    """At least so many for the built-in model, to make it, or to train it too: gradients, AdamW's two moments, and for
    each token one number of every layer's width and the logits."""
    shape = shape_of(config.model)
    block = (4 + 2 * MLP_FACTOR) * shape.width**2
    parameters = shape.layers * block + 2 * shape.vocabulary * shape.width
    if not is_trained:
        return 4 * parameters
    sequences = min(config.data.batch, config.learner.micro_batch or config.data.batch)
    tokens = sequences * shape.context * (shape.layers * shape.width + shape.vocabulary)
    return 4 * (4 * parameters + tokens) + 2 * 8 * config.data.batch * shape.context


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
