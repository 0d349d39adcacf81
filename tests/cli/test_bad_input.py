"""Bad input: one line on stderr that says what, where and what to do, exit code 2, and nothing written or changed."""

import contextlib
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from cli.called import called
from e2e.processes import (
    OPTIONS,
    Puppet,
    Running,
    Syncer,
    facts_of,
    is_hung_up,
    processes_naming,
    secret,
    skerry,
    stranger,
    until,
    write_genesis,
)
from engines.launches import until_merging, write_launch
from skerry import cli
from skerry import config as configs
from skerry.algo.fragments import split
from skerry.core.facts import Committed, EpochStarted
from skerry.core.messages import Contribution
from skerry.core.state import state_of
from skerry.errors import RefusedError
from skerry.node import versions
from skerry.plan import layouts
from skerry.run import room
from skerry.run.facts import fragments_of
from skerry.store import Store
from skerry.train.shapes import SHAPES
from skerry.wire import frames
from skerry.wire.handshake import HANDSHAKE

HERE = ["--out", "new", "--model", "tiny", "--steps", "5"]  # of a train command that would be good otherwise
SERVE = ["--run", "new", "--port", "0", "--model.preset", "tiny"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory of a user, holding nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("SKERRY_SYNCER", "SKERRY_NAME", "SKERRY_TOKEN_FILE", "SKERRY_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def call(folder, capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""

    return partial(called, capsys)


@pytest.fixture
def refused(folder, call):
    """Run a command that must be refused, with and without --json, and return its one line."""

    def run(*words, code=2):
        before, expected = tree(folder), code
        code, out, err = call(*words)
        assert (code, out) == (expected, "")
        assert tree(folder) == before, "something was written or changed"
        line = one_line(err)
        code, out, err = call(*words, "--json")
        assert code == expected and json.loads(out) == {"error": line} and out.count("\n") == 1
        assert one_line(err) == line and tree(folder) == before
        return line

    return run


def one_line(err):
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("skerry: "), err
    return lines[0].removeprefix("skerry: ")


def tree(root, apart=("status.json", "lock")):
    """Every path below root with its contents; a syncer's status and lock come and go."""
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*")) if p.name not in apart}


def write(folder, text, name="run.toml"):
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


# ---------------------------------------------------------------------------------------------- the command itself


def test_no_arguments_and_help_print_the_verbs(call):
    for words in ([], ["--help"], ["-h"], ["help"]):
        code, out, err = call(*words)
        assert (code, err) == (0, "")
        assert all(f"  {verb} " in out for verb in cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(call, verb):
    code, out, err = call(verb, "--help")
    assert (code, err) == (0, "") and out.startswith(f"usage: skerry {verb}")


def test_version(call):
    from skerry import __version__

    assert call("--version") == (0, f"skerry {__version__}\n", "")


def test_python_m_skerry_refuses_with_exit_code_2(folder):
    done = skerry("trian", "--json", cwd=folder)
    assert done.returncode == 2
    assert done.stderr == "skerry: unknown command 'trian': did you mean train?\n"
    assert json.loads(done.stdout) == {"error": "unknown command 'trian': did you mean train?"}


def test_an_unknown_command_lists_the_known_ones(refused):
    assert refused("fly") == "unknown command 'fly': known are " + ", ".join(cli.VERBS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "--lerners", "4"], "did you mean --learners?"),
        (["train", "--kill-lerner=0.5"], "did you mean --kill-learner?"),
        (["syncer", "--ran", "x"], "--run"),
        (["train", "extra"], "unknown argument 'extra'"),
        (["train", "--sync.quorum"], "--sync.quorum: a value is missing"),
        (["train", "--learners", "four"], "--learners: invalid whole number value: 'four'"),
        (["train", "--preset", "papre"], "invalid choice: 'papre' (choose from"),
        (["export"], "required: RUN_DIR"),
        (["syncer"], "required: --run"),
        (["bench", "learner", "--ranks", "2"], "--ranks 2: it is how many processes an --island has, two or more"),
        (["bench", "learner", "--island", "ddp", "--ranks", "1"], "--ranks: '1' must be from 2 to 64"),
        (["bench", "learner", "--island", "ddp", "--ranks", "65"], "--ranks: '65' must be from 2 to 64"),
        (["bench", "learner", "--steps", "1e15"], "--steps: '1e15' must be from 1 to 1e+06"),
        (["bench", "learner", "--pairs", "20k"], "--pairs: '20k' must be from 1 to 10000"),
        (["bench", "learner", "--batch", "0"], "--batch: '0' must be from 1 to 1e+06"),
        (["bench", "learner", "--cores", "4096"], "--cores 4096: of the"),
        (["bench", "learner", "--island", "ddp", "--cores", "1"], "it is for a learner of one process"),
        (
            ["bench", "learner", "--island", "fsdp", "--device", "cuda"],
            "--device cuda: an --island is measured on the CPU",
        ),
        (["export", "run", "--sync.quorum", "2"], "nothing is configured here"),
        (["learner", "--sync.quorum", "2"], "configuration comes from its syncer"),
    ],
)
def test_a_command_line_that_cannot_be_read(refused, words, says):
    assert says in refused(*words)


