"""What the subjects of skerry bench share: their words of progress, their tables, and what they refuse."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from skerry.errors import Refusal
from skerry.text import Kind, count, size

PARAMETERS = Kind(count, 1, 1e11)


def tell(text: str) -> None:
    """A line of progress, beside what is measured."""
    print(text, file=sys.stderr, flush=True)


def refuse_overrides(overrides: Sequence[tuple[str, Any]]) -> None:
    """Where no run is configured a dotted key has no meaning."""
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")


def table(*columns: str) -> Table:
    """Of numbers, so all to the right."""
    made = Table(box=None, pad_edge=False, collapse_padding=True)
    for column in columns:
        made.add_column(column, justify="right")
    return made


def bytes_text(value: int | None) -> str:
    """A dash where the system does not tell."""
    return "–" if value is None else size(value)
