"""The laboratory computes what the product computes: the same bits encoded and published, the same merges."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from algo import slow  # noqa: E402
from skerry.algo import codecs, outer  # noqa: E402
from skerry.algo.fragments import BLOCK, ROW, Fragment, Tensor, layout_of, split  # noqa: E402
from skerry.algo.merge import RULES  # noqa: E402
from skerry.core.facts import Decision  # noqa: E402
from skerry.node.algebra import FLOAT32, Values  # noqa: E402
from skerry.proof.lab.algebra import Device  # noqa: E402

EXACT = ("fp32", "bf16", "int8", "int4")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")),
]
on_every_device = pytest.mark.parametrize("device", DEVICES)


def fragment_of(*extents: int) -> Fragment:
    tensors = [Tensor(f"t{i:02}", (n,), "embedding" if i == 0 else "other") for i, n in enumerate(extents)]
    (fragment,) = split(layout_of(tensors), 1)
    return fragment


FRAGMENT = fragment_of(300, 5, 2 * ROW + 77, BLOCK, 1000)


def gaussian(seed: int, scale: float = 1.0, fragment: Fragment = FRAGMENT) -> np.ndarray:
    """Random values with zeros between the tensors."""
    random = np.random.default_rng(seed)
    flat = np.zeros(fragment.size, np.float32)
    for slot in fragment.slots:
        flat[slot.offset : slot.offset + slot.size] = random.standard_normal(slot.size) * scale
    return flat


def difficult(seed: int) -> np.ndarray:
    """Every block at a scale of its own, from below the smallest normal number to near the largest."""
    x = gaussian(seed).reshape(-1, BLOCK)
    random = np.random.default_rng(seed)
    exponents = random.uniform(-44, 37, len(x))
    x = (x.astype(np.float64) * 10.0 ** exponents[:, None]).astype(np.float32)
    x[::7] = 0
    x[1::7, ::3] = -0.0
    x[2::7] = np.sign(x[2::7]) * np.float32(7 * 2.0**-126)  # at the smallest scale there is
    x[3::7] = np.arange(-64, 64) / 2  # ties
    return x.ravel()


def same_bits(ours: "torch.Tensor", theirs: np.ndarray) -> bool:
    return ours.cpu().numpy().tobytes() == theirs.tobytes()


def put(array: np.ndarray, device: str) -> "torch.Tensor":
    return torch.tensor(array, device=device)


@on_every_device
@pytest.mark.parametrize("codec", EXACT)
@pytest.mark.parametrize("seed", range(8))
def test_encoding_says_the_same_bits(codec, seed, device):
    x = gaussian(seed, 1e-3) if seed < 2 else difficult(seed)
    expected = np.empty_like(x)
    wire = codecs.encode(codec, x, expected)
    payload = Device(device).encode(codec, put(x, device))
    assert same_bits(payload.values, expected)
    assert len(payload) == len(wire)


@on_every_device
@pytest.mark.parametrize("seed", range(8))
def test_two_bits_say_the_same_up_to_the_last_bit_of_the_scale(seed, device):
    x = gaussian(seed, 1e-3) if seed < 2 else difficult(seed)
    expected = np.empty_like(x)
    wire = codecs.encode("int2", x, expected)
    payload = Device(device).encode("int2", put(x, device))
    np.testing.assert_allclose(payload.values.cpu(), expected, rtol=2.0**-22, atol=0)
    assert len(payload) == len(wire)


@on_every_device
@pytest.mark.parametrize("codec", EXACT)
@pytest.mark.parametrize("seed", range(4))
def test_publishing_gives_the_same_bits(codec, seed, device):
    theta = gaussian(seed)
    x = theta + gaussian(seed + 100, 10.0 ** -(seed + 1))
    expected = slow.publish(codec, x, theta)
    theta_new, error = Device(device).publish(codec, put(x, device), put(theta, device))
    assert same_bits(theta_new, expected.theta_new) and same_bits(error, expected.error_new)


@on_every_device
@pytest.mark.parametrize("codec", codecs.CODECS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible(codec, poison, device):
    x = gaussian(0)
    x[700] = poison
    decoded = Device(device).encode(codec, put(x, device)).values
    assert not torch.isfinite(decoded[700])


def decided(
    rule: str,
    outer_rule: str,
    version: int = 6,
    delay: int = 1,
    restart: int = 0,
    gain: float = 1.0,
    codec: str = "fp32",
    delta: str = "fp32",
) -> Decision:
    return Decision(
        1, 0, version, b"", rule, outer_rule, 0.7, 0.9, delay, restart, gain, codec, delta, 1, 1, "steady", "all in", 1,
        (), (), (), 0.0, 0.0, 0.0,
    )  # fmt: skip


def assert_close(ours: "torch.Tensor", theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours.cpu().numpy(), theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max())


def contributions(count: int) -> list[tuple[np.ndarray, float]]:
    """Drifts of differing length and weight; of two, some tensors cancel; one is still."""
    drifts = [gaussian(i, 0.1 * (i + 1)) for i in range(count)]
    _, opposite, other_length, still, _ = (slice(slot.offset, slot.padded_stop) for slot in FRAGMENT.slots)
    if count == 2:
        drifts[1][opposite] = -drifts[0][opposite]
        drifts[1][other_length] = -2 * drifts[0][other_length]
    drifts[-1][still] = 0
    return [(drift, 1.0 + i // 2 / 3) for i, drift in enumerate(drifts)]


def merged_by_both(decision: Decision, old: list[np.ndarray], drifts: list[tuple[np.ndarray, float]], device: str):
    lab = Device(device)
    held, theirs = [], []
    for drift, weight in drifts:
        payload = lab.encode("fp32", put(drift, device))
        held.append(lab.hold("fp32", payload, weight, lab.inspect("fp32", payload, FRAGMENT)))
        raw = FLOAT32.encode("fp32", drift)
        theirs.append(FLOAT32.hold("fp32", raw, weight, FLOAT32.inspect("fp32", raw, FRAGMENT)))
    mine = Values(*(put(array, device) for array in old))
    ours = lab.advance(decision, FRAGMENT, mine, lab.merge(decision, FRAGMENT, held))
    return ours, FLOAT32.advance(decision, FRAGMENT, Values(*old), FLOAT32.merge(decision, FRAGMENT, theirs))


@on_every_device
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("outer_rule", outer.OUTER_RULES)
@pytest.mark.parametrize("rule", RULES)
def test_a_merge_is_the_products(rule, outer_rule, count, device):
    old = [gaussian(10), gaussian(11, 0.1), gaussian(12, 1e-3)]
    ours, theirs = merged_by_both(decided(rule, outer_rule), old, contributions(count), device)
    for our, their in zip(ours.values[:2], theirs.values[:2], strict=True):
        assert_close(our, their)
        padding = np.setdiff1d(
            np.arange(FRAGMENT.size), np.concatenate([np.arange(s.offset, s.offset + s.size) for s in FRAGMENT.slots])
        )
        assert not our.cpu()[padding].any()
    assert len(ours.payload) == len(theirs.payload)


@on_every_device
@pytest.mark.parametrize("outer_rule", ["nesterov", "delayed"])
@pytest.mark.parametrize("version, delay, restart", [(6, 3, 0), (7, 3, 0), (6, 4, 3), (6, 3, 3), (6, 3, 4)])
def test_outer_steps_keep_the_same_calendar(outer_rule, version, delay, restart, device):
    old = [gaussian(10), gaussian(11, 0.1), gaussian(12, 1e-3)]
    decision = decided("mean", outer_rule, version, delay, restart)
    ours, theirs = merged_by_both(decision, old, contributions(2), device)
    assert_close(ours.values.theta, theirs.values.theta)
    assert_close(ours.values.velocity, theirs.values.velocity)


@on_every_device
@pytest.mark.parametrize("rule", RULES)
def test_a_gain_shortens_the_merged_delta_and_not_the_momentum(rule, device):
    zero = np.zeros(FRAGMENT.size, np.float32)
    velocity = gaussian(11, 0.1)
    (ours, theirs), (_, whole) = (
        merged_by_both(decided(rule, "nesterov", gain=gain), [zero, velocity, zero], contributions(5), device)
        for gain in (0.5, 1.0)
    )
    assert_close(ours.values.theta, theirs.values.theta)
    assert_close(ours.values.velocity, theirs.values.velocity)
    delta = whole.values.velocity - np.float32(0.9) * velocity
    np.testing.assert_allclose(theirs.values.velocity, np.float32(0.9) * velocity + delta / 2, atol=1e-6)


@on_every_device
def test_norms_are_the_products(device):
    lab, drift = Device(device), gaussian(3)
    payload = lab.encode("int8", put(drift, device))
    raw = FLOAT32.encode("int8", drift)
    expected = FLOAT32.inspect("int8", raw, FRAGMENT).norms
    np.testing.assert_allclose(lab.inspect("int8", payload, FRAGMENT).norms.cpu(), expected, rtol=1e-6)


@on_every_device
@pytest.mark.parametrize("codec", codecs.CODECS)
def test_a_learner_adopts_the_very_tensor_that_was_published(codec, device):
    lab = Device(device)
    zero = torch.zeros(FRAGMENT.size, device=device)
    genesis = Values(put(gaussian(0), device), zero, zero)
    old = lab.load(bytes(lab.parts(genesis)[0]), FRAGMENT)
    assert old is genesis
    payload = lab.encode(codec, put(gaussian(1), device))
    held = lab.hold(codec, payload, 1.0, lab.inspect(codec, payload, FRAGMENT))
    decision = decided("rda", "nesterov", codec=codec)
    merged = lab.advance(decision, FRAGMENT, old, lab.merge(decision, FRAGMENT, [held]))
    adopted, digest, is_finite = lab.adopt(codec, merged.payload, old.theta)
    assert adopted is merged.values.theta and digest == merged.digest and is_finite
    assert len(merged.payload) == lab.payload_bytes(codec, FRAGMENT) == codecs.payload_bytes(codec, FRAGMENT.size)
    whole = lab.whole(adopted)
    assert lab.adopt("fp32", whole, None).base is adopted and len(whole) == 4 * FRAGMENT.size
    assert lab.checksum(payload) != lab.checksum(whole)
    assert bytes(lab.parts(old)[0]) != bytes(lab.parts(merged.values)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("codec", codecs.CODECS)
def test_nothing_waits_for_the_device(codec):
    lab = Device("cuda")
    old = Values(*(put(gaussian(i), "cuda") for i in range(3)))
    drifts = [put(gaussian(i), "cuda") for i in range(3)]

    def merge(rule: str, outer_rule: str) -> None:
        decision = decided(rule, outer_rule, codec=codec)
        lab.advance(decision, FRAGMENT, old, lab.merge(decision, FRAGMENT, hold_all(lab, codec, drifts)))

    merge("rda", "nesterov")  # first use copies
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rule in RULES:
            for outer_rule in outer.OUTER_RULES:
                merge(rule, outer_rule)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def hold_all(lab: Device, codec: str, drifts: list) -> list:
    payloads = [lab.encode(codec, drift) for drift in drifts]
    return [lab.hold(codec, payload, 1.0, lab.inspect(codec, payload, FRAGMENT)) for payload in payloads]