# ---------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[sync]\nquorom = 2\n", "run.toml: unknown key sync.quorom: did you mean quorum?"),
        ("[sync]\nxyzzy = 2\n", "run.toml: unknown key sync.xyzzy: known are num_fragments, "),
        ("[snyc]\nquorum = 2\n", "run.toml: unknown table [snyc]: did you mean sync?"),
        ("quorum = 2\n", "run.toml: unknown table [quorum]: known are run, model, "),
        ("sync = 3\n", "run.toml: sync is a table, write [sync] and keys below it"),
        ("[[sync]]\nquorum = 2\n", "run.toml: sync is a table"),
        ("[sync\n", "run.toml: is not valid TOML: "),
        (b"\xff\xfe", "run.toml: is not valid TOML: "),
        ("[sync]\nquorum = 99\n", "sync.quorum = 99: more than the 4 learners that are expected (run.learners)"),
        ("[sync]\nquorum = true\n", "run.toml: sync.quorum = true: write a number"),
        ("[sync]\nquorum = 1.0\n", "sync.quorum = 1.0: a number of learners from 1, or a share between 0 and 1"),
        ("[sync]\ngrace = nan\n", "sync.grace = nan: must be from 0 to 1"),
        ("[run]\nseed = 1.5\n", "run.toml: run.seed = 1.5: write a whole number"),
        ("[run]\nname = 'A b'\n", "run.name = 'A b': use 1 to 64 of a-z"),
        ("[merge]\nrule = 'median'\n", "merge.rule = 'median': did you mean mean?"),
        ("[sync]\npolicy = 'warm'\n", "sync.policy = 'warm': known are auto, fixed"),
        ("[wire]\ncodec_up = 'int3'\n", "wire.codec_up = 'int3': "),
        ("[outer]\nlr = -0.3\n", "outer.lr = -0.3: must be from 1e-06 to 10"),
    ],
)
def test_a_config_file_nobody_can_run(folder, refused, text, says):
    assert says in refused("train", *HERE, "--config", write(folder, text))
    assert says in refused("syncer", *SERVE, "--run.steps", "5", "--config", folder / "run.toml")


DIGITS = "9" * 5000  # more than Python makes a number of
PARTS = ".".join("a" * 20_000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"[run]\ntokens = {DIGITS}\n", "run.toml: has a number of thousands of digits: write a shorter one"),
        (f"[run]\ntokens = 0x{'f' * 5000}\n", "run.toml: run.tokens: has a number of more than 64 bits"),
        (f"x = {'[' * 20_000}{']' * 20_000}\n", "run.toml: has tables or lists more than 32 deep in each other"),
        (f"[run]\ntokens = {'{a = ' * 600}1{'}' * 600}\n", "run.toml: has tables or lists more than 32 deep"),
        (f"[{PARTS}]\n", "run.toml: has tables or lists more than 32 deep in each other"),
        (f"[[islands]]\nname = 'a'\n[islands.env.{PARTS}]\n", "run.toml: has tables or lists more than 32 deep"),
        (f"[run]\nname = {'[' * 100}{DIGITS[:20]}{']' * 100}\n", "run.toml: has tables or lists more than 32 deep"),
    ],
    ids=["digits", "hexadecimal", "lists", "tables", "a header", "a header of an island", "what Python itself reads"],
)
def test_a_file_that_python_cannot_go_down_to_is_refused_by_everybody_who_reads_it(folder, refused, text, says):
    file = write(folder, text)
    for words in (
        ["plan", "run", "--params", "300M", "--config", file],
        ["syncer", *SERVE, "--run.steps", "5", "--config", file],
        ["train", *HERE, "--config", file],
        ["launch", file, "--dry-run"],
        ["chaos", file],
        ["lab", file],
    ):
        line = refused(*words)
        assert says in line and len(line) < 300, words


def test_a_config_file_that_is_not_there(folder, refused):
    assert "nosuch.toml: cannot be read (No such file" in refused("train", *HERE, "--config", "nosuch.toml")
    (folder / "dir.toml").mkdir()
    assert "dir.toml: cannot be read (Is a directory)" in refused("train", *HERE, "--config", "dir.toml")


