"""A learner in JAX, with optax: a pytree of parameters, and a step that gives them back.

    python examples/jax_loop.py --genesis genesis.safetensors
    skerry syncer --run runs/mine --genesis genesis.safetensors --run.steps 250 --run.learners 1
    SKERRY_SYNCER=localhost:7077 SKERRY_NAME=island-a python examples/jax_loop.py

Without SKERRY_SYNCER it trains by itself. It needs pip install 'skerry[jax]'.
"""

import sys

import jax
import jax.numpy as jnp
import optax

import skerry.jax

STEPS, BATCH = 300, 64
optimizer = optax.adamw(3e-3)


def first_params():
    shapes, key = {"hidden": (8, 32), "out": (32, 1)}, jax.random.key(0)
    return {name: {"kernel": jax.random.normal(key, s) / 4, "bias": jnp.zeros(s[1])} for name, s in shapes.items()}


def loss_of(params, x):
    hidden = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    guess = hidden @ params["out"]["kernel"] + params["out"]["bias"]
    return ((guess - jnp.sin(x.sum(1, keepdims=True))) ** 2).mean()


@jax.jit
def train_step(params, state, x):
    loss, slopes = jax.value_and_grad(loss_of)(params, x)
    updates, state = optimizer.update(slopes, state, params)
    return optax.apply_updates(params, updates), state, loss


def main():
    params = first_params()
    if "--genesis" in sys.argv:
        return skerry.jax.save_genesis(params, sys.argv[-1])
    with skerry.jax.Learner(params) as learner:
        params = learner.params
        state, key = optimizer.init(params), jax.random.key(1 + learner.index)
        for number in range(STEPS):
            x = jax.random.normal(jax.random.fold_in(key, number), (BATCH, 8))
            params, state, loss = train_step(params, state, x)
            if number % 50 == 0:
                print(f"step {number:4d}  loss {loss:.4f}", flush=True)
            params = learner.step(params, tokens=BATCH)
            state = optimizer.init(params) if learner.was_reset else state
            if not learner.is_running:
                break


if __name__ == "__main__":
    main()
