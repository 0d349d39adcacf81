"""A run's buffers, made from those that learners gave: floats are averaged, everything else is taken from one learner.

A mean by tokens lies between what the learners have, so a variance stays one. Whoever gave none lately does not count:
its model was another one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import xxhash
from safetensors import deserialize

from skerry.algo.contents import decode_contents
from skerry.core.facts import Buffered
from skerry.core.state import RunState
from skerry.run.tensors import WIDTHS, narrowed, widened
from skerry.store.files import opened
from skerry.store.store import FILES

LATELY = 0.1  # of the run's time, before the newest,
LATELY_S = 60.0  # and in a short run so long

log = logging.getLogger("skerry.store")


def of_learners(root: Path, state: RunState) -> dict[str, bytes]:
    """By name, the bytes of every buffer that some learner has told of."""
    lately = given_lately(state.buffers.values())
    read = [(given, tensors) for given in lately if (tensors := _read(root, given)) is not None]
    dtypes = {fixed.name: fixed.dtype for fixed in decode_contents(state.created.contents).fixed}
    names = sorted({name for _, tensors in read for name in tensors})
    weights = [_tokens(state, given) for given, _ in read]
    if any(weights):  # whose work is in the model; before there is any, everybody's are as good
        read = [each for w, each in zip(weights, read, strict=True) if w]
        names, weights = sorted({name for _, tensors in read for name in tensors}), [w for w in weights if w]
    return {
        name: _one(dtypes[name], [(w, t[name]) for w, (_, t) in zip(weights, read, strict=True) if name in t])
        for name in names
    }


def _tokens(state: RunState, given: Buffered) -> int:
    """After which it had them, and no more than were merged of that life: a learner may say anything."""
    return min(given.tokens, state.ledger.merged_of(given.learner, given.life) // len(state.fragments))


def given_lately(buffers: Iterable[Buffered]) -> list[Buffered]:
    """The oldest first."""
    given = sorted(buffers, key=lambda each: (each.elapsed_s, each.learner))
    newest_s = given[-1].elapsed_s if given else 0.0
    return [each for each in given if newest_s - each.elapsed_s <= max(LATELY_S, LATELY * newest_s)]


def _one(dtype: str, given: list[tuple[int, bytes]]) -> bytes:
    """A buffer, of what learners had after so many tokens, the newest last."""
    if dtype not in (*WIDTHS, "F64"):
        return given[-1][1]
    weights = np.array([max(1, tokens) for tokens, _ in given], np.float64)
    values = np.stack([_float64(data, dtype) for _, data in given])
    mean = (weights / weights.sum()) @ values
    mean = np.clip(mean, values.min(0), values.max(0))  # whatever rounding does
    return mean.tobytes() if dtype == "F64" else bytes(narrowed(mean.astype(np.float32), dtype))


def _float64(data: bytes, dtype: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.frombuffer(data, np.float64) if dtype == "F64" else widened(data, dtype).astype(np.float64)


def _read(root: Path, given: Buffered) -> dict[str, bytes] | None:
    """None of a file that is not there, or not what was written: the run can do without."""
    path = root / FILES / given.file
    try:
        with opened(path) as file:
            data = file.read()
    except OSError:
        data = b""
    if xxhash.xxh3_128_hexdigest(data) != given.file:
        log.warning("%s: the buffers of %s are damaged or missing, and are left out", path, given.learner)
        return None
    return {name: bytes(about["data"]) for name, about in deserialize(data)}  # type: ignore[no-untyped-call]
