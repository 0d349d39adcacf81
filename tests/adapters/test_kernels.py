"""A learner's kernels on torch tensors have the bits of `algo/`, whatever the values; on a GPU too, if there is one."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from skerry.adapters import kernels  # noqa: E402
from skerry.algo import codecs, digests  # noqa: E402
from skerry.algo.fragments import BLOCK, ROW, Tensor, gather, layout_of, padded, split  # noqa: E402

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")],
    ),
]
on_every_device = pytest.mark.parametrize("device", DEVICES)
every_codec = pytest.mark.parametrize("codec", codecs.CODECS)


def gaussian(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def magnitudes():
    """Every block at a scale of its own, from below the smallest normal number to near the largest."""
    exponents = np.linspace(-46, 37.5, 400)[:, None]
    with np.errstate(over="ignore"):
        x = (gaussian(400 * BLOCK, 1).reshape(-1, BLOCK).astype(np.float64) * 10.0**exponents).astype(np.float32)
    return np.nan_to_num(x, posinf=3e38, neginf=-3e38)


def edges():
    """Zeros of either sign, ties, the smallest scale there is and its neighbours, blocks with a single value."""
    x = gaussian(10 * BLOCK, 2).reshape(-1, BLOCK)
    smallest = np.float32(2.0**-126)
    x[0], x[1, ::3], x[2] = 0.0, -0.0, np.arange(-64, 64) / 2
    for row, top in enumerate([7 * smallest, np.nextafter(7 * smallest, 0), 127 * smallest, smallest, 1e-45], start=3):
        x[row] = np.sign(x[row]) * np.float32(top)
    x[8] = 0.0
    x[8, 77] = -3.5
    x[9] = np.float32(3.4e38) * np.sign(x[9])
    return x


def spoiled():
    """NaN and infinities, alone and in company, beside a block that has none."""
    x = gaussian(7 * BLOCK, 3).reshape(-1, BLOCK)
    x[0, 5], x[1, 127], x[2, 64], x[3] = np.nan, np.inf, -np.inf, np.nan
    x[4, :2] = np.inf, np.nan
    x[5].view(np.uint32)[9] = 0xFF800001  # a signalling NaN with a sign
    return x


def fragment_like():
    """Tensors cut and padded, as they lie in fragments."""
    tensors = [Tensor("a", (5,)), Tensor("b", (300, 7)), Tensor("c", (ROW + 3,)), Tensor("d", ())]
    arrays = {t.name: np.asarray(gaussian(t.size, 4).reshape(t.shape)) for t in tensors}
    return np.concatenate([gather(fragment, arrays) for fragment in split(layout_of(tensors), 3)])


VALUES = {
    "random": lambda: gaussian(3 * ROW + 5 * BLOCK),
    "small": lambda: gaussian(BLOCK) * np.float32(1e-3),
    "zero": lambda: np.zeros(ROW, np.float32),
    "magnitudes": magnitudes,
    "edges": edges,
    "spoiled": spoiled,
    "fragments": fragment_like,
}
all_values = pytest.mark.parametrize("kind", VALUES)


def put(array, device):
    return torch.tensor(array, device=device)


def same_bits(ours, theirs):
    """And a NaN where there is one: its own bits are the processor's."""
    ours = ours.cpu().numpy()
    is_nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), is_nan)
    np.testing.assert_array_equal(ours.view(np.uint32)[~is_nan], theirs.view(np.uint32)[~is_nan])


@on_every_device
@every_codec
@all_values
def test_a_payload_has_the_bytes_that_algo_gives(device, codec, kind):
    x = VALUES[kind]().ravel()
    payload = torch.full((codecs.payload_bytes(codec, x.size),), 0xA5, dtype=torch.uint8, device=device)
    kernels.encode(codec, put(x, device), payload)
    np.testing.assert_array_equal(payload.cpu().numpy(), codecs.encode(codec, x))


@on_every_device
@every_codec
@all_values
def test_it_says_the_values_that_algo_reads(device, codec, kind):
    payload = codecs.encode(codec, VALUES[kind]().ravel())
    expected = codecs.decode(codec, payload)
    out = torch.full((expected.size,), torch.nan, device=device)
    kernels.decode(codec, put(payload, device), out)
    same_bits(out, expected)


@on_every_device
@every_codec
def test_any_bytes_are_read_alike(device, codec):
    """Also such as no encoder gives, which somebody may send."""
    payload = np.random.default_rng(5).integers(0, 256, codecs.payload_bytes(codec, 64 * BLOCK), dtype=np.uint8)
    out = torch.empty(64 * BLOCK, device=device)
    kernels.decode(codec, put(payload, device), out)
    with np.errstate(all="ignore"):
        same_bits(out, codecs.decode(codec, payload))


@on_every_device
@every_codec
def test_pieces_make_the_same_whole(device, codec, monkeypatch):
    monkeypatch.setattr(kernels, "PIECE", ROW)
    x = gaussian(2 * ROW + 7 * BLOCK)
    expected = codecs.encode(codec, x)
    payload = torch.empty(expected.size, dtype=torch.uint8, device=device)
    kernels.encode(codec, put(x, device), payload)
    np.testing.assert_array_equal(payload.cpu().numpy(), expected)
    out = torch.empty(x.size, device=device)
    kernels.decode(codec, payload, out)
    same_bits(out, codecs.decode(codec, expected))
    assert digest(x, device) == digests.digest(x)


@every_codec
def test_a_payload_of_another_length_is_refused(codec):
    x, payload = torch.zeros(2 * BLOCK), torch.zeros(codecs.payload_bytes(codec, BLOCK), dtype=torch.uint8)
    for call in (kernels.encode, kernels.decode):
        with pytest.raises(ValueError, match=f"{codec} payload of 256 elements must be of"):
            call(codec, *((x, payload) if call is kernels.encode else (payload, x)))


def digest(x, device):
    sums = kernels.row_sums(put(x, device), kernels.factors_on(torch.device(device)))
    return digests.of_row_sums(sums.cpu().numpy().view(np.uint64))


@on_every_device
@all_values
def test_a_digest_is_algos(device, kind):
    x = VALUES[kind]().ravel()
    assert digest(x, device) == digests.digest(x)


@on_every_device
@pytest.mark.parametrize("size", [1, BLOCK, ROW - 1, ROW, ROW + 1])
def test_a_digest_is_algos_at_any_size(device, size):
    x = np.zeros(padded(size), np.float32)
    x[:size] = gaussian(size)
    assert digest(x, device) == digests.digest(x)


@on_every_device
def test_the_largest_magnitude_shows_what_is_not_finite(device):
    x = gaussian(ROW)
    assert kernels.largest(put(x, device)).item() == np.abs(x).max()
    for poison in (np.nan, np.inf, -np.inf):
        x[700] = poison
        assert not np.isfinite(kernels.largest(put(x, device)).item())
