"""Every key has its bounds, every choice is one that the code knows, and what cannot run is refused by name."""

import os
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from msgspec.structs import replace

from skerry import config as configs
from skerry.algo.codecs import CODECS
from skerry.algo.merge import RULES
from skerry.algo.outer import OUTER_RULES
from skerry.errors import ConfigError

TABLES = configs.Config.__struct_fields__


def run_of(**tables):
    """The defaults with a budget, and these tables instead of theirs."""
    return replace(configs.Config(run=configs.Run(steps=100)), **tables)


def test_every_number_has_its_bounds():
    numbers = {
        f"{table}.{key}"
        for table in TABLES
        for key, kind in get_type_hints(get_type_hints(configs.Config)[table]).items()
        if kind in (int, float)
    }
    assert numbers == {path for path, _, _ in configs._RANGES}


def test_every_choice_is_one_that_is_computed():
    assert get_args(configs.Codec) == CODECS
    assert set(get_args(get_type_hints(configs.Merge)["rule"])) == set(RULES)
    assert set(get_args(get_type_hints(configs.Outer)["rule"])) == set(OUTER_RULES)


@pytest.mark.parametrize("name", configs.PRESETS)
def test_a_preset_with_a_budget_can_run(name):
    preset = configs.PRESETS[name]()
    configs.validate(replace(preset, run=replace(preset.run, steps=100)))


def test_the_papers_preset_is_the_papers():
    """[P §5.1, §D.1] M = 8, P = H = 24, tau = 2, K = 1 with grace, and alpha = 0."""
    c = configs.paper()
    assert (c.run.learners, c.sync.num_fragments, c.sync.sync_every) == (8, 24, 24)
    assert (c.sync.fragment_sync_delay, c.sync.quorum, c.sync.policy) == (2, 1, "fixed")
    assert 0 < c.sync.grace < 1
    assert (c.merge.rule, c.learner.adopt) == ("rda", "overwrite")


def test_the_number_of_fragments_is_given_or_left_to_the_models_size():
    assert configs.default().sync.num_fragments == 0 and configs.local().sync.num_fragments == 24
    for count in (0, 1, 10_000):
        configs.validate(run_of(sync=configs.Sync(num_fragments=count)))
    with pytest.raises(ConfigError, match=r"sync\.num_fragments = -1: must be from 0 to 10000"):
        configs.validate(run_of(sync=configs.Sync(num_fragments=-1)))


def test_an_evaluation_is_a_share_of_the_budget_or_never():
    for share in (0.0, 0.001, 0.05, 1.0):
        configs.validate(run_of(run=configs.Run(steps=100, evaluate_every=share)))
    with pytest.raises(ConfigError, match=r"run.evaluate_every = 0.0001: a share of the budget from 0.001"):
        configs.validate(run_of(run=configs.Run(steps=100, evaluate_every=0.0001)))


def test_a_timeout_leaves_room_for_a_late_heartbeat():
    configs.validate(run_of(wire=configs.Wire(heartbeat_s=1.0, timeout_s=2.0)))
    with pytest.raises(ConfigError, match=r"wire.timeout_s = 1.9: must be at least 2, twice wire.heartbeat_s = 1"):
        configs.validate(run_of(wire=configs.Wire(heartbeat_s=1.0, timeout_s=1.9)))


def test_a_bound_on_links_is_none_or_one_that_lets_something_through():
    for mbit in (0.0, 0.01, 200.0):
        configs.validate(run_of(wire=configs.Wire(mbit_max_up=mbit, mbit_max_down=mbit)))
    with pytest.raises(ConfigError, match=r"wire.mbit_max_down = 1e-300: from 0.01 Mbit/s, or 0 for no bound"):
        configs.validate(run_of(wire=configs.Wire(mbit_max_down=1e-300)))


def test_a_stored_configuration_without_a_key_does_what_it_did_before_there_was_one():
    stored = configs.encode(run_of()).replace(b',"alone_steps_max":300', b"")
    assert b"alone_steps_max" not in stored and configs.decode(stored).learner.alone_steps_max == 0
    assert configs.decode(configs.encode(run_of())) == run_of()


KEYS = [f"{table}.{key}" for table in TABLES for key in get_type_hints(get_type_hints(configs.Config)[table])]


def test_of_every_key_it_is_said_whether_an_order_may_change_it_or_why_not():
    may_not = {key for key in KEYS if key in configs.UNCHANGEABLE or key.split(".")[0] in configs.UNCHANGEABLE}
    assert may_not == set(KEYS) - set(configs.CHANGEABLE)
    assert set(configs.CHANGEABLE) <= set(KEYS)
    assert all(name in KEYS or name in TABLES for name in configs.UNCHANGEABLE)


@pytest.mark.parametrize("key", KEYS)
def test_an_order_changes_a_key_or_is_refused_with_the_reason(key):
    value = configs._value(run_of(), key)
    if key in configs.CHANGEABLE:
        assert configs.changed(run_of(), [(key, value)]) == run_of()
    else:
        with pytest.raises(ConfigError, match=f"{key} cannot be changed while a run goes on: "):
            configs.changed(run_of(), [(key, value)])


def test_a_change_is_judged_as_a_whole_but_not_for_what_was_wrong_before_it():
    before = run_of(wire=configs.Wire(held_bytes_max=1))  # which no bound of today allows
    assert configs.changed(before, [("sync.quorum", 2)]).sync.quorum == 2
    with pytest.raises(ConfigError, match="more than the 4 learners"):
        configs.changed(before, [("sync.quorum", 5)])
    with pytest.raises(ConfigError, match=r"longer than sync\.sync_every = 1"):
        configs.changed(before, [("sync.sync_every", 1)])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("quorum", "did you mean sync.quorum?"),
        ("snyc.quorum", "did you mean sync.quorum?"),
        ("sync.quroum", "did you mean sync.quorum?"),
        ("lr", "did you mean outer.lr?"),  # of those that may change, before any other
        ("codec_up", "did you mean wire.codec_up?"),
        ("xyzzy", "what may change is sync.sync_every, sync.quorum, "),
    ],
)
def test_a_key_that_there_is_not_is_answered_with_the_whole_name_of_one(given, said):
    assert configs.meant(given).startswith(said)
    if "." in given:
        with pytest.raises(ConfigError, match=f"^unknown key {given}: {re.escape(said)}"):
            configs.changed(configs.Config(), [(given, 3)])


def test_a_file_is_of_bounded_length_and_may_be_a_link_or_a_pipe(tmp_path):
    file, link = tmp_path / "run.toml", tmp_path / "link.toml"
    file.write_bytes(b"[run]\r\nlearners = 3\r\n")
    link.symlink_to(file)
    assert configs.resolve(configs.default(), link).run.learners == 3
    reading, writing = os.pipe()  # as a shell's <(...) is
    os.write(writing, file.read_bytes())
    os.close(writing)
    assert configs.resolve(configs.default(), Path(f"/dev/fd/{reading}")).run.learners == 3
    os.close(reading)
    file.write_text("#" * (1 << 20))
    configs.resolve(configs.default(), file)
    file.write_text("#" * (1 << 20) + "#")
    for path in (Path("/dev/zero"), link):
        with pytest.raises(
            ConfigError, match=f"^{path}: is longer than 1048576 bytes: check the path given to --config$"
        ):
            configs.resolve(configs.default(), path)
