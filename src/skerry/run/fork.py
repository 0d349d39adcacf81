"""A run's model as the first values of another run, with where it came from on the new tape.

Of the model everything goes over: its layout, its values as the syncer has them in float32, what is frozen, further
names, and buffers as learners last had them. The configuration goes over too, with what is said in its place. Velocity,
residual, the books, the budget that was spent and the keys do not: it is a run of its own.

Memory holds the values once, 4 bytes a parameter; to serve the run takes three times as much.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from skerry import config as configs
from skerry.algo.contents import Contents, decode_contents
from skerry.algo.fragments import decode_layout, gather, split
from skerry.core.facts import Lineage, RunCreated
from skerry.core.state import KeptVersion, RunState
from skerry.disk import sync_folder
from skerry.errors import ConfigError, Refusal, StoreInUse
from skerry.run import room
from skerry.run.backups import failure
from skerry.run.export import fixed_pieces, trained
from skerry.run.facts import read_run
from skerry.run.genesis import FIXED, Show, begin
from skerry.run.last_words import state_in
from skerry.run.leftovers import making, remove_left
from skerry.run.outputs import fixed_file
from skerry.run.rollback import kept_version
from skerry.run.status import holders_of
from skerry.run.tensors import head_of, written
from skerry.store.files import temporary
from skerry.store.store import Store

BUDGETS = ("run.tokens", "run.steps", "run.minutes")

Overrides = list[tuple[str, Any]]


def fork(
    parent: Path, root: Path, config: configs.Config, version: int | None, show: Show = lambda done, total: None
) -> RunCreated:
    """Begin a run in this new directory with a run's newest model, or a version that it kept."""
    if os.path.lexists(root):
        raise Refusal(f"{root}: is there already: name a directory that is not; a fork overwrites nothing")
    if version is None and any(holders_of(parent)):
        raise StoreInUse(
            f"{parent}: is served, and its newest model changes: stop it first (skerry stop {parent}), or take a kept "
            f"version with --version (skerry rollback {parent} lists them)"
        )
    return read_run(parent, lambda store: _forked(store, root, config, version, show))


def taken_over(recorded: configs.Config, overrides: Overrides) -> configs.Config:
    """The parent's configuration with these in place of its own; a budget takes the place of any other."""
    for key, _ in overrides:
        if key.startswith("model."):
            raise ConfigError(
                f"{key}: the model is the run's, and a fork begins with its values: leave it out, or begin a run of "
                "another model with skerry syncer --genesis"
            )
    given = {key for key, _ in overrides if key in BUDGETS}
    cleared: Iterable[tuple[str, Any]] = [(key, 0) for key in BUDGETS if given and key not in given]
    return configs.validate(configs.resolve(recorded, overrides=[*cleared, *overrides]))


def _forked(store: Store, root: Path, config: configs.Config, version: int | None, show: Show) -> RunCreated:
    state = state_in(store)
    kept = None if version is None else kept_version(state, version)
    layout = decode_layout(state.created.layout)
    file = fixed_file(store.root, state.created) if state.created.fixed else None
    fixed_bytes = sum(entry.size for entry in file.entries.values()) if file else 0
    fragments = split(layout, config.sync.num_fragments, config.sync.cut_tensors)
    room.check(root, config, fragments, is_new=True, fixed_bytes=fixed_bytes)
    arrays = trained(store, state, kept)
    lineage = _lineage(store, state, kept)
    anew = temporary(root)
    try:
        remove_left(root)
        anew.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        anew.mkdir(mode=0o700)
        with making(anew), Store.open(anew) as fresh:
            contents, fixed = _keep_fixed(store, state, kept, anew / FIXED)
            created = begin(
                fresh, config, layout, lambda fragment: gather(fragment, arrays),
                show=show, contents=contents, fixed=fixed, lineage=lineage,
            )  # fmt: skip
        anew.rename(root)
        sync_folder(root.absolute().parent)
    except OSError as error:
        shutil.rmtree(anew, ignore_errors=True)
        raise failure(root, error) from error
    except BaseException:
        shutil.rmtree(anew, ignore_errors=True)
        raise
    return created


def _lineage(store: Store, state: RunState, kept: KeptVersion | None) -> Lineage:
    versions = kept.versions if kept is not None else tuple(at.version for at in state.fragments)
    return Lineage(state.created.run, store.tape.head, versions, None if kept is None else kept.number)


def _keep_fixed(store: Store, state: RunState, kept: KeptVersion | None, path: Path) -> tuple[Contents, str]:
    """What is not trained, in a file of the fork's own; what there is, with its digests, and the file's sha256."""
    contents = decode_contents(state.created.contents)
    if not state.created.fixed:
        return contents, ""
    entries = fixed_file(store.root, state.created).entries
    names = [fixed.name for fixed in contents.fixed]
    head, placed = head_of((entries[name] for name in names), {})
    digests = {name: xxhash.xxh3_128() for name in names}
    with written(path) as file:
        file.write(head)
        for piece in fixed_pieces(store.root, state, names, is_newest=kept is None):
            file.seek(len(head) + placed[piece.of.name].start + piece.start)
            file.write(piece.data)
            digests[piece.of.name].update(piece.data)
        file.seek(0)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    path.chmod(0o600)
    known = tuple(msgspec.structs.replace(each, digest=digests[each.name].digest()) for each in contents.fixed)
    return msgspec.structs.replace(contents, fixed=known), sha256
