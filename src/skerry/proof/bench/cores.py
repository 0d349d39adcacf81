"""Which cores a process may use, and, where there is /proc, what its threads have used of them and its memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from skerry.errors import Refusal

REST = "other"  # threads without a name, or that are gone


class Cores(NamedTuple):
    """Who runs where, what is measured and the others; None: on any core."""

    own: set[int] | None = None
    others: set[int] | None = None


def can_pin() -> bool:
    return hasattr(os, "sched_setaffinity")


def divided(count: int) -> Cores:
    """So many cores for what is measured, the rest for the others; for 0, or where nothing can be pinned, no rule."""
    if not count or not can_pin():
        return Cores()
    allowed = sorted(os.sched_getaffinity(0))
    if count >= len(allowed):
        raise Refusal(f"--cores {count}: of the {len(allowed)} cores here at least one must be left to the others")
    return Cores(set(allowed[:count]), set(allowed[count:]))


@contextlib.contextmanager
def confined(cores: set[int] | None) -> Iterator[None]:
    """This thread, and every thread and process that it starts meanwhile, stays on these cores."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Usage(NamedTuple):
    """CPU seconds of a process and of each thread it has, by the system's id; and what they waited for a core."""

    total_s: float
    threads_s: dict[int, float]
    waited_s: float = 0.0  # ready to run while others ran; 0 where the system does not tell


def usage(pid: int) -> Usage | None:
    """As it stands; None where the system does not tell."""
    root = Path(f"/proc/{pid}")
    try:
        total_s = _cpu_s(root / "stat")
    except OSError:
        return None
    threads_s, waited_s = {}, 0.0
    for folder in (root / "task").iterdir():
        with contextlib.suppress(OSError):  # it has ended since, or the system keeps no schedstat
            threads_s[int(folder.name)] = _cpu_s(folder / "stat")
            waited_s += int((folder / "schedstat").read_text().split()[1]) / 1e9
    return Usage(total_s, threads_s, waited_s)


def spent(before: Usage, after: Usage, names: dict[int, str]) -> dict[str, float]:
    """CPU seconds between two looks by the threads' names, the busiest first; what no name is known of is `REST`."""
    by_name: dict[str, float] = {}
    for thread, cpu_s in after.threads_s.items():
        if thread in names:
            used_s = cpu_s - before.threads_s.get(thread, 0.0)
            by_name[names[thread]] = by_name.get(names[thread], 0.0) + used_s
    by_name[REST] = max(0.0, after.total_s - before.total_s - sum(by_name.values()))
    return dict(sorted(by_name.items(), key=lambda item: -item[1]))


def _cpu_s(stat: Path) -> float:
    """User and system time, the 14th and 15th field; the second, in brackets, may hold anything."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, which: str) -> int | None:
    """`VmRSS`, what a process has in memory, or `VmHWM`, the most it ever had; None where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{which}:")), None)


def written_bytes(pid: int) -> int | None:
    """What a process has handed to `write` and its kin, which sockets are not; None where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def forget_peak(pid: int) -> None:
    """Have `VmHWM` of a process count from now on, where the system can."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
