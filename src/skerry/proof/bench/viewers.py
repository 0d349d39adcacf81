"""What pages that are open cost a syncer: stretches with viewers and without, in one run.

The learners are those of `syncer`; the page is served all the time, as `skerry syncer --http-port` has it served, and
viewers are connections that follow its events from a process of their own. Stretches are alone and watched in turn
(`disturbed`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from skerry import algo
from skerry.engines.supervisor import LocalRun
from skerry.proof.bench import cores, disturbed
from skerry.proof.bench.reference import Tell
from skerry.proof.bench.swarm import Swarm
from skerry.proof.bench.syncer import (
    DECIDING,
    Bench,
    Job,
    Look,
    Spread,
    create,
    publication_spread,
    threads_s,
    turn_spread,
)
from skerry.shell.page import LOOPBACK, Beside, listening

BEGIN_S = 2.0  # for viewers to come, and to go
DIAL_S = 10.0
READ_BYTES = 1 << 16


class Stretch(Struct, frozen=True):
    """None where the system does not tell, or where nothing happened to speak of."""

    merges_per_s: float
    cpu: float | None  # of a core, the whole syncer
    cpu_deciding: float | None  # the thread that takes its turns
    turn_s: Spread | None  # one of its turns that had something to take in
    quorum_to_publication_s: Spread | None  # a merge's K-th contribution sent -> its version at the first learner


class Found(Struct, frozen=True):
    learners: int
    viewers: int
    parameters: int
    seconds: float  # of a stretch
    merges_per_s_asked: float
    cores: int
    load_average: float  # of this machine when it began
    alone: tuple[Stretch, ...]
    watched: tuple[Stretch, ...]


def measure(job: Job, viewers: int, tell: Tell) -> Found:
    algo.warm_up()
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        local = LocalRun(Path(folder), [], [])
        create(local.run_dir, job.config, job.layout)
        with local.ends_everything(), cores.confined(job.division.others):
            alone, watched = _Watched(job, local, tell).run_all(viewers)
    return Found(
        learners=job.load.learners,
        viewers=viewers,
        parameters=job.load.parameters,
        seconds=job.load.seconds,
        merges_per_s_asked=job.load.merges_per_s,
        cores=len(os.sched_getaffinity(0)),
        load_average=load_average,
        alone=tuple(alone),
        watched=tuple(watched),
    )


class _Watched(Bench):
    """A load, and viewers beside it now and then."""

    def run_all(self, viewers: int) -> tuple[list[Stretch], list[Stretch]]:
        with cores.confined(self.division.own):
            self.local.start_syncer()
        listener, log = listening(LOOPBACK, 0), self.local.run_dir / "logs" / "page.log"
        with self.swarm() as swarm, Beside(self.local.run_dir, listener, [], log):
            self.join(swarm)
            swarm.start()
            self.wait(swarm, self.load.sync_every * self.load.step_s, "first interval")
            watching = partial(_watching, listener.getsockname()[1], viewers)
            alone, watched = disturbed.in_turn(watching, partial(self._stretch, swarm, viewers))
            self.terminate()
        return [self._found(swarm, *each) for each in alone], [self._found(swarm, *each) for each in watched]

    def _stretch(self, swarm: Swarm, viewers: int, is_watched: bool) -> tuple[Look, Look, dict[str, float] | None]:
        self.wait(swarm, BEGIN_S, "viewers come" if is_watched else "viewers go")
        before = self.look(swarm)
        self.wait(swarm, self.load.seconds, f"{viewers} viewers" if is_watched else "alone")
        after = self.look(swarm)
        return before, after, threads_s(before, after, self.status())

    def _found(self, swarm: Swarm, before: Look, after: Look, cpu_s: dict[str, float] | None) -> Stretch:
        decisions, _ = self._decisions(before.wall, after.wall)
        seconds = after.at - before.at
        return Stretch(
            merges_per_s=len(decisions) / seconds,
            cpu=None if cpu_s is None else sum(cpu_s.values()) / seconds,
            cpu_deciding=None if cpu_s is None else cpu_s.get(DECIDING, 0.0) / seconds,
            turn_s=turn_spread(before, after),
            quorum_to_publication_s=publication_spread(decisions, swarm.seen),
        )


@contextlib.contextmanager
def _watching(port: int, count: int) -> Iterator[None]:
    with disturbed.others("skerry.proof.bench.viewers", str(port), str(count)) as said:
        assert said == b"all here\n", said
        yield


def watch(port: int, count: int) -> None:
    """Follow the events of a page as so many viewers, until stdin is closed."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for _ in range(count):
            viewer = stack.enter_context(contextlib.closing(socket.create_connection((LOOPBACK, port), DIAL_S)))
            viewer.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert viewer.recv(READ_BYTES).startswith(b"HTTP/1.1 200"), "the page lets no more in"
            selector.register(viewer, selectors.EVENT_READ, viewer)
        selector.register(sys.stdin, selectors.EVENT_READ)
        print("all here", flush=True)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    return
                assert key.data.recv(READ_BYTES), "the page hung up"


def main(words: Sequence[str]) -> None:
    watch(int(words[0]), int(words[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