def test_an_empty_config_file_changes_nothing(folder, refused):
    write(folder, "")
    assert "nosuch does not exist" in refused("train", *HERE, "--config", "run.toml", "--data", "nosuch")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sync.quorom", "2"], "command line: unknown key sync.quorom: did you mean quorum?"),
        (
            ["--learner.node", "thread"],
            "unknown key learner.node: it is each learner's own: give --node to skerry learner",
        ),
        (["--learner.state", "device"], "or set SKERRY_STATE, which the learners of skerry train read too"),
        (["--snyc.quorum=2"], "command line: unknown table [snyc]: did you mean sync?"),
        (["--sync.quorum", "5"], "sync.quorum = 5: more than the 4 learners that are expected"),
        (["--sync.quorum", "0"], "sync.quorum = 0: a number of learners from 1"),
        (["--sync.quorum", "1e400"], "sync.quorum = '1e400': write a number"),
        (["--sync.quorum", "[" * 100_000], "sync.quorum = '[[["),
        (["--run.name", "\udcff"], "run.name = "),
        (["--sync.grace", "NaN"], "sync.grace = 'NaN': write a number"),
        (["--sync.sync_every", "0"], "sync.sync_every = 0: must be from 1 to 1000000"),
        (["--sync.fragment_sync_delay", "99"], "sync.fragment_sync_delay = 99: longer than sync.sync_every"),
        (["--sync.warm_share", "0.7", "--sync.cool_share", "0.7"], "more than the whole run"),
        (["--learner.step_s", "inf"], "learner.step_s = 'inf': write a number"),
        (["--step-s", "nan"], "learner.step_s = nan: must be from 0 to 3600"),
        (["--step-s", "-1"], "learner.step_s = -1.0: must be from 0 to 3600"),
        (["--learners", "0"], "run.learners = 0: must be from 1 to 4096"),
        (["--seed", "-1"], "run.seed = -1: must be from 0 to"),
        (["--minutes", "1"], "exactly one of run.tokens, run.steps and run.minutes is the budget, run.steps and"),
        (["--steps", "0"], "--steps 0: a budget is above zero"),
        (["--model", "huge"], "model.preset = 'huge': known are tiny, 1m, 3m, 10m"),
        (["--learner.precision", "fp8"], "learner.precision = 'fp8': known are auto, fp32, bf16"),
        (["--run.evaluate_every", "2"], "run.evaluate_every = 2.0: must be from 0 to 1"),
        (["--model.width", "57"], "model.width = 57: must be a multiple of twice model.heads = 2"),
        (["--speeds", "fast,slow"], "--speeds 'fast,slow': write numbers with commas between them"),
        (["--speeds", ""], "--speeds '': write numbers"),
        (["--speeds", "1,nan"], "--speeds '1,nan': each must be from 0.001 to 1000"),
        (["--speeds", "1,1,1", "--learners", "2"], "--speeds '1,1,1': 3 speeds for 2 learners"),
        (["--kill-learner", "1.5"], "--kill-learner 1.5: a fraction of the run between 0 and 1"),
        (["--kill-syncer", "nan"], "--kill-syncer nan: a fraction of the run between 0 and 1"),
    ],
)
def test_options_nobody_can_run(refused, words, says):
    assert says in refused("train", *HERE, *words)


@pytest.mark.parametrize("minutes", ["nan", "inf", "-1"])
def test_a_time_budget_is_a_number(refused, minutes):
    assert "run.minutes = " in refused("train", "--out", "new", "--minutes", minutes)


# ---------------------------------------------------------------------------------------------- data and directories


def test_a_model_that_finds_no_room_is_refused_before_anything_is_made(monkeypatch, refused):
    """In the words of the syncer, with the numbers."""
    train = ("train", "--minutes", "1", "--model", "tiny", "--out", "mine")
    monkeypatch.setattr("skerry.run.room.free_disk", lambda root: 1000)
    line = refused(*train)
    assert line.startswith("a model of 104,216 parameters needs ")
    assert line.endswith(" of disk in mine, 1 kB are free: choose a larger disk")
    monkeypatch.setattr("skerry.run.room.free_memory", lambda: 1000)
    assert refused(*train).endswith(" of memory here, 1 kB are free: take a larger machine")


@pytest.mark.parametrize("command", ["syncer --port 0 --run", "train --out"])
def test_a_built_in_model_that_no_machine_holds_is_refused_before_a_value_of_it_is_made(monkeypatch, refused, command):
    monkeypatch.setattr("skerry.cli.syncer.make_genesis", None)
    monkeypatch.setattr("skerry.cli.train.HeldOut", None)
    big = ("--model.preset", "1b", "--model.layers", "400", "--model.width", "65536", "--model.heads", "64")
    line = refused(*command.split(), "mine", "--run.steps", "10", *big)
    assert line.startswith("a model of 20,615,") and "of memory here" in line


@pytest.fixture
def making(monkeypatch, call):
    """Serve a new run of the built-in model, which ends where a value of it would be made."""

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("skerry.cli.syncer.make_genesis", stop)
    monkeypatch.setattr("skerry.run.room.free_memory", lambda: 10**12)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield partial(call, "syncer", "--run", "mine", "--port", "0", "--run.steps", "5", "--model.preset")
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_built_in_model_needs_room_for_the_file_that_it_is_made_in(monkeypatch, making):
    """On the disk of the run beside what the run needs, or on another."""
    config, layout = configs.resolve(configs.default(), None, [("run.steps", 5)]), layouts.built_in(SHAPES["tiny"])
    sizes = [fragment.size for fragment in split(layout, config.sync.num_fragments, config.sync.cut_tensors)]
    needed = sum(room.disk(sizes, config.store).values()) + sum(room.grown(sizes, config).values())
    made = 4 * layout.param_count
    for free, is_made in ((needed + made - 1, False), (needed + made, True)):
        monkeypatch.setattr(room, "free_disk", lambda root, free=free: free)
        code, _, err = making("tiny")
        assert (code == 130) == is_made and (" of disk in mine, " in err) != is_made
    monkeypatch.setattr(room, "is_one_disk", lambda one, other: False)
    for free, is_made in ((made - 1, False), (made, True)):
        monkeypatch.setattr(room, "free_disk", lambda root, free=free: needed if root == Path("mine") else free)
        code, _, err = making("tiny")
        assert (code == 130) == is_made and ("name another folder by TMPDIR" in err) != is_made
    assert not os.path.exists("mine")


