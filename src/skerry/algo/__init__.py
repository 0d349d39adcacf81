"""Computes: arrays in, arrays out. No clock, no I/O, no randomness; numpy and numba, never torch."""

import numpy as np

from skerry.algo import codecs, fragments, merge, outer


def warm_up() -> None:
    """Compile every kernel, or load it from the disk cache, with the types it will meet.

    Called once before processes are spawned, so that none of them compiles, and none compiles in mid-run.
    """
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
