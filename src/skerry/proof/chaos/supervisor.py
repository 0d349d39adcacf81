"""Chaos on real processes: a local run whose supervisor also carries out a list of faults.

Time is counted from the first step of the run. Signals and limits strike processes, the proxy strikes links, a pace
file slows a learner. The protocol is never touched: nothing here knows more than a bad machine room does.

Rules that hold here: a fault that finds its process away is left out and not counted; every fault is told when it
begins and when it ends, and written to RUN_DIR/faults.jsonl at once; when the syncer has ended they are put on the tape
as well, so that whoever reads the run later knows what was done to it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from skerry.core.facts import Injected
from skerry.engines.supervisor import LocalRun
from skerry.proof.chaos.plan import ENDS_PROCESS, LINK, MOMENTARY, Fault
from skerry.proof.chaos.proxy import Lane, Proxy, Weather
from skerry.store.files import appended, put_in_place
from skerry.store.store import Store

FAULTS = "faults.jsonl"
LAST_WORDS_BYTES = 4096  # what a syncer without disk may still write to its log
NODE = b"skerry.shell.companion"  # on the command line of a process beside a learner


@dataclass
class Done:
    """A fault that was carried out; wall-clock times."""

    number: int
    fault: Fault
    at: float
    until: float | None = None

    @property
    def detail(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.fault.parameters.items())


@dataclass
class ChaosRun(LocalRun):
    """A local run under a schedule of faults; its learners dial through the proxy, which outlives it."""

    faults: list[Fault] = field(default_factory=list)  # in order of time
    proxy: Proxy = field(kw_only=True)
    done: list[Done] = field(default_factory=list)
    began: float | None = None  # monotonic, at the first step
    _late: list[Fault] = field(default_factory=list)  # of a moment, waiting for a link to strike

    def port_for(self, name: str) -> int:
        return self.proxy.add(name, "127.0.0.1", self.port)

    def disturb(self) -> None:
        if self.began is None and self.status.get("phase", "created") != "created":
            self.began = time.monotonic()
        if self.began is None:
            return
        passed_s = time.monotonic() - self.began
        for one in self._active():
            if self._is_over(one, passed_s):
                self._end(one)
        self._late = [fault for fault in self._late if not self._begin(fault)]
        while self.faults and self.faults[0].at_s <= passed_s:
            fault = self.faults.pop(0)
            if self._begin(fault):
                continue
            if fault.kind in MOMENTARY:  # a moment that can be any: it strikes once the link is back
                self._late.append(fault)
            else:
                self.tell(f"{fault.kind} left out: {fault.target} is away")

    def calm(self) -> None:
        for one in self._active():
            self._end(one)

    # ------------------------------------------------------------------------------------------ one fault

    def _active(self) -> list[Done]:
        return [one for one in self.done if one.until is None]

    def _begin(self, fault: Fault) -> bool:
        """False if there was nothing to strike."""
        one = Done(len(self.done) + 1, fault, time.time())
        if not self._strike(fault):
            return False
        self.done.append(one)
        if fault.kind in LINK:
            self._set_weather(fault.target)
        until = "" if fault.kind in MOMENTARY else f" for {fault.for_s:.1f} s"
        self.tell(f"{fault.kind} of {fault.target}{until}{one.detail and f' ({one.detail})'}")
        self._write(one, "begins", one.at)
        if fault.kind in MOMENTARY:
            self._end(one)
        return True

    def _strike(self, fault: Fault) -> bool:
        match fault.kind:
            case "kill" | "kill_node" | "stop" | "disk_full":
                return self._strike_process(fault)
            case "slow":
                _write_pace(self.pace_file(fault.target), float(fault.parameters["speed"]))
            case "drop":
                return self.proxy.reset(fault.target) > 0
            case "corrupt":
                return self.proxy.corrupt(fault.target, str(fault.parameters["direction"]))
            case "truncate":
                return self.proxy.truncate(fault.target, str(fault.parameters["direction"]))
            case _:
                assert fault.kind in LINK, fault  # it lasts: the link's weather is set for it
        return True

    def _strike_process(self, fault: Fault) -> bool:
        child = self.child(fault.target)
        if child.process is None or not child.is_running:
            return False
        match fault.kind:
            case "kill":
                child.kill(fault.for_s)
            case "kill_node":
                return _signal(_nodes_of(child.process.pid), signal.SIGKILL)
            case "stop":
                _signal([child.process.pid, *_nodes_of(child.process.pid)], signal.SIGSTOP)
            case "disk_full":
                child.excused_s = fault.for_s
                _fill_disk(child.process.pid, child.log)
        return True

    def _is_over(self, one: Done, passed_s: float) -> bool:
        if one.fault.kind in ENDS_PROCESS:
            return self.child(one.fault.target).started_at > one.at
        return passed_s >= one.fault.at_s + one.fault.for_s

    def _end(self, one: Done) -> None:
        fault, one.until = one.fault, time.time()
        if fault.kind == "stop":
            process = self.child(fault.target).process
            assert process is not None
            _signal([process.pid, *_nodes_of(process.pid)], signal.SIGCONT)
        elif fault.kind == "slow":
            self.pace_file(fault.target).unlink(missing_ok=True)
        elif fault.kind in LINK:
            self._set_weather(fault.target)
        elif fault.kind in ENDS_PROCESS:
            one.until = max(one.at, self.child(fault.target).started_at)
        if fault.kind not in (*MOMENTARY, *ENDS_PROCESS):  # those are told of otherwise
            self.tell(f"{fault.kind} of {fault.target} is over")
        self._write(one, "ends", one.until)

    def _set_weather(self, name: str) -> None:
        self.proxy.set(name, weather_of(one.fault for one in self._active() if one.fault.target == name))

    def _write(self, one: Done, what: str, at: float) -> None:
        record: dict[str, Any] = {"fault": one.number, "kind": one.fault.kind, "target": one.fault.target}
        record |= {"what": what, "at": at, "detail": one.detail}
        with appended(self.run_dir / FAULTS) as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def write_to_tape(self) -> None:
        """Once the syncer has ended: what was done to it."""
        facts = [Injected(d.fault.kind, d.fault.target, d.detail, d.at, d.until or d.at) for d in self.done]
        if facts:
            with Store.open(self.run_dir) as store:
                store.commit([msgspec.msgpack.encode(fact) for fact in facts])


def weather_of(faults: Iterable[Fault]) -> Weather:
    """What faults of one link make of it together."""
    up = down = Lane()
    for fault in faults:
        up, down = _worse(up, fault, "up"), _worse(down, fault, "down")
    return Weather(up, down)


def _worse(lane: Lane, fault: Fault, direction: str) -> Lane:
    blocked = fault.kind == "partition" or (fault.kind == "half_open" and fault.parameters["direction"] == direction)
    delay_s = float(fault.parameters.get("delay_s", 0.0))
    rates = [rate for rate in (lane.rate_bps, 1e6 * float(fault.parameters.get("mbit", 0.0))) if rate]
    return Lane(lane.delay_s + delay_s, min(rates, default=0.0), lane.blocked or blocked)


def _write_pace(file: Path, share: float) -> None:
    file.parent.mkdir(mode=0o700, exist_ok=True)
    put_in_place(file, f"{share}\n".encode())  # the learner reads all of it or nothing


def _nodes_of(pid: int) -> list[int]:
    """The process beside a learner, if it has one: where the machine stops, it stops too."""
    with contextlib.suppress(OSError):  # it has ended, or this system has no such files: then nodes are threads
        files = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(word) for file in files for word in file.read_text().split()]
        return [child for child in children if NODE in Path(f"/proc/{child}/cmdline").read_bytes()]
    return []


def _signal(pids: Iterable[int], number: int) -> bool:
    """Whether there was somebody to signal."""
    is_there = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            is_there = True
    return is_there


def _fill_disk(pid: int, log: Path) -> None:
    """Every write of this process fails where a full disk would fail it; only its log has room for last words."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (log.stat().st_size + LAST_WORDS_BYTES, hard))
