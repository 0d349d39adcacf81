"""What the laboratory's learners read is what the built-in learner reads, batch for batch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skerry import config as configs
from skerry.config import Config
from skerry.proof.lab.feed import Feed
from skerry.proof.lab.study import Setting
from skerry.train.data import Corpus, Stream
from skerry.train.held_out import HeldOut

LEARNERS, BATCH, CONTEXT = 3, 4, 16


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """On a text in which each place is known by its bytes."""
    draw = np.random.default_rng(0)
    (tmp_path / "text.txt").write_bytes(draw.integers(32, 127, 300_000, np.uint8).tobytes())
    return of(tmp_path / "text.txt")


def of(path: Path, **data: Any) -> Config:
    return Config(
        run=configs.Run(learners=LEARNERS, steps=1, seed=5),
        model=configs.Model(preset="tiny", context=CONTEXT),
        data=configs.Data(path=str(path), batch=BATCH, **data),
    )


def streams_of(config: Config) -> list[Stream]:
    corpus = Corpus.open(config.data.path, config.data.bytes_max)
    return [Stream(corpus, learner, config.run.seed, BATCH, CONTEXT) for learner in range(LEARNERS)]


def is_same(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    return ours.dtype == torch.int64 and np.array_equal(ours.numpy(), theirs)


def test_each_row_draws_the_batches_of_the_built_in_learner(config: Config) -> None:
    feed, streams = Feed(config, Setting(), "cpu"), streams_of(config)
    for _ in range(20):
        inputs, targets = feed.windows(range(LEARNERS))
        assert inputs.shape == targets.shape == (LEARNERS, BATCH, CONTEXT)
        for row, stream in enumerate(streams):
            expected, after = next(stream)
            assert is_same(inputs[row], expected) and is_same(targets[row], after)


def test_a_row_that_takes_no_part_misses_nothing(config: Config) -> None:
    feed, streams = Feed(config, Setting(), "cpu"), streams_of(config)
    before, _ = feed.windows([0, 1, 2])
    for stream in streams:
        next(stream)
    for rows in ([0], [0, 2], [1]):
        inputs, _ = feed.windows(rows)
        for row in range(LEARNERS):
            assert is_same(inputs[row], next(streams[row])[0] if row in rows else before[row].numpy())
        before = inputs


def test_a_row_that_seeks_goes_on_there(config: Config) -> None:
    feed, stream = Feed(config, Setting(), "cpu"), streams_of(config)[1]
    feed.windows(range(LEARNERS))
    feed.streams[1].seek(7)
    stream.seek(7)
    assert is_same(feed.windows([1])[0][1], next(stream)[0])


def test_a_text_too_small_to_be_dealt_is_shared(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_bytes(bytes(range(32, 127)) * 4)
    config = of(tmp_path / "small.txt")
    feed, streams = Feed(config, Setting(), "cpu"), streams_of(config)
    for _ in range(5):
        inputs, _ = feed.windows(range(LEARNERS))
        assert all(is_same(inputs[row], next(stream)[0]) for row, stream in enumerate(streams))


def test_with_domains_each_row_has_a_stretch_of_its_own(config: Config) -> None:
    """One after the other through the whole training text; dealt, or drawn from all, each row is everywhere."""
    text = Corpus.open(config.data.path, config.data.bytes_max).train.tobytes()
    spans = {}
    for kind in ("domains", "dealt", "all"):
        feed = Feed(config, Setting(text=kind), "cpu")
        drawn = torch.cat([feed.windows(range(LEARNERS))[0] for _ in range(100)], dim=1).to(torch.uint8).numpy()
        places = [[text.find(window.tobytes()) for window in row] for row in drawn]
        spans[kind] = [(min(found for found in row if found >= 0), max(row)) for row in places]
        assert kind == "dealt" or min(map(min, places)) >= 0  # none runs over the end of a stretch
    assert all(last < first for (_, last), (first, _) in pairwise(spans["domains"]))
    assert all(last - first > 0.25 * len(text) for first, last in spans["domains"])
    assert all(last - first > 0.9 * len(text) for first, last in spans["dealt"] + spans["all"])


def test_the_held_out_text_is_the_judges(config: Config) -> None:
    count = config.data.held_out_batches
    ours = Feed(config, Setting(), "cpu").held_out(count)
    theirs = HeldOut(config, Corpus.open(config.data.path, config.data.bytes_max)).batches
    assert len(ours) == len(theirs) == count
    for batch, expected in zip(ours, theirs, strict=True):
        assert all(is_same(part, array) for part, array in zip(batch, expected, strict=True))
