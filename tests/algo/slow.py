"""An outer step and what it publishes, slow and obvious: an operation after the other over whole arrays."""

from typing import NamedTuple

import numpy as np

from skerry.algo.codecs import decode, encode
from skerry.algo.outer import OuterStep


class Published(NamedTuple):
    payload: np.ndarray
    theta_new: np.ndarray
    error_new: np.ndarray


def outer_step(
    step: OuterStep, theta: np.ndarray, velocity: np.ndarray, error: np.ndarray, delta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(x, b')."""
    eta, mu = np.float32(step.lr), np.float32(step.momentum)
    if step.restart and step.version % step.restart == 0:
        velocity = np.zeros_like(velocity)
    if step.rule == "nesterov":
        b = mu * velocity + delta
        return (theta + error) + eta * (delta + mu * b), b
    if step.rule == "delayed":
        b = velocity + np.float32(1 / step.delay) * delta
        if step.version % step.delay == 0:
            return (theta + error) + eta * (delta + mu * b), mu * b
        return (theta + error) + eta * (delta + np.float32(0) * b), b
    return (theta + error) + eta * delta, np.zeros_like(velocity)


def publish(codec: str, x: np.ndarray, theta: np.ndarray) -> Published:
    """d = Q(x − Θ), Θ' = Θ + decode(d), e' = x − Θ'."""
    payload = encode(codec, x - theta)
    theta_new = theta + decode(codec, payload)
    return Published(payload, theta_new, x - theta_new)
