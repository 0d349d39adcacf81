"""The tensors of a model, without torch and without reading a value: built-in shapes, or a guess."""

from __future__ import annotations

from skerry.algo.fragments import Layout, Tensor, layout_of
from skerry.train.shapes import MLP_FACTOR, Shape


def built_in(shape: Shape) -> Layout:
    """The layout of `gpt.GPT` of this shape."""
    width, hidden = shape.width, MLP_FACTOR * shape.width
    tensors = [
        Tensor("tok_emb.weight", (shape.vocabulary, width), "embedding"),
        Tensor("norm.weight", (width,)),
        Tensor("head.weight", (shape.vocabulary, width)),
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
