"""The order of a pack's windows: which one a learner draws at any number, without a list and without memory.

Each epoch is a permutation of all windows, keyed by (seed, epoch): a Feistel network over the next even number of bits,
walked on until it falls below the number of windows. An epoch is dealt out in lanes, every M-th place of the
permutation to one of M learners, so learners in different lanes share no window of an epoch. What a lane leaves undone
in one epoch is dealt out anew in the next.

All of it is integer arithmetic modulo 2^64, so it is the same on every machine and with every release of numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 6
WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


def window_numbers(total: int, learner: int, learners: int, seed: int, first: int, count: int) -> Numbers:
    """The windows, of `total`, that learner `learner` of `learners` draws as its draws `first`, `first` + 1, …

    A learner beyond `learners` has the place of one that has gone: it shares its lane, and begins elsewhere in it.
    """
    assert 0 < learners <= total, f"{learners} learners, {total} windows"
    turn, lane = divmod(learner, learners)
    each = total // learners  # of an epoch; the few that are over are others in every epoch
    shift = (turn * GOLDEN % WORD) * each // WORD
    draws = np.arange(first, first + count, dtype=np.int64)
    epochs, places = draws // each, lane + learners * ((draws % each + shift) % each)
    numbers = np.empty(count, np.int64)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        numbers[now] = permuted(places[now], total, seed, int(epoch))
    return numbers


def permuted(places: Numbers, total: int, seed: int, epoch: int) -> Numbers:
    """Where the permutation of [0, `total`) that (seed, epoch) keys has each of these places."""
    half = max(1, ((total - 1).bit_length() + 1) // 2)
    keys = round_keys(seed, epoch)
    found = _feistel(places.astype(np.uint64), half, keys)
    while (outside := found >= total).any():  # fewer than 4 `total` values: a few times
        found[outside] = _feistel(found[outside], half, keys)
    return found.astype(np.int64)


def round_keys(seed: int, epoch: int) -> Words:
    key = mix(mix(np.full(ROUNDS, seed % WORD, np.uint64)) + np.uint64(epoch))
    return mix(key + np.array(range(ROUNDS), np.uint64))


def _feistel(values: Words, half: int, keys: Words) -> Words:
    """A permutation of [0, 4^half)."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << bits) | right


def mix(words: Words) -> Words:
    """The output function of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), with its increment."""
    words = words + np.uint64(GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
