"""What a run takes in the syncer's memory and on its disk, and whether it is there: known before the start.

Memory: three float32 a parameter, the newest deltas for learners a few versions behind, and what merges work in. Disk:
the first version, two checkpoints of each fragment and one that is being written, and the deltas since the older of the
two. Contributions on their way, the tape and what `store.record = "full"` keeps come on top.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from skerry.algo.codecs import payload_bytes
from skerry.config import Config
from skerry.errors import Refusal
from skerry.node.syncer import DELTAS_BYTES
from skerry.store.journal import FILE_BYTES
from skerry.text import size

STATE_BYTES = 12  # an element of a version: value, velocity, residual
GENESIS_BYTES = 4  # an element of version 0, which has values alone
DELTA_BYTES = 2  # an element of a merged delta in the journal
CHECKPOINTS = 2  # kept of a fragment
EVERY_MIN = 2  # versions between two checkpoints: with fewer the disk is busy with nothing else


def memory(config: Config, sizes: Sequence[int]) -> dict[str, int]:
    """Bytes that the syncer has in memory, by what for; `sizes` are those of the fragments."""
    down, largest = config.wire.codec_down, max(sizes)
    merges, newest = min(config.merge.threads, len(sizes)), sum(payload_bytes(down, each) for each in sizes)
    return {
        "values": STATE_BYTES * sum(sizes),
        "deltas": min(config.store.deltas_kept * newest, max(newest, DELTAS_BYTES)),
        "working": merges * ((STATE_BYTES + 4) * largest + payload_bytes(down, largest)),
    }


def disk(sizes: Sequence[int], checkpoint_every: int) -> dict[str, int]:
    """Bytes that lie on the disk at most, by what for."""
    return {
        "files": (GENESIS_BYTES + CHECKPOINTS * STATE_BYTES) * sum(sizes) + STATE_BYTES * max(sizes),
        "journal": (2 * checkpoint_every + 1) * DELTA_BYTES * sum(sizes) + FILE_BYTES,  # removed by the file
    }


def check(root: Path, config: Config, sizes: Sequence[int], is_new: bool) -> None:
    """Refuse a model that this machine cannot hold, with the numbers."""
    what = f"a model of {sum(sizes):,} parameters"
    needed, free = sum(memory(config, sizes).values()), free_memory()
    if free is not None and needed > free:
        raise Refusal(f"{what} needs {size(needed)} of memory here, {size(free)} are free: take a larger machine")
    if not is_new:
        return
    every = config.store.checkpoint_every
    needed, free = sum(disk(sizes, every).values()), free_disk(root)
    if needed > free:
        fits = [n for n in range(EVERY_MIN, every) if sum(disk(sizes, n).values()) <= free]
        less = f"with --store.checkpoint_every {fits[-1]} it fits" if fits else "choose a larger disk"
        raise Refusal(f"{what} needs {size(needed)} of disk in {root}, {size(free)} are free: {less}")


def free_disk(root: Path) -> int:
    there = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


def free_memory() -> int | None:
    """Bytes that this process may still take: of the machine, and of the container it is in; None: nobody says."""
    free = [_of_machine(), _of_container()]
    return min((each for each in free if each is not None), default=None)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    return 1024 * int(told["MemAvailable"].split()[0]) if "MemAvailable" in told else None


def _of_container() -> int | None:
    """Of a control group: its limit less what cannot be dropped of what it has."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get("file", 0))
