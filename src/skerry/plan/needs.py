"""What a run holds in memory and on disk. N is the padded parameter count, f the largest fragment's, both in elements.

Learner (`node/learner.py`), its float32 arrays on the host or, with state = "device", beside the model:

    bases        4 N               the version every fragment stands on
    residuals    4 N               what quantisation left; none with learner.residual = "theta" or adopt = "overwrite"
    drifts       n 4 f             of n contributions on their way, what settling takes out; none with "theta". n is the
                                   rounds that may be open; at worst every fragment
    cells        8 c f             what is on its way to and from the loop (`node/cells.py`); 12 c f with "blend". With
                                   the state on the host as much again on the device, through which copies go
    working      on the host 4 f + b (8 f + down): a residual while the next is made of it; b versions being adopted at
                 once, each new and as it was before the loop has taken it in. On the device 4 f + the larger payload +
                 4 b f, and 8 bytes (20 in bf16 and int2) of each element, 16M at most, that a kernel has on the way

Besides, whatever the state: on the host n up of payloads, to which a state on the device adds b down of those that come
and 8 MiB through which they cross the bus, and one on the host the process that has it; on the device 16 N, float32
parameters, gradients and two Adam moments. Activations are not in it, nor is the master copy that a framework of mixed
precision may keep.

Syncer (`node/syncer.py`): three float32 arrays a fragment, the newest deltas, contributions in their encoded form, and
t merges at a time, one for each of merge.threads or one for each fragment. The process is what a syncer had at its peak
beside those arrays, measured at 1.3M, 10M, 30M and 100M parameters.

    values       12 N              published values, velocity, residual
    deltas       deltas_kept · down of all fragments, the newest or 512 MiB at most; 128 MiB while all have them
    held         n M up            at most wire.held_bytes_max and one fragment's contributions beyond
    working      t (14 f + down)   the new three, in one of which the merged delta was added up, and its bf16
    process      220 MB            interpreter, libraries, kernels, and what threads keep for their next arrays

Disk (`store/`): a checkpoint of a fragment is a file of 12 bytes an element. There are the newest two, one that is
being written or that the closing began with, genesis (4), and every kept version (store.keep_every) until it is pruned.
Others lie there until every 32nd commit. The tape grows by one record a merge and one of measurements each five
seconds, and with store.record = "full" every merged contribution stays, until they are pruned. What of a model is not
trained lies there once, as it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from skerry.algo.codecs import payload_bytes
from skerry.config import Config, Learner
from skerry.core.facts import Committed, Decision, Entry, Part, Result, Row, Sample, Sampled, Seen, Took
from skerry.core.samples import SAMPLE_S
from skerry.node.cells import count_for
from skerry.run import room

GROUP_BYTES = 100  # what the tape puts around a commit of one record
TRAINING_BYTES = 16  # an element, on the device: value, gradient and two moments
PIECE = 1 << 24  # elements that a kernel on the device works on at once (`adapters/kernels.py`, which needs torch)
STAGING_BYTES = 8 << 20  # of pinned memory between host and device (`adapters/device.py`, likewise)
PROCESS_BYTES = 150_000_000  # the node's: interpreter, libraries, kernels

State = Literal["host", "device"]


def learner_memory(
    config: Config, sizes: Sequence[int], rounds: int, burst: int, state: State = "host"
) -> dict[str, dict[str, int]]:
    """Bytes on a learner's host and device by what they are for; `at_worst` with every fragment outstanding."""
    total, largest, count = sum(sizes), max(sizes), min(rounds, len(sizes))
    up, down = (payload_bytes(codec, largest) for codec in (config.wire.codec_up, config.wire.codec_down))
    arrays, payloads = _arrays(config.learner, total, count * largest), count * up
    more_arrays = _more(arrays, _arrays(config.learner, total, total))
    more_payloads = max(0, sum(payload_bytes(config.wire.codec_up, size) for size in sizes) - payloads)
    cells = 4 * largest * count_for(len(sizes), largest) * (3 if config.learner.adopt == "blend" else 2)
    device = {"training": TRAINING_BYTES * total, "cells": cells}
    if state == "device":
        host = {"payloads": payloads + burst * down, "staging": STAGING_BYTES}
        device |= arrays | {"working": 4 * largest + max(up, down) + 4 * burst * largest + _on_the_way(config, largest)}
        return {"host": _summed(host, more_payloads), "device": _summed(device, more_arrays)}
    working = 4 * largest + burst * (8 * largest + down)
    host = arrays | {"payloads": payloads, "cells": cells, "working": working, "process": PROCESS_BYTES}
    return {"host": _summed(host, more_arrays + more_payloads), "device": _summed(device, 0)}


