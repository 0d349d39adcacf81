"""What suits a model's preset stands in place of the defaults, and below whatever is said."""

import pytest

from skerry import config as configs
from skerry.train.shapes import SHAPES, SUITED, resolved, shape_of


def test_small_models_have_the_defaults():
    for preset in ("tiny", "1m", "3m", "10m"):
        asked = [("model.preset", preset)]
        assert resolved(configs.default(), None, asked) == configs.resolve(configs.default(), None, asked)


@pytest.mark.parametrize("preset", SUITED)
def test_large_ones_have_a_rate_and_a_batch_of_their_own(preset):
    config = resolved(configs.local(), None, [("model.preset", preset)])
    default = configs.default()
    assert config.learner.lr < default.learner.lr and config.data.batch > default.data.batch
    assert config.learner.step_s == configs.local().learner.step_s, "the run's preset stays"
    assert shape_of(config.model) == SHAPES[preset] and SHAPES[preset].context == 1024


def test_what_is_said_goes_before_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[model]\npreset = '1b'\n[data]\nbatch = 2\n")
    config = resolved(configs.default(), file, [("learner.lr", 0.5)])
    assert (config.learner.lr, config.data.batch) == (0.5, 2)


def test_larger_models_step_more_carefully():
    rates = [dict(SUITED[preset])["learner.lr"] for preset in ("100m", "300m", "1b")]
    assert rates == sorted(rates, reverse=True)
