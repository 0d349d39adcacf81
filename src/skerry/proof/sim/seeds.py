"""Many seeds at once: worlds side by side in a few processes, what happened counted, failures told."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import active_children

from skerry.proof.chaos.plan import FaultPlan
from skerry.proof.sim.scenario import draw, under
from skerry.proof.sim.world import World
from skerry.python import Spawning
from skerry.shell.signals import end_with, held_back

CHUNK = 20  # seeds handed to a process at a time

RARE = (
    "merge at bare quorum",
    "merge of all",
    "late contribution carried over",
    "several events in one turn",
    "report replaced by a newer one",
    "contributed by order",
    "rejoined in a new life",
    "rejoined in mid-round",
    "crash between file and commit record",
    "unacknowledged commit survived a crash",
    "power cut",
    "stopped by a disk error",
    "tape rotated",
    "second syncer refused",
    "fenced old life",
    "an old life's contribution merged",
    "frame refused",
    "silent link given up",
    "clock jump",
    "optimizer reset",
    "left",
    "version waited for the window",
    "held while its fragment merged",
    "merges committed together",
    "message waited for the disk",
    "checkpoint",
    "merges done again at a start",
    "work overtaken by later work",
    "syncer crash while merging",
    "interrupted while merging",
    "refused: duplicate",
    "refused: full",
    "refused: overlap",
    "fast-forward: stale",
    "version kept",
    "rolled back",
    "fast-forward: rolled back",
    "alone for too long",
    "turned out",
    "ordered: set",
    "ordered: extend",
    "ordered: drop",
    "ordered: readmit",
    "ordered: finish",
    "order carried out on the directory",
    "order given again",
    "lives summed up",
    "hostile work: merged",
    "hostile work: died",
    "refused: implausible",
    "turned away: in use",
    "taken over with its key",
    "discarded: expelled",
    "discarded: died",
    "discarded: fast-forward",
    "discarded: absent at close",
)


@dataclass(frozen=True)
class Outcome:
    """One seed; `failure` is the broken invariant in one line, with its place if it is not one of ours."""

    seed: int
    events: int
    saw: Counter[str]
    failure: str = ""


@dataclass
class Result:
    seeds: int = 0
    events: int = 0
    seconds: float = 0.0
    saw: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    @property
    def rare(self) -> dict[str, int]:
        return {name: self.saw[name] for name in RARE}

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.events += outcome.events
        self.saw += outcome.saw
        if outcome.failure:
            self.failures.append(outcome)


def run_seed(
    seed: int, tensors: bool = False, plan: FaultPlan | None = None, trace: Callable[[str], None] | None = None
) -> Outcome:
    """One world from beginning to end; a broken invariant, or any crash of the product, is its outcome."""
    scenario, faults = under(plan, seed) if plan is not None else (draw(seed), [])
    world = World(seed, tensors=tensors, scenario=scenario, plan=faults)
    world.trace = trace
    failure = ""
    try:
        world.run()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        failure = f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
    return Outcome(seed, world.events, world.saw, failure)


def run_seeds(
    seeds: Sequence[int], tensors: bool, plan: FaultPlan | None, jobs: int, show: Callable[[Result], None]
) -> Result:
    """All of them over `jobs` processes; `show` is called as results come in."""
    result, began = Result(), time.monotonic()
    chunk = max(1, min(CHUNK, len(seeds) // (4 * jobs)))
    chunks = [seeds[at : at + chunk] for at in range(0, len(seeds), chunk)]
    # Spawned, not forked: a fork of a process with threads (the progress bar's) may hang.
    with ProcessPoolExecutor(jobs, Spawning(), _begin, (os.getpid(),)) as pool:
        try:
            with held_back():  # which starts workers: an interrupt in the middle of that could be lost, or hang
                results = pool.map(partial(_run_chunk, tensors, plan), chunks)
            for outcomes in results:
                for outcome in outcomes:
                    result.add(outcome)
                result.seconds = time.monotonic() - began
                show(result)
        except KeyboardInterrupt:  # a chunk may take long, and nobody wants it any more
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.kill()
            raise
    return result


def _begin(parent: int) -> None:
    """In a worker: it ends with whoever wants its results, however that ends."""
    end_with(parent)
    logging.disable(logging.CRITICAL)  # refusals by the thousand are what is simulated


def _run_chunk(tensors: bool, plan: FaultPlan | None, seeds: Sequence[int]) -> list[Outcome]:
    return [run_seed(seed, tensors, plan) for seed in seeds]
