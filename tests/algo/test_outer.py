"""The outer step is torch's SGD, done in one pass as if step by step, and what is published is what learners adopt."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algo import slow
from skerry.algo.codecs import CODECS, decode, encode
from skerry.algo.digests import digest
from skerry.algo.fragments import BLOCK, ROW
from skerry.algo.kernels import ROWS_PER_THREAD_MIN
from skerry.algo.outer import OUTER_RULES, Advanced, OuterStep, adopt, advance

small = settings(deadline=None, max_examples=25, derandomize=True)
every_codec = pytest.mark.parametrize("codec", CODECS)
every_rule = pytest.mark.parametrize("rule", OUTER_RULES)
SIZE = 2 * ROW + BLOCK
ZERO = np.zeros(SIZE, np.float32)
NESTEROV = OuterStep("nesterov", 0.7, 0.9)


def gaussian(seed: int, scale: float = 1.0, size: int = SIZE) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def version_before(seed: int = 0, size: int = SIZE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Θ, b and e."""
    return gaussian(seed, 1.0, size), gaussian(seed + 1, 0.1, size), gaussian(seed + 2, 1e-3, size)


def moved(step: OuterStep, state: tuple[np.ndarray, ...], delta: np.ndarray, codec: str = "fp32") -> Advanced:
    return advance(step, *state, "fp32", delta.view(np.uint8), codec)


def bits(advanced: Advanced) -> list[bytes]:
    return [*(array.tobytes() for array in advanced[:4]), *advanced.digests]


def master(advanced: Advanced) -> np.ndarray:
    return advanced.theta.astype(np.float64) + advanced.error


@every_rule
@every_codec
@pytest.mark.parametrize("delta_codec", ["fp32", "bf16"])
@pytest.mark.parametrize("version, delay, restart", [(6, 1, 0), (6, 3, 0), (7, 3, 0), (6, 3, 2), (6, 4, 5)])
def test_one_pass_gives_the_bits_of_one_operation_after_the_other(rule, codec, delta_codec, version, delay, restart):
    step = OuterStep(rule, 0.3, 0.9, version, delay, restart)
    theta, velocity, error = version_before()
    payload = encode(delta_codec, gaussian(3, 0.01))
    x, b = slow.outer_step(step, theta, velocity, error, decode(delta_codec, payload))
    expected = slow.publish(codec, x, theta)
    ours = advance(step, theta, velocity, error, delta_codec, payload, codec)
    assert ours.finite and ours.velocity.tobytes() == b.tobytes()
    assert ours.payload.tobytes() == expected.payload.tobytes()
    assert ours.theta.tobytes() == expected.theta_new.tobytes()
    assert ours.error.tobytes() == expected.error_new.tobytes()
    assert ours.digests == tuple(digest(array) for array in (ours.theta, ours.velocity, ours.error))


@pytest.mark.parametrize("rule, lr, momentum", [("nesterov", 0.7, 0.9), ("nesterov", 0.3, 0.5), ("sgd", 0.7, 0.9)])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_follows_torch_sgd_given_minus_the_delta_as_gradient(rule, lr, momentum, codec):
    """Whatever learners hold meanwhile: what the codec could not say is not lost."""
    torch = pytest.importorskip("torch")
    state = (gaussian(0), ZERO, ZERO)
    parameter = torch.nn.Parameter(torch.tensor(state[0]))
    nesterov = rule == "nesterov"
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum if nesterov else 0.0, nesterov=nesterov)
    for step in range(5):
        delta = gaussian(step + 1, 0.01)
        advanced = moved(OuterStep(rule, lr, momentum), state, delta, codec)
        state = advanced[:3]
        parameter.grad = torch.tensor(-delta)
        optimizer.step()
        np.testing.assert_allclose(master(advanced), parameter.detach().numpy(), rtol=2e-6, atol=2e-7)


def test_paper_2_plain_averaging_is_outer_sgd_with_rate_one():
    theta = gaussian(0)
    learner = theta + gaussian(1, 0.01)
    advanced = moved(OuterStep("sgd", 1.0, 0.0), (theta, ZERO, ZERO), learner - theta)
    np.testing.assert_allclose(advanced.theta, learner, rtol=1e-6, atol=1e-7)


def test_nesterov_without_momentum_is_sgd():
    theta, delta = gaussian(0), gaussian(1)
    ours = moved(OuterStep("nesterov", 0.7, 0.0), (theta, gaussian(2), ZERO), delta)
    theirs = moved(OuterStep("sgd", 0.7, 0.0), (theta, ZERO, ZERO), delta)
    assert ours.theta.tobytes() == theirs.theta.tobytes() and ours.error.tobytes() == theirs.error.tobytes()


def test_delayed_with_a_delay_of_one_is_nesterov():
    theirs, ours = ((gaussian(0), ZERO, ZERO) for _ in range(2))
    for version in range(1, 6):
        delta = gaussian(version, 0.01)
        theirs = moved(NESTEROV, theirs, delta)[:3]
        ours = moved(OuterStep("delayed", 0.7, 0.9, version, delay=1), ours, delta)[:3]
        assert ours[0].tobytes() == theirs[0].tobytes()


