"""What a machine can do at best, measured beside what is asked about: a plain copy of memory.

Subject and reference take turns, so what slows the machine for a while slows both. What counts is their ratio.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from msgspec import Struct

from skerry.algo import codecs
from skerry.algo.fragments import F32, Layout, fragments_wanted
from skerry.errors import Refusal
from skerry.plan.layouts import even
from skerry.text import counted
from skerry.text import size as size_text

ROUNDS = 5
COPIES = 8  # of each array, one after the other: about as long as a merge takes

Tell = Callable[[str], None]


class Spread(Struct, frozen=True):
    """Of ROUNDS measurements."""

    median: float
    min: float
    max: float


def spread(numbers: Sequence[float]) -> Spread:
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


def timed(work: Callable[[], object]) -> float:
    """Seconds it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copy_gb_s(pool: ThreadPoolExecutor, pairs: Sequence[tuple[F32, F32]]) -> float:
    """Bytes read and written a second when (source, target) are copied, a pair by each thread at a time."""
    moved = sum(2 * source.nbytes * COPIES for source, _ in pairs)
    return moved / timed(lambda: list(pool.map(_copy, pairs))) / 1e9


def _copy(pair: tuple[F32, F32]) -> None:
    source, target = pair
    for _ in range(COPIES):
        np.copyto(target, source)


def merge_bytes(contributions_bytes: int, size: int, delta_codec: str, codec_down: str) -> int:
    """What a merge has to touch at least: contributions, both versions, delta and what is published, each once."""
    made = codecs.payload_bytes(delta_codec, size) + codecs.payload_bytes(codec_down, size)
    return contributions_bytes + 24 * size + made


def layout_for(parameters: int, num_fragments: int) -> Layout:
    """A model of this size, a tensor for each fragment that a run with it would have."""
    fragments = fragments_wanted(parameters, num_fragments)
    if parameters < fragments:
        many = counted(fragments, "fragment")
        raise Refusal(f"--parameters {parameters}: fewer than the {many} they would be in (sync.num_fragments)")
    return even(parameters, fragments)


def check_disk(needed_bytes: float, option: str) -> None:
    """Refuse what the folder for temporary files has no room for."""
    folder = tempfile.gettempdir()
    if needed_bytes > (there := shutil.disk_usage(folder).free):
        raise Refusal(
            f"{option}: needs {size_text(needed_bytes)} in {folder}, and {size_text(there)} are free (TMPDIR)"
        )


def check_memory(needed_bytes: float, option: str) -> None:
    """Refuse what would only measure the swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # the system does not tell
        return
    there = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if needed_bytes > there:
        raise Refusal(f"{option}: needs {size_text(needed_bytes)} of memory, and {size_text(there)} are free here")
