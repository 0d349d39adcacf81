"""skerry export: write a run's model as safetensors, loadable without Skerry."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from skerry import cli
from skerry.algo.fragments import decode_layout
from skerry.core.facts import Committed
from skerry.core.state import KeptVersion, RunState
from skerry.errors import FileDamaged, Refusal, TapeDamaged
from skerry.run import repair
from skerry.run.export import part_at, write_model
from skerry.run.facts import facts_of, read_run
from skerry.run.last_words import cut_off, state_in
from skerry.run.rollback import kept_version
from skerry.store.store import FILES, RECORD, Store


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry export", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--version", type=cli.whole, metavar="N", help="a kept version (skerry rollback RUN_DIR lists them)"
    )
    parser.add_argument("--out", type=Path, help="default: RUN_DIR/model.safetensors, RUN_DIR/model-N.safetensors")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    name = "model.safetensors" if options.version is None else f"model-{options.version}.safetensors"
    out = options.out or options.run / name
    record = read_run(options.run, lambda store: _exported(store, out, options.version))
    cli.tell(record, options.json, _show)
    return 0


def _exported(store: Store, out: Path, version: int | None) -> dict[str, Any]:
    state = state_in(store)
    left_out = cut_off(store, state) or store.left_out
    kept = None if version is None else kept_version(state, version)
    try:
        digest = export(store, state, out, kept)
    except FileDamaged as error:
        raise type(error)(_explain(store, state, kept, error)) from None
    return {
        "model_path": str(out),
        "model_sha256": digest,
        "phase": state.phase,
        "merges": state.merges,
        "version": version,
        "parameters": decode_layout(state.created.layout).param_count,
        "left_out": left_out,
    }


def _show(record: dict[str, Any]) -> None:
    if record["left_out"]:
        print(record["left_out"], file=sys.stderr)
    version = record["version"]
    when = f"after {record['merges']} merges" if version is None else f"of kept version {version}"
    print(f"{record['model_path']}  ({record['parameters']:,} parameters {when})\nsha256 {record['model_sha256']}")


def _explain(store: Store, state: RunState, kept: KeptVersion | None, error: FileDamaged) -> str:
    """Why there is no model to write, and how there can be one."""
    if kept is not None:
        return f"kept version {kept.number}: {error}, or try skerry syncer --run {store.root} --repair"
    hint = f", or make it from the record: skerry replay {store.root} --out FILE" if _is_recorded(store, state) else ""
    return repair.explain(store, state, repair.damaged(store, state)) + hint


def _is_recorded(store: Store, state: RunState) -> bool:
    """Whether the run's start and every contribution since lie there, by their names."""
    try:
        merges = [fact.result.payloads for _, fact in facts_of(store) if isinstance(fact, Committed)]
    except TapeDamaged:
        return False
    files = [store.root / FILES / file for file in state.created.files]
    files += [store.root / RECORD / file for file in merges]  # itself a folder where nothing was recorded
    return len(merges) == state.merges and all(file.is_file() for file in files)


def export(store: Store, state: RunState, out: Path, kept: KeptVersion | None = None) -> str:
    """`write_model`, with what the file system says against it in one line."""
    try:
        check_out(store.root, out)
        return write_model(store, state, out, kept)
    except (OSError, SafetensorError) as error:
        raise Refusal(f"{out}: cannot be written ({error}): free space, or name another with --out") from None


def check_out(root: Path, out: Path) -> None:
    """Refuse a name under which no model of the run in `root` can be written, or only over a part of some run."""
    if out.is_dir():
        raise Refusal(f"--out {out}: is a folder; name a file in it")
    if not out.parent.is_dir():
        raise Refusal(f"--out {out}: {out.parent} is not a folder")
    if part := part_at(root, out):
        raise Refusal(f"--out {out}: {part} is a part of a run; name another file")
