"""`on_metrics`: a loop's own dashboard is told now and then where its learner stands, and cannot end the loop."""

import numpy as np
import pytest

import skerry
from skerry.adapters import metrics
from skerry.adapters.metrics import Metrics
from skerry.shell.learner import Standing

NAMES = {"step", "tokens", "loss", "progress", "merged_share", "connected", "alone_steps", "steps_per_s"}


def test_it_is_told_where_the_learner_stands(monkeypatch):
    monkeypatch.setattr(metrics, "EVERY_S", 0.0)
    told = []
    counted = Metrics(told.append)
    standing = Standing(connected=True, steps=4, steps_merged=3, prior_steps=100, progress=0.25)
    counted.stepped(8, 2.5, lambda: standing)
    counted.stepped(8, 0.0, lambda: standing)
    assert {*told[0]} == NAMES
    assert (told[0]["step"], told[0]["tokens"], told[0]["loss"]) == (101, 8, 2.5)
    assert (told[1]["step"], told[1]["tokens"], told[1]["loss"]) == (102, 16, None)
    assert (told[0]["progress"], told[0]["merged_share"], told[0]["connected"]) == (0.25, 0.75, True)


def test_it_is_told_seldom_and_asks_for_nothing_in_between():
    told, asked = [], []
    counted = Metrics(told.append)
    for _ in range(100):
        counted.stepped(1, 0.0, lambda: asked.append(1) or Standing())
    assert len(told) == len(asked) < 100


def test_a_hook_that_fails_ends_nobody_and_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr(metrics, "EVERY_S", 0.0)

    def tell(record):
        raise OSError("the disk is full")

    learner = skerry.ArrayLearner({"w": np.zeros(4, np.float32)}, on_metrics=tell)
    assert all(learner.step(tokens=8) for _ in range(5))
    said = [record.message for record in caplog.records]
    assert said == ["on_metrics failed, training goes on: OSError: the disk is full"]


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="on_metrics is a str: give a function that takes one dict"):
        skerry.ArrayLearner({"w": np.zeros(4, np.float32)}, on_metrics="wandb")
