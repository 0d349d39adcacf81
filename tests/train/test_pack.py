"""The built-in trainer on a pack: its model has the pack's vocabulary, and a learner's pack must be the run's."""

import msgspec
import numpy as np
import pytest

from skerry import config as configs
from skerry.adapters.torch import layout_of_model
from skerry.data import Pack, Writer
from skerry.errors import ConfigError, DataError
from skerry.plan import layouts
from skerry.train.data import Corpus, open_data
from skerry.train.held_out import HeldOut
from skerry.train.inner import Inner
from skerry.train.loop import model_of
from skerry.train.shapes import resolved, shape_of

TINY = [("model.preset", "tiny"), ("model.context", 16), ("run.steps", 5)]


def written(path, vocabulary, count=20_000, tokenizer="mine", seed=0):
    with Writer(path, vocabulary, tokenizer) as pack:
        pack.add(np.random.default_rng(seed).integers(0, vocabulary, count) // 2)
    return path


def begun(path, *more):
    """The configuration of a run on this data, as the tape and a learner have it."""
    config = resolved(configs.default(), None, [*TINY, ("data.path", str(path)), *more])
    return configs.decode(configs.encode(configs.validate(config)))


def elsewhere(config, path):
    return configs.resolve(config, None, [("data.path", str(path))])


def test_the_model_has_the_packs_vocabulary_everywhere(tmp_path):
    config = begun(written(tmp_path / "pack", 1000))
    assert model_of(config).tok_emb.weight.shape[0] == 1000
    assert layouts.built_in(shape_of(config.model)) == layout_of_model(model_of(config))
    assert config.pack.digest == Pack(tmp_path / "pack").digest


def test_a_model_may_have_more_tokens_than_the_pack_but_not_fewer(tmp_path):
    path = written(tmp_path / "pack", 1000)
    assert model_of(begun(path, ("model.vocabulary", 1024))).head.weight.shape[0] == 1024
    with pytest.raises(ConfigError, match=r"model.vocabulary = 999: .*pack has a vocabulary of 1000"):
        begun(path, ("model.vocabulary", 999))


def test_a_pack_of_bytes_has_the_model_of_text(tmp_path):
    text = begun("stdlib")
    assert text.pack == configs.Pack() and text.model.vocabulary == 0
    packed = begun(written(tmp_path / "pack", 256))
    ours, theirs = model_of(packed).state_dict(), model_of(text).state_dict()
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_a_step_on_a_pack_lowers_its_loss(tmp_path):
    config = begun(written(tmp_path / "pack", 1000))
    data = open_data(config)
    held_out = HeldOut(config, data, "cpu", 1)
    inner = Inner(model_of(config), lr=1e-2)
    batches = data.batches(0, 0, 16, 16, learners=4)
    before = held_out.loss({name: value.numpy() for name, value in inner.model.state_dict().items()})
    for _ in range(30):
        inner.step(*next(batches), progress=0.5)
    after = held_out.loss({name: value.numpy() for name, value in inner.model.state_dict().items()})
    assert after < before - 0.3  # half of the vocabulary never comes


def test_a_learner_whose_pack_lies_elsewhere_must_have_the_same(tmp_path):
    config = begun(written(tmp_path / "pack", 1000))
    written(tmp_path / "copy", 1000)
    assert open_data(elsewhere(config, tmp_path / "copy")).tokens == 20_000
    for name, more, fault in (
        ("wide", {"vocabulary": 70_000}, r"dtype uint32 \(the run has uint16\), vocabulary 70000 \(the run has 1000\)"),
        ("other", {"vocabulary": 1000, "tokenizer": "theirs"}, r"tokenizer theirs \(the run has mine\)"),
        ("short", {"vocabulary": 1000, "count": 15_000}, r"tokens 15000 \(the run has 20000\)"),
        ("changed", {"vocabulary": 1000, "seed": 1}, r"digest [0-9a-f]+ \(the run has [0-9a-f]+\)"),
    ):
        written(tmp_path / name, **more)
        with pytest.raises(DataError, match=f"{name} is not the pack that the run trains on: .*{fault}"):
            open_data(elsewhere(config, tmp_path / name))
    with pytest.raises(DataError, match=r"stdlib is not the pack .* it is text; give a pack of 20000 tokens \(mine\)"):
        open_data(elsewhere(config, "stdlib"))


def test_a_pack_is_refused_where_the_run_is_on_text_and_its_model_too_small(tmp_path):
    """The syncer may have begun a run of text whose learners bring their own data: then the vocabulary decides."""
    config = begun("stdlib")
    with pytest.raises(DataError, match="wide has a vocabulary of 1000, and the run's model one of 256"):
        open_data(elsewhere(config, written(tmp_path / "wide", 1000)))
    assert isinstance(open_data(elsewhere(config, written(tmp_path / "bytes", 256))), Pack)
    assert isinstance(open_data(config), Corpus)


def test_a_syncer_needs_only_the_index(tmp_path):
    written(tmp_path / "pack", 1000)
    (tmp_path / "syncer").mkdir()
    (tmp_path / "syncer" / "index.json").write_bytes((tmp_path / "pack" / "index.json").read_bytes())
    config = begun(tmp_path / "syncer")
    assert config.model.vocabulary == 1000
    assert open_data(elsewhere(config, tmp_path / "pack")).digest == config.pack.digest
    with pytest.raises(DataError, match=r"00000.bin cannot be read"):
        open_data(config)


def test_more_learners_than_windows_are_refused_before_any_joins(tmp_path):
    config = begun(written(tmp_path / "pack", 1000, count=400), ("run.learners", 24))
    with pytest.raises(DataError, match="has 23 windows of 16 tokens, too few to deal out among 24 learners"):
        open_data(config)
    fewer = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, learners=23))
    assert open_data(fewer).tokens == 400
