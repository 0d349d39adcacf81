"""skerry export: write a run's model as safetensors, loadable without Skerry.

The file has exactly the state_dict that made the genesis, or what another file has (--like). --folder writes it as
transformers' from_pretrained loads it, --adapter as PEFT loads an adapter.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from skerry import cli
from skerry.algo.fragments import decode_layout
from skerry.cli.live import forked_from
from skerry.core.facts import Committed
from skerry.core.state import KeptVersion, RunState
from skerry.errors import DiskFull, FileDamaged, Refusal, TapeDamaged
from skerry.run import repair
from skerry.run.export import lineage_of, part_at, write_model
from skerry.run.facts import facts_of, read_run
from skerry.run.last_words import cut_off, state_in
from skerry.run.outputs import ADAPTER, Output, adapter, files_for, like
from skerry.run.rollback import kept_version
from skerry.run.tensors import written
from skerry.store.lock import NO_ROOM
from skerry.store.store import FILES, RECORD, Store

PT = {"format": "pt"}  # metadata without which transformers loads no safetensors


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry export", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--version", type=cli.whole, metavar="N", help="a kept version (skerry rollback RUN_DIR lists them)"
    )
    parser.add_argument("--out", type=Path, help="default: RUN_DIR/model.safetensors, RUN_DIR/model-N.safetensors")
    parser.add_argument(
        "--like", type=Path, metavar="FILE", help="with names, dtypes and order of this safetensors file"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="as from_pretrained loads it: model and config.json")
    parser.add_argument(
        "--config-from", type=Path, metavar="DIR", help="with --folder: take config.json and tokenizer files from here"
    )
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="what is trained of a PEFT model, as PEFT loads it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    form = _form(options)
    record = read_run(options.run, lambda store: _exported(store, form, options.version))
    cli.tell(record, options.json, _show)
    return 0


class Form(NamedTuple):
    """Where a model goes, and as what."""

    out: Path
    like: Path | None = None
    folder: Path | None = None  # which `out` is in
    config_from: Path | None = None
    is_adapter: bool = False


def _form(options: argparse.Namespace) -> Form:
    given = [word for word in ("out", "folder", "adapter") if getattr(options, word) is not None]
    if len(given) > 1:
        raise Refusal(f"--{given[0]} and --{given[1]}: both say where to; give one of them")
    if options.config_from is not None and options.folder is None:
        raise Refusal("--config-from: goes with --folder")
    if options.like is not None and options.adapter is not None:
        raise Refusal("--like and --adapter: both say which tensors there are; give one of them")
    if options.adapter is not None:
        return Form(options.adapter / "adapter_model.safetensors", None, options.adapter, None, is_adapter=True)
    if options.folder is not None:
        return Form(options.folder / "model.safetensors", options.like, options.folder, options.config_from)
    name = "model.safetensors" if options.version is None else f"model-{options.version}.safetensors"
    return Form(options.out or options.run / name, options.like)


def _exported(store: Store, form: Form, version: int | None) -> dict[str, Any]:
    state = state_in(store)
    left_out = cut_off(store, state) or store.left_out
    kept = None if version is None else kept_version(state, version)
    try:
        digest = _written(store, state, form, kept)
    except FileDamaged as error:
        raise type(error)(_explain(store, state, kept, error)) from None
    return {
        "model_path": str(form.out),
        "model_sha256": digest,
        "phase": state.phase,
        "merges": state.merges,
        "version": version,
        "parameters": decode_layout(state.created.layout).param_count,
        "left_out": left_out,
        "lineage": lineage_of(state.created),
    }


def _written(store: Store, state: RunState, form: Form, kept: KeptVersion | None) -> str:
    outputs, files = None, dict[str, bytes]()
    if form.like is not None:
        outputs = like(store.root, state.created, form.like)
    if form.is_adapter:
        outputs, text = adapter(store.root, state.created)
        files[ADAPTER] = text.encode()
    elif form.folder is not None:
        files = files_for(state.created, form.config_from)
    if form.folder is not None:
        _make_folder(form.folder)
    digest = export(store, state, form.out, kept, outputs, PT if form.folder is not None else {})
    for name, data in files.items():
        with written(form.out.with_name(name)) as file:
            file.write(data)
    return digest


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise Refusal(f"{folder}: cannot be made ({error.strerror}): name another folder") from None


def _show(record: dict[str, Any]) -> None:
    if record["left_out"]:
        print(record["left_out"], file=sys.stderr)
    version = record["version"]
    when = f"after {record['merges']} merges" if version is None else f"of kept version {version}"
    forked = f"\nforked from {forked_from(record['lineage'])}" if record["lineage"] else ""
    print(
        f"{record['model_path']}  ({record['parameters']:,} parameters {when})\nsha256 {record['model_sha256']}{forked}"
    )


def _explain(store: Store, state: RunState, kept: KeptVersion | None, error: FileDamaged) -> str:
    """Why there is no model to write, and how there can be one."""
    if kept is not None:
        return f"kept version {kept.number}: {error}, or try skerry syncer --run {store.root} --repair"
    damage = repair.damaged(store, state)
    if not damage:  # it is what is not trained, and says so
        return str(error)
    hint = f", or make it from the record: skerry replay {store.root} --out FILE" if _is_recorded(store, state) else ""
    return repair.explain(store, state, damage) + hint


def _is_recorded(store: Store, state: RunState) -> bool:
    """Whether the run's start and every contribution since lie there, by their names."""
    try:
        merges = [fact.result.payloads for _, fact in facts_of(store) if isinstance(fact, Committed)]
    except TapeDamaged:
        return False
    files = [store.root / FILES / file for file in state.created.files]
    files += [store.root / RECORD / file for file in merges]  # itself a folder where nothing was recorded
    return len(merges) == state.merges and all(file.is_file() for file in files)


def export(
    store: Store,
    state: RunState,
    out: Path,
    kept: KeptVersion | None = None,
    outputs: Sequence[Output] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """`write_model`, with what the file system says against it in one line."""
    try:
        check_out(store.root, out)
        return write_model(store, state, out, kept, outputs, metadata)
    except (OSError, SafetensorError) as error:
        is_full = getattr(error, "errno", None) in NO_ROOM
        kind, remedy = (DiskFull, "free space, or name") if is_full else (Refusal, "name")
        raise kind(f"{out}: cannot be written ({error}): {remedy} another with --out") from None


def check_out(root: Path, out: Path) -> None:
    """Refuse a name under which no model of the run in `root` can be written, or only over a part of some run."""
    if out.is_dir():
        raise Refusal(f"--out {out}: is a folder; name a file in it")
    if os.path.lexists(out) and not stat.S_ISREG(out.lstat().st_mode):
        raise Refusal(f"--out {out}: is a link, a device or a pipe, which a file would take the place of; name a file")
    if not out.parent.is_dir():
        raise Refusal(f"--out {out}: {out.parent} is not a folder")
    if part := part_at(root, out):
        raise Refusal(f"--out {out}: {part} is a part of a run; name another file")
