"""The outer step is torch's SGD, and what is published is what every learner adopts, to the bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algo.codecs import CODECS, decode
from skerry.algo.fragments import BLOCK, ROW
from skerry.algo.outer import adopt, outer_step, publish

small = settings(deadline=None, max_examples=25, derandomize=True)
every_codec = pytest.mark.parametrize("codec", CODECS)
SIZE = 2 * ROW + BLOCK
ZERO = np.zeros(SIZE, np.float32)


def gaussian(seed: int, scale: float = 1.0, size: int = SIZE) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


@pytest.mark.parametrize("rule, lr, momentum", [("nesterov", 0.7, 0.9), ("nesterov", 0.3, 0.5), ("sgd", 0.7, 0.9)])
def test_follows_torch_sgd_given_minus_the_delta_as_gradient(rule, lr, momentum):
    torch = pytest.importorskip("torch")
    start = gaussian(0)
    parameter = torch.nn.Parameter(torch.tensor(start))
    nesterov = rule == "nesterov"
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum if nesterov else 0.0, nesterov=nesterov)
    x, velocity = start, ZERO
    for step in range(5):
        delta = gaussian(step + 1, 0.01)
        x, velocity = outer_step(rule, lr, momentum, x, ZERO, velocity, delta)
        parameter.grad = torch.tensor(-delta)
        optimizer.step()
        np.testing.assert_allclose(x, parameter.detach().numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", ["nesterov", "sgd"])
def test_each_operation_is_rounded_as_written(rule):
    theta, error, velocity, delta = (gaussian(i, s) for i, s in enumerate((1.0, 1e-3, 0.1, 0.01)))
    eta, mu = np.float32(0.3), np.float32(0.9)
    x, b = outer_step(rule, 0.3, 0.9, theta, error, velocity, delta)
    if rule == "nesterov":
        expected_b = mu * velocity + delta
        expected_x = (theta + error) + eta * (delta + mu * expected_b)
    else:
        expected_b = ZERO
        expected_x = (theta + error) + eta * delta
    assert x.dtype == b.dtype == np.float32
    assert b.tobytes() == expected_b.tobytes() and x.tobytes() == expected_x.tobytes()


def test_paper_2_plain_averaging_is_outer_sgd_with_rate_one():
    theta = gaussian(0)
    learner = theta + gaussian(1, 0.01)
    x, _ = outer_step("sgd", 1.0, 0.0, theta, ZERO, ZERO, learner - theta)
    np.testing.assert_allclose(x, learner, rtol=1e-6, atol=1e-7)


def test_nesterov_without_momentum_is_sgd():
    theta, delta = gaussian(0), gaussian(1)
    assert (
        outer_step("nesterov", 0.7, 0.0, theta, ZERO, gaussian(2), delta)[0].tobytes()
        == outer_step("sgd", 0.7, 0.0, theta, ZERO, ZERO, delta)[0].tobytes()
    )


def test_delayed_with_a_delay_of_one_is_nesterov():
    theirs, ours = (gaussian(0), ZERO), (gaussian(0), ZERO)
    for version in range(1, 6):
        delta = gaussian(version, 0.01)
        theirs = outer_step("nesterov", 0.7, 0.9, theirs[0], ZERO, theirs[1], delta)
        ours = outer_step("delayed", 0.7, 0.9, ours[0], ZERO, ours[1], delta, version=version, delay=1)
        assert ours[0].tobytes() == theirs[0].tobytes()


def test_delayed_takes_a_momentum_step_with_the_mean_of_each_period():
    delay, eta, mu = 3, 0.7, 0.9
    x, velocity, slow_x, b = gaussian(0), ZERO, gaussian(0).astype(np.float64), np.zeros(SIZE)
    deltas = [gaussian(i + 1, 0.01) for i in range(9)]
    for version, delta in enumerate(deltas, 1):
        x, velocity = outer_step("delayed", eta, mu, x, ZERO, velocity, delta, version=version, delay=delay)
        slow_x += eta * delta
        if version % delay == 0:
            b = mu * b + np.mean(deltas[version - delay : version], axis=0, dtype=np.float64)
            slow_x += eta * mu * b
        np.testing.assert_allclose(x, slow_x, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("rule", ["nesterov", "delayed"])
def test_a_restart_forgets_the_velocity_at_its_versions_alone(rule):
    theta, velocity, delta = gaussian(0), gaussian(1), gaussian(2)

    def step(version: int, restart: int, velocity: np.ndarray = velocity) -> list[bytes]:
        values = outer_step(rule, 0.7, 0.9, theta, ZERO, velocity, delta, version=version, delay=2, restart=restart)
        return [array.tobytes() for array in values]

    assert step(12, 4) == step(12, 0, ZERO) != step(12, 0)
    assert step(11, 4) == step(11, 0) == step(11, 5) != step(11, 0, ZERO)


def test_unknown_rule_is_refused_and_inputs_are_left_alone():
    theta, error, velocity, delta = (gaussian(i) for i in range(4))
    for array in (theta, error, velocity, delta):
        array.flags.writeable = False
    outer_step("nesterov", 0.7, 0.9, theta, error, velocity, delta)
    with pytest.raises(ValueError, match="unknown outer rule 'adam', known are nesterov, sgd, delayed"):
        outer_step("adam", 0.7, 0.9, theta, error, velocity, delta)


@every_codec
@small
@given(st.integers(0, 2**31), st.integers(-12, 4))
def test_what_is_published_is_what_is_adopted(codec, seed, exponent):
    theta = gaussian(seed)
    x = theta + gaussian(seed + 1, 10.0**exponent)
    published = publish(codec, x, theta)
    assert published.finite
    assert adopt(codec, published.payload, theta).tobytes() == published.theta_new.tobytes()
    assert published.theta_new.tobytes() == (theta + decode(codec, published.payload)).tobytes()
    assert published.error_new.tobytes() == (x - published.theta_new).tobytes()


@every_codec
def test_adopting_from_a_received_buffer_gives_the_same_bits(codec):
    theta, x = gaussian(0), gaussian(1)
    published = publish(codec, x, theta)
    received = np.frombuffer(published.payload.tobytes(), np.uint8)
    theta.flags.writeable = False
    assert adopt(codec, received, theta).tobytes() == published.theta_new.tobytes()
    with pytest.raises(ValueError, match="payload of"):
        adopt(codec, received[:-1], theta)


@every_codec
def test_the_error_rides_along_until_it_is_said(codec):
    """With nothing new merged, publishing again and again brings Θ to the master value."""
    master = gaussian(0)
    theta, error = ZERO, master
    for _ in range(120 if codec == "int2" else 12):  # int2 says an outlier bit by bit
        x, _velocity = outer_step("sgd", 0.7, 0.0, theta, error, ZERO, ZERO)
        published = publish(codec, x, theta)
        theta, error = published.theta_new, published.error_new
    np.testing.assert_allclose(theta, master, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(theta + error, master, rtol=1e-6, atol=1e-7)


@every_codec
def test_zero_padding_stays_zero(codec):
    theta, delta = gaussian(0), gaussian(1, 0.1)
    theta[100:BLOCK] = delta[100:BLOCK] = theta[-77:] = delta[-77:] = 0
    velocity, error = ZERO, ZERO
    for _ in range(3):
        x, velocity = outer_step("nesterov", 0.7, 0.9, theta, error, velocity, delta)
        _, theta, error, _ = publish(codec, x, theta)
    for state in (theta, error, velocity):
        assert not state[100:BLOCK].any() and not state[-77:].any()


@every_codec
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "theta"])
def test_what_is_not_finite_is_flagged(codec, poison, where):
    theta, x = gaussian(0), gaussian(1)
    (theta if where == "theta" else x)[ROW + 5] = poison
    assert not publish(codec, x, theta).finite


@every_codec
def test_a_difference_that_overflows_is_flagged(codec):
    theta, x = gaussian(0), gaussian(1)
    theta[7], x[7] = -3e38, 3e38
    assert not publish(codec, x, theta).finite


@every_codec
@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads_gives_the_same_bits(codec, threads):
    theta, error, velocity, delta = (gaussian(i, size=90 * ROW + BLOCK) for i in range(4))
    alone = outer_step("nesterov", 0.7, 0.9, theta, error, velocity, delta)
    many = outer_step("nesterov", 0.7, 0.9, theta, error, velocity, delta, threads=threads)
    assert [a.tobytes() for a in alone] == [m.tobytes() for m in many]
    one, more = publish(codec, alone[0], theta), publish(codec, alone[0], theta, threads=threads)
    assert [a.tobytes() for a in one[:3]] == [m.tobytes() for m in more[:3]] and one.finite == more.finite
    assert adopt(codec, one.payload, theta, threads=threads).tobytes() == one.theta_new.tobytes()


@pytest.mark.parametrize("rule", ["nesterov", "sgd"])
@every_codec
def test_handed_in_buffers_are_filled_with_the_same_bits(rule, codec):
    theta, error, velocity, delta = (gaussian(i) for i in range(4))
    buffers = [np.full(SIZE, np.nan, np.float32) for _ in range(5)]
    fresh = outer_step(rule, 0.7, 0.9, theta, error, velocity, delta)
    x, b = outer_step(rule, 0.7, 0.9, theta, error, velocity, delta, out=(buffers[0], buffers[1]))
    assert x is buffers[0] and b is buffers[1] and [x.tobytes(), b.tobytes()] == [f.tobytes() for f in fresh]
    published = publish(codec, x, theta, out=(buffers[2], buffers[3]))
    assert published.theta_new is buffers[2] and published.error_new is buffers[3]
    assert [a.tobytes() for a in published[:3]] == [a.tobytes() for a in publish(codec, x, theta)[:3]]
    assert adopt(codec, published.payload, theta, out=buffers[4]) is buffers[4]
    assert buffers[4].tobytes() == published.theta_new.tobytes()