def test_it_is_said_that_a_large_model_is_being_made(monkeypatch, making):
    monkeypatch.setattr(room, "free_disk", lambda root: 10**12)
    assert making("10m")[2] == "skerry: interrupted\n"
    assert making("1b")[2].startswith("making the built-in model of 1,209,108,480 parameters ...\n")


def test_data_that_holds_too_little(folder, refused):
    (folder / "empty").mkdir()
    write(folder, "", "empty.txt")
    write(folder, "hi", "small.txt")
    assert "nosuch does not exist; name a text file" in refused("train", *HERE, "--data", "nosuch")
    assert "empty holds no text" in refused("train", *HERE, "--data", "empty")
    assert "empty.txt holds no text" in refused("train", *HERE, "--data", "empty.txt")
    assert "neither a file nor a folder" in refused("train", *HERE, "--data", "/dev/null")
    line = refused("train", *HERE, "--data", "small.txt")
    assert line.startswith("small.txt holds 2 bytes of text, too few for a context of 64: at least ")


def test_out_that_is_taken(folder, refused):
    (folder / "full").mkdir()
    write(folder, "mine", "full/notes.txt")
    for out in ("full", "full/notes.txt"):
        assert f"--out {out}: is there already" in refused("train", "--steps", "5", "--out", out)
    assert "File name too long" in refused("train", "--steps", "5", "--out", "x" * 300)


def test_a_run_directory_that_cannot_be_one(folder, refused):
    write(folder, "mine", "file")
    write_genesis(folder / "genesis")
    serve = ["syncer", "--port", "0", "--run.steps", "5", "--genesis", "genesis", "--run"]
    assert "/file: Not a directory; choose a directory" in refused(*serve, "file")
    assert "Not a directory; choose a directory" in refused(*serve, "file/below")
    assert "File name too long" in refused(*serve, "x" * 300)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_a_run_directory_without_permission(folder, refused):
    (folder / "locked").mkdir(mode=0o500)
    write_genesis(folder / "genesis")
    words = ["syncer", "--port", "0", "--run.steps", "5", "--genesis", "genesis", "--run", "locked"]
    assert "Permission denied; check its owner and permissions" in refused(*words)


def test_resume_of_nothing(folder, refused):
    (folder / "empty").mkdir()
    write(folder, "mine", "file")
    for verb in ("train", "demo"):
        assert "nosuch holds no run: check the path" in refused(verb, "--resume", "nosuch")
    assert "empty holds no run: check the path" in refused("train", "--resume", "empty")
    assert "Not a directory; choose a directory" in refused("train", "--resume", "file")


def test_export_of_nothing_and_to_nowhere(folder, refused, stopped_run):
    (folder / "empty").mkdir()
    assert "nosuch holds no run: check the path" in refused("export", "nosuch")
    assert "empty holds no run: check the path" in refused("export", "empty")
    assert "--out empty: is a folder; name a file in it" in refused("export", stopped_run, "--out", "empty")
    assert "--out nosuch/model: nosuch is not a folder" in refused("export", stopped_run, "--out", "nosuch/model")


def test_what_is_no_file_is_not_replaced_by_one(folder, refused, stopped_run):
    """Somebody who wants no file names the machine's null device, and root could put a file in its place."""
    (folder / "link").symlink_to("/dev/null")
    os.mkfifo(folder / "pipe")
    for name in ("link", "pipe"):
        assert f"--out {name}: is a link, a device or a pipe" in refused("export", stopped_run, "--out", name)
    assert (folder / "link").is_symlink() and stat.S_ISFIFO((folder / "pipe").stat().st_mode)


def test_a_genesis_that_is_no_model(folder, refused):
    import numpy as np
    from safetensors.numpy import save_file

    serve = ["syncer", "--run", "new", "--port", "0", "--run.steps", "5", "--genesis"]
    write(folder, "not a model", "junk")
    save_file({"w": np.array([1, np.nan], np.float32)}, folder / "nan")
    save_file({"w": np.zeros(2, np.float64)}, folder / "double")
    save_file({}, folder / "nothing")
    assert "nosuch: no such file; write one with skerry.save_genesis" in refused(*serve, "nosuch")
    assert "junk: is not a readable safetensors file" in refused(*serve, "junk")
    assert "nan: parameter w holds values that are not finite" in refused(*serve, "nan")
    assert "double: parameter w is F64; a genesis holds float32" in refused(*serve, "double")
    assert "nothing: a layout needs at least one tensor" in refused(*serve, "nothing")


