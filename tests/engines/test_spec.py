"""A launch's file is read as a whole, and refused in one line that names the key, before anything is started."""

import pytest

from skerry import config as configs
from skerry.engines import spec
from skerry.errors import ConfigError

GOOD = """
[run]
name = "mine"
tokens = 1e6

[syncer]
genesis = "genesis.safetensors"

[[islands]]
name = "fast"
count = 2

[[islands]]
name = "pair"
workers = 2
command = ["python", "train.py"]
"""


def read(tmp_path, text, *overrides):
    file = tmp_path / "run.toml"
    file.write_text(text)
    return spec.read(file, overrides)


def test_a_run_has_as_many_learners_as_its_islands(tmp_path):
    launch = read(tmp_path, GOOD)
    assert launch.name == "mine" and launch.config.run.tokens == 10**6
    assert launch.config.run.learners == 3
    assert [launch.islands[0].learner(i) for i in range(2)] == ["fast-0", "fast-1"]
    assert launch.path(launch.syncer.genesis) == tmp_path / "genesis.safetensors"
    assert read(tmp_path, GOOD, ("run.learners", 8)).config.run.learners == 8, "more may come"


def test_the_same_file_is_a_configuration_too(tmp_path):
    read(tmp_path, GOOD)
    assert configs.resolve(configs.Config(), tmp_path / "run.toml").run.tokens == 10**6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("count = 2", "cout = 2"), "islands[0].cout: unknown key: did you mean count?"),
        (("count = 2", 'count = "two"'), "islands[0].count = 'two': write a whole number"),
        (("genesis =", "genesys ="), "syncer.genesys: unknown key: did you mean genesis?"),
        (('name = "pair"', 'name = "fast"'), "'fast': is used twice"),
        (('name = "pair"', 'name = "Pair"'), "islands[1].name = 'Pair': use 1 to 40"),
        (('name = "pair"', 'name = "syncer"'), "that is what the syncer is called"),
        (('name = "pair"\n', ""), "islands[1]: write a table with at least a name"),
        (('command = ["python", "train.py"]', ""), "the built-in trainer is one process"),
        (("workers = 2", "workers = 0"), "workers = 0: must be from 1"),
        (("count = 2", "gpus = -1"), "gpus = -1"),
        (("count = 2", 'restart = "sometimes"'), "islands[0].restart = 'sometimes': known are always, failure, never"),
        (("count = 2", 'env = { SKERRY_SYNCER = "x" }'), "env.SKERRY_SYNCER is said by the engine"),
        (('name = "mine"', 'name = "my_run"'), "run.name = 'my_run'"),
        (("tokens = 1e6", "tokens = 1e6\nlearners = 2"), "run.learners = 2, and the islands have 3"),
        (("[run]", "[runs]"), "unknown table [runs]: did you mean run?"),
        (("[[islands]]", "[islands]"), "is not valid TOML"),
        (("[syncer]", '[syncer]\npreset = "big"'), "syncer.preset: known are default, local, paper"),
        (("[syncer]", "[syncer]\nport = 70000"), "syncer.port = 70000"),
        (("[syncer]", "[ray]\nadress = 'x'\n[syncer]"), "ray.adress: unknown key: did you mean address?"),
    ],
)
def test_what_nobody_can_launch_is_refused_by_name(tmp_path, change, said):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, GOOD.replace(*change))
    assert said in str(refused.value) and str(tmp_path / "run.toml") in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("character", ["\\u0000", "\\u001b", "\\r", "\\u007f", "\\u0085", "\\n", "\\t"])
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (("workers = 2", 'workers = 2\nfolder = "a@"'), "islands[1].folder"),
        (("count = 2", 'where = "a@"'), "islands[0].where"),
        (('"genesis.safetensors"', '"gene@sis"'), "syncer.genesis"),
        (('name = "mine"', 'name = "mi@ne"'), "run.name"),
        (("[syncer]", '[data]\npath = "a@"\n[syncer]'), "data.path"),
        (("[syncer]", '[kubernetes]\nimage = "a@"\n[syncer]'), "kubernetes.image"),
        (("[syncer]", '[slurm]\noptions = ["--a", "@"]\n[syncer]'), "slurm.options[1]"),
        (("count = 2", 'env = { "A@" = "x" }'), "islands[0].env: the key 'A"),
    ],
)
def test_a_control_character_is_refused_wherever_it_is(tmp_path, character, change, where):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, GOOD.replace(change[0], change[1].replace("@", character)))
    said = str(refused.value)
    assert where in said and "has the control character '\\" in said and said.isprintable()


def test_a_word_of_a_command_may_have_lines_and_no_other_control_character(tmp_path):
    text = GOOD.replace('"train.py"', '"-c", "import x\\n\\tx.y()"')
    assert read(tmp_path, text).island("pair").command[2] == "import x\n\tx.y()"
    with pytest.raises(ConfigError, match=r"islands\[1\]\.command\[1\]: has the control character"):
        read(tmp_path, GOOD.replace('"train.py"', '"train\\u001b.py"'))


def test_an_environment_variable_may_be_of_several_lines_and_no_more(tmp_path):
    launch = read(tmp_path, GOOD.replace("count = 2", 'env = { A = "one\\n\\ttwo" }'))
    assert launch.islands[0].env == {"A": "one\n\ttwo"}
    for table in ("syncer]\nenv", "[islands]]\nname = 'x'\nenv"):
        with pytest.raises(ConfigError, match=r"env\.A: has the control character"):
            read(tmp_path, GOOD.replace("[syncer]", f"[{table} = {{ A = 'b', B = 'c' }}\n").replace("'b'", '"\\u0000"'))


def test_a_file_without_islands_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no \[\[islands\]\]"):
        read(tmp_path, "[run]\nsteps = 10\n")
