"""What this machine has for a run, or the container that this is in."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

GPUS = Path("/proc/driver/nvidia/gpus")


def cores_here() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib_here() -> float:
    """Of the machine, or of the container that this is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total / (1 << 30)


def gpus_here() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    if (said := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [word for word in said.split(",") if word and word != "-1"]
    return [str(at) for at in range(len(list(GPUS.iterdir())))] if GPUS.is_dir() else []