# ---------------------------------------------------------------------------------------------- runs that are there


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A run of the small model with a few merges, its syncer ended by SIGTERM."""
    folder = tmp_path_factory.mktemp("stopped")
    with Syncer(folder) as syncer:
        with Puppet(syncer.port) as puppet:
            while puppet.merge_once() < 2:
                pass
        syncer.process.terminate()
        assert syncer.wait() == 0
    return syncer.run_dir


def test_a_run_goes_on_only_with_its_own_configuration(folder, refused, stopped_run):
    """What is said and differs is named, up to a few keys, with the value given and the value recorded."""
    write(folder, "[sync]\nquorum = 1\ngrace = 0.5\n")
    before = tree(stopped_run)
    serve = ["syncer", "--run", stopped_run, "--port", "0"]
    own = f"{stopped_run}: holds a run, which goes on with its own configuration: "
    advice = ": leave out what differs, or give --run a fresh directory"
    line = refused(*serve, "--run.learners", "2", "--run.steps", "5")
    assert line == f"{own}run.steps = 5 (the run has 1000000){advice}"
    line = refused(*serve, "--config", "run.toml")
    assert line == f"{own}sync.grace = 0.5 (the run has 0.8){advice}"
    line = refused(*serve, "--preset", "paper")
    assert line.startswith(f"{own}run.learners = 8 (the run has 2), ") and line.endswith(f" and 5 more{advice}")
    assert "unknown key sync.quorom" in refused(*serve, "--sync.quorom", "1")
    assert "gone.toml: cannot be read (No such file" in refused(*serve, "--config", "gone.toml")
    for words in (["--sync.quorum", "1"], ["--learners", "2"], ["--seed", "3"]):
        assert f"leave {words[0]} out" in refused("train", "--resume", stopped_run, *words)
    assert tree(stopped_run) == before


def test_a_run_directory_of_another_model_names_the_first_difference(folder, refused, stopped_run):
    before = tree(stopped_run)
    write_genesis(folder / "wide", {"emb.weight": (32, 8), "mlp.bias": (17,), "mlp.weight": (17, 8)})
    write_genesis(folder / "more", {"emb.weight": (32, 8), "mlp.bias": (16,), "mlp.weight": (16, 8), "mlp.z": (3,)})
    serve = ["syncer", "--run", stopped_run, "--port", "0", "--genesis"]
    line = refused(*serve, "wide")
    assert "holds a run of another model: mlp.bias: shape (17,) here, (16,) there" in line
    assert "mlp.z is missing there" in refused(*serve, "more")
    assert tree(stopped_run) == before


def test_a_closed_run_is_neither_served_nor_resumed(folder, refused):
    with Syncer(folder, options=[*OPTIONS, "--run.steps=4", "--sync.close_timeout_s=0.1"]) as syncer:
        with Puppet(syncer.port) as puppet, contextlib.suppress(AssertionError):
            puppet._step_until(lambda _: False)  # until the syncer says Done or hangs up
        assert syncer.wait() == 0
    before = tree(syncer.run_dir)
    again = skerry("syncer", "--run", syncer.run_dir, "--port", "0", "--run.tokens", "7")
    assert again.returncode == 2 and "run.tokens" in again.stderr
    assert "this run is closed; export it" in refused("train", "--resume", syncer.run_dir)
    assert tree(syncer.run_dir) == before


# ---------------------------------------------------------------------------------------------- a live syncer


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with Syncer(tmp_path_factory.mktemp("live")) as syncer:
        yield syncer


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A live syncer that requires a token."""
    folder = tmp_path_factory.mktemp("guarded")
    secret(folder / "token", "correct horse battery staple\n")
    with Syncer(folder, "--token-file", folder / "token") as syncer:
        syncer.token_file = folder / "token"
        yield syncer


def test_a_run_directory_in_use_names_the_process(refused, live):
    line = refused("syncer", "--run", live.run_dir, "--port", "0")
    assert line == f"{live.run_dir} is in use by process {live.process.pid}: stop it, or choose another directory"


def test_a_port_in_use_is_refused_before_anything_is_written(refused, live, stopped_run):
    before = tree(stopped_run)
    says = f"127.0.0.1:{live.port} is in use: stop what listens there, or pass another port"
    assert refused("syncer", "--run", stopped_run, "--port", live.port, code=69) == says  # no epoch on the tape
    assert refused("syncer", *SERVE, "--run.steps", "5", "--port", live.port, code=69) == says  # no run
    assert tree(stopped_run) == before
    assert "--port 99999: must be from 0 to 65535" in refused("syncer", *SERVE, "--port", "99999")


