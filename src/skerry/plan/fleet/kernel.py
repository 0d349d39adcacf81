"""One learner of a fleet, compiled: from failure to failure, whatever lies between costs nothing.

A learner steps, in steps of `step_s`, until a chip of it fails or a slice comes back. Both take effect at the end of
the step they fall into. All that failed in one step is one downscale, all that came back one upscale, and each stops
the learner for `pause_s`. What fails or comes back meanwhile is part of it and costs nothing more. A learner that is
rigid has no slice missing: it restarts whole, on spares, and loses what it did since its last checkpoint.

Random numbers are SplitMix64's: a learner's fate depends on its seed alone, on any machine. All compiled code lives in
this one file: numba's disk cache does not notice a change in a callee elsewhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from skerry.compiled import kernel

Array = npt.NDArray[Any]
compiled = partial(kernel, error_model="numpy")


@compiled
def uniform(state: Array) -> float:
    """In (0, 1), 53 bits; the state is one 64-bit word."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53 + 2.0**-54


@compiled
def exponential(state: Array, rate: float) -> float:
    return -np.log(uniform(state)) / rate if rate > 0 else np.inf


@compiled
def push(heap: Array, size: int, value: float) -> None:
    """Add to a binary heap of `size` values, the smallest first."""
    at = size
    while at > 0 and heap[(at - 1) >> 1] > value:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = value


@compiled
def pop(heap: Array, size: int) -> None:
    """Drop the smallest of `size` values."""
    value, at, last = heap[size - 1], 0, size - 1
    while 2 * at + 1 < last:
        child = 2 * at + 1
        if child + 1 < last and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value


@compiled
def spells(
    seed: int,
    total_s: float,
    slices: int,
    slice_rate: float,  # failures/s of one slice
    step_s: float,
    pause_s: float,
    is_rigid: bool,
    checkpoint_s: float,  # 0: a restart loses nothing
    repairs_s: Array,  # equally likely times a slice is gone
    away: Array,  # (from, until) of its absences, in order of time
    heap: Array,  # room for the return times of its slices
    downs: Array,  # out: (from, until) of each time it did not step
    widths: Array,  # out: share of its slices that stepped before each of them, and after the last
) -> tuple[int, float, int]:
    """(times it stopped, useful seconds of the whole learner, failures)."""
    state = np.array([seed], np.uint64)
    next_fail = exponential(state, slices * slice_rate)
    missing, absence, stops, failures = 0, 0, 0, 0
    useful_s, unsaved_s = 0.0, 0.0
    now, is_up = 0.0, False
    while now < total_s:
        failed, returned = 0, 0
        while next_fail <= now:
            failed += 1
            if not is_rigid:
                push(heap, missing, next_fail + repairs_s[int(uniform(state) * repairs_s.size)])
                missing += 1
            next_fail += exponential(state, (slices - missing) * slice_rate)
        while missing and heap[0] <= now:
            pop(heap, missing)
            missing -= 1
            returned += 1
        if returned:  # more chips than before: the exponential has no memory
            next_fail = now + exponential(state, (slices - missing) * slice_rate)
        failures += failed
        until = now
        if is_up:
            until += pause_s * ((failed > 0) + (returned > 0))
            if failed and checkpoint_s > 0:
                useful_s -= unsaved_s % checkpoint_s
                unsaved_s = 0.0
        if absence < len(away) and away[absence, 0] <= now:
            until = max(until, away[absence, 1] + pause_s)
            absence += 1
        elif missing == slices:
            until = max(until, heap[0] + pause_s)
        if until > now:
            if not is_up:
                widths[stops] = 0.0
            downs[stops, 0] = now
            downs[stops, 1] = min(until, total_s)
            stops += 1
            now, is_up = until, False
            continue
        first = min(next_fail, heap[0]) if missing else next_fail
        until = now + max(1.0, np.ceil((first - now) / step_s)) * step_s
        if absence < len(away):
            until = min(until, away[absence, 0])
        until = min(until, total_s)
        widths[stops] = (slices - missing) / slices
        useful_s += widths[stops] * (until - now)
        unsaved_s += until - now
        now, is_up = until, True
    if not is_up:
        widths[stops] = 0.0
    return stops, useful_s, failures


@compiled
def together(a: Array, b: Array, out: Array) -> int:
    """The spans that lie in both of two lists; how many."""
    i, j, count = 0, 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i, 0], b[j, 0]), min(a[i, 1], b[j, 1])
        if start < end:
            out[count, 0] = start
            out[count, 1] = end
            count += 1
        if a[i, 1] < b[j, 1]:
            i += 1
        else:
            j += 1
    return count
