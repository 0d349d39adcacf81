"""A learner without a framework: named numpy arrays, and gradients by hand.

    python examples/numpy_loop.py --genesis genesis.safetensors
    skerry syncer --run runs/mine --genesis genesis.safetensors --run.steps 250 --run.learners 1
    SKERRY_SYNCER=localhost:7077 SKERRY_NAME=island-a python examples/numpy_loop.py

Without SKERRY_SYNCER it trains by itself. Any framework can be joined in this way: read its tensors into such arrays,
step, and write them back; or as an adapter of its own, see skerry.adapters.arrays.
"""

import argparse

import numpy as np

import skerry

STEPS, BATCH, RATE = 300, 64, 0.05


def first_values():
    draw = np.random.default_rng(0)
    shapes = {"in.weight": (8, 32), "in.bias": (32,), "out.weight": (32, 1), "out.bias": (1,)}
    return {name: (draw.standard_normal(shape) / 4).astype(np.float32) for name, shape in shapes.items()}


def step(arrays, x, y):
    """One step of gradient descent on a network of one hidden layer, in place; the loss before it."""
    hidden = np.maximum(x @ arrays["in.weight"] + arrays["in.bias"], 0)
    error = hidden @ arrays["out.weight"] + arrays["out.bias"] - y
    back = (error @ arrays["out.weight"].T) * (hidden > 0)
    slopes = {"in.weight": x.T @ back, "in.bias": back.sum(0), "out.weight": hidden.T @ error, "out.bias": error.sum(0)}
    for name, slope in slopes.items():
        arrays[name] -= RATE / len(x) * slope
    return float((error**2).mean())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--genesis", help="write the first values to this file, and end")
    arrays = first_values()
    if genesis := parser.parse_args().genesis:
        skerry.save_arrays(arrays, genesis)
        return
    with skerry.ArrayLearner(arrays) as learner:
        draw = np.random.default_rng(1 + learner.index)
        for number in range(STEPS):
            x = draw.standard_normal((BATCH, 8)).astype(np.float32)
            loss = step(arrays, x, np.sin(x.sum(1, keepdims=True)))
            if number % 50 == 0:
                print(f"step {number:4d}  loss {loss:.4f}", flush=True)
            if not learner.step(tokens=BATCH, loss=loss):
                break


if __name__ == "__main__":
    main()
