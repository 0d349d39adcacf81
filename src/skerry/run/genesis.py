"""Genesis: the first values of a run, from a safetensors file, and the record that begins a tape.

The values never come from whoever happens to be alive. What is stored has been looked at, whatever becomes of the file.

A file's metadata, under the one key METADATA, may say what of it is trained (`Said`); where it does not, all of it is.
The run works on trained tensors in float32. What is not trained is copied, tensor by tensor, to a file of the run's
own, because an export gives back the whole state_dict.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open

from skerry import config as configs
from skerry.algo.contents import Contents, Fixed, encode_contents
from skerry.algo.fragments import (
    F32,
    Fragment,
    Layout,
    Tensor,
    check_dimensions,
    decode_fragments,
    encode_fragments,
    encode_layout,
    layout_of,
    split,
)
from skerry.core.facts import RULES, Lineage, RunCreated
from skerry.errors import DiskFull, ModelError, StoreError
from skerry.node.algebra import FLOAT32, Algebra, Array, Values
from skerry.run.tensors import WIDTHS, Entry, TensorFile, head_of, widened, written
from skerry.store.journal import JOURNAL
from skerry.store.lock import NO_ROOM
from skerry.store.store import RECORD, Store

AT_ONCE = 1 << 22  # values that are looked at together
GENESIS = "genesis.safetensors"  # in the directory of a local run
FIXED = "fixed.safetensors"  # in the directory of any run whose model has what is not trained
Show = Callable[[int, int], None]  # (fragments written, of how many)
METADATA = "skerry"  # the one metadata key of our safetensors; the library writes several in random order

UNSAID = Contents(is_whole=False)  # of values alone

log = logging.getLogger("skerry.store")


PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}\.(json|txt|model|jinja)")  # of a file beside a model


class Said(msgspec.Struct, frozen=True):
    """What a file's metadata says of its tensors; those that are neither trained nor buffers are frozen parameters."""

    embeddings: set[str]
    trained: set[str] | None = None  # None: all of them
    buffers: set[str] = set()
    aliases: dict[str, str] = {}  # further names; the file may have a copy under them
    files: dict[str, str] = {}


class GenesisFile(Mapping[str, F32]):
    """The trained tensors of a safetensors file, as float32, which stay there until they are asked for.

    What is given out is finite, or `ModelError` is raised.
    """

    def __init__(self, file: TensorFile, layout: Layout, contents: Contents) -> None:
        self.path, self.layout, self.contents = file.path, layout, contents
        self._file = file
        self._shapes = {tensor.name: tensor.shape for tensor in layout.tensors}

    def __getitem__(self, name: str) -> F32:
        shape = self._shapes[name]
        return self._values(name, 0, math.prod(shape)).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def fragment(self, fragment: Fragment) -> F32:
        """What the fragment holds, as one flat vector with zeros between the slots."""
        flat = np.zeros(fragment.size, np.float32)
        for slot in fragment.slots:
            flat[slot.offset : slot.offset + slot.size] = self._values(slot.name, slot.start, slot.size)
        return flat

    def check(self) -> None:
        """Go through all that is trained, and every copy under a further name, a piece at a time."""
        for name, shape in self._shapes.items():
            count = math.prod(shape)
            for start in range(0, count, AT_ONCE):
                self._values(name, start, min(AT_ONCE, count - start))
        for alias, name in self.contents.aliases.items():
            if alias in self._file.entries:
                self._check_copy(alias, name)

    @property
    def fixed_bytes(self) -> int:
        """Of what is not trained."""
        return sum(entry.size for entry in self._fixed)

    def keep_fixed(self, path: Path) -> tuple[Contents, str]:
        """Copy what is not trained to this file; what there is, with its digests, and the file's sha256 in hex."""
        if not self.contents.fixed:
            path.unlink(missing_ok=True)  # of a creation that was broken off
            return self.contents, ""
        digests, (head, placed) = {}, head_of(self._fixed, {})
        sha256 = hashlib.sha256(head)
        with written(path) as file:
            file.write(head)
            for name in placed:
                digest = xxhash.xxh3_128()
                for piece in self._file.pieces(name):
                    file.write(piece)
                    sha256.update(piece)
                    digest.update(piece)
                digests[name] = digest.digest()
        known = tuple(replace(fixed, digest=digests[fixed.name]) for fixed in self.contents.fixed)
        return replace(self.contents, fixed=known), sha256.hexdigest()

    def _check_copy(self, alias: str, name: str) -> None:
        """The run keeps one of the two."""
        if any(one != other for one, other in zip(self._file.pieces(alias), self._file.pieces(name), strict=True)):
            raise ModelError(
                f"{self.path}: its metadata {METADATA!r} has {alias!r:.80} as another name of {name!r:.80}, and their "
                "values differ: leave it out of the aliases"
            )

    @property
    def _fixed(self) -> list[Entry]:
        return [self._file.entries[fixed.name] for fixed in self.contents.fixed]

    def _values(self, name: str, start: int, count: int) -> F32:
        """So many values of a tensor, from this one on."""
        dtype = self._file.entries[name].dtype
        width = WIDTHS[dtype]
        values = widened(self._file.read(name, width * start, width * count), dtype)
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: parameter {name} holds values that are not finite")
        return values


