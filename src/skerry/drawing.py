"""How pictures look: the style of all plots, and saving one so that the same numbers give the same bytes.

Needs matplotlib only where something is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "svg.hashsalt": "skerry",
    "svg.fonttype": "none",
}


def save(figure: Any, stem: Path, dpi: int) -> list[Path]:
    """STEM.png and STEM.svg; the same figure gives the same files, byte for byte."""
    files = [stem.with_name(stem.name + ending) for ending in (".png", ".svg")]
    figure.savefig(files[0], dpi=dpi, metadata={"Software": None})
    figure.savefig(files[1], metadata={"Date": None, "Creator": None})
    return files
