"""skerry data: packs, which are tokens on disk in shards that training maps into memory.

pack   text files, JSON lines, folders, standard input or a dataset of Hugging Face into a pack
show   what a pack holds; --check reads all of it and compares with what was packed
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from skerry import cli
from skerry.cli import live
from skerry.data.encode import BYTES, Encoder, encoder_of, together
from skerry.data.pack import Pack
from skerry.data.sources import Sources
from skerry.data.write import SHARD_TOKENS, Writer
from skerry.errors import Refusal, one_line
from skerry.text import Kind, count, size

SHARD = Kind(count, 1, 1 << 40)
SKIPPED_SHOWN = 3


def run(words: Sequence[str]) -> int:
    if words and words[0] == "pack":
        return _pack(words[1:])
    if words and words[0] == "show":
        return _show(words[1:])
    parser = cli.Parser(prog="skerry data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pack", "show"])
    parser.parse_args(list(words))
    raise AssertionError(words)


def _pack(words: Sequence[str]) -> int:
    parser = cli.Parser(
        prog="skerry data pack", description="Tokens of text, in shards that training maps into memory."
    )
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE",
        help='a text file, a .jsonl file (key "text"), a folder of them, stdlib, - for standard input, or '
        "hf:NAME[:CONFIG][@SPLIT], a dataset of Hugging Face with a column text",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the pack; must not exist")
    parser.add_argument(
        "--tokenizer", default=BYTES, metavar="NAME",
        help="bytes (default), a tokenizer.json, or a name on the Hugging Face hub",
    )  # fmt: skip
    parser.add_argument(
        "--separator", metavar="TOKEN",
        help="the token that ends each document, or none (default: 0 of bytes, else the tokenizer's own if it has one)",
    )  # fmt: skip
    parser.add_argument("--shard-tokens", type=cli.counting(SHARD), default=SHARD_TOKENS, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = _parsed(parser, words)
    if options.out.exists() or not options.out.parent.is_dir():
        fault = "exists: remove it or name another" if options.out.exists() else f"{options.out.parent} is not a folder"
        raise Refusal(f"--out {options.out}: {fault}")
    sources, encoder = Sources(options.sources), encoder_of(options.tokenizer)
    separator = _separator(options.separator, encoder)
    quiet = options.json and not sys.stderr.isatty()
    with (
        live.counting("packing", quiet, "bytes") as told,
        Writer(options.out, encoder.vocabulary, encoder.name, separator, options.shard_tokens) as writer,
    ):
        _write(sources, encoder, writer, told)
    cli.tell(_record(Pack(options.out)) | {"skipped": sources.skipped}, options.json, _print)
    return 0


def _write(sources: Sources, encoder: Encoder, writer: Writer, told: Callable[[int, int], None]) -> None:
    for pieces in together(sources.pieces()):
        for piece, tokens in zip(pieces, encoder.encode(pieces), strict=True):
            writer.add(tokens)
            if piece.ends:
                writer.end_document()
        told(pieces[-1].done_bytes, max(sources.total_bytes, pieces[-1].done_bytes))


def _separator(given: str | None, encoder: Encoder) -> int | None:
    if given is None:
        return encoder.separator
    if given == "none":
        return None
    try:
        token = cli.whole(given)
    except ValueError:
        raise Refusal(f"--separator {given}: give a token's number, or none") from None
    if not 0 <= token < encoder.vocabulary:
        raise Refusal(f"--separator {token}: {encoder.name} has tokens from 0 to {encoder.vocabulary - 1}")
    return token


def _show(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry data show", description="What a pack holds.")
    parser.add_argument("pack", type=Path, metavar="DIR")
    parser.add_argument("--check", action="store_true", help="read every shard, and compare with what was packed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = _parsed(parser, words)
    pack = Pack(options.pack)
    if options.check:
        with live.counting("checking", options.json and not sys.stderr.isatty(), "shards") as told:
            pack.check(told)
    cli.tell(_record(pack) | {"checked": options.check}, options.json, _print)
    return 0


def _parsed(parser: cli.Parser, words: Sequence[str]) -> argparse.Namespace:
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    return options


def _record(pack: Pack) -> dict[str, Any]:
    index: dict[str, Any] = msgspec.to_builtins(pack.index)
    held_out = len(pack.held_out)
    return {"pack": pack.name, **index, "digest": pack.digest, "train": pack.tokens - held_out, "held_out": held_out}


def _print(record: dict[str, Any]) -> None:
    if skipped := record.get("skipped"):
        more = f" and {len(skipped) - SKIPPED_SHOWN} more" if len(skipped) > SKIPPED_SHOWN else ""
        print(f"not text, left out: {', '.join(skipped[:SKIPPED_SHOWN])}{more}", file=sys.stderr)
    disk_bytes = record["tokens"] * {"uint8": 1, "uint16": 2, "uint32": 4}[record["dtype"]]
    print(
        f"{record['pack']}: {record['tokens']:,} tokens of {record['documents']:,} documents, {size(disk_bytes)} in "
        f"{len(record['shards'])} shards ({record['dtype']})\n"
        f"tokenizer {one_line(record['tokenizer'])}, vocabulary {record['vocabulary']:,}, "
        f"separator {record['separator']}\n"
        f"{record['train']:,} tokens to train on, {record['held_out']:,} held out\n"
        f"digest {record['digest']}" + (", every shard is as it was packed" if record.get("checked") else "")
    )