def read_genesis(path: Path) -> tuple[Layout, GenesisFile]:
    """A safetensors file as layout and values, which have been looked at and stay in the file until they are used."""
    layout, values = open_genesis(path)
    values.check()
    return layout, values


def open_genesis(path: Path) -> tuple[Layout, GenesisFile]:
    """The same by its header alone: values are looked at when they are asked for."""
    file = opened(path)
    said = _said(file)
    trained, contents = _sorted_out(file, said)
    for entry in trained:
        if entry.dtype not in WIDTHS:
            raise ModelError(
                f"{path}: parameter {entry.name} is {entry.dtype}; a genesis holds float32, bfloat16 or float16 "
                f"({', '.join(WIDTHS)})"
            )
    return (layout := _layout(file, said, trained)), GenesisFile(file, layout, contents)


def opened(path: Path) -> TensorFile:
    """A safetensors file; what is none is refused."""
    if path.is_dir():
        raise ModelError(f"{path}: is a directory; name the safetensors file in it")
    if path.exists() and not path.is_file():
        raise ModelError(f"{path}: is no plain file; name a safetensors file")
    try:
        with safe_open(path, framework="numpy"):  # which looks at the whole header
            return TensorFile(path)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; write one with skerry.save_genesis(model, path)") from None
    except (OSError, SafetensorError, TypeError) as error:
        raise ModelError(f"{path}: is not a readable safetensors file ({error})") from None


def _said(file: TensorFile) -> Said | None:
    said = file.metadata.get(METADATA)
    try:
        return msgspec.json.decode(said, type=Said) if said else None
    except (ValueError, RecursionError):
        raise ModelError(f"{file.path}: its metadata {METADATA!r} names no embeddings: leave it out") from None


def _sorted_out(file: TensorFile, said: Said | None) -> tuple[list[Entry], Contents]:
    """What of the file is trained, and all else there is to know of it."""
    if said is None or said.trained is None:
        return (every := list(file.entries.values())), Contents(_dtypes(every), is_whole=False)
    for name in [*sorted(said.trained), *said.aliases.values()]:
        if name not in file.entries:
            raise ModelError(f"{file.path}: its metadata {METADATA!r} names {name}, which is not in it")
    _check_aliases(file, said)
    for name in said.files:
        if not PLAIN_NAME.fullmatch(name):
            raise ModelError(
                f"{file.path}: its metadata {METADATA!r} has a file {name!r:.80}, which is no configuration"
            )
    trained = [entry for entry in file.entries.values() if entry.name in said.trained]
    fixed = tuple(
        Fixed(entry.name, entry.dtype, entry.shape, "buffer" if entry.name in said.buffers else "frozen")
        for entry in file.entries.values()
        if entry.name not in said.trained and entry.name not in said.aliases
    )
    return trained, Contents(_dtypes(trained), said.aliases, fixed, said.files)


