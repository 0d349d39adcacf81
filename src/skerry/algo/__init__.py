"""Computes: arrays in, arrays out. No clock, no I/O, no randomness; numpy and numba, never torch."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numba.core import event

from skerry.algo import codecs, digests, drift, fragments, merge, outer

COMPILING = "compiling kernels once for this machine, which may take a minute"


class _Compiling(event.Listener):
    """Hears when a kernel is about to be compiled, which one that is loaded from the disk cache is not."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell

    def on_start(self, event: event.Event) -> None:
        if self._tell is not None:
            self._tell()
        self._tell = None

    def on_end(self, event: event.Event) -> None: ...


Use = Callable[[], object]
"""A call of a few kernels, which compiles or loads them."""


def warm_up(tell: Callable[[], None] = lambda: None, each: Callable[[Use], object] = lambda use: use()) -> None:
    """Compile every kernel, or load it from the disk cache, with the types it will meet.

    Called once before processes are spawned, so that none of them compiles, and none compiles in mid-run. `tell` is
    called before the first is compiled, if any has to be. `each` is handed the uses one by one, so whoever may have to
    end meanwhile can look in between: native code cannot be broken off.
    """
    with event.install_listener("numba:compile", _Compiling(tell)):
        for use in _uses():
            each(use)


def _uses() -> Iterator[Use]:
    layout = fragments.layout_of([fragments.Tensor("a", (3,), "embedding"), fragments.Tensor("b", (200,))])
    (fragment,) = fragments.split(layout, 1)
    x = fragments.gather(fragment, {"a": np.ones(3, np.float32), "b": np.ones(200, np.float32)})
    zeros = np.zeros_like(x)
    norms = np.ones(len(fragment.slots))
    for codec in codecs.CODECS:
        payload = np.zeros(codecs.payload_bytes(codec, x.size), np.uint8)
        held = [merge.Held(codec, payload, 1.0, norms)]
        yield partial(codecs.encode, codec, x, np.empty_like(x))
        yield partial(outer.adopt, codec, payload, zeros)
        yield partial(drift.say, codec, x, None, payload)
        yield partial(drift.unsaid, codec, payload, x, None, np.empty_like(x))
        yield partial(codecs.inspect, codec, payload, fragment)
        for rule in merge.RULES:
            yield partial(merge.merge, rule, fragment, held)
    step = outer.OuterStep("nesterov", 0.7, 0.9)
    yield partial(outer.advance, step, x, zeros, zeros, "fp32", x.view(np.uint8), "fp32")
    yield partial(digests.digest, x)
    yield partial(drift.difference, x, (x,), np.empty_like(x))
