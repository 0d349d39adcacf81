"""How long a syncer takes to open its port: over a fresh run directory, and again after it was killed.

The genesis is a safetensors file of random values. The clock runs from the command until a syncer answers who dials its
port and asks for its status. Both starts are processes of their own, so each one's memory is its own too.
"""

from __future__ import annotations

import json
import socket
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from skerry import config as configs
from skerry.algo.fragments import Layout
from skerry.engines.child import Child
from skerry.engines.supervisor import ours
from skerry.errors import NoAnswer, RunFailed
from skerry.proof.bench import cores
from skerry.proof.bench.reference import Tell, check_disk, layout_for
from skerry.wire.inquiry import ask_status

HOST = "127.0.0.1"
MINUTES = configs.most("run.minutes")  # a budget that no measurement spends
OPEN_S_MAX = 900.0
POLL_S = 0.01
DISK_BYTES = 16  # a parameter at most: the genesis, and values, velocity and residual of its first version
BLOCK_BYTES = 512  # what the system counts a file's room in


class Row(Struct, frozen=True):
    """Both starts with one model; None where the system does not tell."""

    parameters: int
    fresh_s: float  # command -> open port, with a genesis
    again_s: float  # the same after a SIGKILL, with what lies in the run directory
    fresh_peak_bytes: int | None  # of memory, until the port was open
    again_peak_bytes: int | None
    disk_bytes: int  # of the run directory, then
    bytes_per_parameter: float  # of disk


class Opened(NamedTuple):
    seconds: float
    peak_bytes: int | None


def measure(parameters: Sequence[int], overrides: Iterable[tuple[str, Any]], tell: Tell) -> list[Row]:
    overrides = [("run.minutes", MINUTES), *overrides]
    config = configs.validate(configs.resolve(configs.Config(), None, overrides))
    layouts = [layout_for(count, config.sync.num_fragments) for count in parameters]
    for count in parameters:
        check_disk(DISK_BYTES * count, f"--parameters {count}")
    return [_row(layout, overrides, tell) for layout in layouts]


def _row(layout: Layout, overrides: Iterable[tuple[str, Any]], tell: Tell) -> Row:
    words = [f"--{key}={msgspec.json.encode(value).decode()}" for key, value in overrides]
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        genesis, run_dir = Path(folder) / "genesis.safetensors", Path(folder) / "run"
        tell(f"{layout.param_count} parameters: writing a genesis")
        _write_genesis(genesis, layout)
        tell("a fresh start")
        with _syncer(run_dir, ["--genesis", str(genesis), *words]) as fresh:
            pass  # killed as soon as its port is open
        tell("a start after SIGKILL")
        with _syncer(run_dir, []) as again:
            disk_bytes = sum(BLOCK_BYTES * file.stat().st_blocks for file in run_dir.rglob("*"))
    return Row(
        parameters=layout.param_count,
        fresh_s=fresh.seconds,
        again_s=again.seconds,
        fresh_peak_bytes=fresh.peak_bytes,
        again_peak_bytes=again.peak_bytes,
        disk_bytes=disk_bytes,
        bytes_per_parameter=disk_bytes / layout.param_count,
    )


@contextmanager
def _syncer(run_dir: Path, words: Sequence[str]) -> Iterator[Opened]:
    """A syncer with an open port, and a SIGKILL at the end."""
    port = _free_port()
    command = ours("syncer", "--run", str(run_dir), "--port", str(port), *words)
    child = Child("syncer", command, run_dir.with_suffix(".log"))
    began = time.monotonic()
    child.start()
    assert child.process is not None
    try:
        while not _tells(port):
            if not child.is_running:
                raise RunFailed(f"the syncer ended: {child.last_line().removeprefix('skerry: ')}")
            if time.monotonic() - began > OPEN_S_MAX:
                raise RunFailed(f"no port was open after {OPEN_S_MAX:.0f} s: try fewer --parameters")
            time.sleep(POLL_S)
        yield Opened(time.monotonic() - began, cores.memory_bytes(child.process.pid, "VmHWM"))
    finally:
        child.process.kill()
        child.process.wait()


def _tells(port: int) -> bool:
    """The run is served: a syncer that only looks whether it could have the port has no status."""
    try:
        ask_status(HOST, port, None)
    except NoAnswer:
        return False
    return True


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def _write_genesis(path: Path, layout: Layout) -> None:
    """A safetensors file, a tensor at a time: none is in memory with another."""
    header, end = {}, 0
    for tensor in layout.tensors:
        begin, end = end, end + 4 * tensor.size
        header[tensor.name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, end]}
    text, dice = json.dumps(header).encode(), np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in layout.tensors:
            file.write(dice.standard_normal(tensor.size, np.float32).data)