def _check_aliases(file: TensorFile, said: Said) -> None:
    """A further name is of a tensor that has its own, and what lies under it is a copy of that, or nothing."""
    for alias, name in said.aliases.items():
        copy, one = file.entries.get(alias), file.entries[name]
        is_copy = copy is None or (copy.dtype, copy.shape) == (one.dtype, one.shape)
        if name in said.aliases or alias in (said.trained or ()) or alias == "__metadata__" or not is_copy:
            raise ModelError(
                f"{file.path}: its metadata {METADATA!r} has {alias!r:.80} as another name of {name!r:.80}: it is none"
            )


def _dtypes(trained: list[Entry]) -> dict[str, str]:
    return {entry.name: entry.dtype for entry in trained if entry.dtype != "F32"}


def _layout(file: TensorFile, said: Said | None, trained: list[Entry]) -> Layout:
    """Embeddings by the file's metadata, else by 'emb' in the name."""
    names = {entry.name for entry in trained}
    embeddings = {name for name in names if "emb" in name.lower()} if said is None else said.embeddings
    try:
        for entry in file.entries.values():
            check_dimensions(entry.name, entry.shape)
        return layout_of(Tensor(e.name, e.shape, "embedding" if e.name in embeddings else "other") for e in trained)
    except ValueError as error:
        raise ModelError(f"{file.path}: {error}") from None


def is_from(path: Path, layout: Layout, created: RunCreated) -> bool:
    """Whether a run began with the values of this file, by those of its smallest fragment; its layout is the run's."""
    about = zip(decode_fragments(created.fragments, layout), created.thetas, strict=True)
    fragment, theta = min(about, key=lambda each: each[0].size)
    try:
        return FLOAT32.sha256(open_genesis(path)[1].fragment(fragment)) == theta
    except ModelError:  # values that no run begins with
        return False


def create_run(
    store: Store, config: configs.Config, layout: Layout, first: GenesisFile, show: Show = lambda done, total: None
) -> RunCreated:
    """Begin a run with the values of a file, in place of what a creation that was broken off has left."""
    was_run = any(any((store.root / folder).iterdir()) for folder in (JOURNAL, RECORD))  # and has lost its tape
    if not was_run and (stale := store.collect(())):
        log.info("%s: removed %d files of a creation that was broken off", store.root, stale)
    try:
        contents, fixed = first.keep_fixed(store.root / FIXED)
    except OSError as error:
        kind = DiskFull if error.errno in NO_ROOM else StoreError
        raise kind(f"{store.root / FIXED}: cannot be written ({error.strerror}): free space and restart") from None
    return begin(store, config, layout, first.fragment, show=show, contents=contents, fixed=fixed)


def begin(
    store: Store,
    config: configs.Config,
    layout: Layout,
    first: Callable[[Fragment], Array],
    algebra: Algebra = FLOAT32,
    show: Show = lambda done, total: None,
    contents: Contents = UNSAID,
    fixed: str = "",
    lineage: Lineage | None = None,
) -> RunCreated:
    """Split the model, write version 0 of every fragment, whose values `first` gives, and begin the tape.

    `contents` is what else the model has, of which `fixed`, by its sha256, lies in the run's directory.
    """
    fragments = split(layout, config.sync.num_fragments, config.sync.cut_tensors)
    files, digests, states, thetas = [], [], [], []
    for theta in map(first, fragments):
        zero = theta - theta
        values = Values(theta, zero, zero)
        files.append(store.put(algebra.parts(values)))
        digests.append(algebra.digest(theta))
        states.append(algebra.state_digest(values))
        thetas.append(algebra.sha256(theta))
        show(len(files), len(fragments))
    fact = RunCreated(
        run=config.run.name,
        rules=RULES,
        config=configs.encode(config),
        layout=encode_layout(layout),
        fragments=encode_fragments(fragments),
        files=tuple(files),
        digests=tuple(digests),
        states=tuple(states),
        thetas=tuple(thetas),
        contents=encode_contents(contents),
        fixed=fixed,
        lineage=lineage,
    )
    store.commit([msgspec.msgpack.encode(fact)], files)
    return fact
