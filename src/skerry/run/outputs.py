"""Which tensors an exported file has, under which names and in which dtype, and what each of them is of.

By default they are the state_dict that made the genesis: trained tensors in the dtype they had, what is frozen,
buffers, and a tensor of its own for every further name, because safetensors share no memory. Or those that another file
has, or those that a PEFT adapter is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from skerry.algo.contents import Contents, decode_contents
from skerry.algo.fragments import decode_layout
from skerry.core.facts import RunCreated
from skerry.errors import FileDamaged, FileMissing, ModelError
from skerry.run.genesis import FIXED, opened
from skerry.run.tensors import WIDTHS, WORDS, Entry, TensorFile, entry_of

ADAPTER = "adapter_config.json"  # PEFT's, among the files that belong to a model
ADAPTER_NAME = "skerry_adapter"  # the key in it under which a genesis says what its adapter is called
BESIDE = (".json", ".txt", ".model", ".jinja")  # of what lies beside a model's values


class Output(NamedTuple):
    """A tensor to be written, and the name of the run's tensor whose values it has."""

    entry: Entry
    source: str


def whole(root: Path, created: RunCreated) -> list[Output]:
    """Exactly the state_dict that made the genesis."""
    contents, known = decode_contents(created.contents), _known(root, created)
    names = {**{name: name for name in known}, **contents.aliases}
    return [Output(known[source]._replace(name=name), source) for name, source in names.items()]


def like(root: Path, created: RunCreated, path: Path) -> list[Output]:
    """What another safetensors file has, by its names, its dtypes and its order; refused by name where it cannot be."""
    if not path.exists():
        raise ModelError(f"--like {path}: no such file: name a safetensors file of the same model")
    known, aliases = _known(root, created), decode_contents(created.contents).aliases
    outputs = [_alike(path, wanted, known, aliases) for wanted in _in_order(opened(path))]
    missing = sorted(known.keys() - {output.source for output in outputs})
    if missing:
        raise ModelError(
            f"--like {path}: has no {missing[0]}, which the run's model has: name a file of the same model"
        )
    return outputs


def _in_order(file: TensorFile) -> list[Entry]:
    return sorted(file.entries.values(), key=lambda entry: (entry.start, entry.name))


def _alike(path: Path, wanted: Entry, known: dict[str, Entry], aliases: dict[str, str]) -> Output:
    source = aliases.get(wanted.name, wanted.name)
    ours = known.get(source)
    if ours is None:
        raise ModelError(f"--like {path}: {wanted.name} is not in the run's model: name a file of the same model")
    if ours.shape != wanted.shape:
        raise ModelError(f"--like {path}: {wanted.name} has shape {wanted.shape} there, {ours.shape} in the run")
    if ours.dtype != wanted.dtype and not {ours.dtype, wanted.dtype} <= WIDTHS.keys():
        raise ModelError(
            f"--like {path}: {wanted.name} is {wanted.dtype} there and {ours.dtype} in the run, which is not made into "
            f"the other: only {', '.join(WORDS.values())} are"
        )
    return Output(wanted, source)


def adapter(root: Path, created: RunCreated) -> tuple[list[Output], str]:
    """What PEFT saves of an adapter, by the names it gives it, and its adapter_config.json."""
    text = decode_contents(created.contents).files.get(ADAPTER)
    if text is None:
        raise ModelError(
            f"--adapter: {root} began from no PEFT model: save its genesis from one (skerry.save_genesis of what "
            "get_peft_model returned), or export without --adapter"
        )
    try:
        about = json.loads(text)
        called = str(about.pop(ADAPTER_NAME))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ModelError(f"--adapter: the {ADAPTER} that the run began with names no adapter: export without") from None
    entries = (entry._replace(name=_in_peft(entry.name, called)) for entry in _trained(created))
    outputs = [Output(entry, source.name) for entry, source in zip(entries, _trained(created), strict=True)]
    return outputs, json.dumps(about, indent=2, sort_keys=True) + "\n"


def _in_peft(name: str, called: str) -> str:
    """As PEFT saves it: without the adapter's name, and a module that is trained whole under its own."""
    parts = name.replace(".modules_to_save.", ".").split(".")
    return ".".join(part for part in parts if part != called)


def files_for(created: RunCreated, source: Path | None) -> dict[str, bytes]:
    """What from_pretrained wants beside the values: config.json and the tokenizer's files, by name.

    From this folder, where one is given; else as the genesis has them.
    """
    files = {name: text.encode() for name, text in decode_contents(created.contents).files.items() if name != ADAPTER}
    if source is not None:
        if not source.is_dir():
            raise ModelError(f"--config-from {source}: is not a folder; name one with a config.json")
        found = sorted(path for path in source.iterdir() if path.is_file() and path.suffix in BESIDE)
        files |= {path.name: path.read_bytes() for path in found if not path.name.endswith(".index.json")}
    if "config.json" not in files:
        raise ModelError(
            "--folder: the run's genesis has no config.json: name a folder that has one with --config-from, such as "
            "the one the model came from"
        )
    return files


def _known(root: Path, created: RunCreated) -> dict[str, Entry]:
    """Every tensor of the run's model, as it is, once each."""
    entries = {entry.name: entry for entry in _trained(created)}
    if created.fixed:
        entries |= fixed_file(root, created).entries
    return entries


def _trained(created: RunCreated) -> list[Entry]:
    dtypes = decode_contents(created.contents).dtypes
    tensors = decode_layout(created.layout).tensors
    return [entry_of(tensor.name, dtypes.get(tensor.name, "F32"), tensor.shape) for tensor in tensors]


def fixed_file(root: Path, created: RunCreated) -> TensorFile:
    """The run's own file with what is not trained; its tensors' digests are for who reads them to look at."""
    path, contents = root / FIXED, decode_contents(created.contents)
    try:
        file = opened(path)
    except ModelError as error:
        kind = FileDamaged if path.exists() else FileMissing
        raise kind(f"{error if path.exists() else f'{path} is missing'}: {ways_out(root)}") from None
    for fixed in contents.fixed:
        there = file.entries.get(fixed.name)
        if there is None or (there.dtype, there.shape) != (fixed.dtype, fixed.shape):
            raise FileDamaged(f"{path}: {fixed.name} is not what was written: {ways_out(root)}")
    return file


def ways_out(root: Path) -> str:
    return f"restore it from a copy, or from the genesis file: skerry syncer --run {root} --repair --genesis FILE"


def said_of(created: RunCreated) -> dict[str, object]:
    """What metadata says of the tensors, so that an export can be the genesis of another run."""
    contents = decode_contents(created.contents)
    layout = decode_layout(created.layout)
    said: dict[str, object] = {"embeddings": [t.name for t in layout.tensors if t.kind == "embedding"]}
    return said | _besides(contents, [t.name for t in layout.tensors]) if contents.is_whole else said


def _besides(contents: Contents, trained: list[str]) -> dict[str, object]:
    buffers = [fixed.name for fixed in contents.fixed if fixed.kind == "buffer"]
    return {"trained": trained, "buffers": buffers, "aliases": contents.aliases, "files": contents.files}