def test_beyond_loopback_there_are_keys_or_somebody_says_insecure_and_has_a_token(folder, refused):
    secret(folder / "empty", "\n")
    secret(folder / "token", "correct horse battery staple\n")
    serve = ["syncer", *SERVE, "--run.steps", "5"]
    beyond = [*serve, "--host", "0.0.0.0"]
    assert "can be reached from other machines: pass --token-file" in refused(*beyond, "--insecure")
    assert "have keys, and need no token: leave it out, or add --insecure" in refused(*beyond, "--token-file", "token")
    assert refused(*beyond, "--insecure", "--keys") == "--keys and --insecure: give one of them"
    assert "cannot listen on nosuch.invalid:0" in refused(*serve, "--host", "nosuch.invalid")
    assert "the token is empty" in refused(*serve, "--token-file", "empty")
    assert "nosuch: the token cannot be read (No such file" in refused(*serve, "--token-file", "nosuch")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no syncer: give --syncer host:port or set SKERRY_SYNCER"),
        (["--syncer", "::"], "is no address of a syncer"),
        (["--syncer", "host:port"], "'host:port' is no address of a syncer: write host:port"),
        (["--syncer", "127.0.0.1:99999"], "'127.0.0.1:99999' is no address of a syncer: its port"),
        (["--syncer", "127.0.0.1:1", "--speed", "nan"], "--speed nan: must be from 0.001 to 1000"),
        (["--syncer", "127.0.0.1:1", "--speed", "inf"], "--speed inf: must be from 0.001 to 1000"),
        (["--syncer", "127.0.0.1:1", "--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        (["--syncer", "127.0.0.1:1", "--compile", "yes"], "argument --compile: invalid choice: 'yes'"),
        (["--syncer", "127.0.0.1:1", "--micro-batch", "0.5"], "argument --micro-batch: '0.5' is not a whole number"),
        (["--syncer", "127.0.0.1:1", "--threads", "0"], "--threads 0: must be from 1"),
        (["--syncer", "127.0.0.1:1", "--state", "device", "--node", "process"], "a process beside the trainer cannot"),
        (["--syncer", "127.0.0.1:1", "--token-file", "nosuch"], "nosuch: the token cannot be read"),
        (["--syncer", "127.0.0.1:1", "--join-timeout", "soon"], "= soon: give seconds, or 0 to wait for ever"),
    ],
)
def test_a_learner_that_cannot_dial(refused, words, says):
    assert says in refused("learner", *words)


def test_a_learner_that_nobody_takes_in_says_so_last(call):
    code, _, err = call("learner", "--syncer", "127.0.0.1:1", "--join-timeout", "0.2")
    assert code == 2 and "at 127.0.0.1:1 for 0.2 s: connection refused" in err.splitlines()[-1]


def test_a_learner_with_a_wrong_or_missing_token(folder, call, guarded, live):
    secret(folder / "wrong", "wrong horse battery staple")
    for syncer, words, says in (
        (
            guarded,
            ["--token-file", "wrong"],
            "wrong token: name a copy of the syncer's file as token_file (or SKERRY_TOKEN_FILE)",
        ),
        (guarded, [], "this syncer requires a token: name a copy of its file as token_file"),
        (live, ["--token-file", "wrong"], "this syncer has no token: leave token_file (or SKERRY_TOKEN_FILE) out"),
    ):
        code, out, err = call("learner", "--syncer", f"127.0.0.1:{syncer.port}", *words, "--json")
        assert code == 2 and says in json.loads(out)["error"]
        assert says in one_line(err)
    with Puppet(guarded.port, token=b"correct horse battery staple") as puppet:  # and with the right one all is well
        assert puppet.merge_once() >= 1


def test_a_learner_name_nobody_can_write(live):
    with pytest.raises(AssertionError, match="learner name 'Big One': use 1 to 64 of a-z"):
        Puppet(live.port, name="Big One")


def test_a_learner_whose_model_differs_is_told_the_first_parameter(live):
    torch = pytest.importorskip("torch")
    import skerry

    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(32, 8), "mlp": torch.nn.Linear(8, 17)})
    with pytest.raises(RefusedError) as refusal:
        skerry.Learner(model, syncer=f"127.0.0.1:{live.port}", name="other")
    assert str(refusal.value) == (
        "the model differs from the run's: mlp.bias: shape (17,) here, (16,) there (here: the learner, there: the run)"
    )


def test_nan_in_a_contribution_is_refused_whole_counted_and_named(tmp_path):
    with Syncer(tmp_path) as syncer, Puppet(syncer.port, name="sick") as puppet:
        fragment = puppet.pulled()
        before = committed(syncer.run_dir)
        puppet.contribute(fragment, float("nan"))
        assert puppet.rejected().reason == "not finite"
        until(lambda: syncer.status["refused"] == {"not finite": 1}, "the refusal in the status")
        assert f"refused contribution of sick to fragment {fragment}: not finite" in syncer.said
        assert committed(syncer.run_dir) == before
        assert puppet.merge_once() >= 1  # the run goes on, and what it merges is finite
        rows = [row for fact in facts_of(syncer.run_dir) if isinstance(fact, Committed) for row in fact.decision.rows]
        assert any(row.fate == "merged" for row in rows)
        assert 1 not in {row.seq for row in rows if row.fragment == fragment}


def committed(run_dir):
    return [
        (fact.decision.fragment, fact.decision.version) for fact in facts_of(run_dir) if isinstance(fact, Committed)
    ]


# ---------------------------------------------------------------------------------------------- junk on the port


