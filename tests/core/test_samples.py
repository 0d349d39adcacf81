"""Samples: what a life said of its loss and gradients since the last look, as a mean, and nothing that is no number."""

import math

from skerry.core.facts import Sample
from skerry.core.messages import Report
from skerry.core.samples import SAMPLE_S, STEPS_MAX, Samples


def report(step, loss=0.0, grad_norm=0.0):
    return Report("a", 1, step + 1, step, 10 * step, 0.5, "training", (), loss=loss, grad_norm=grad_norm)


def sampled(*reports):
    samples = Samples(0.0)
    for one in reports:
        samples.reported(one)
    assert samples.take_due(SAMPLE_S - 1) == ()
    (sample,) = samples.take_due(SAMPLE_S)
    return sample


def test_loss_and_gradient_norm_are_means_of_what_was_said():
    sample = sampled(report(0), report(1, 4.0, 2.0), report(2, 3.0, 1.0), report(2, 9.0, 9.0))
    assert (sample.steps, sample.loss, sample.grad_norm) == (2, 3.5, 1.5)


def test_a_learner_that_says_nothing_of_it_has_none():
    sample = sampled(report(0), report(1))
    assert (sample.loss, sample.grad_norm) == (None, None)
    assert Sample("a", 1, 1, 1, (), 0, 0.0, 0, 0.0).loss is None, "as on tapes of before"


def test_what_is_not_finite_is_left_out():
    sample = sampled(report(0), report(1, math.nan), report(2, 2.0), report(3, math.inf), report(4, 4.0))
    assert sample.loss == 3.0
    assert sampled(report(0), report(1, math.nan)).loss is None
    assert math.isfinite(sampled(report(0), report(1, 1.7e308), report(2, 1.7e308)).loss)


def test_no_more_of_them_are_kept_than_of_step_times():
    samples = Samples(0.0)
    for step in range(3 * STEPS_MAX):
        samples.reported(report(step, 1.0, 1.0))
    window = samples._windows["a", 1]
    assert len(window.losses) <= STEPS_MAX >= len(window.grad_norms)
