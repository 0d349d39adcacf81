"""How long a learner takes to get the whole model: a real syncer process, and a real learner without a training loop.

The model is random numbers. The learner has the product's own shell, node and arithmetic: it checks what it gets and
copies it into parameters, and takes no step. With a link the two talk through the proxy of `proof/chaos`, which runs in
this process too. The clock runs from the learner's start until the model stands in its parameters.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct

from skerry import algo
from skerry import config as configs
from skerry.algo.fragments import Fragment, Layout, split
from skerry.config import Config
from skerry.core.flow import WINDOW_BYTES
from skerry.engines.supervisor import LocalRun
from skerry.node.algebra import Array
from skerry.node.training import ByHand
from skerry.proof.bench import cores
from skerry.proof.bench.reference import layout_for
from skerry.proof.chaos.proxy import Lane, Proxy, Weather
from skerry.run.genesis import begin
from skerry.shell.beside import NodeThread
from skerry.shell.learner import LearnerShell
from skerry.store.store import Store

MINUTES = configs.most("run.minutes")  # a budget that no measurement spends
JOIN_S_MAX = 600.0
ROUTE = "learner"


class Link(Struct, frozen=True):
    """What lies between learner and syncer; the defaults are loopback itself, without a proxy."""

    round_trip_s: float = 0.0
    bits_per_s: float = 0.0  # each way; 0: as fast as it goes

    @property
    def is_plain(self) -> bool:
        return not self.round_trip_s and not self.bits_per_s


class Joined(Struct, frozen=True):
    """One join; None where the system does not tell, or the link has no rate."""

    parameters: int
    fragments: int
    link: Link
    model_bytes: int
    wire_bytes: int  # that the learner read in all
    joined_s: float
    needed_s: float | None  # by the model's bytes at the link's rate
    window_bytes: int  # of the model, on its way to one learner at most
    syncer_before_bytes: int | None  # in memory, before the learner came: the model's values, and what any syncer takes
    syncer_peak_bytes: int | None  # since then
    learner_peak_bytes: int | None  # of this process, proxy and all


class PlainParameters:
    """Parameters of no framework: a flat array a fragment, in memory before the clock runs, as a model's are."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.values: list[Array] = [np.full(fragment.size, np.nan, np.float32) for fragment in fragments]

    def write(self, fragment: Fragment, values: Array) -> None:
        self.values[fragment.index][:] = values

    def add(self, fragment: Fragment, increment: Array) -> None:
        self.values[fragment.index] += increment

    def read(self, fragment: Fragment) -> Array:
        return self.values[fragment.index].copy()

    def blend(self, fragment: Fragment, towards: Array, alpha: float) -> None: ...
    def reset_optimizer(self) -> None: ...


def measure(parameters: int, link: Link, overrides: list[tuple[str, object]], tell: Callable[[str], None]) -> Joined:
    base = Config(run=configs.Run(name="bench", learners=1, minutes=MINUTES))
    config = configs.validate(configs.resolve(base, None, overrides))
    layout = layout_for(parameters, config.sync.num_fragments)
    algo.warm_up()
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        local = LocalRun(Path(folder), [], [])
        tell("writing the model's first version")
        _create(local.run_dir, config, layout)
        with local.ends_everything():
            tell("starting the syncer")
            local.start_syncer()
            tell("joining")
            return _join(local, config, layout, parameters, link)


def _create(root: Path, config: Config, layout: Layout) -> None:
    dice = np.random.default_rng(config.run.seed)
    with Store.open(root) as store:
        begin(store, config, layout, lambda fragment: dice.standard_normal(fragment.size, np.float32))


def _join(local: LocalRun, config: Config, layout: Layout, parameters: int, link: Link) -> Joined:
    assert local.syncer is not None and local.syncer.process is not None
    pid = local.syncer.process.pid
    before = cores.memory_bytes(pid, "VmRSS")
    cores.forget_peak(pid)
    fragments = split(layout, config.sync.num_fragments, config.sync.cut_tensors)
    model = PlainParameters(fragments)
    with _reached(local.port, link) as port:
        began = time.monotonic()
        shell = LearnerShell("bench", layout, ByHand(model), "127.0.0.1", port, None)
        shell.start(JOIN_S_MAX)
        joined_s = time.monotonic() - began
        assert isinstance(shell.beside, NodeThread)
        wire_bytes = shell.beside.loop.client.bytes_in
        shell.close(timeout_s=0.0)
    return Joined(
        parameters=parameters,
        fragments=len(model.values),
        link=link,
        model_bytes=4 * parameters,
        wire_bytes=wire_bytes,
        joined_s=joined_s,
        needed_s=4 * parameters * 8 / link.bits_per_s if link.bits_per_s else None,
        window_bytes=max(WINDOW_BYTES, sum(sorted(4 * each.size for each in fragments)[-config.wire.streams :])),
        syncer_before_bytes=before,
        syncer_peak_bytes=cores.memory_bytes(pid, "VmHWM"),
        learner_peak_bytes=cores.memory_bytes(os.getpid(), "VmHWM"),
    )


@contextlib.contextmanager
def _reached(port: int, link: Link) -> Iterator[int]:
    """The port to dial: the syncer's own, or that of a proxy before it."""
    if link.is_plain:
        yield port
        return
    lane = Lane(link.round_trip_s / 2, link.bits_per_s)
    with Proxy() as proxy:
        near = proxy.add(ROUTE, "127.0.0.1", port)
        proxy.set(ROUTE, Weather(up=lane, down=lane))
        yield near