JUNK = {
    "noise": bytes(range(1, 256)) * 16,
    "zeros": bytes(4096),
    "http": b"GET / HTTP/1.1\r\nHost: skerry\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(506),
    "a frame of 4 GB": frames._header(frames.HANDSHAKE, 0xFFFFFFFF, 0),
    "a message before the handshake": frames._frame(frames.MESSAGE, msgspec.msgpack.encode("hello")),
    "a handshake that is none": frames._frame(frames.HANDSHAKE, b"\xc1\xc1\xc1"),
    "a wrong checksum": frames._header(frames.HANDSHAKE, 4, 1) + b"junk",
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
def test_junk_is_hung_up_on_while_a_run_goes_on(live, junk):
    with Puppet(live.port) as puppet:
        version = puppet.merge_once()
        with stranger(live.port) as sock:
            sock.sendall(junk)
            assert is_hung_up(sock)
        while puppet.merge_once() <= version:
            pass
    assert live.process.poll() is None


def test_a_truncated_frame_and_silence_leave_the_run_unharmed(live):
    proof = frames.encode(frames.Proof(HANDSHAKE, bytes(32), b""))
    with Puppet(live.port) as puppet, stranger(live.port) as silent, stranger(live.port) as half:
        half.sendall(proof[: len(proof) // 2])
        half.shutdown(socket.SHUT_WR)
        assert is_hung_up(half)
        assert puppet.merge_once() >= 1
        assert is_hung_up(silent)  # by the deadline of the handshake
        assert puppet.merge_once() >= 1
    assert live.process.poll() is None


def test_a_payload_that_claims_10_gb_is_dropped_and_never_allocated(live):
    with Puppet(live.port) as puppet:
        puppet.merge_once()
        before = peak_bytes(live.process.pid)
        control, bulk = admitted(live.port)
        with control, bulk:
            claim = Contribution("big", 1, 1, 0, 0, 0, 0, 1, 1, "fp32", bytes(16))
            bulk.sendall(frames._frame(frames.BULK, msgspec.msgpack.encode((1, 10 << 30, claim))))
            assert is_hung_up(bulk) and is_hung_up(control)
        assert puppet.merge_once() >= 1
    assert live.process.poll() is None
    assert peak_bytes(live.process.pid) - before < 1 << 30
    assert "10737418240" in live.said  # the claim is in the log


def admitted(port):
    """A control and a bulk connection that have passed the handshake by hand."""
    control = stranger(port)
    parser = frames.Parser(frames.learner_dialect(lambda message: 0))
    heard(control, parser, frames.Challenge)
    control.sendall(frames.encode(frames.Proof(HANDSHAKE, bytes(32), b"")))
    session = heard(control, parser, frames.Attached).session
    bulk = stranger(port)
    parser = frames.Parser(frames.learner_dialect(lambda message: 0))
    heard(bulk, parser, frames.Challenge)
    bulk.sendall(frames.encode(frames.Attach(HANDSHAKE, bytes(32), session, b"")))
    heard(bulk, parser, frames.Attached)
    return control, bulk


def heard(sock, parser, kind):
    while data := sock.recv(1):  # a byte at a time: nothing behind the handshake is taken
        for item in parser.feed(data):
            assert isinstance(item, kind), item
            return item
    raise AssertionError(f"hung up before {kind.__name__}")


def peak_bytes(pid):
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


# ---------------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a few megabytes, or None where we may not mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    yield disk if mounted else None
    if mounted:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_stops_the_syncer_with_committed_state_intact(tmp_path, small_disk):
    run_dir = (small_disk or tmp_path) / "run"
    with Syncer(tmp_path, run_dir=run_dir) as syncer, Puppet(syncer.port) as puppet:
        puppet.merge_once()
        if small_disk:
            fill(small_disk / "filler")
        else:  # no mount here: the tape, larger than the log, may grow no further
            size = (run_dir / "tape" / "000001.seg").stat().st_size
            resource.prlimit(syncer.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        with contextlib.suppress(AssertionError):  # a page that is begun has room for a while; then the link is lost
            while True:
                puppet.merge_once()
        assert syncer.wait() == (75 if small_disk else 2), "there may be room later"
    (line,) = syncer.refusals
    assert "Traceback" not in syncer.said
    if small_disk:
        assert "the disk is full" in line and "committed state is intact: free space and restart" in line
    after = committed(run_dir)
    with Store.open(run_dir, readonly=True) as store:  # whatever was committed is there, whole
        state = state_of(store.records)
        assert versions.newest(store, state, fragments_of(state.created))
        assert all(base <= at.version for base, at in zip(puppet.base, state.fragments, strict=True))
    if small_disk:
        (small_disk / "filler").unlink()
    with Syncer(tmp_path, run_dir=run_dir) as syncer, Puppet(syncer.port) as puppet:
        assert puppet.merge_once() >= 1
    assert len(committed(run_dir)) > len(after)
    assert [f.epoch for f in facts_of(run_dir) if isinstance(f, EpochStarted)] == [1, 2]


def test_a_full_disk_ends_a_launch_in_one_line_and_its_processes_with_it(tmp_path, small_disk):
    if not small_disk:
        pytest.skip("may not mount a small disk here")
    run = small_disk / "run"
    with Running(tmp_path, "launch", write_launch(tmp_path, ("a", 1)), "--run", run, "--http-port", "off") as launch:
        until_merging(run, "a-0")
        fill(small_disk / "filler")
        assert launch.wait() == 75
    (line,) = launch.refusals
    assert "Traceback" not in launch.said and "disk" in line
    assert not processes_naming(str(run))


def test_a_launch_on_a_full_disk_says_so_by_the_name_of_its_file(tmp_path, small_disk):
    """Its run directory lies elsewhere; in the background as in the foreground the same may do later."""
    if not small_disk:
        pytest.skip("may not mount a small disk here")
    file, run = write_launch(tmp_path, ("a", 1)), small_disk / "run"
    file.write_text(file.read_text().replace("[syncer]", f'[syncer]\ndir = "{tmp_path}/rundir"'))
    launch = ["launch", file, "--run", run, "--http-port", "off"]
    with Running(tmp_path, *launch) as running:
        until_merging(tmp_path / "rundir", "a-0")
        fill(small_disk / "filler")
        done = skerry("scale", run, "a", 2)
        assert done.returncode == 75 and one_line(done.stderr).startswith(f"{run}/launch.json: the disk is full")
        running.process.terminate()
        assert running.wait() == 130, running.said
    for words in ([], ["--detach"]):
        done = skerry(*launch, *words)
        assert done.returncode == 75, done.stderr
        assert words or one_line(done.stderr).startswith(f"{run}/")


def test_a_launch_on_a_disk_that_is_read_only_is_one_line_of_every_command(tmp_path, small_disk):
    if not small_disk:
        pytest.skip("may not mount a small disk here")
    run = small_disk / "run"
    launch = ["launch", write_launch(tmp_path, ("a", 1)), "--run", run, "--http-port", "off"]
    with Running(tmp_path, *launch) as running:
        until_merging(run, "a-0")
        running.signal(signal.SIGKILL)  # so that down has a token to remove
        running.wait()
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    until(lambda: not subprocess.run(remount, capture_output=True).returncode, "the end of all that wrote there")
    for words in (launch, [*launch, "--detach"], ["scale", run, "a", 2], ["down", run]):
        done = skerry(*words)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.splitlines()[-1].endswith(": Read-only file system; mount it writable"), done.stderr
        assert "Traceback" not in done.stderr


def fill(file):
    """Write until there is no room left, the last bytes one by one."""
    with file.open("wb", buffering=0) as filler:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while filler.write(bytes(size)) == size:
                    pass


def test_export_to_a_full_disk_is_one_line_and_leaves_no_half_a_model(tmp_path, small_disk, stopped_run):
    folder = small_disk or tmp_path / "disk"
    if small_disk:
        fill(small_disk / "filler")
    # no mount here: no file of the command may be as large as the model
    limits = {} if small_disk else {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))}
    done = skerry("export", stopped_run, "--out", folder / "model", **limits)
    assert done.returncode == (75 if small_disk else 2) and "cannot be written" in one_line(done.stderr)
    assert not [path for path in folder.iterdir() if path.name != "filler"]


@pytest.mark.parametrize(("words", "code"), [(["report", "--out"], 75), (["fork"], 2)], ids=["report", "fork"])
def test_what_there_is_no_room_for_is_refused_with_the_next_step_and_leaves_nothing(
    small_disk, stopped_run, words, code
):
    """A fork is refused before anything is written, with how much it needs."""
    if not small_disk:
        pytest.skip("may not mount a small disk here")
    fill(small_disk / "filler")
    done = skerry(words[0], stopped_run, *words[1:], small_disk / "made")
    assert done.returncode == code and "free" in one_line(done.stderr)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_run_that_cannot_be_made_leaves_one_line(folder):
    """A lone syncer whose first values cannot be written says so once and exits with 2."""
    with Running(folder, "syncer", "--run", "/proc/skerry", "--port", "0", "--run.steps", "5", "--genesis",
                 write_genesis(folder / "genesis")) as syncer:  # fmt: skip
        assert syncer.wait() == 2
    assert len(syncer.said.splitlines()) == 1 and len(syncer.refusals) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["train", *HERE],
        ["demo", "--out", "new"],
        ["chaos", "storm", "--out", "new"],
        ["syncer", *SERVE, "--run.steps", "5"],
        ["learner", "--syncer", "localhost:1"],
        ["bench", "learner"],
    ],
)
def test_what_trains_says_what_to_install_where_there_is_no_torch(call, folder, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err = call(*words)
    assert (code, out) == (2, "") and "needs torch: pip install 'skerry[torch]'" in err and err.count("\n") == 1
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "goodput", "--chips", "-1.2e6"],
        ["simulate", "goodput", "--mtbi", "-1y"],
        ["plan", "bandwidth", "--params", "-.5e9"],
        ["plan", "bandwidth", "--link", "-5Gbit"],
    ],
)
def test_a_negative_number_is_not_taken_for_an_option(call, words):
    code, out, err = call(*words)
    assert (code, out) == (2, "") and f"'{words[-1]}' is negative" in err and err.count("\n") == 1
