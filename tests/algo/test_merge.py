"""Merging agrees with a slow obvious version, keeps the paper's claims, and does not depend on threads."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algo import merge as merging
from skerry.algo.codecs import CODECS, decode, encode, inspect
from skerry.algo.fragments import BLOCK, ROW, Fragment, Tensor, gather, layout_of, scatter, split
from skerry.algo.kernels import ROWS_PER_THREAD_MIN
from skerry.algo.merge import RULES, Held

small = settings(deadline=None, max_examples=25, derandomize=True)
every_rule = pytest.mark.parametrize("rule", RULES)
weights_of = st.lists(st.floats(0.01, 1e12), min_size=1, max_size=6)


def fragment_of(*tensors: Tensor) -> Fragment:
    (fragment,) = split(layout_of(tensors), 1)
    return fragment


FRAGMENT = fragment_of(
    Tensor("bias", (5,)), Tensor("embed", (30, 7), "embedding"), Tensor("one", ()), Tensor("weight", (70, 65))
)


def delta_of(fragment: Fragment, seed: int, scale: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    flat = np.zeros(fragment.size, np.float32)
    for slot in fragment.slots:
        flat[slot.offset : slot.offset + slot.size] = rng.standard_normal(slot.size) * scale
    return flat


def hold(fragment: Fragment, delta: np.ndarray, weight: float = 1.0, codec: str = "fp32") -> Held:
    payload = encode(codec, delta)
    return Held(codec, payload, weight, inspect(codec, payload, fragment).norms)


def hold_many(fragment: Fragment, weights: list[float], codec: str = "fp32", seed: int = 0) -> list[Held]:
    """Contributions of differing length, as a list in learner-id order."""
    return [hold(fragment, delta_of(fragment, seed + i, 0.1 * (i + 1)), w, codec) for i, w in enumerate(weights)]


def merge(rule: str, fragment: Fragment, held: list[Held], threads: int = 1) -> np.ndarray:
    return decode("fp32", merging.merge(rule, fragment, held, threads=threads))


def slow_merge(rule: str, fragment: Fragment, held: list[Held]) -> np.ndarray:
    vectors = [decode(h.codec, h.payload).astype(np.float64) for h in held]
    weights = np.array([h.weight for h in held]) / sum(h.weight for h in held)
    merged = np.zeros(fragment.size)
    for slot in fragment.slots:
        at = slice(slot.offset, slot.offset + slot.size)
        mean = sum(w * v[at] for w, v in zip(weights, vectors, strict=True))
        lengths = [np.linalg.norm(v[at]) for v in vectors]
        units = [v[at] / n if n > 0 else 0 * v[at] for v, n in zip(vectors, lengths, strict=True)]
        direction = sum(w * u for w, u in zip(weights, units, strict=True))
        if rule == "consensus":
            mass = sum(w * np.abs(v[at]) for w, v in zip(weights, vectors, strict=True))
            direction = mean * np.divide(np.abs(mean), mass, out=np.zeros_like(mass), where=mass > 0)
        if rule == "mean" or slot.kind == "embedding" or np.linalg.norm(direction) < 1e-6:
            merged[at] = mean
        else:
            radius = sum(w * n for w, n in zip(weights, lengths, strict=True))
            merged[at] = radius * direction / np.linalg.norm(direction)
    return merged


def is_padding(fragment: Fragment) -> np.ndarray:
    padding = np.ones(fragment.size, bool)
    for slot in fragment.slots:
        padding[slot.offset : slot.offset + slot.size] = False
    return padding


@every_rule
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [1, 2, 5, 8, 9, 17])
def test_agrees_with_the_slow_version(rule, codec, count):
    held = hold_many(FRAGMENT, [1.0 + i for i in range(count)], codec)
    merged = merge(rule, FRAGMENT, held)
    assert merged.dtype == np.float32
    np.testing.assert_allclose(merged, slow_merge(rule, FRAGMENT, held), rtol=2e-6, atol=6e-7)


@every_rule
def test_contributions_may_use_different_codecs(rule):
    held = [hold(FRAGMENT, delta_of(FRAGMENT, i), 1.0 + i, codec) for i, codec in enumerate(CODECS)]
    expected = slow_merge(rule, FRAGMENT, held)
    np.testing.assert_allclose(merge(rule, FRAGMENT, held), expected, rtol=2e-6, atol=4e-7)


@small
@given(st.integers(2, 8), st.integers(0, 2**31))
def test_paper_d2_equal_lengths_keep_their_length_under_rda(count, seed):
    """All ‖v‖ = R ⇒ ‖RDA‖ = R for any M, where a plain mean shrinks to about R/√M."""
    fragment, radius = fragment_of(Tensor("w", (40, 50))), 3.0
    deltas = [delta_of(fragment, seed + i) for i in range(count)]
    held = [hold(fragment, np.float32(radius) * d / np.linalg.norm(d), 1.0 + i) for i, d in enumerate(deltas)]
    assert np.linalg.norm(merge("rda", fragment, held)) == pytest.approx(radius, rel=1e-6)
    alike = [h._replace(weight=1.0) for h in held]
    assert np.linalg.norm(merge("mean", fragment, alike)) == pytest.approx(radius / math.sqrt(count), rel=0.2)


@pytest.mark.parametrize("rule", ["rda", "consensus"])
def test_paper_d2_embeddings_are_averaged_whatever_the_rule(rule):
    held = hold_many(FRAGMENT, [1.0, 2.0, 3.0])
    (embedding,) = [slot for slot in FRAGMENT.slots if slot.kind == "embedding"]
    at = slice(embedding.offset, embedding.padded_stop)
    assert merge(rule, FRAGMENT, held)[at].tobytes() == merge("mean", FRAGMENT, held)[at].tobytes()


@every_rule
@pytest.mark.parametrize("weight", [1e-3, 1.0, 12345.678])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e10])
def test_one_learner_alone_is_its_delta(rule, weight, scale):
    delta = delta_of(FRAGMENT, 0, scale)
    np.testing.assert_allclose(merge(rule, FRAGMENT, [hold(FRAGMENT, delta, weight)]), delta, rtol=5e-7)


@every_rule
@small
@given(weights_of, st.floats(1e-6, 1e6))
def test_scale_of_weights_does_not_matter(rule, weights, factor):
    held = hold_many(FRAGMENT, weights)
    scaled = [h._replace(weight=h.weight * factor) for h in held]
    merged = merge(rule, FRAGMENT, held)
    np.testing.assert_allclose(merge(rule, FRAGMENT, scaled), merged, rtol=1e-5, atol=1e-6)


@every_rule
@small
@given(st.permutations(range(5)))
def test_order_of_arrival_does_not_matter_once_sorted_by_learner(rule, arrival):
    held = dict(enumerate(hold_many(FRAGMENT, [3.0, 1.0, 4.0, 1.0, 5.0], "int4")))
    arrived = {learner: held[learner] for learner in arrival}
    merged = merge(rule, FRAGMENT, [arrived[learner] for learner in sorted(arrived)])
    assert merged.tobytes() == merge(rule, FRAGMENT, list(held.values())).tobytes()


@every_rule
@small
@given(weights_of)
def test_weight_zero_is_absence(rule, weights):
    held = hold_many(FRAGMENT, weights)
    idle = hold(FRAGMENT, delta_of(FRAGMENT, 99), weight=0.0)
    merged = merge(rule, FRAGMENT, held)
    np.testing.assert_array_equal(merge(rule, FRAGMENT, [*held, idle]), merged)


@every_rule
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_any_number_of_threads_gives_the_same_bits(rule, codec):
    share = ROWS_PER_THREAD_MIN * ROW  # of one thread at least
    fragment = fragment_of(
        Tensor("a", (2 * share + 17,)), Tensor("b", (share,), "embedding"), Tensor("c", (4 * share + 1,))
    )
    held = hold_many(fragment, [1.0, 2.0, 0.5], codec)
    alone = merge(rule, fragment, held)
    for threads in (2, 3, 7):
        assert merge(rule, fragment, held, threads=threads).tobytes() == alone.tobytes()
    np.testing.assert_allclose(alone, slow_merge(rule, fragment, held), rtol=2e-5, atol=1e-6)


def test_cancelling_directions_fall_back_to_the_mean_of_that_tensor_alone():
    fragment = fragment_of(Tensor("a", (200,)), Tensor("b", (ROW + 9,)), Tensor("c", (3,)))
    first, second = delta_of(fragment, 0), delta_of(fragment, 1)
    b = fragment.slots[1]
    at = slice(b.offset, b.padded_stop)
    second[at] = -2 * first[at]  # opposite direction, twice as long: the mean is −½ first
    held = [hold(fragment, first), hold(fragment, second)]
    merged = merge("rda", fragment, held)
    np.testing.assert_allclose(merged[at], -first[at] / 2, rtol=1e-6)
    np.testing.assert_allclose(merged, slow_merge("rda", fragment, held), rtol=2e-6, atol=1e-6)
    assert merged.tobytes() == merge("rda", fragment, held, threads=2).tobytes()


def test_consensus_favours_what_learners_agree_on_and_keeps_the_length():
    fragment = fragment_of(Tensor("w", (1000,)))
    first, second = delta_of(fragment, 0), delta_of(fragment, 1)
    second[:500] = first[:500]  # agreed on
    first[500], second[500] = 1.0, -1.0  # not at all
    held = [hold(fragment, first), hold(fragment, second)]
    merged, mean = merge("consensus", fragment, held), merge("mean", fragment, held)
    radius = (np.linalg.norm(first) + np.linalg.norm(second)) / 2
    assert np.linalg.norm(merged) == pytest.approx(radius, rel=1e-6)
    assert merged[500] == 0
    ratio = merged[:1000] / np.where(mean[:1000] == 0, 1, mean[:1000])
    np.testing.assert_allclose(ratio[:500], ratio[0], rtol=1e-5)
    assert (ratio[501:] < ratio[0] * (1 + 1e-5)).all() and ratio[501:].mean() < 0.8 * ratio[0]


def test_a_tensor_nobody_agrees_on_is_averaged_under_consensus():
    fragment = fragment_of(Tensor("a", (200,)), Tensor("b", (ROW + 9,)))
    first, second = delta_of(fragment, 0), delta_of(fragment, 1)
    at = slice(fragment.slots[1].offset, fragment.slots[1].padded_stop)
    second[at] = -first[at] * np.float32(1 + 1e-4)
    held = [hold(fragment, first), hold(fragment, second)]
    merged = merge("consensus", fragment, held)
    assert merged[at].tobytes() == merge("mean", fragment, held)[at].tobytes()
    assert np.linalg.norm(merged[: at.start]) > 1


def test_a_zero_delta_has_no_direction_but_counts_in_the_radius():
    fragment = fragment_of(Tensor("w", (300,)))
    delta = delta_of(fragment, 0)
    held = [hold(fragment, delta), hold(fragment, np.zeros_like(delta))]
    np.testing.assert_allclose(merge("rda", fragment, held), delta / 2, rtol=1e-6)


@every_rule
def test_nothing_but_zeros_merges_to_zero(rule):
    held = [hold(FRAGMENT, np.zeros(FRAGMENT.size, np.float32))] * 3
    assert not merge(rule, FRAGMENT, held).any()


@every_rule
@pytest.mark.parametrize("codec", CODECS)
def test_padding_stays_zero_even_when_a_contribution_fills_it(rule, codec):
    hostile = hold(FRAGMENT, np.ones(FRAGMENT.size, np.float32), 1.0, codec)
    merged = merge(rule, FRAGMENT, [hostile, *hold_many(FRAGMENT, [1.0, 2.0], codec)])
    padding = is_padding(FRAGMENT)
    assert padding.any() and not merged[padding].any() and merged[~padding].all()


@every_rule
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("gain", [1.0, 0.3])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_delta_is_multiplied_by_the_gain_and_then_encoded(rule, codec, gain, threads):
    fragment = fragment_of(Tensor("a", (2 * ROWS_PER_THREAD_MIN * ROW + 17,)), Tensor("b", (300,), "embedding"))
    held = hold_many(fragment, [1.0, 2.0], "int8")
    expected = encode(codec, np.float32(gain) * merge(rule, fragment, held))
    assert merging.merge(rule, fragment, held, codec, gain, threads).tobytes() == expected.tobytes()


@every_rule
def test_what_lies_in_the_scratch_does_not_matter(rule):
    held = hold_many(FRAGMENT, [1.0, 2.0])
    scratch, out = np.full(FRAGMENT.size, np.nan, np.float32), np.full(4 * FRAGMENT.size, 255, np.uint8)
    assert merging.merge(rule, FRAGMENT, held, scratch=scratch, out=out) is out
    assert out.tobytes() == merge(rule, FRAGMENT, held).tobytes()


def test_what_cannot_be_merged_is_refused():
    held = hold_many(FRAGMENT, [1.0])
    with pytest.raises(ValueError, match="unknown merge rule 'median', known are rda, mean, consensus"):
        merge("median", FRAGMENT, held)
    with pytest.raises(AssertionError):
        merge("mean", FRAGMENT, [])
    with pytest.raises(AssertionError, match="no mean"):
        merge("mean", FRAGMENT, [held[0]._replace(weight=0.0)])


@pytest.mark.parametrize("codec", CODECS)
def test_slices_of_a_tensor_are_averaged_as_the_whole_is_to_the_bit(codec):
    layout = layout_of([Tensor("embed", (300, BLOCK), "embedding"), Tensor("weight", (70, 2 * BLOCK))])
    rng = np.random.default_rng(0)
    deltas = [{t.name: rng.standard_normal(t.shape, np.float32) for t in layout.tensors} for _ in range(3)]

    def merged(num_fragments: int) -> dict[str, np.ndarray]:
        whole = {t.name: np.empty(t.shape, np.float32) for t in layout.tensors}
        for fragment in split(layout, num_fragments):
            held = [hold(fragment, gather(fragment, delta), 1.0 + i, codec) for i, delta in enumerate(deltas)]
            scatter(fragment, merge("mean", fragment, held), whole)
        return whole

    whole, cut = merged(1), merged(7)
    assert len(split(layout, 7)) == 7
    for name, array in whole.items():
        np.testing.assert_array_equal(cut[name], array)


def test_paper_section_d2_each_slice_has_its_own_direction_and_length():
    """The same as two tensors that hold the two slices would give."""
    halves = split(layout_of([Tensor("w", (8, BLOCK))]), 2)
    for half in halves:
        held = hold_many(half, [1.0, 2.0])
        np.testing.assert_array_equal(
            merge("rda", half, held), merge("rda", fragment_of(Tensor("v", (4, BLOCK))), held)
        )
