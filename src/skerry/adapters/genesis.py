"""A PyTorch model as the first version of a run: every tensor of its state_dict, and what each of them is.

What is trained takes part in the run. What is frozen must be the same everywhere, so learners tell its digests; buffers
are each machine's own. Tensors that share their memory are written once, with their further names. It is written tensor
by tensor: a frozen base may be as large as the machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from skerry.adapters.attached import by_plain_name, filled, named, trainable, unwrapped
from skerry.adapters.shards import is_sharded, whole
from skerry.adapters.sharing import memory_of
from skerry.run.genesis import METADATA
from skerry.run.outputs import ADAPTER, ADAPTER_NAME
from skerry.run.tensors import Entry, head_of, written

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def save_genesis(model: nn.Module, path: str | Path) -> None:
    """Write the model's current values as the first version of a run: `skerry syncer --genesis PATH`."""
    path, parts = Path(path), _parts(model)
    for name, each in parts.tensors.items():
        if is_sharded(each):
            raise ValueError(f"tensor {name} is sharded: write the genesis of the model as it is before, on one rank")
    for name in parts.trained:
        if not parts.tensors[name].isfinite().all():
            raise ValueError(f"parameter {name} holds values that are not finite: no run begins with those")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}: make it first")
    about = {
        "embeddings": sorted(embedding_names(model)),
        "trained": sorted(parts.trained),
        "buffers": sorted(parts.tensors.keys() - parts.trained - parts.frozen),
        "aliases": parts.aliases,
        "files": _files(unwrapped(model)),
    }
    entries = [entry_of(name, each) for name, each in parts.tensors.items()]
    head, placed = head_of(entries, {METADATA: json.dumps(about)})
    with written(path) as file:
        file.write(head)
        for name in placed:
            file.write(bytes_of(parts.tensors[name]))


def frozen_digests(model: nn.Module) -> dict[str, bytes]:
    """xxh3-128 of the bytes of each parameter that is not trained; of sharded ones every rank has to ask."""
    parts = _parts(model)
    return {name: xxhash.xxh3_128_digest(bytes_of(whole(parts.tensors[name]))) for name in sorted(parts.frozen)}


def embedding_names(model: nn.Module) -> set[str]:
    """Parameters of nn.Embedding modules: those are averaged, not merged by direction."""
    weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    return {name for name, p in named(model).items() if id(p) in weights}


@dataclass(frozen=True)
class Parts:
    """The tensors of a state_dict, each once, by the first of its names; the further names lead to that."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    trained: set[str]
    frozen: set[str]


def _parts(model: nn.Module) -> Parts:
    trained, every = set(filled(model)), state_of(model)
    for name, each in every.items():
        if each.is_meta:
            raise ValueError(f"tensor {name} is on the meta device, without values: give it some")
        if why := unwritable(each):
            raise ValueError(f"tensor {name} {why}")
    aliases = aliases_of(every)
    tensors = {name: each for name, each in every.items() if name not in aliases}
    frozen = {name for name in named(model) if name in tensors and name not in trained}
    return Parts(tensors, aliases, trained, frozen)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a state_dict by their plain names, what is trained before the rest."""
    trained = {name: parameter.detach() for name, parameter in trainable(model).items()}
    rest = by_plain_name(model, model.state_dict(keep_vars=True).items())
    return trained | {name: each for name, each in rest.items() if name not in trained and isinstance(each, Tensor)}


def aliases_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Further names, and the first that the same memory, seen in the same way, is known by."""
    first: dict[Any, str] = {}
    known = {name: first.setdefault(_sight(name, each), name) for name, each in tensors.items()}
    return {name: other for name, other in known.items() if other != name}


def _sight(name: str, each: Tensor) -> Any:
    """The same for two names of one tensor, and for nothing else."""
    is_wrapper = is_traceable_wrapper_subclass(each) and not is_sharded(each)  # whose memory is that of others
    memory = None if is_wrapper or unwritable(each) else memory_of(each)
    return name if memory is None else (memory, each.dtype, each.is_conj(), each.is_neg())


def unwritable(each: Tensor) -> str:
    """Why no file can hold such a tensor, and what helps; empty if one can."""
    if is_lazy(each):
        return "has no shape yet: run a batch through the model first"
    if each.is_nested or each.layout != torch.strided:
        kind = "nested" if each.is_nested else f"{each.layout}"
        return f"is {kind}, which a run's files cannot hold: keep it dense (torch.strided)"
    return ""


def untyped(each: Tensor) -> str:
    return "" if each.dtype in DTYPES else f"is {each.dtype}, which safetensors has not: keep it in another type"


def entry_of(name: str, each: Tensor) -> Entry:
    if why := untyped(each):
        raise ValueError(f"tensor {name} {why}")
    return Entry(name, DTYPES[each.dtype], tuple(each.shape), each.numel() * each.element_size())


def bytes_of(each: Tensor) -> memoryview:
    """In C order; of one on a device a copy."""
    if not each.numel():
        return memoryview(b"")
    return each.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _files(model: nn.Module) -> dict[str, str]:
    """What Hugging Face's libraries want beside the values of a model of theirs; they need not be installed."""
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, dict) and adapters:
        called = getattr(model, "active_adapter", None)
        called = called if called in adapters else next(iter(adapters))
        about = {**adapters[called].to_dict(), "inference_mode": True, ADAPTER_NAME: called}
        return {ADAPTER: json.dumps(about, default=_told)}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_diff_dict"):
        about = {**config.to_diff_dict(), "architectures": [type(model).__name__]}
        return {"config.json": json.dumps(about, indent=2, sort_keys=True, default=_told) + "\n"}
    return {}


def _told(value: object) -> object:
    """What JSON has no word for."""
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)
