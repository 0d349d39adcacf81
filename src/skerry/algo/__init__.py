"""Computes: arrays in, arrays out. No clock, no I/O, no randomness; numpy and numba, never torch."""

from collections.abc import Callable

import numpy as np
from numba.core import event

from skerry.algo import codecs, fragments, merge, outer

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


def warm_up(tell: Callable[[], None] = lambda: None) -> None:
    """Compile every kernel, or load it from the disk cache, with the types it will meet.

    Called once before processes are spawned, so that none of them compiles, and none compiles in mid-run. `tell` is
    called before the first is compiled, if any has to be.
    """
    with event.install_listener("numba:compile", _Compiling(tell)):
        _use_all()


def _use_all() -> None:
    layout = fragments.layout_of([fragments.Tensor("a", (3,), "embedding"), fragments.Tensor("b", (200,))])
    (fragment,) = fragments.split(layout, 1)
    x = fragments.gather(fragment, {"a": np.ones(3, np.float32), "b": np.ones(200, np.float32)})
    zeros = np.zeros_like(x)
    for codec in codecs.CODECS:
        payload = codecs.encode(codec, x, np.empty_like(x))
        outer.adopt(codec, payload, zeros)
        norms = codecs.inspect(codec, payload, fragment).norms
        for rule in merge.RULES:
            merge.merge(rule, fragment, [merge.Held(codec, payload, 1.0, norms)])
    outer.advance(outer.OuterStep("nesterov", 0.7, 0.9), x, zeros, zeros, "fp32", x.view(np.uint8), "fp32")
