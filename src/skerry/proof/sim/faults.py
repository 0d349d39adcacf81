"""What goes wrong in a simulated world: drawn at random by kind, or carried out from a fault plan.

A plan is the same one that `skerry chaos` carries out on real processes. Everything here acts on the world as a bad
machine room would: it ends and stops processes, blocks and breaks links, fails the disk, turns clocks. Nothing here
knows the protocol.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from skerry.errors import StoreInUse
from skerry.proof.chaos.plan import Fault
from skerry.proof.sim import scenario
from skerry.proof.sim.files import Crash, Session
from skerry.proof.sim.learner import LearnerProcess
from skerry.proof.sim.oracle import need
from skerry.proof.sim.syncer import ROOT
from skerry.store.files import FileSystem
from skerry.store.store import Store

if TYPE_CHECKING:
    from skerry.proof.sim.world import World

DAY_S = 86_400.0
BOTH = ("up", "down")
NARROW_S = 0.5  # what a payload takes longer on a narrow link


class Faults:
    """The state of the weather; `is_on` until everything is healed."""

    def __init__(self, world: World, plan: Sequence[Fault] = ()) -> None:
        self.world, self.plan = world, plan
        self.is_on = world.scenario.fault_s > 0
        self.extra_s: dict[str, float] = {}  # learner -> delay of its link, each way
        self.narrow: set[str] = set()  # learners behind a narrow link
        self._blocked: dict[tuple[str, str], float] = {}  # (learner, direction) -> until
        self._spoils: dict[str, str] = {}  # learner -> what happens to the next frame on its link
        self._disk_fate = ""

    def begin(self) -> None:
        self.world.disk.strike = self._disk_strike
        if self.plan:
            for fault in self.plan:
                self.world.at(fault.at_s, lambda fault=fault: self._carry_out(fault))  # type: ignore[misc]
        else:
            self.world.at(self.world.scenario.fault_every_s, self._strike)

    def heal(self) -> None:
        self.is_on, self._disk_fate = False, ""
        for state in (self.extra_s, self.narrow, self._blocked, self._spoils):
            state.clear()

    # ------------------------------------------------------------------------------------------ asked by the network

    def blocked_s(self, learner: str, direction: str) -> float:
        return self._blocked.get((learner, direction), 0.0) - self.world.now

    def is_blocked(self, learner: str) -> bool:
        return any(self.blocked_s(learner, direction) > 0 for direction in BOTH)

    def slower_s(self, learner: str, is_bulk: bool) -> float:
        narrow_s = NARROW_S if is_bulk and learner in self.narrow else 0.0
        return self.extra_s.get(learner, 0.0) + narrow_s

    def spoil(self, learner: str, data: bytes) -> tuple[bytes, bool]:
        """What becomes of a frame on its way, and whether its link breaks off after it."""
        kind, random = self._spoils.pop(learner, ""), self.world.random
        if kind == "corrupt":
            at = random.randrange(len(data))
            return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :], False
        if kind == "truncate":
            return data[: random.randrange(len(data))], True
        return data, False

    def block(self, learner: str, directions: tuple[str, ...], for_s: float) -> None:
        world = self.world
        for direction in directions:
            self._blocked[learner, direction] = max(self._blocked.get((learner, direction), 0.0), world.now + for_s)
        for link in world.links:
            if link.learner == learner:
                world.at(world.scenario.config.wire.timeout_s, link.silent)

    # ------------------------------------------------------------------------------------------ drawn

    def _strike(self) -> None:
        """One fault, drawn at random, and the next one later."""
        world = self.world
        if not self.is_on:
            return
        kind = world.random.choice(world.scenario.kinds)
        world.tell("fault:", kind)
        world.saw[f"fault: {kind}"] += 1
        if not self._strike_syncer(kind):
            process = world.processes.get(world.random.choice(world.scenario.learners))
            if process is not None and not process.is_dead:
                self._strike_learner(kind, process)
        world.at(world.random.expovariate(1 / world.scenario.fault_every_s), self._strike)

    def _strike_syncer(self, kind: str) -> bool:
        world, syncer, random = self.world, self.world.syncer, self.world.random
        match kind:
            case "crash" | "power" if syncer is not None:
                if kind == "power":
                    world.cut_power()
                world.syncer_died(syncer)
            case "crash at write" | "disk":
                self._disk_fate = kind
            case scenario.INTERRUPT if syncer is not None:
                if random.random() < 0.5:
                    syncer.interrupt()
                else:
                    syncer.is_to_end = True
            case "freeze" if syncer is not None:
                syncer.paused_until = world.now + random.choice([1.0, 8.0])
            case "second syncer" if syncer is not None:
                self._second_syncer()
            case "swizzle":
                for name in world.scenario.learners:
                    start_s, for_s = random.uniform(0, 2), random.uniform(0.5, 4)
                    world.at(start_s, lambda n=name, s=for_s: self.block(n, BOTH, s))  # type: ignore[misc]
            case "jump" if syncer is not None and random.random() < 0.5:
                world.wall_ahead_s = random.choice([-world.now, 3600.0, -3600.0])
                syncer.clock_ahead_s += random.choice([5.0, DAY_S])
                world.saw["clock jump"] += 1
            case _:
                return kind in ("crash", "power", "freeze", "second syncer", scenario.INTERRUPT)
        return True

    def _strike_learner(self, kind: str, process: LearnerProcess) -> None:
        world, name, random = self.world, process.name, self.world.random
        match kind:
            case "kill":
                world.kill(process, random.uniform(0.1, 3))
            case "cut" if process.link is not None:
                process.link.cut()
            case "partition":
                self.block(name, BOTH, random.choice([0.5, 3.0, 8.0]))
            case "half-open":
                self.block(name, (random.choice(BOTH),), random.choice([0.5, 3.0, 8.0]))
            case "corrupt" | "truncate":
                self._spoils[name] = kind
            case "pause":
                process.paused_until = world.now + random.choice([1.0, 8.0])
            case "jump":
                process.clock_ahead_s += random.choice([5.0, DAY_S])
                world.saw["clock jump"] += 1
            case "take over":
                world.boot(name)  # the process that runs under this name does not know yet
            case "spoil" if world.is_exact and process.values:
                process.spoil()
            case "leave":
                process.wants_to_leave = True

    def _disk_strike(self, kind: str, name: str) -> int:
        """Asked before every file operation: what a fault has left for it."""
        world = self.world
        if not self._disk_fate or world.random.random() < 0.6:
            return 0
        fate, self._disk_fate = self._disk_fate, ""
        if fate == "crash at write":
            is_between = kind in ("append", "sync_dir") or (kind == "sync" and name.startswith("tape"))
            world.saw["crash between file and commit record"] += is_between and bool(world.oracle.trying)
            raise Crash
        return errno.ENOSPC if fate == "disk_full" else world.random.choice([errno.EIO, errno.ENOSPC])

    def _second_syncer(self) -> None:
        """Another process on the same directory: refused, and nothing changes."""
        try:
            Store.open(ROOT, files=cast(FileSystem, Session(self.world.disk)))
        except StoreInUse:
            self.world.saw["second syncer refused"] += 1
        else:
            need(False, "I13 fencing", "two syncers on one directory")

    # ------------------------------------------------------------------------------------------ planned

    def _carry_out(self, fault: Fault) -> None:
        world = self.world
        world.tell("fault:", fault)
        world.saw[f"fault: {fault.kind}"] += 1
        if fault.target == "syncer":
            self._on_syncer(fault)
        elif (process := world.processes.get(fault.target)) is not None and not process.is_dead:
            self._on_learner(fault, process)

    def _on_syncer(self, fault: Fault) -> None:
        syncer = self.world.syncer
        if fault.kind == "disk_full":
            self._disk_fate = fault.kind
        elif syncer is not None and fault.kind == "stop":
            syncer.paused_until = self.world.now + fault.for_s
        elif syncer is not None:
            self.world.syncer_died(syncer, fault.for_s)

    def _on_learner(self, fault: Fault, process: LearnerProcess) -> None:
        world, name, parameters = self.world, process.name, fault.parameters
        match fault.kind:
            case "kill" | "kill_node":  # the whole learner is one process here
                world.kill(process, fault.for_s)
            case "stop":
                process.paused_until = world.now + fault.for_s
            case "slow":
                process.speed = float(parameters["speed"])
                world.at(fault.for_s, lambda: setattr(process, "speed", 1.0))
            case "partition":
                self.block(name, BOTH, fault.for_s)
            case "half_open":
                self.block(name, (str(parameters["direction"]),), fault.for_s)
            case "delay":
                self.extra_s[name] = float(parameters["delay_s"])
                world.at(fault.for_s, lambda: self.extra_s.pop(name, None))
            case "bandwidth":
                self.narrow.add(name)
                world.at(fault.for_s, lambda: self.narrow.discard(name))
            case "drop" if process.link is not None:
                process.link.cut()
            case "corrupt" | "truncate":
                self._spoils[name] = fault.kind
            case _:
                assert fault.kind == "drop", fault  # and there is nothing to cut
