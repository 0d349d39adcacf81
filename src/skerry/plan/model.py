"""The tensors of a model, without torch and without reading a value: built-in shapes, a genesis file, or a guess."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from skerry.algo.fragments import Layout, Tensor, layout_of
from skerry.node.model import METADATA, ModelError
from skerry.train.shapes import BYTE_VALUES, MLP_FACTOR, Shape


def built_in(shape: Shape) -> Layout:
    """The layout of `gpt.GPT` of this shape."""
    width, hidden = shape.width, MLP_FACTOR * shape.width
    tensors = [
        Tensor("tok_emb.weight", (BYTE_VALUES, width), "embedding"),
        Tensor("norm.weight", (width,)),
        Tensor("head.weight", (BYTE_VALUES, width)),
    ]
    for i in range(shape.layers):
        block = {
            "attention_norm.weight": (width,),
            "attention.qkv.weight": (3 * width, width),
            "attention.out.weight": (width, width),
            "mlp_norm.weight": (width,),
            "mlp.up.weight": (hidden, width),
            "mlp.down.weight": (width, hidden),
        }
        tensors += [Tensor(f"blocks.{i}.{name}", dims) for name, dims in block.items()]
    return layout_of(tensors)


def even(params: float, tensors: int) -> Layout:
    """A model known by its size alone: as many tensors, equal to one parameter."""
    size, more = divmod(round(params), tensors)
    return layout_of(Tensor(f"tensor-{i:06d}", (size + (i < more),)) for i in range(tensors))


def of_file(path: Path) -> Layout:
    """The layout of a genesis file, from its header."""
    if path.is_dir():
        raise ModelError(f"{path}: is a directory; name the safetensors file in it")
    try:
        with safe_open(path, framework="numpy") as file:
            said = (file.metadata() or {}).get(METADATA)
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; write one with skerry.save_genesis(model, path)") from None
    except (OSError, SafetensorError, TypeError) as error:
        raise ModelError(f"{path}: is not a readable safetensors file ({error})") from None
    embeddings = set(json.loads(said)["embeddings"]) if said else {n for n in shapes if "emb" in n.lower()}
    try:
        return layout_of(Tensor(n, dims, "embedding" if n in embeddings else "other") for n, dims in shapes.items())
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
