"""Codecs keep their stated error bounds, agree with themselves to the bit, and notice what is not finite."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from skerry import algo
from skerry.algo import kernels, warm_up
from skerry.algo.codecs import CODECS, decode, encode, inspect, number, payload_bytes, readable
from skerry.algo.fragments import BLOCK, ROW, Fragment, Tensor, layout_of, padded, split
from skerry.algo.kernels import ROWS_PER_THREAD_MIN
from skerry.algo.merge import TOGETHER

small = settings(deadline=None, max_examples=25, derandomize=True)
every_codec = pytest.mark.parametrize("codec", CODECS)
LEVELS = {"int8": 127, "int4": 7}
INTEGERS = (*LEVELS, "int2")
ODD_SIZES = [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, ROW, ROW + 1, 2 * ROW + 77]


def gaussian(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def fragment_of(*extents: int) -> Fragment:
    (fragment,) = split(layout_of(Tensor(f"t{i:02}", (extent,)) for i, extent in enumerate(extents)), 1)
    return fragment


def fill(fragment: Fragment, seed: int = 0) -> np.ndarray:
    flat = np.zeros(fragment.size, np.float32)
    for slot in fragment.slots:
        flat[slot.offset : slot.offset + slot.size] = gaussian(slot.size, seed + slot.offset)
    return flat


def slow_decode(codec: str, payload: np.ndarray, size: int) -> np.ndarray:
    raw, blocks = payload.tobytes(), size // BLOCK
    if codec == "fp32":
        return np.frombuffer(raw, "<f4")
    if codec == "bf16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    scales, rest = np.frombuffer(raw[: 4 * blocks], "<f4"), raw[4 * blocks :]
    if codec == "int2":
        bytes_ = np.frombuffer(rest, np.uint8).reshape(blocks, BLOCK // 4)
        codes = np.concatenate([bytes_ >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
        scales = scales[:, None]
        four = scales * np.float32([0.4528, 1.5104, -0.4528, -1.5104])
        three = -scales * np.float32([0, 1.2240, -0.0, -1.2240])
        return np.take_along_axis(np.where(scales < 0, three, four), codes, axis=1).ravel()
    if codec == "int8":
        codes = np.frombuffer(rest, np.int8).reshape(blocks, BLOCK)
    else:
        pairs = np.frombuffer(rest, np.uint8).reshape(blocks, BLOCK // 2)
        codes = np.concatenate([pairs & 15, pairs >> 4], axis=1).astype(np.int8) - 8
    return (scales[:, None] * codes.astype(np.float32)).ravel()


@every_codec
@pytest.mark.parametrize("size", ODD_SIZES)
def test_decode_agrees_with_the_slow_version_and_with_decoded_to_the_bit(codec, size):
    x = np.zeros(padded(size), np.float32)
    x[:size] = gaussian(size)
    decoded = np.full_like(x, np.nan)
    payload = encode(codec, x, decoded=decoded)
    assert payload.dtype == np.uint8 and payload.size == payload_bytes(codec, x.size)
    expected = slow_decode(codec, payload, x.size)
    assert decode(codec, payload).tobytes() == decoded.tobytes() == expected.tobytes()
    assert not decoded[size:].any()


def test_payload_lengths():
    assert {codec: payload_bytes(codec, 2 * BLOCK) for codec in CODECS} == {
        "fp32": 2 * 512,
        "bf16": 2 * 256,
        "int8": 2 * (4 + 128),
        "int4": 2 * (4 + 64),
        "int2": 2 * (4 + 32),
    }


def test_fp32_is_exact():
    x = gaussian(ROW)
    assert encode("fp32", x).tobytes() == x.tobytes()


def test_bf16_is_within_one_part_in_256_and_rounds_ties_to_even():
    x = np.concatenate([gaussian(8 * ROW) * np.float32(10.0**e) for e in (-30, -3, 0, 30)])
    decoded = decode("bf16", encode("bf16", x))
    assert (np.abs(decoded - x) <= np.abs(x) * 2.0**-8).all()
    ties = np.zeros(BLOCK, np.float32)
    ties[:4] = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20]
    assert decode("bf16", encode("bf16", ties))[:4].tolist() == [1, 1 + 2**-6, -1, 1 + 2**-7]


@pytest.mark.parametrize("codec, bound", [("int8", 0.008), ("int4", 0.125), ("int2", 0.35)])
def test_relative_error_on_gaussian_data(codec, bound):
    x = gaussian(64 * ROW)
    error = np.linalg.norm(decode(codec, encode(codec, x)) - x) / np.linalg.norm(x)
    assert bound / 2 < error < bound


@pytest.mark.parametrize("codec", LEVELS)
@small
@given(st.integers(0, 2**31), st.integers(-30, 30), st.integers(1, 4))
def test_every_element_is_within_half_a_scale(codec, seed, exponent, blocks):
    x = gaussian(blocks * BLOCK, seed) * np.float32(10.0**exponent)
    decoded = decode(codec, encode(codec, x))
    scale = np.abs(x).reshape(-1, BLOCK).max(axis=1).astype(np.float64) / LEVELS[codec]
    error = np.abs(decoded.astype(np.float64) - x).reshape(-1, BLOCK)
    assert (error <= scale[:, None] / 2 * (1 + 1e-4)).all()


@pytest.mark.parametrize("codec", LEVELS)
def test_all_levels_survive_and_decode_again_to_themselves(codec):
    top = LEVELS[codec]
    levels = np.resize(np.arange(-top, top + 1), 2 * BLOCK).astype(np.float32)
    np.testing.assert_array_equal(decode(codec, encode(codec, levels)), levels)


def test_int2_keeps_zeros_and_measures_only_the_rest():
    x = gaussian(64 * ROW)
    few = x.copy()
    few.reshape(-1, BLOCK)[:, 3:] = 0  # as at the end of a small tensor
    decoded = decode("int2", encode("int2", few))
    assert not decoded[few == 0].any()
    error = np.linalg.norm(decoded - few) / np.linalg.norm(few)
    assert 0.2 < error < 0.44  # three levels: 0.44 on a whole Gaussian block
    x[::BLOCK] = 0
    decoded = decode("int2", encode("int2", x))
    assert np.linalg.norm(decoded - x) / np.linalg.norm(x) == pytest.approx(0.436, abs=0.005)
    assert len(np.unique(np.abs(decoded[:BLOCK]))) == 2


def test_int2_scale_is_the_rms_summed_in_fixed_lanes():
    x = gaussian(4 * BLOCK)
    scales = encode("int2", x)[:16].view(np.float32)
    for scale, block in zip(scales, x.astype(np.float64).reshape(-1, 64 * 2), strict=True):
        total = 0.0
        for lane in block[:64] * block[:64] + block[64:] * block[64:]:
            total += lane
        assert scale == np.float32(np.sqrt(total / BLOCK))


@every_codec
def test_zero_blocks_stay_zero_and_tiny_ones_do_not_blow_up(codec):
    x = np.zeros(4 * BLOCK, np.float32)
    x[BLOCK] = 1e-45  # the smallest float32 there is
    x[2 * BLOCK] = 1e-37
    x[3 * BLOCK :] = 1.0
    payload = encode(codec, x)
    decoded = decode(codec, payload)
    assert not decoded[x == 0].any() and not np.signbit(decoded).any()
    rtol = 0.511 if codec == "int2" else 2.0**-8  # equal values lie between its levels
    np.testing.assert_allclose(decoded, x, rtol=rtol, atol=127 * 2.0**-126)
    assert inspect(codec, payload, fragment_of(4 * BLOCK)).finite


@every_codec
@pytest.mark.parametrize("size", [BLOCK, 2 * ROW + BLOCK])
def test_wrong_lengths_are_refused(codec, size):
    payload = encode(codec, gaussian(size))
    fragment = fragment_of(size)
    acc = np.zeros(size, np.float32)
    for wrong in (payload[:-1], payload[:0], np.concatenate([payload, payload[:4]])):
        with pytest.raises(ValueError, match="payload of"):
            decode(codec, wrong, out=acc)
        with pytest.raises(ValueError, match="payload of"):
            inspect(codec, wrong, fragment)
        with pytest.raises(ValueError, match="payload of"):
            readable(codec, wrong, size)
    with pytest.raises(ValueError, match="payload of"):
        decode(codec, payload[:-1])
    with pytest.raises(ValueError, match="whole number of blocks"):
        payload_bytes(codec, size + 1)


def test_unknown_codecs_are_refused():
    for call in (lambda: payload_bytes("int3", BLOCK), lambda: encode("int3", gaussian(BLOCK))):
        with pytest.raises(ValueError, match="unknown codec 'int3', known are fp32, bf16, int8, int4, int2"):
            call()


@every_codec
def test_payloads_are_read_from_any_buffer(codec):
    x = gaussian(ROW)
    payload = encode(codec, x)
    expected = decode(codec, payload).tobytes()
    fragment = fragment_of(ROW)
    for raw in (payload.tobytes(), bytearray(payload.tobytes())):
        assert decode(codec, np.frombuffer(raw, np.uint8)).tobytes() == expected
    odd = np.frombuffer(b"\0" + payload.tobytes(), np.uint8)[1:]  # off alignment, read only
    assert decode(codec, odd).tobytes() == expected
    assert inspect(codec, odd, fragment).norms == inspect(codec, payload, fragment).norms


@every_codec
def test_encode_writes_into_the_buffer_it_is_handed(codec):
    x = gaussian(2 * ROW)
    buffer = np.zeros(payload_bytes(codec, x.size), np.uint8)
    assert encode(codec, x, out=buffer) is buffer
    assert buffer.tobytes() == encode(codec, x).tobytes()
    with pytest.raises(ValueError, match="multiple of 4 bytes"):
        encode(codec, x, out=np.zeros(buffer.size + 1, np.uint8)[1:])


@every_codec
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_a_bit(codec, threads):
    x = gaussian(threads * ROWS_PER_THREAD_MIN * ROW + BLOCK)  # less would be done on one thread
    one, many = np.empty_like(x), np.empty_like(x)
    payload = encode(codec, x, decoded=one)
    assert encode(codec, x, decoded=many, threads=threads).tobytes() == payload.tobytes()
    assert one.tobytes() == many.tobytes() == decode(codec, payload, threads=threads).tobytes()


def accumulate(
    codecs: list[str],
    payloads: list[np.ndarray],
    fragment: Fragment,
    coef: np.ndarray,
    acc: np.ndarray,
    lo: int,
    hi: int,
) -> None:
    """acc ← acc + Σ coef[payload, slot] · decoded on rows [lo, hi)."""
    numbers = kernels.frozen(np.array([number(codec) for codec in codecs], np.int64))
    opened = [readable(codec, payload, fragment.size) for codec, payload in zip(codecs, payloads, strict=True)]
    filled = tuple(opened) + (opened[0],) * (TOGETHER - len(opened))
    rows = (fragment.row_start, fragment.row_stop, fragment.row_slot)
    kernels.accumulate(numbers, filled, len(opened), *rows, kernels.frozen(coef), False, acc, np.empty(0), lo, hi)


def slow_term(codec: str, payload: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """coefficient · element, one product; an element of int4 is its code, and the coefficient takes the scale first."""
    if codec != "int4":
        return coefficients * decode(codec, payload)
    blocks = coefficients.size // BLOCK
    scales = np.repeat(payload[: 4 * blocks].view(np.float32), BLOCK)
    pairs = payload[4 * blocks :].reshape(blocks, BLOCK // 2)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=1).astype(np.float32).ravel() - 8
    return (coefficients * scales) * codes


@pytest.mark.parametrize(
    "codecs",
    [[codec] for codec in CODECS] + [["int4"] * 2, ["int4"] * 5, ["int4", "bf16", "int4", "int4"], list(CODECS)],
)
def test_accumulate_rounds_each_product_then_adds(codecs):
    fragment = fragment_of(5, ROW + 300, 2 * ROW)
    payloads = [encode(codec, fill(fragment, seed)) for seed, codec in enumerate(codecs)]
    coef = (np.array([0.3, 1 / 7, 1e-3]) / np.arange(1, 1 + len(codecs))[:, None]).astype(np.float32)
    start = gaussian(fragment.size, seed=9)
    acc, expected = start.copy(), start.copy()
    lo, hi = 1, fragment.row_count - 1
    accumulate(codecs, payloads, fragment, coef, acc, lo, hi)
    for codec, payload, coefficients in zip(codecs, payloads, coef, strict=True):
        spread = coefficients[np.repeat(fragment.row_slot, fragment.row_stop - fragment.row_start)]
        expected = expected + slow_term(codec, payload, spread)
    touched = slice(fragment.row_start[lo], fragment.row_stop[hi - 1])
    assert acc[touched].tobytes() == expected[touched].tobytes()
    assert acc[: touched.start].tobytes() == start[: touched.start].tobytes()
    assert acc[touched.stop :].tobytes() == start[touched.stop :].tobytes()


@every_codec
@pytest.mark.parametrize("extents", [(1,), (3, 129), (ROW, 1, ROW + 1), (40 * ROW + 5, 7)])
def test_inspect_measures_what_decode_gives(codec, extents):
    fragment = fragment_of(*extents)
    payload = encode(codec, fill(fragment))
    decoded = decode(codec, payload)
    seen = inspect(codec, payload, fragment)
    assert seen.finite and seen.max_abs == np.abs(decoded).max()
    if codec != "int4":  # which is measured by its codes, before scale · code is rounded
        assert seen.norms.tobytes() == inspect("fp32", decoded.view(np.uint8), fragment).norms.tobytes()
    for norm, slot in zip(seen.norms, fragment.slots, strict=True):
        exact = np.linalg.norm(decoded[slot.offset : slot.padded_stop].astype(np.float64))
        np.testing.assert_allclose(norm, exact, rtol=1e-7 if codec == "int4" else 1e-12)


def test_the_norm_of_int4_is_of_its_codes():
    """Σ scale² Σ (code − 8)², blocks in order, the codes of a block in integers; −8, which none of ours sends, too."""
    fragment = fragment_of(ROW + BLOCK)
    payload = np.random.default_rng(5).integers(0, 256, payload_bytes("int4", fragment.size), dtype=np.uint8)
    blocks = fragment.size // BLOCK
    scales = payload[: 4 * blocks].view(np.float32)
    scales[:] = np.random.default_rng(6).standard_normal(blocks)
    codes = payload[4 * blocks :].reshape(blocks, BLOCK // 2)
    codes[0] = 0  # the most a block can sum up to
    squares = ((codes & 15).astype(int) - 8) ** 2 + ((codes >> 4).astype(int) - 8) ** 2
    rows = [0.0, 0.0]
    for block, (scale, square) in enumerate(zip(scales.astype(np.float64), squares.sum(axis=1), strict=True)):
        rows[block * BLOCK // ROW] += scale * scale * float(square)
    assert inspect("int4", payload, fragment).norms[0] == np.sqrt(rows[0] + rows[1])


def test_row_norms_add_fixed_lanes_in_order():
    """The same bits on any vector width: 64 lanes a row, lanes in order, rows in order."""
    fragment = fragment_of(2 * ROW + BLOCK)
    x = gaussian(fragment.size)
    total = 0.0
    for start, stop in zip(fragment.row_start, fragment.row_stop, strict=True):
        lanes = np.zeros(64)
        for piece in x[start:stop].astype(np.float64).reshape(-1, 64):
            lanes += piece * piece
        row = 0.0
        for lane in lanes:
            row += lane
        total += row
    assert inspect("fp32", x.view(np.uint8), fragment).norms[0] == np.sqrt(total)


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_of_int4_is_found_whatever_the_codes_and_the_order_of_the_scales(seed):
    """No encoder of ours gives the code of −8, and a block may be smaller than one before it and hold the largest."""
    rng = np.random.default_rng(seed)
    fragment = fragment_of(3 * ROW, 129)
    payload = rng.integers(0, 256, payload_bytes("int4", fragment.size), np.uint8)
    blocks = fragment.size // BLOCK
    payload[: 4 * blocks].view(np.float32)[:] = 1 + rng.integers(0, 4, blocks) / 8
    payload[4 * blocks :][rng.random(payload.size - 4 * blocks) < 0.98] = 0x88  # zeros
    assert inspect("int4", payload, fragment).max_abs == np.abs(decode("int4", payload)).max()


@every_codec
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 77, ROW + 200, -1])
def test_what_is_not_finite_is_found_after_encoding(codec, poison, at):
    fragment = fragment_of(3 * ROW)
    x = gaussian(fragment.size)
    x[at] = poison
    decoded = np.empty_like(x)
    payload = encode(codec, x, decoded=decoded)
    seen = inspect(codec, payload, fragment)
    assert not seen.finite and not np.isfinite(seen.max_abs)
    assert not np.isfinite(decoded[at])


@pytest.mark.parametrize("codec", INTEGERS)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, 3e38])
def test_a_hostile_scale_is_found_even_over_zero_codes(codec, scale):
    fragment = fragment_of(2 * ROW)
    payload = encode(codec, np.zeros(fragment.size, np.float32)).copy()
    payload.view(np.uint8)[4:8] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
    if np.isfinite(scale):  # the scale is fine, scale · code is not
        payload[4 * fragment.size // BLOCK + {"int8": 128, "int4": 64, "int2": 32}[codec]] = 2 + (codec == "int2")
    assert not inspect(codec, payload, fragment).finite


@every_codec
def test_any_bytes_decode_without_an_exception(codec):
    size = 4 * BLOCK
    junk = np.random.default_rng(1).integers(0, 256, payload_bytes(codec, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = slow_decode(codec, junk, size)
    np.testing.assert_array_equal(decode(codec, junk), expected)
    assert inspect(codec, junk, fragment_of(size)).finite == bool(np.isfinite(expected).all())


def test_who_waits_is_told_before_the_first_kernel_is_compiled_and_only_then(monkeypatch):
    told = []
    warm_up()
    warm_up(lambda: told.append("again"))
    assert told == [], "all are there already"
    fresh = [njit(lambda x: x + 1), njit(lambda x: x - 1)]
    monkeypatch.setattr(algo, "_uses", lambda: [partial(kernel, 1) for kernel in fresh])
    warm_up(lambda: told.append("compiling"), lambda use: told.append(use()))
    assert told == ["compiling", 2, 0]


def test_after_warm_up_no_kind_of_array_makes_a_kernel_compile_again():
    def signatures() -> dict[str, int]:
        # helpers (_name) are compiled into their callers, and not loaded when those come from the cache
        public = {k: v for k, v in vars(kernels).items() if hasattr(v, "signatures") and k[0] != "_"}
        return {name: len(kernel.signatures) for name, kernel in public.items()}

    warm_up()
    warm = signatures()
    assert len(warm) == 14 and all(warm.values())
    fragment = fragment_of(ROW, 3)
    x, acc, one = fill(fragment), np.zeros(fragment.size, np.float32), np.ones((1, 2), np.float32)
    for codec in CODECS:
        payload = encode(codec, x)
        encode(codec, kernels.frozen(x), decoded=np.empty_like(x))
        for raw in (
            payload,
            np.frombuffer(payload.tobytes(), np.uint8),
            np.frombuffer(bytearray(payload), np.uint8),
        ):
            decode(codec, raw, out=acc)
            inspect(codec, raw, fragment)
            accumulate([codec], [raw], fragment, one, acc, 0, fragment.row_count)
    assert signatures() == warm


@pytest.mark.parametrize("x", [np.ones(BLOCK), np.ones((2, BLOCK), np.float32), np.ones(256, np.float32)[::2]])
def test_only_flat_contiguous_float32_reaches_a_kernel(x):
    with pytest.raises(AssertionError, match="expected contiguous float32"):
        encode("int8", x)
