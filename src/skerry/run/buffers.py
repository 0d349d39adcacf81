"""A run's buffers, made from those that learners gave: floats are averaged, everything else is taken from one learner.

A mean by tokens lies between what the learners have, so a variance stays one. Whoever gave none lately does not count:
its model was another one. Nor does anybody whose work is not in the model, once there is any in it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from skerry.algo.contents import Contents, decode_contents
from skerry.core.facts import Buffered
from skerry.core.state import RunState
from skerry.node.buffers import FLOATS, Given, as_float64, of_the_run
from skerry.run.tensors import narrowed
from skerry.store.files import opened
from skerry.store.store import FILES

LATELY = 0.1  # of the run's time, before the newest,
LATELY_S = 60.0  # and in a short run so long

F64 = npt.NDArray[np.float64]

log = logging.getLogger("skerry.store")


def of_learners(root: Path, state: RunState) -> dict[str, bytes]:
    """By name, the bytes of every buffer that some learner has told of: one learner's are in memory at a time."""
    contents = decode_contents(state.created.contents)
    dtypes = {fixed.name: fixed.dtype for fixed in contents.fixed}
    means, tokens, newest = dict[str, F64](), dict[str, int](), dict[str, bytes]()
    for weight, given in _weighed(state):
        for name, each in _read(root, given, contents).items():
            if each.dtype in FLOATS:
                values = as_float64(each)
                tokens[name] = tokens.get(name, 0) + weight
                means[name] = _between(means.get(name, values), values, weight / tokens[name])
            else:
                newest[name] = each.data
    return newest | {name: _bytes(mean, dtypes[name]) for name, mean in means.items()}


def _weighed(state: RunState) -> list[tuple[int, Buffered]]:
    """Those that count, the oldest first, each with the tokens it counts for."""
    if not state.ledger.merged:  # everybody's are as good
        return [(1, given) for given in given_lately(state.buffers.values())]
    tokens = {given.learner: _tokens(state, given) for given in state.buffers.values()}
    lately = given_lately(given for given in state.buffers.values() if tokens[given.learner])
    return [(tokens[given.learner], given) for given in lately]


def _tokens(state: RunState, given: Buffered) -> int:
    """After which it had them, and no more than were merged of that life: a learner may say anything."""
    return min(given.tokens, state.ledger.merged_of(given.learner, given.life) // len(state.fragments))


def given_lately(buffers: Iterable[Buffered]) -> list[Buffered]:
    """The oldest first."""
    given = sorted(buffers, key=lambda each: (each.elapsed_s, each.learner))
    newest_s = given[-1].elapsed_s if given else 0.0
    return [each for each in given if newest_s - each.elapsed_s <= max(LATELY_S, LATELY * newest_s)]


def _between(mean: F64, values: F64, share: float) -> F64:
    """So far from the one to the other, and never outside of them, whatever rounding does."""
    moved = (1.0 - share) * mean + share * values
    return np.clip(moved, np.minimum(mean, values), np.maximum(mean, values))


def _bytes(values: F64, dtype: str) -> bytes:
    return values.tobytes() if dtype == "F64" else bytes(narrowed(values.astype(np.float32), dtype))


def _read(root: Path, given: Buffered, contents: Contents) -> dict[str, Given]:
    """Nothing of a file that is not there, or not what was written: the run can do without."""
    path = root / FILES / given.file
    try:
        with opened(path) as file:
            data = file.read()
    except OSError:
        data = b""
    if xxhash.xxh3_128_hexdigest(data) != given.file:
        log.warning("%s: the buffers of %s are damaged or missing, and are left out", path, given.learner)
        return {}
    return of_the_run(data, contents)
