"""What honest learners have of a syncer while others flood it: stretches with a flood and without, in one run.

The learners are those of `syncer`, the others those of `hostile`. Each kind of flood has its stretches, calm and
flooded in turn (`disturbed`). A ratio is that of the merges in all flooded stretches to those in the calm ones beside
them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from skerry import algo
from skerry.algo import codecs
from skerry.engines.supervisor import LocalRun
from skerry.errors import MeasurementError
from skerry.proof.bench import cores, disturbed
from skerry.proof.bench.hostile import FLOODS, Flood, Harm, hostile_name
from skerry.proof.bench.reference import Tell
from skerry.proof.bench.swarm import Swarm
from skerry.proof.bench.syncer import DECIDING, POLL_S, SOCKETS, Bench, Job, Status, create, key_files, threads_s

STATUS_S = 60.0  # for a syncer to write its next status
BEGIN_S = 1.0  # from the start of a flood to the stretch that is measured


class Stretch(Struct, frozen=True):
    merges_per_s: float
    sockets_cpu: float | None  # of a core, the thread that has the sockets
    deciding_cpu: float | None
    rss_bytes: int | None  # of the syncer when it ended


class Flooded(Struct, frozen=True):
    """One kind of flood: the stretches with it and those without it beside them."""

    kind: Flood
    ratio: float | None  # of merges a second
    calm: tuple[Stretch, ...]
    flooded: tuple[Stretch, ...]
    links_lost: int  # of honest learners, in all of them


class Found(Struct, frozen=True):
    learners: int
    hostile: int
    parameters: int
    fragments: int
    seconds: float  # of a stretch
    merges_per_s_asked: float
    cores: int
    load_average: float  # of this machine when it began
    kinds: tuple[Flooded, ...]


def measure(job: Job, hostile: int, tell: Tell, kinds: tuple[Flood, ...] = FLOODS) -> Found:
    """The job's configuration has room for the hostile ones too."""
    algo.warm_up()
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        local = LocalRun(Path(folder) / "run", [], [], ["--keys"] if job.load.tls else [])
        create(local.run_dir, job.config, job.layout)
        if not job.load.tls:
            local.token_file = Path(folder) / "token"
            local.token_file.touch(0o600)
            local.token_file.write_text(secrets.token_hex(32))
        with local.ends_everything(), cores.confined(job.division.others):
            flooded = tuple(_Floods(job, local, tell).run_all(hostile, kinds))
    return Found(
        learners=job.load.learners,
        hostile=hostile,
        parameters=job.load.parameters,
        fragments=job.load.fragments,
        seconds=job.load.seconds,
        merges_per_s_asked=job.load.merges_per_s,
        cores=len(os.sched_getaffinity(0)),
        load_average=load_average,
        kinds=flooded,
    )


class _Floods(Bench):
    """A load, and floods beside it in turn."""

    def run_all(self, hostile: int, kinds: tuple[Flood, ...]) -> Iterator[Flooded]:
        names = [hostile_name(index) for index in range(hostile)] if self.load.tls else []
        self._keys = tuple(map(str, key_files(self.local.run_dir, names)))
        self._guessed = tuple(map(str, key_files(self.local.run_dir.parent / "another", names)))
        with cores.confined(self.division.own):
            self.local.start_syncer()
        with self.swarm() as swarm:
            self.join(swarm)
            swarm.start()
            self.wait(swarm, self.load.sync_every * self.load.step_s, "first interval")
            for kind in kinds:
                yield self._kind(swarm, kind, hostile)
            self.terminate()

    def _kind(self, swarm: Swarm, kind: Flood, hostile: int) -> Flooded:
        lost = swarm.links_lost
        calm, flooded = disturbed.in_turn(partial(self._harm, kind, hostile), partial(self._stretch, swarm, kind))
        without = sum(each.merges_per_s for each in calm)
        ratio = sum(each.merges_per_s for each in flooded) / without if without else None
        return Flooded(kind, ratio, tuple(calm), tuple(flooded), swarm.links_lost - lost)

    def _status_after(self, swarm: Swarm, at: float) -> Status:
        """One that is newer; a syncer on a busy machine may not have written any in a short stretch."""
        deadline = time.monotonic() + STATUS_S
        while (status := self.status()).at <= at:
            if time.monotonic() > deadline:
                raise MeasurementError(f"the syncer has written no status for {STATUS_S:.0f} s: is its disk full?")
            self.wait(swarm, POLL_S, "waiting for a status")
        return status

    def _stretch(self, swarm: Swarm, kind: Flood, is_flooded: bool) -> Stretch:
        self.wait(swarm, BEGIN_S, f"{kind}: begins")
        began, before = self.status(), self.look(swarm)
        self.wait(swarm, self.load.seconds, kind if is_flooded else "calm")
        ended, after = self._status_after(swarm, began.at), self.look(swarm)
        seconds = after.at - before.at
        cpu_s = threads_s(before, after, ended)
        sockets_s, deciding_s = (None if cpu_s is None else cpu_s.get(name, 0.0) for name in (SOCKETS, DECIDING))
        return Stretch(
            merges_per_s=(ended.merges - began.merges) / (ended.at - began.at),
            sockets_cpu=None if sockets_s is None else sockets_s / seconds,
            deciding_cpu=None if deciding_s is None else deciding_s / seconds,
            rss_bytes=cores.memory_bytes(self.pid, "VmRSS"),
        )

    @contextlib.contextmanager
    def _harm(self, kind: Flood, count: int) -> Iterator[None]:
        wire, size = self.config.wire, self.fragments[0].size
        harm = Harm(
            port=self.local.port,
            kind=kind,
            count=count,
            token=self.token,
            keys=self._guessed if kind == "guesses" else self._keys,
            parameters=self.load.parameters,
            fragments=self.load.fragments,
            streams=wire.streams,
            codec=wire.codec_up,
            payload_bytes=codecs.payload_bytes(wire.codec_up, size),
        )
        with disturbed.others("skerry.proof.bench.hostile", msgspec.json.encode(harm).decode()):
            yield
