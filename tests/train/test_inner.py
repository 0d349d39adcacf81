"""An inner step learns, on the run's schedule, to the same bits each time."""

import logging

import numpy as np
import pytest
import torch

from skerry.config import Learner
from skerry.train.data import Corpus, Stream, held_out_batches
from skerry.train.gpt import build
from skerry.train.inner import BETAS, Execution, Inner, execution_of, held_out_loss, schedule

STEPS = 40


@pytest.fixture(scope="module")
def corpus():
    return Corpus.open("stdlib", max_bytes=1 << 20)


def train(corpus, steps=STEPS, seed=0, lr=5e-3, **how):
    inner = Inner(build(layers=2, width=32, heads=2, context=32, seed=seed), lr, **how)
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


def test_any_number_of_threads_gives_the_same_loss_to_the_bit(corpus):
    inner, _ = train(corpus, steps=2)
    batches, told = held_out_batches(corpus, batch=8, context=32, count=7), []
    losses = {held_out_loss(inner.model, batches, lambda *at: told.append(at), threads) for threads in (1, 2, 5)}
    assert len(losses) == 1 and told == 3 * [(done, 7) for done in range(1, 8)]
    assert all(p.grad_fn is None and p.requires_grad for p in inner.model.parameters())


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


# ---------------------------------------------------------------------------------------------- how it is computed


def values_of(inner):
    return torch.cat([p.detach().flatten() for p in inner.model.parameters()])


def test_a_step_is_the_plain_one_to_the_bit(corpus):
    """Forward, backward, clip at 1, AdamW: what every recorded run was trained with."""
    model = build(layers=2, width=32, heads=2, context=32, seed=0)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=True)
    stream, losses = Stream(corpus, learner=0, seed=0, batch=8, context=32), []
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * schedule(step / 4)
        inputs, targets = (torch.from_numpy(array).to(torch.int64) for array in next(stream))
        loss = model.loss(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    inner, ours = train(corpus, steps=4)
    assert ours == losses and torch.equal(
        values_of(inner), torch.cat([p.detach().flatten() for p in model.parameters()])
    )


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_micro_batches_make_the_same_step_but_for_rounding(corpus, size):
    whole, losses = train(corpus, steps=3)
    pieces, ours = train(corpus, steps=3, execution=Execution(micro_batch=size))
    assert ours == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(values_of(pieces), values_of(whole), rtol=1e-3, atol=1e-4)


def test_a_gradient_longer_than_the_clip_is_shortened_to_it(corpus):
    def gradient(clip):
        inner, _ = train(corpus, steps=1, clip=clip)
        return torch.cat([p.grad.flatten() for p in inner.model.parameters()])

    free = gradient(clip=0.0)
    assert free.norm() > 0.5
    assert gradient(clip=0.5).norm() == pytest.approx(0.5, rel=1e-4)
    assert torch.equal(gradient(clip=1e6), free)


def test_bf16_is_for_matrix_products_alone(corpus):
    _, exact = train(corpus, steps=3)
    inner, rough = train(corpus, steps=3, execution=Execution(autocast=torch.bfloat16))
    assert rough != exact and rough == pytest.approx(exact, rel=1e-2)
    moments = [value for state in inner.optimizer.state.values() for value in state.values()]
    kept = [*inner.model.parameters(), *(p.grad for p in inner.model.parameters()), *moments]
    assert {value.dtype for value in kept} == {torch.float32}


def test_what_is_left_open_is_plain_on_a_cpu():
    assert execution_of(Learner(), "cpu") == Execution()
    asked = Learner(precision="bf16", compile="default", micro_batch=2)
    assert execution_of(asked, "cpu") == Execution(torch.bfloat16, "default", 2)
    assert execution_of(Learner(precision="fp32"), "cpu").autocast is None


def test_a_compiled_models_parameters_keep_their_names():
    model = build(layers=1, width=8, heads=1, context=8, seed=0)
    names = [name for name, _ in model.named_parameters()]
    inner = Inner(model, 1e-3, execution=Execution(compile="default"))
    assert inner.model is model and [name for name, _ in inner.model.named_parameters()] == names


def test_what_is_compiled_is_the_same_step(corpus, caplog):
    """Traced and run as it is: compiling for a CPU takes minutes. `test_cuda.py` compiles."""
    _, losses = train(corpus, steps=3)
    with torch.compiler.set_stance("force_eager"):
        inner, _ = train(corpus, steps=0, execution=Execution(compile="default"))
        before = values_of(inner).clone()
        with caplog.at_level(logging.INFO):
            inner.prepare(batch=8, context=32)
        assert "compiling the model (torch.compile, default), which may take minutes" in caplog.text
        assert torch.equal(values_of(inner), before) and all(p.grad is None for p in inner.model.parameters())
        _, ours = train(corpus, steps=3, execution=Execution(compile="default"))
        _, kept = train(corpus, steps=3, execution=Execution(compile="reduce-overhead"))
    assert ours == kept == losses
