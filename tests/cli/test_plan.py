"""skerry plan: what it prints, and what it refuses in one line."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from torch import nn

import skerry
from cli.called import called
from skerry import config as configs
from skerry.plan import layouts
from skerry.train.shapes import SHAPES

BANDWIDTH = ("bandwidth", "--params", "5e9", "--step-s", "1", "--sites", "8", "--learners", "8")
RUN = ("run", "--mbit", "200", "--step-s", "0.5")


def run(capsys, *words):
    """(exit code, stdout, stderr) of a command."""
    return called(capsys, "plan", *words)


def test_the_papers_table_as_json(capsys):
    code, out, _ = run(capsys, "bandwidth", "--paper", "--json")
    told = json.loads(out)
    assert code == 0 and len(told["cells"]) == 60
    assert told["deviation_max"] <= 0.15 and told["deviation_mean"] < 0.03 and told["left_out"]


def test_the_papers_table_for_people(capsys):
    code, out, _ = run(capsys, "bandwidth", "--paper")
    assert code == 0 and "197/198" in out and "391*" in out and "left out" in out


def test_the_command_of_the_documentation(capsys):
    code, out, _ = run(capsys, *BANDWIDTH, "--codec", "int4", "--utilisation", "0.95", "--link", "1Gbit", "--json")
    told = json.loads(out)
    assert code == 0 and told["data_parallel"]["gbit_s"] == pytest.approx(194.6, rel=1e-3)
    assert told["skerry"]["gbit_s"] < told["data_parallel"]["gbit_s"] / 40
    assert 0 < told["at_link"]["data_parallel"] < told["at_link"]["skerry"] < 1


def test_an_override_is_an_option(capsys):
    _, out, _ = run(capsys, *BANDWIDTH, "--sync.sync_every", "48", "--sync.policy", "fixed", "--json")
    assert [p["sync_every"] for p in json.loads(out)["skerry"]["phases"]] == [48]


def test_bandwidth_for_people(capsys):
    code, out, _ = run(capsys, *BANDWIDTH, "--link", "2Gbit")
    assert code == 0 and "data-parallel" in out and "warm, H = 4" in out and "2 Gbit/s" in out
    assert "5e+09 parameters in 24 fragments, " in out


def test_a_run_from_a_file_with_a_link_for_each_learner(capsys, tmp_path):
    (tmp_path / "run.toml").write_text('[run]\nname = "isles"\nlearners = 3\ntokens = 1e9\n[model]\npreset = "10m"\n')
    links = ("--mbit", "200,200,20", "--rtt-ms", "40", "--step-s", "1,1,2")
    words = ("run", "--config", str(tmp_path / "run.toml"), *links)
    code, out, _ = run(capsys, *words, "--json")
    told = json.loads(out)
    assert code == 0 and told["run"] == "isles" and told["params"] == layouts.built_in(SHAPES["10m"]).param_count
    assert {"fragments", "phases", "memory", "disk", "goodput", "suggested", "warnings"} <= set(told)
    assert [p["phase"] for p in told["phases"]] == ["warm", "steady"]
    steady = told["phases"][-1]
    assert [x["learner"] for x in steady["learners"]] == ["learner-0", "learner-1", "learner-2"]
    assert steady["learners"][2]["up_s"] == pytest.approx(10 * steady["learners"][0]["up_s"])
    assert sum(told["fragments"]["elements"]) >= told["params"]
    code, out, _ = run(capsys, *words)
    assert code == 0 and "expected goodput" in out and "suggested: --sync.num_fragments" in out


LINKS = """
[run]
learners = 3
tokens = 1e9
[plan]
params = 5e9
tensors = 200
mbit = [200, "1Gbit", "50Mbit"]
rtt_ms = 40
step_s = "500ms"
syncer_mbit = "2Gbit"
mtbi = "2d"
repair = "10min"
"""


def test_links_may_stand_in_the_file_alone(capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(LINKS)
    code, out, _ = run(capsys, "run", "--config", str(file), "--json")
    assert code == 0
    told = json.loads(out)
    file.write_text("[run]\nlearners = 3\ntokens = 1e9\n")
    links = ("--mbit", "200,1000,50", "--rtt-ms", "40", "--step-s", "0.5", "--syncer-mbit", "2000")
    others = ("--params", "5e9", "--tensors", "200", "--mtbi", "48h", "--repair", "600")
    _, out, _ = run(capsys, "run", "--config", str(file), *links, *others, "--json")
    assert told == json.loads(out) and told["params"] == 5 * 10**9 and told["goodput"] < 1


def test_memory_follows_where_learners_have_their_state(capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(LINKS)
    words = ("run", "--config", str(file))
    usual = json.loads(run(capsys, *words, "--json")[1])["memory"]
    moved = json.loads(run(capsys, *words, "--state", "device", "--json")[1])["memory"]
    assert usual["learner_host"]["total"] > 8 * 5e9 > 8 * moved["learner_host"]["total"]
    assert moved["learner_device"]["total"] > usual["learner_device"]["total"] + 8 * 5e9
    assert moved["syncer"] == usual["syncer"]
    file.write_text(LINKS + 'state = "device"\n')
    assert json.loads(run(capsys, *words, "--json")[1])["memory"] == moved
    file.write_text(LINKS + 'state = "auto"\n')
    code, _, err = run(capsys, *words)
    assert (code, err) == (2, f"skerry: {file}: plan.state = auto: give host or device\n")


def test_an_option_wins_over_the_file(capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(LINKS)
    save_file({"w": np.zeros((8, 8), np.float32)}, tmp_path / "genesis")
    words = ("run", "--config", str(file), "--json", "--mbit", "100")
    told = json.loads(run(capsys, *words)[1])
    assert len({x["up_s"] for x in told["phases"][0]["learners"]}) == 1
    assert json.loads(run(capsys, *words, "--params", "1e9")[1])["params"] == 10**9
    assert json.loads(run(capsys, *words, "--genesis", str(tmp_path / "genesis"))[1])["params"] == 64


def test_a_run_takes_the_same_file_and_leaves_its_plan_unread(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(LINKS)
    expected = configs.resolve(configs.default(), None, [("run.learners", 3), ("run.tokens", 10**9)])
    assert configs.resolve(configs.default(), file) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[plan]\nmbits = 200\n", "run.toml: unknown key plan.mbits: did you mean mbit?"),
        ("[plna]\nmbit = 200\n", "run.toml: unknown table [plna]: did you mean plan?"),
        ("plan = 200\n", "run.toml: plan is a table, write [plan]"),
        ("[plan]\nmbit = [200, 100]\n", "run.toml: plan.mbit = 200,100: 2 values for 4 learners"),
        ("[plan]\nmbit = [200, 'fast', 1, 1]\n", "run.toml: plan.mbit = 200,fast,1,1: 'fast' is not Mbit/s"),
        ("[plan]\nmbit = '200M'\n", "run.toml: plan.mbit = 200M: '200M' has the unknown unit 'M'"),
        ("[plan]\nmbit = true\n", "run.toml: plan.mbit = True: 'True' is not Mbit/s"),
        ("[plan]\nmbit = []\n", "run.toml: plan.mbit = : '' is not Mbit/s"),
        ("[plan]\nmbit = nan\n", "run.toml: plan.mbit = nan: 'nan' is not"),
        ("[plan]\nmbit = 200\nrepair = '2h'\n", "run.toml: plan.repair = 2h: "),
        ("[plan]\nmbit = 200\ngenesis = 'x'\nparams = 5\n", "run.toml: plan.genesis = x says how large"),
        (
            "[plan]\nrtt_ms = 40\n",
            "--mbit: is needed, the learners' links: --mbit 200 or 200,50, or mbit = 200 under [pl",
        ),
    ],
)
def test_a_bad_plan_in_the_file_is_refused_by_its_place(capsys, tmp_path, text, named):
    (tmp_path / "run.toml").write_text(text)
    code, out, err = run(capsys, "run", "--config", str(tmp_path / "run.toml"), "--learner.step_s", "1", "--json")
    assert code == 2 and named in err and len(err.splitlines()) == 1, err
    assert named in json.loads(out)["error"]


def test_what_no_link_carries_is_said_to_people(capsys):
    code, out, _ = run(capsys, "run", "--mbit", "0.01", "--step-s", "0.01", "--params", "5e9")
    assert code == 0 and "expected goodput 0.0%" in out and "suggested: nothing" in out
    assert "cannot carry this model" in out and "5,000,000,000 parameters" in out


def test_what_is_not_trained_takes_room_on_the_disk(capsys, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(100, 50))
    model[1].requires_grad_(False)
    skerry.save_genesis(model, tmp_path / "genesis")
    _, out, _ = run(capsys, *RUN, "--genesis", str(tmp_path / "genesis"), "--json")
    told = json.loads(out)
    assert told["params"] == 8 * 9 and told["disk"]["fixed"] == 4 * 50 * 101
    _, out, _ = run(capsys, *RUN, "--genesis", str(tmp_path / "genesis"))
    assert "disk, what is not trained" in out
    assert "disk, what is not trained" not in run(capsys, *RUN)[1]


def test_the_learners_of_the_configuration_are_those_of_the_question(capsys):
    words = ("bandwidth", "--params", "5e9", "--step-s", "1", "--json")
    told = json.loads(run(capsys, *words, "--run.learners", "4")[1])
    assert told == json.loads(run(capsys, *words, "--learners", "4")[1]) and told["learners"] == 4


def test_help_names_the_defaults(capsys):
    _, out, _ = run(capsys, "run", "--help")
    assert "is back: 10min (default 0)" in " ".join(out.split())


def test_a_users_model_by_its_file(capsys, tmp_path):
    save_file({"emb": np.zeros((100, 8), np.float32), "w": np.zeros((8, 8), np.float32)}, tmp_path / "genesis")
    _, out, _ = run(capsys, *RUN, "--genesis", str(tmp_path / "genesis"), "--sync.cut_tensors", "false", "--json")
    told = json.loads(out)
    assert (told["params"], told["tensors"], told["fragments"]["count"]) == (864, 2, 2)
    _, out, _ = run(capsys, *RUN, "--genesis", str(tmp_path / "genesis"), "--sync.num_fragments", "24", "--json")
    told = json.loads(out)
    assert told["fragments"]["count"] == 8
    assert any("24, but the model has 864 parameters and a fragment has 128 at least" in w for w in told["warnings"])


@pytest.mark.parametrize(("preset", "count"), [("default", 12), ("local", 24), ("paper", 24)])
def test_how_many_fragments_the_built_in_model_of_10m_has(capsys, preset, count):
    _, out, _ = run(capsys, *RUN, "--preset", preset, "--model.preset", "10m", "--json")
    assert json.loads(out)["fragments"]["count"] == count


def test_failures_lower_the_goodput(capsys):
    _, out, _ = run(capsys, *RUN, "--mtbi", "1d", "--repair", "2h", "--json")
    assert json.loads(out)["goodput"] == pytest.approx(12 / 13, rel=0.01)


BAD = [
    ((), "what"),
    (("weather",), "weather"),
    (("bandwidth",), "--params: is needed"),
    (("bandwidth", "--params", "5e9"), "--step-s: is needed"),
    (("bandwidth", "--params", "0", "--step-s", "1"), "--params: '0' must be from 1 to"),
    (("bandwidth", "--params", "5x", "--step-s", "1"), "--params: '5x' has the unknown unit 'x'"),
    (("bandwidth", "--params", "1e40", "--step-s", "1"), "--params: '1e40'"),
    (("bandwidth", "--params=-5", "--step-s", "1"), "'-5' is negative"),
    (("bandwidth", "--params", "5", "--step-s", "1"), "--params 5: fewer than the 6 fragments they would be in"),
    (("bandwidth", "--params", "5e9", "--step-s", "soon"), "--step-s: 'soon' is not a time"),
    ((*BANDWIDTH, "--utilisation", "1"), "--utilisation 1: a share"),
    ((*BANDWIDTH, "--utilisation", "nan"), "--utilisation: 'nan' is not a share"),
    ((*BANDWIDTH, "--codec", "int3"), "int3"),
    ((*BANDWIDTH, "--link", "5"), "--link: '5' has no unit"),
    ((*BANDWIDTH, "--link", "0Gbit"), "--link: '0Gbit' must be from 1kbit to 100Tbit"),
    ((*BANDWIDTH, "--link", "1e6Tbit"), "--link: '1e6Tbit' must be from 1kbit to 100Tbit"),
    ((*BANDWIDTH, "--run.learners", "4"), "--run.learners 4: --learners says 8; give one of the two"),
    ((*BANDWIDTH, "--codec", "int4", "--wire.codec_up", "bf16"), "--wire.codec_up bf16: --codec says int4"),
    (("bandwidth", "--params", "5e9", "--step-s", "1", "--run.learners", "1"), "--run.learners 1: links lie"),
    ((*BANDWIDTH, "--sites", "9"), "--sites 9: more than the 8 learners"),
    ((*BANDWIDTH, "--sites", "1"), "--sites: '1' must be from 2"),
    ((*BANDWIDTH, "--learners", "2.5"), "--learners: '2.5' is not a whole number"),
    ((*BANDWIDTH, "--sync.quorum", "9"), "sync.quorum = 9: more than the 8 learners"),
    ((*BANDWIDTH, "--sync.num_fragment", "9"), "did you mean num_fragments?"),
    ((*BANDWIDTH, "--paper"), "--params: --paper"),
    (("bandwidth", "--paper", "--sync.quorum", "1"), "--sync.quorum: --paper"),
    (("run",), "--mbit: is needed"),
    (("run", "--mbit", "200"), "--step-s: is needed"),
    ((*RUN, "--mbit", "200,100"), "--mbit 200,100: 2 values for 4 learners"),
    ((*RUN, "--mbit", "fast"), "--mbit fast: 'fast' is not Mbit/s like 200"),
    ((*RUN, "--mbit", "0"), "--mbit 0: '0' must be from 1kbit to 100Tbit"),
    ((*RUN, "--mbit", "200M"), "--mbit 200M: '200M' has the unknown unit 'M': known are kbit, Mbit"),
    ((*RUN, "--mbit", "2e8"), "--mbit 2e8: '2e8' must be from 1kbit to 100Tbit"),
    ((*RUN, "--syncer-mbit", "1G"), "--syncer-mbit 1G: '1G' has the unknown unit 'G'"),
    ((*RUN, "--rtt-ms", "1k"), "--rtt-ms 1k: '1k' has the unknown unit 'k': known are ms, s"),
    ((*RUN, "--plan.mbit", "5"), "command line: unknown table [plan]"),
    ((*RUN, "--step-s", "1,1,1,0"), "--step-s 1,1,1,0: '0' must be from"),
    ((*RUN, "--rtt-ms", "1e9"), "--rtt-ms 1e9: '1e9' must be from 0 to 1h"),
    ((*RUN, "--repair", "2h"), "--repair 2h: says how long an interruption takes; mtbi"),
    ((*RUN, "--mtbf", "2d"), "did you mean --mtbi?"),
    ((*RUN, "--mtbi", "3m"), "--mtbi 3m: '3m' has the unknown unit 'm'"),
    ((*RUN, "--tensors", "3"), "--tensors 3: goes with params"),
    ((*RUN, "--tensors", "2.5", "--params", "5"), "--tensors 2.5: '2.5' is not a whole number"),
    ((*RUN, "--params", "3", "--tensors", "9"), "--params 3: fewer than the 9 tensors"),
    ((*RUN, "--params", "3", "--genesis", "g"), "--params 3: --genesis g says how large the model is"),
    ((*RUN, "--params", "5e12"), "5e+12 parameters: one syncer holds at most 1e+11"),
    ((*RUN, "--genesis", "nowhere.safetensors"), "nowhere.safetensors: no such file"),
    ((*RUN, "--genesis", "."), ".: is a directory; name the safetensors file"),
    ((*RUN, "--config", "nowhere.toml"), "nowhere.toml"),
    ((*RUN, "--model.preset", "9m"), "model.preset = '9m'"),
    ((*RUN, "--sync.quorum", "5"), "sync.quorum = 5: more than the 4 learners"),
    ((*RUN, "--mbits", "5"), "did you mean --mbit?"),
]


@pytest.mark.parametrize(("words", "named"), BAD)
def test_bad_input_is_refused_in_one_line(capsys, words, named):
    code, out, err = run(capsys, *words, "--json")
    assert code == 2 and named in err and len(err.splitlines()) == 1, err
    assert named in json.loads(out)["error"]