def test_delayed_takes_a_momentum_step_with_the_mean_of_each_period():
    delay, eta, mu = 3, 0.7, 0.9
    state, slow_x, b = (gaussian(0), ZERO, ZERO), gaussian(0).astype(np.float64), np.zeros(SIZE)
    deltas = [gaussian(i + 1, 0.01) for i in range(9)]
    for version, delta in enumerate(deltas, 1):
        advanced = moved(OuterStep("delayed", eta, mu, version, delay), state, delta)
        state = advanced[:3]
        slow_x += eta * delta
        if version % delay == 0:
            b = mu * b + np.mean(deltas[version - delay : version], axis=0, dtype=np.float64)
            slow_x += eta * mu * b
        np.testing.assert_allclose(master(advanced), slow_x, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("rule", ["nesterov", "delayed"])
def test_a_restart_forgets_the_velocity_at_its_versions_alone(rule):
    theta, velocity, delta = gaussian(0), gaussian(1), gaussian(2)

    def step(version: int, restart: int, velocity: np.ndarray = velocity) -> list[bytes]:
        return bits(moved(OuterStep(rule, 0.7, 0.9, version, 2, restart), (theta, velocity, ZERO), delta))

    assert step(12, 4) == step(12, 0, ZERO) != step(12, 0)
    assert step(11, 4) == step(11, 0) == step(11, 5) != step(11, 0, ZERO)


def test_unknown_rule_is_refused_and_inputs_are_left_alone():
    state, delta = version_before(), gaussian(3)
    for array in (*state, delta):
        array.flags.writeable = False
    moved(NESTEROV, state, delta)
    with pytest.raises(ValueError, match="unknown outer rule 'adam', known are nesterov, sgd, delayed"):
        moved(NESTEROV._replace(rule="adam"), state, delta)


@every_codec
@small
@given(st.integers(0, 2**31), st.integers(-12, 4))
def test_what_is_published_is_what_is_adopted(codec, seed, exponent):
    state = version_before(seed)
    advanced = moved(NESTEROV, state, gaussian(seed + 3, 10.0**exponent), codec)
    assert advanced.finite
    assert adopt(codec, advanced.payload, state[0]).theta.tobytes() == advanced.theta.tobytes()
    assert advanced.theta.tobytes() == (state[0] + decode(codec, advanced.payload)).tobytes()


@every_codec
def test_adopting_from_a_received_buffer_gives_the_same_bits(codec):
    theta, velocity, error = version_before()
    advanced = moved(NESTEROV, (theta, velocity, error), gaussian(3), codec)
    received = np.frombuffer(advanced.payload.tobytes(), np.uint8)
    theta.flags.writeable = False
    assert adopt(codec, received, theta).theta.tobytes() == advanced.theta.tobytes()
    with pytest.raises(ValueError, match="payload of"):
        adopt(codec, received[:-1], theta)


@every_codec
def test_the_error_rides_along_until_it_is_said(codec):
    """With nothing new merged, publishing again and again brings Θ to the master value."""
    goal = gaussian(0)
    state = (ZERO, ZERO, goal)
    for _ in range(120 if codec == "int2" else 12):  # int2 says an outlier bit by bit
        state = moved(OuterStep("sgd", 0.7, 0.0), state, ZERO, codec)[:3]
    np.testing.assert_allclose(state[0], goal, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state[0] + state[2], goal, rtol=1e-6, atol=1e-7)


@every_codec
def test_zero_padding_stays_zero(codec):
    theta, delta = gaussian(0), gaussian(1, 0.1)
    theta[100:BLOCK] = delta[100:BLOCK] = theta[-77:] = delta[-77:] = 0
    state = (theta, ZERO, ZERO)
    for _ in range(3):
        state = moved(NESTEROV, state, delta, codec)[:3]
    for array in state:
        assert not array[100:BLOCK].any() and not array[-77:].any()


@every_codec
@every_rule
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["theta", "error", "delta"])
def test_what_is_not_finite_is_flagged(codec, rule, poison, where):
    theta, velocity, error = version_before()
    delta = gaussian(3)
    {"theta": theta, "error": error, "delta": delta}[where][ROW + 5] = poison
    assert not moved(OuterStep(rule, 0.7, 0.9), (theta, velocity, error), delta, codec).finite


@every_codec
def test_a_difference_that_overflows_is_flagged(codec):
    theta, delta = gaussian(0), gaussian(1)
    theta[7], delta[7] = -3e38, 3e38
    assert not moved(OuterStep("sgd", 2.0, 0.0), (theta, ZERO, ZERO), delta, codec).finite


@every_codec
@every_rule
@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads_gives_the_same_bits(codec, rule, threads):
    size = threads * ROWS_PER_THREAD_MIN * ROW + BLOCK  # less would be done on fewer threads
    state, delta = version_before(size=size), encode("bf16", gaussian(3, size=size))
    step = OuterStep(rule, 0.7, 0.9)
    alone = advance(step, *state, "bf16", delta, codec)
    many = advance(step, *state, "bf16", delta, codec, threads)
    assert bits(alone) == bits(many) and alone.finite and many.finite
    assert adopt(codec, alone.payload, state[0], threads=threads).theta.tobytes() == alone.theta.tobytes()


@every_rule
@every_codec
def test_handed_in_buffers_are_filled_with_the_same_bits(rule, codec):
    state, delta = version_before(), gaussian(3).view(np.uint8)
    step = OuterStep(rule, 0.7, 0.9)
    fresh = advance(step, *state, "fp32", delta, codec)
    values = [np.full(SIZE, np.nan, np.float32) for _ in range(4)]
    out = (*values[:3], np.full_like(fresh.payload, 255))
    filled = advance(step, *state, "fp32", delta, codec, out=out)
    assert all(ours is buffer for ours, buffer in zip(filled[:4], out, strict=True))
    assert bits(filled) == bits(fresh)
    assert adopt(codec, filled.payload, state[0], out=values[3]).theta is values[3]
    assert values[3].tobytes() == filled.theta.tobytes()
