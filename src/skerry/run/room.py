"""What a run takes in the syncer's memory and on its disk, and whether it is there: known before the start.

Memory: three float32 a parameter, the newest deltas for learners a few versions behind, what merges work in, and what
a syncer of the smallest model takes. Disk: the first version, two checkpoints of each fragment and one that is being
written, and the deltas since the older of the two, and the versions of the whole model that are kept by shares of the
budget. What `store.record = "full"` keeps, and versions that are kept by their number, grow with the run: a budget of
steps tells by how much. What of the model is not trained lies there once, as it came. Contributions on their way and
the tape come on top. While a run is served its disk is watched (`DiskWatch`), for others may fill it too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
from collections import deque
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import Fragment
from skerry.config import Config
from skerry.config import Store as Keeping
from skerry.core.schedule import sync_every_in
from skerry.errors import Refusal
from skerry.node.syncer import DELTAS_BYTES, merges_at_once
from skerry.store.journal import JOURNAL, file_bytes
from skerry.store.store import FILES
from skerry.text import size

PROCESS_BYTES = 220_000_000  # of a syncer, whatever its model: interpreter, libraries, kernels, what threads keep
STATE_BYTES = 12  # an element of a version: value, velocity, residual
GENESIS_BYTES = 4  # an element of version 0, which has values alone
DELTA_BYTES = 2  # an element of a merged delta in the journal
CHECKPOINTS = 2  # kept of a fragment
EVERY_MIN = 2  # versions between two checkpoints: with fewer the disk is busy with nothing else
MERGES = 1000  # of which is said what they add, where nobody knows how many there will be
LOOK_S = 10.0  # from one look at the disk to the next
AHEAD_S = 600.0  # a disk that lasts for less is short; and of so long a time it is known how quickly its room goes
SURE_S = 60.0  # before that, nothing is made of how quickly it goes
ROOM_AGAIN = 1.1  # times what is needed, before a short disk is called one with room: it shall not come and go

log = logging.getLogger("skerry.syncer")


def memory(config: Config, sizes: Sequence[int]) -> dict[str, int]:
    """Bytes that the syncer has in memory, by what for; `sizes` are those of the fragments."""
    down, largest = config.wire.codec_down, max(sizes)
    merges = min(merges_at_once(config.merge.threads, largest), len(sizes))
    newest = sum(payload_bytes(down, each) for each in sizes)
    return {
        "values": STATE_BYTES * sum(sizes),
        "deltas": min(config.store.deltas_kept * newest, max(newest, DELTAS_BYTES)),
        "working": merges * ((STATE_BYTES + DELTA_BYTES) * largest + payload_bytes(down, largest)),
        "process": PROCESS_BYTES,
    }


def disk(sizes: Sequence[int], store: Keeping) -> dict[str, int]:
    """Bytes that lie on the disk at most, by what for."""
    total = sum(sizes)
    version = DELTA_BYTES * total
    return {
        "files": (GENESIS_BYTES + CHECKPOINTS * STATE_BYTES) * total + STATE_BYTES * max(sizes),
        "kept": kept_versions(store.keep_every) * STATE_BYTES * total,
        # what nobody needs is removed by the file
        "journal": (2 * store.checkpoint_every + 1) * version + file_bytes(store.checkpoint_every * version),
    }


def kept_versions(every: float) -> int:
    """How many a whole run keeps besides the start, where that is a share of the budget; those by versions grow."""
    return math.ceil(1 / every) - 1 if 0 < every < 1 else 0


def grown(sizes: Sequence[int], config: Config) -> dict[str, int]:
    """Bytes that a budget of steps adds to that by its end, by what for; nothing is known of other budgets."""
    versions = _versions(config)
    return {what: math.ceil(versions * each) for what, each in _a_version(sizes, config).items()}


def _versions(config: Config) -> int:
    """How many every fragment has at the end, if rounds keep the H that is asked for; slower ones make fewer."""
    run, sync = config.run, config.sync
    if not run.steps:
        return 0
    warm = 0.0 if sync.policy == "fixed" else min(sync.warm_steps, sync.warm_share * run.steps)
    steady = (run.steps - warm) / sync_every_in(sync, "steady")
    return math.ceil(warm / sync_every_in(sync, "warm")) + math.ceil(steady) + 1  # and the closing


def _a_version(sizes: Sequence[int], config: Config) -> dict[str, float]:
    """Bytes that stay for good of one version of every fragment, if every learner is in it."""
    store, every = config.store, config.store.keep_every
    up = config.run.learners * sum(payload_bytes(config.wire.codec_up, each) for each in sizes)
    return {
        "recorded": up if store.record == "full" else 0.0,
        "kept by number": STATE_BYTES * sum(sizes) / every if every >= 1 else 0.0,
    }


def check(root: Path, config: Config, fragments: Sequence[Fragment], is_new: bool, fixed_bytes: int = 0) -> None:
    """Refuse a model that this machine cannot hold, with the numbers; on its disk `fixed_bytes` lie there besides,
    such as what of it is not trained."""
    sizes = [fragment.size for fragment in fragments]
    parameters = sum(slot.size for fragment in fragments for slot in fragment.slots)  # without what lies between those
    check_memory(parameters, sum(memory(config, sizes).values()))
    if not is_new:
        return
    check_elsewhere(root)
    needed, free = _on_disk(sizes, config) + fixed_bytes, free_disk(root)
    if needed > free:
        less = _less(config, sizes, free - fixed_bytes)
        what = f"a model of {parameters:,} parameters"
        raise Refusal(f"{what} needs {size(needed)} of disk in {root}, {size(free)} are free: {less}")
    if not config.run.steps and (more := round(MERGES * sum(_a_version(sizes, config).values()) / len(sizes))):
        grows = f"records and kept versions grow by up to {size(more)} with {MERGES:,} merges"
        log.info("%s: %s are free, the run needs %s, and its %s", root, size(free), size(needed), grows)


def check_memory(parameters: int, needed: int) -> None:
    free = free_memory()
    if free is not None and needed > free:
        what = f"a model of {parameters:,} parameters"
        raise Refusal(f"{what} needs {size(needed)} of memory here, {size(free)} are free: take a larger machine")


def check_elsewhere(folder: Path, best: str = "") -> None:
    """Refuse a folder inside of a run's own directory: what lies there is that run's own."""
    above = Path(os.path.realpath(folder)).parents
    if any(os.path.isdir(each / "tape") and os.path.isdir(each / FILES) for each in above):
        raise Refusal(f"{folder}: lies in a run's directory: name a folder elsewhere{best}")


def _on_disk(sizes: Sequence[int], config: Config) -> int:
    """By the end of the run, as far as that is known."""
    return sum(disk(sizes, config.store).values()) + sum(grown(sizes, config).values())


def _less(config: Config, sizes: Sequence[int], free: int) -> str:
    """What to do about a disk that is too small: write checkpoints more often, keep no versions, record less."""
    store = config.store
    every = range(store.checkpoint_every, EVERY_MIN - 1, -1)
    for record, keep, checkpoint in product((store.record, "decisions"), (store.keep_every, 0.0), every):
        smaller = replace(store, record=record, keep_every=keep, checkpoint_every=checkpoint)
        if _on_disk(sizes, replace(config, store=smaller)) <= free:
            words = [f"--store.record {record}"] if record != store.record else []
            words += [f"--store.keep_every {keep:g}"] if keep != store.keep_every else []
            words += [f"--store.checkpoint_every {checkpoint}"] if checkpoint != store.checkpoint_every else []
            return f"with {' '.join(words)} it fits"
    return "choose a larger disk"


class Short(NamedTuple):
    """There is less room on the disk than will soon be taken."""

    free_bytes: int
    needed_bytes: int  # for checkpoints, journal and kept versions, and for ten minutes of what grows besides


class DiskWatch:
    """Whether the disk of a run that is served is about to be full: said once, while something can be done about it.

    What `disk` reckons with comes and goes, so room is kept for all of it, whatever of it lies there now. All else on
    this disk, be it the tape, records or another's, is expected to grow as it did in the last ten minutes.
    """

    def __init__(self, root: Path, sizes: Sequence[int], store: Keeping) -> None:
        self.root = root
        self.short: Short | None = None
        self._reckoned = sum(disk(sizes, store).values())
        self._seen: deque[tuple[float, int]] = deque()  # when, and what all else had left; the last ten minutes

    def look(self, now: float) -> None:
        """See how much is free, unless that was seen just now."""
        if self._seen and now - self._seen[-1][0] < LOOK_S:
            return
        try:
            free, ours = free_disk(self.root), min(taken(self.root), self._reckoned)
        except OSError:
            return  # a disk that fails is the store's to speak of, at its next write
        self._seen.append((now, free + ours))
        while now - self._seen[0][0] > AHEAD_S:
            self._seen.popleft()
        needed = self._reckoned - ours + round(AHEAD_S * self._grows_per_s())
        was_short = self.short is not None
        is_short = free < (ROOM_AGAIN if was_short else 1) * needed
        self.short = Short(free, needed) if is_short else None
        if is_short != was_short:
            self._say(free, needed)

    def _grows_per_s(self) -> float:
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return max(0.0, (first - last) / (ended - began)) if ended - began >= SURE_S else 0.0

    def _say(self, free: int, needed: int) -> None:
        if self.short is None:
            log.info("%s: the disk has room again, %s are free", self.root, size(free))
            return
        log.warning(
            "%s: the disk is about to be full, %s are free and about %s will be taken soon: free space, or stop "
            "the run and see what skerry prune %s can remove",
            self.root, size(free), size(needed), self.root,
        )  # fmt: skip


def taken(root: Path) -> int:
    """Bytes of a run's checkpoints, kept versions and journal, of which some may be removed meanwhile."""
    total = 0
    for folder in (FILES, JOURNAL):
        for entry in os.scandir(root / folder):
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat().st_size
    return total


def free_disk(root: Path) -> int:
    return shutil.disk_usage(_there(root)).free


def is_one_disk(one: Path, other: Path) -> bool:
    """Whether what is written to one folder is missing for the other."""
    return os.stat(_there(one)).st_dev == os.stat(_there(other)).st_dev


def _there(root: Path) -> Path:
    """This folder, or the nearest above it that there is."""
    return next(folder for folder in (root.absolute(), *root.absolute().parents) if os.path.exists(folder))


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
