"""skerry plan: what it prints, and what it refuses in one line."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from skerry import cli
from skerry.train.shapes import SHAPES, parameter_count

BANDWIDTH = ("bandwidth", "--params", "5e9", "--step-s", "1", "--sites", "8", "--learners", "8")
RUN = ("run", "--mbit", "200", "--step-s", "0.5")


def run(capsys, *words):
    """(exit code, stdout, stderr) of a command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *words])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


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


def test_a_run_from_a_file_with_a_link_for_each_learner(capsys, tmp_path):
    (tmp_path / "run.toml").write_text('[run]\nname = "isles"\nlearners = 3\ntokens = 1e9\n[model]\npreset = "10m"\n')
    links = ("--mbit", "200,200,20", "--rtt-ms", "40", "--step-s", "1,1,2")
    words = ("run", "--config", str(tmp_path / "run.toml"), *links)
    code, out, _ = run(capsys, *words, "--json")
    told = json.loads(out)
    assert code == 0 and told["run"] == "isles" and told["params"] == parameter_count(SHAPES["10m"])
    assert {"fragments", "phases", "memory", "disk", "goodput", "suggested", "warnings"} <= set(told)
    assert [p["phase"] for p in told["phases"]] == ["warm", "steady"]
    steady = told["phases"][-1]
    assert [x["learner"] for x in steady["learners"]] == ["learner-0", "learner-1", "learner-2"]
    assert steady["learners"][2]["up_s"] == pytest.approx(10 * steady["learners"][0]["up_s"])
    assert sum(told["fragments"]["elements"]) >= told["params"]
    code, out, _ = run(capsys, *words)
    assert code == 0 and "expected goodput" in out and "suggested: --sync.num_fragments" in out


def test_a_users_model_by_its_file(capsys, tmp_path):
    save_file({"emb": np.zeros((100, 8), np.float32), "w": np.zeros((8, 8), np.float32)}, tmp_path / "genesis")
    _, out, _ = run(capsys, *RUN, "--genesis", str(tmp_path / "genesis"), "--json")
    told = json.loads(out)
    assert (told["params"], told["tensors"], told["fragments"]["count"]) == (864, 2, 2)


def test_failures_lower_the_goodput(capsys):
    _, out, _ = run(capsys, *RUN, "--mtbf", "1d", "--repair", "2h", "--json")
    assert json.loads(out)["goodput"] == pytest.approx(12 / 13, rel=0.01)


BAD = [
    ((), "what"),
    (("weather",), "weather"),
    (("bandwidth",), "--params: is needed"),
    (("bandwidth", "--params", "5e9"), "--step-s: is needed"),
    (("bandwidth", "--params", "0", "--step-s", "1"), "--params: '0' must be above 0"),
    (("bandwidth", "--params", "5x", "--step-s", "1"), "--params: '5x' has the unknown unit 'x'"),
    (("bandwidth", "--params", "1e40", "--step-s", "1"), "--params: '1e40'"),
    (("bandwidth", "--params=-5", "--step-s", "1"), "'-5' is negative"),
    (("bandwidth", "--params", "5", "--step-s", "1"), "sync.num_fragments = 24"),
    (("bandwidth", "--params", "5e9", "--step-s", "soon"), "--step-s: 'soon' is not a time"),
    ((*BANDWIDTH, "--utilisation", "1"), "--utilisation 1.0"),
    ((*BANDWIDTH, "--utilisation", "nan"), "--utilisation nan"),
    ((*BANDWIDTH, "--codec", "int3"), "int3"),
    ((*BANDWIDTH, "--link", "5"), "--link: '5' has no unit"),
    ((*BANDWIDTH, "--link", "0Gbit"), "--link: '0Gbit' must be above 0"),
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
    ((*RUN, "--mbit", "fast"), "--mbit fast: 'fast' is not a number"),
    ((*RUN, "--mbit", "0"), "--mbit 0: each must be from"),
    ((*RUN, "--step-s", "1,1,1,0"), "--step-s 1,1,1,0: each must be from"),
    ((*RUN, "--rtt-ms", "1e9"), "--rtt-ms 1e9: each must be"),
    ((*RUN, "--repair", "2h"), "--mtbf"),
    ((*RUN, "--mtbf", "3m"), "--mtbf: '3m' has the unknown unit 'm'"),
    ((*RUN, "--tensors", "3"), "--tensors: goes with --params"),
    ((*RUN, "--params", "3", "--tensors", "9"), "--tensors 9: more than --params 3"),
    ((*RUN, "--params", "5e12"), "5e+12 parameters: one syncer holds at most 1e+11"),
    ((*RUN, "--genesis", "nowhere.safetensors"), "nowhere.safetensors: no such file"),
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