def _arrays(own: Learner, total: int, outstanding: int) -> dict[str, int]:
    """What a learner's state is, wherever it is."""
    has_buffer = own.residual == "buffer"
    return {
        "bases": 4 * total,
        "residuals": 4 * total if has_buffer and own.adopt != "overwrite" else 0,
        "drifts": 4 * outstanding if has_buffer else 0,
    }


def _more(parts: dict[str, int], at_worst: dict[str, int]) -> int:
    return max(0, sum(at_worst.values()) - sum(parts.values()))


def _on_the_way(config: Config, largest: int) -> int:
    """What a kernel on the device works in."""
    codecs = {config.wire.codec_up, config.wire.codec_down}
    return (20 if codecs & {"bf16", "int2"} else 8) * min(largest, PIECE)


def syncer_memory(config: Config, sizes: Sequence[int], rounds: int) -> dict[str, int]:
    """Bytes in the syncer by what they are for; `at_worst` with a contribution of everyone to every fragment held."""
    largest, learners, up = max(sizes), config.run.learners, config.wire.codec_up
    one = learners * payload_bytes(up, largest)
    bound = config.wire.held_bytes_max + one
    parts = {**room.memory(config, sizes), "held": min(min(rounds, len(sizes)) * one, bound)}
    every = min(learners * sum(payload_bytes(up, size) for size in sizes), bound)
    return _summed(parts, max(every, parts["held"]) - parts["held"])


def _summed(parts: dict[str, int], more: int) -> dict[str, int]:
    total = sum(parts.values())
    return {**parts, "total": total, "at_worst": total + more}


def disk(config: Config, sizes: Sequence[int], merges_per_h: float, contributors: float) -> dict[str, float]:
    """Bytes that lie on the syncer's disk at any time, that are written in an hour, and that stay from it."""
    mean = sum(sizes) / len(sizes)
    tape = merges_per_h * (len(_commit(contributors, config.run.learners)) + GROUP_BYTES)
    tape += 3600 / SAMPLE_S * (len(_samples(config.run.learners)) + GROUP_BYTES)
    recorded = 0.0
    if config.store.record == "full":
        recorded = merges_per_h * contributors * sum(payload_bytes(config.wire.codec_up, s) for s in sizes) / len(sizes)
    every = config.store.checkpoint_every
    by_versions = config.store.keep_every  # below 1 it is a share of the budget, and known for the whole run
    kept = room.STATE_BYTES * merges_per_h * mean / by_versions if by_versions >= 1 else 0.0
    return {
        **room.disk(sizes, config.store),
        "tape_per_hour": tape,
        "recorded_per_hour": recorded,
        "kept_per_hour": kept,
        "grows_per_hour": tape + recorded + kept,
        "written_per_hour": merges_per_h * (room.DELTA_BYTES + room.STATE_BYTES / every) * mean
        + tape
        + recorded
        + kept,
    }


def _commit(contributors: float, learners: int) -> bytes:
    """A record of a merge in the middle of a run, for its length."""
    who, big = "learner-00", 10**6
    merged = round(contributors)
    rows = tuple(Row(who, 1, 10, big, big, big, big, "merged", big) for _ in range(merged))
    seen = tuple(Seen(who, 1, big, big, 2**40, 2**40, 0.5) for _ in range(learners))
    parts = tuple(Part("int4", big, 0.5) for _ in range(merged))
    decision = Decision(
        1, 10, big, b"0" * 16, "rda", "nesterov", 0.3, 0.9, 1, 0, 1.0, "int4", "bf16", 24, 4, "steady",
        "grace over", learners, rows, parts, seen, 0.5, 0.5, 0.5,
    )  # fmt: skip
    took = Took(0.5, 0.5, 0.5, 0.5, 0.5, 0.5)
    return msgspec.msgpack.encode(
        Committed(decision, Result(b"0" * 16, b"0" * 16, Entry(big, big, big, b"0" * 16)), took)
    )


def _samples(learners: int) -> bytes:
    one = Sample("learner-00", 1, 5, 10**6, (0.5,) * 5, 10**9, 0.5, 10**9, 0.5, 10**9, 0.5, 10**9, 0.5)
    return msgspec.msgpack.encode(Sampled((one,) * learners, 0.5))
