"""An inner step learns, on the run's schedule, to the same bits each time."""

import numpy as np
import pytest
import torch

from skerry.train.data import Corpus, Stream, held_out_batches
from skerry.train.gpt import build
from skerry.train.inner import Inner, held_out_loss, schedule

STEPS = 40


@pytest.fixture(scope="module")
def corpus():
    return Corpus.open("stdlib", max_bytes=1 << 20)


def train(corpus, steps=STEPS, seed=0, lr=5e-3):
    inner = Inner(build(layers=2, width=32, heads=2, context=32, seed=seed), lr)
    stream = Stream(corpus, learner=0, seed=seed, batch=8, context=32)
    losses = [inner.step(*next(stream), progress=step / steps) for step in range(steps)]
    return inner, losses


def test_loss_falls_on_text_it_has_not_seen(corpus):
    batches = held_out_batches(corpus, batch=8, context=32, count=4)
    before = held_out_loss(build(layers=2, width=32, heads=2, context=32, seed=0), batches)
    inner, losses = train(corpus)
    assert losses[0] == pytest.approx(np.log(256), abs=0.1)
    assert held_out_loss(inner.model, batches) < before - 2.0


def test_same_seed_same_losses_to_the_bit(corpus):
    (one, losses), (other, again) = train(corpus), train(corpus)
    assert losses == again
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert train(corpus, seed=1)[1] != losses


def test_held_out_loss_changes_nothing(corpus):
    inner, _ = train(corpus, steps=2)
    before = {name: value.clone() for name, value in inner.model.state_dict().items()}
    batches = held_out_batches(corpus, batch=8, context=32, count=2)
    assert held_out_loss(inner.model, batches) == held_out_loss(inner.model, batches)
    assert inner.model.training
    assert all(torch.equal(value, before[name]) for name, value in inner.model.state_dict().items())


def test_the_rate_is_peak_times_schedule_times_ramp(corpus):
    inner, _ = train(corpus, steps=1, lr=1e-2)
    batch = next(Stream(corpus, learner=0, seed=0, batch=2, context=32))
    inner.step(*batch, progress=0.5, ramp=0.25)
    assert {group["lr"] for group in inner.optimizer.param_groups} == {1e-2 * schedule(0.5) * 0.25}


def test_a_ramp_of_zero_leaves_the_model_as_it_is(corpus):
    inner, _ = train(corpus, steps=1)
    before = [p.clone() for p in inner.model.parameters()]
    inner.step(*next(Stream(corpus, 0, 0, 2, 32)), progress=0.5, ramp=0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, inner.model.parameters(), strict=True))


def test_schedule_rises_over_two_percent_then_falls_to_a_tenth():
    assert schedule(0.0) == pytest.approx(0.1)
    assert schedule(0.01) == pytest.approx(0.55)
    assert schedule(0.02) == pytest.approx(1.0)
    assert schedule(0.51) == pytest.approx(0.55)
    assert schedule(1.0) == pytest.approx(0.1)
    rates = [schedule(at / 100) for at in range(2, 101)]
    assert rates == sorted(rates, reverse=True)


def test_schedule_holds_its_ends_outside_the_run():
    assert schedule(-0.5) == schedule(0.0)
    assert schedule(1.5) == schedule(1.0)
