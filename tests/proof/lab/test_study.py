"""Studies: what a file says, what it may not, results that survive crashes, and jobs in real worker processes."""

import math
import os
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path

import msgspec
import pytest

from e2e.processes import is_running, until
from proof.lab.fake import result_of, run, save_of, study_of
from skerry import config as configs
from skerry.errors import StudyError
from skerry.proof.lab import study as studies
from skerry.proof.lab.results import Results
from skerry.proof.lab.study import read
from skerry.proof.lab.workers import execute
from skerry.run.delays import MEASURED, Delays

GOOD = """
name = "good"
seeds = [0, 1]
baseline = "dp"
[common]
run = { learners = 4, tokens = 1000 }
lab.dead_steps = 20
[variants.dp]
lab.data_parallel = true
[variants.plain]
[variants.faults]
sync.quorum = 2
lab = { speeds = [1, 0.5, 0.33], dead_share = 0.1 }
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="good.toml"):
        file = tmp_path / name
        file.write_text(text)
        return file

    return write


# ---------------------------------------------------------------------------------------------- reading


def test_a_study_names_its_delays_and_none_is_what_there_was_before(write):
    def of(said):
        return read(write(GOOD.replace("lab.dead_steps = 20", f"lab.dead_steps = 20\nlab.delays = {said}"))).jobs

    absent, none, measured = read(write(GOOD)).jobs, of('"none"'), of('"measured"')
    figures = of("{ encode_ns = 1, commit_s = 0.01 }")
    assert [job.key for job in none] == [job.key for job in absent]
    assert none[1].setting.delays == Delays() and measured[1].setting.delays == MEASURED
    assert figures[1].setting.delays == Delays(encode_ns=1, commit_s=0.01)
    assert len({job.key for job in (absent[1], measured[1], figures[1])}) == 3
    assert measured[0].key == absent[0].key, "data-parallel training has none of it"


def test_a_result_from_before_there_were_delays_counts_for_a_study_without(write, tmp_path):
    job = read(write(GOOD)).jobs[1]
    result = result_of(job)
    setting = {key: value for key, value in result.setting.items() if key != "delays"}
    old = msgspec.structs.replace(result, setting=setting, key=studies.digest(result.config, setting))
    file = tmp_path / "results.jsonl"
    file.write_bytes(msgspec.json.encode(old) + b"\n")
    assert Results(file).of(job) is not None


def test_a_result_from_before_tensors_were_cut_is_one_of_whole_tensors(write, tmp_path):
    whole, cut = (
        read(write(GOOD.replace("quorum = 2", f"quorum = 2\nsync.cut_tensors = {word}"))).jobs
        for word in ("false", "true")
    )
    result = result_of(whole[-1])
    sync = {key: value for key, value in result.config["sync"].items() if key != "cut_tensors"}
    config = result.config | {"sync": sync}
    old = msgspec.structs.replace(result, config=config, key=studies.digest(config, result.setting))
    file = tmp_path / "results.jsonl"
    file.write_bytes(msgspec.json.encode(old) + b"\n")
    assert Results(file).of(whole[-1]) is not None and Results(file).of(cut[-1]) is None
    assert "sync.cut_tensors was False, is True" in Results(file).why_again(cut[-1])


def test_a_study_says_what_differs_from_the_defaults(write):
    study = read(write(GOOD))
    order = [(job.seed, job.variant) for job in study.jobs]
    assert order == [(seed, name) for seed in (0, 1) for name in ("dp", "plain", "faults")]
    _, plain, faults = study.jobs[:3]
    default = configs.default()
    assert plain.config == msgspec.structs.replace(default, run=configs.Run(learners=4, tokens=1000, seed=0))
    assert faults.config.sync == msgspec.structs.replace(default.sync, quorum=2)
    assert faults.setting == studies.Setting(dead_steps=20, speeds=(1, 0.5, 0.33), dead_share=0.1)
    assert study.jobs[-1].config.run.seed == 1


def test_narrowed_to_some_variants_and_seeds(write):
    study = read(write(GOOD)).narrowed(["faults"], [1])
    assert [(job.variant, job.seed) for job in study.chosen] == [("faults", 1)]
    assert {job.variant for job in study.jobs} == {"dp", "plain", "faults"}  # the baseline can still be looked up


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("seeds = [0, 1]", "seeds = [0, 1, 0]"), "good.toml: seeds = [0, 1, 0]: 0 is there twice"),
        (("seeds = [0, 1]", "seeds = []"), "good.toml: seeds = []: write a list of whole numbers"),
        (("seeds = [0, 1]", "seeds = [true]"), "seeds = [True]: write a list"),
        (("seeds", "seed"), "good.toml: unknown key seed: did you mean seeds?"),
        (('name = "good"', 'name = "Good One"'), "good.toml: name = 'Good One': use 1 to 64 of a-z"),
        (('"dp"', '"dpp"'), "good.toml: baseline = 'dpp': no such variant: did you mean dp?"),
        (('"dp"', "3"), "good.toml: baseline = 3: must be text"),
        (
            ("lab.dead_steps = 20", 'lab.delays = "measurd"'),
            "good.toml, variant dp: lab.delays = 'measurd': did you mean measured?, or a table of figures",
        ),
        (
            ("lab.dead_steps = 20", "lab.delays = { commit_s = 99 }"),
            "good.toml, variant dp: lab.delays.commit_s = 99: must be from 0 to 60",
        ),
        (("quorum = 2", "quorum = 5"), "good.toml, variant faults: sync.quorum = 5: more than the 4 learners"),
        (("sync.quorum", "sync.qorum"), "good.toml, variant faults: unknown key sync.qorum: did you mean quorum?"),
        (("sync.quorum", "synk.quorum"), "good.toml, variant faults: unknown table synk: did you mean sync?"),
        (("sync.quorum = 2", "sync = 2"), "good.toml, variant faults: sync = 2: is a table"),
        (("sync.quorum = 2", "run.seed = 2"), "variant faults: run.seed: a study lists its seeds at the top"),
        (("lab.dead_steps", "lab.dead_stepz"), "good.toml, common: unknown key lab.dead_stepz: did you mean"),
        (("dead_steps = 20", "dead_steps = 'x'"), "variant dp: lab.dead_steps = 'x': write a number"),
        (("dead_steps = 20", "trial.kept = 0"), "variant dp: lab.trial.kept = 0: must be from 0.001 to 1"),
        (("dead_steps = 20", "trial.kept = 'x'"), "variant dp: lab.trial.kept = 'x': write a number"),
        (("dead_steps = 20", "trial.beta2 = 'x'"), "variant dp: lab.trial.beta2 = 'x': write a number"),
        (("dead_steps = 20", "trial.optimizer = 'x'"), "lab.trial.optimizer = 'x': known are adamw, muon"),
        (("dead_steps = 20", "text = 'al'"), "variant dp: lab.text = 'al': did you mean all?"),
        (("dead_steps = 20", "trial.kep = 1"), "variant dp: lab.trial.kep: unknown key: did you mean kept?"),
        (("dead_steps = 20", "trial = 1"), "variant dp: lab.trial = 1: write a table"),
        (("[1, 0.5, 0.33]", "[1, 'x']"), "variant faults: lab.speeds = [1, 'x']: write a number"),
        (("0.33]", "0.3]"), "lab.speeds = [1.0, 0.5, 0.3]: 0.3 is not 1/n with n a whole number"),
        (("0.33]", "2]"), "lab.speeds = [1.0, 0.5, 2.0]: 2 is not 1/n"),
        (("0.33]", "nan]"), "lab.speeds = [1.0, 0.5, nan]: nan is not 1/n"),
        (("0.33]", "1, 1, 1]"), "lab.speeds = [1.0, 0.5, 1.0, 1.0, 1.0]: 5 speeds for 4 learners"),
        (("dead_share = 0.1", "dead_share = 1"), "lab.dead_share = 1: must be from 0 to 0.9"),
        (("dead_share = 0.1", "away_half = 4"), "lab.away_half = 4: of 4 learners (run.learners) one must be there"),
        (("lab.data_parallel = true", "lab = { data_parallel = true, away_half = 1 }"), "dp: lab.away_half: a data-"),
        (("tokens = 1000", "minutes = 2"), "variant dp: run.minutes = 2: variants are compared at equal work"),
        (("tokens = 1000", "name = 'x'"), "variant dp: run: exactly one of run.tokens"),
        (("[common]", "[common]\nmodel.preset = 'huge'"), "variant dp: model.preset = 'huge': known are tiny"),
        (("[variants.plain]", "[variants.'a:b']"), "variant a:b: use 1 to 64 of a-z, 0-9, '.' and '-' for its name"),
        (("[common]", "["), "good.toml: is not valid TOML"),
    ],
)  # fmt: skip
def test_what_nobody_can_run_is_refused_with_file_variant_and_key(write, change, says):
    assert change[0] in GOOD
    with pytest.raises(StudyError) as refusal:
        read(write(GOOD.replace(*change)))
    assert says in str(refusal.value) and "\n" not in str(refusal.value).split("TOML:")[0]


def test_a_study_needs_variants_and_a_file(write, tmp_path):
    with pytest.raises(StudyError, match=r"bare.toml: has no variant: write a table like \[variants.defaults\]"):
        read(write('name = "bare"\nseeds = [0]', "bare.toml"))
    with pytest.raises(StudyError, match=r"nosuch.toml: cannot be read \(No such file"):
        read(tmp_path / "nosuch.toml")


def test_a_key_is_all_that_decides_the_outcome_and_nothing_else(write, tmp_path, monkeypatch):
    jobs = read(write(GOOD)).jobs
    keys = [job.key for job in jobs]
    assert len(set(keys)) == len(keys) and all(len(key) == 16 for key in keys)
    (tmp_path / "elsewhere").mkdir()
    renamed = GOOD.replace('"good"', '"other"').replace("tokens", "name = 'x', tokens").replace("plain", "simple")
    assert [job.key for job in read(write(renamed, "elsewhere/other.toml")).jobs] == keys
    changed = read(write(GOOD.replace("dead_share = 0.1", "dead_share = 0.2"))).jobs
    assert [job.key for job in changed if job.variant != "faults"] == [j.key for j in jobs if j.variant != "faults"]
    assert {job.key for job in changed if job.variant == "faults"}.isdisjoint(keys)
    monkeypatch.setattr(studies, "RECIPE", studies.RECIPE + 1)
    assert {job.key for job in jobs}.isdisjoint(keys)


# ---------------------------------------------------------------------------------------------- results


def test_results_are_read_back_and_the_later_of_two_counts(tmp_path):
    job, other, _ = study_of(tmp_path, "plain").jobs
    results = Results(tmp_path / "new" / "results.jsonl")
    results.append(result_of(job, loss=2.0))
    results.append(result_of(other))
    results.append(result_of(job, loss=1.5))
    assert results.of(job).loss == 1.5
    again = Results(results.file)
    for kept, given in ((again.of(job), result_of(job, loss=1.5)), (again.of(other), result_of(other))):
        assert msgspec.json.encode(kept) == msgspec.json.encode(given)
    assert not again.warning
    assert len(results.file.read_bytes().splitlines()) == 3


def test_a_diverged_run_is_kept_with_losses_that_are_no_number(tmp_path):
    job = study_of(tmp_path, "plain").jobs[0]
    point = studies.Point(progress=0.5, tokens=1, bytes=1, loss=math.inf)
    results = Results(tmp_path / "results.jsonl")
    results.append(result_of(job, loss=math.nan, loss_before_close=math.nan, diverged=True, points=(point,)))
    kept = Results(results.file).of(job)
    assert kept.diverged and math.isnan(kept.loss) and math.isnan(kept.points[0].loss)


def test_a_torn_last_line_is_not_counted_and_mended_by_the_next(tmp_path):
    first, second, third = study_of(tmp_path, "plain").jobs
    results = Results(tmp_path / "results.jsonl")
    results.append(result_of(first))
    results.append(result_of(second))
    whole = results.file.read_bytes()
    begin = whole.index(b"\n") + 1
    for cut in [begin, *range(begin + 1, len(whole) - 1, 37), len(whole) - 2, len(whole) - 1]:
        results.file.write_bytes(whole[:cut])
        torn = Results(results.file)
        is_whole = cut == len(whole) - 1  # only the end of the line is missing
        assert torn.of(first) and (torn.of(second) is not None) == is_whole
        assert bool(torn.warning) == (begin < cut < len(whole) - 1), cut
        torn.append(result_of(third))
        mended = Results(results.file)
        assert mended.of(first) and mended.of(third) and (mended.of(second) is not None) == is_whole
        assert not mended.warning


@pytest.mark.parametrize(
    "line", [b"<<<<<<< HEAD", b"3", b'{"key": "x"}', b"\xff", b"[" * 100_000], ids=lambda line: repr(line[:20])
)
def test_a_line_that_is_no_result_is_refused_with_its_number(tmp_path, line):
    job = study_of(tmp_path, "plain").jobs[0]
    results = Results(tmp_path / "results.jsonl")
    results.append(result_of(job))
    whole = results.file.read_bytes()
    results.file.write_bytes(whole + line + b"\n" + whole)
    with pytest.raises(StudyError, match=r"results.jsonl:2: is no result of this version"):
        Results(results.file)


@pytest.mark.parametrize("text", [b"my notes", b'{"notes": 3', b'{"key":"a"}'])
def test_what_is_no_file_of_results_is_refused_and_stays(tmp_path, text):
    file = tmp_path / "notes.txt"
    file.write_bytes(text)
    with pytest.raises(StudyError, match=r"notes.txt:1: is no result"):
        Results(file)
    assert file.read_bytes() == text


def test_results_are_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StudyError, match="pipe: is no file"):
        Results(tmp_path / "pipe")


@pytest.mark.parametrize("damage", [{"parameters": 0}, {"config": {"run": 3}}, {"points": 3}, {"points": [3]}], ids=str)
def test_a_result_that_no_run_gives_is_refused_with_its_number(tmp_path, damage):
    results = Results(tmp_path / "results.jsonl")
    results.append(result_of(study_of(tmp_path, "plain").jobs[0]))
    record = msgspec.json.decode(results.file.read_bytes()) | damage
    results.file.write_bytes(msgspec.json.encode(record) + b"\n")
    with pytest.raises(StudyError, match=r"results.jsonl:1: is no result of this version"):
        Results(results.file)


def test_results_that_cannot_be_read_or_written_are_refused(tmp_path):
    with pytest.raises(StudyError, match="is no file"):
        Results(tmp_path)
    unwritable = Results(tmp_path / "file" / "results.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="cannot be written"):
        unwritable.check_writable()


def test_a_result_outlives_a_new_key_of_the_configuration_but_no_change_of_one(tmp_path):
    job = study_of(tmp_path, "plain").jobs[0]

    def found(**changes):
        """A result of `plain` run when [sync] was as it is now but for this; None: the key was not there yet."""
        result = result_of(job)
        result.config["sync"] |= changes
        result.config["sync"] = {key: value for key, value in result.config["sync"].items() if value is not None}
        results = Results(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl")
        results.append(msgspec.structs.replace(result, key=studies.digest(result.config, result.setting)))
        again = Results(results.file)
        return "found" if again.of(job) else again.why_again(job)

    assert found(grace=None) == found() == "found"
    assert found(grace=0.7) == "its result is of another configuration: sync.grace was 0.7, is 0.8"
    assert "`long_gone`" in found(long_gone=3)
    assert not Results(tmp_path / "none.jsonl").why_again(job)


def test_a_data_parallel_result_does_not_depend_on_what_it_does_not_read(tmp_path):
    job = study_of(tmp_path, "plain").jobs[0]
    alone = msgspec.structs.replace(job, setting=msgspec.structs.replace(job.setting, data_parallel=True))
    other = msgspec.structs.replace(job.config, outer=configs.Outer(lr=0.1), sync=configs.Sync(grace=0.1))
    faster = msgspec.structs.replace(other, learner=configs.Learner(lr=0.5))
    assert msgspec.structs.replace(job, config=other).key != job.key
    assert msgspec.structs.replace(alone, config=other).key == alone.key
    results = Results(tmp_path / "results.jsonl")
    results.append(result_of(alone))
    why = results.why_again(msgspec.structs.replace(alone, config=faster))
    assert why == "its result is of another configuration: learner.lr was 0.001, is 0.5"


def test_results_count_only_under_todays_recipe(tmp_path, monkeypatch):
    jobs = study_of(tmp_path, "plain").jobs
    results = Results(tmp_path / "results.jsonl")
    for job in jobs[:2]:
        results.append(result_of(job))
    assert set(results.named("trial", "plain")) == {0, 1}
    assert not results.named("trial", "other")
    monkeypatch.setattr(studies, "RECIPE", studies.RECIPE + 1)
    later = Results(results.file)
    assert not later.named("trial", "plain") and not later.of(jobs[0])
    assert later.why_again(jobs[0]) == "its result counts no more: the laboratory computes differently now"


# ---------------------------------------------------------------------------------------------- running


def test_jobs_run_in_order_in_one_process_and_tell_how_far_they_are(tmp_path, capfd):
    jobs = study_of(tmp_path, "a", "b").jobs
    events = list(execute(jobs, save_of, "slate", run=run))
    results = [event.result for event in events if event.result]
    assert [(result.variant, result.seed) for result in results] == [(job.variant, job.seed) for job in jobs]
    assert {result.device for result in results} == {"slate"} and len({result.steps for result in results}) == 1
    assert [event.progress for event in events[:3]] == [0.0, 0.25, 1.0]
    assert capfd.readouterr().out == ""  # where --json prints its one object


def test_several_workers_share_the_jobs(tmp_path):
    jobs = study_of(tmp_path, "slow", "a").jobs
    results = [event.result for event in execute(jobs, save_of, workers=2, run=run) if event.result]
    assert sorted(result.key for result in results) == sorted(job.key for job in jobs)
    assert len({result.steps for result in results if result.variant == "a"}) <= 2


def test_what_fails_is_told_and_the_others_go_on(tmp_path):
    jobs = study_of(tmp_path, "raises", "dies", "exits", "odd", "good").narrowed(seeds=[1]).jobs
    ended = {e.job.variant: e for e in execute(jobs, save_of, run=run) if e.result or e.failure}
    assert ended["raises"].failure.startswith("ValueError: no text for seed 1 (fake.py:")
    assert ended["dies"].failure == "its process was killed by SIGKILL (out of memory?)"
    assert ended["exits"].failure == "its process ended with exit code 3"
    assert "trial/odd seed 1: is no result" in ended["odd"].failure
    assert ended["good"].result.loss == 2.1 and len(ended) == 5


def test_data_lies_beside_the_study_and_a_result_belongs_to_its_job(tmp_path):
    (tmp_path / "text.txt").write_text("chalk")
    study = study_of(tmp_path, "reads", more='[variants.reads.data]\npath = "text.txt"')
    (result,) = [e.result for e in execute(study.jobs[:1], save_of, run=run) if e.result]
    assert result.device == "chalk"
    assert result.config["data"]["path"] == "text.txt"  # not where it lay on this machine


def test_no_job_starts_after_the_time_is_up(tmp_path):
    jobs = study_of(tmp_path, "slow").jobs  # each takes longer than there is
    events = list(execute(jobs, save_of, minutes=0.1 / 60, run=run))
    assert [event.job for event in events if event.result] == [jobs[0]]
    assert list(execute(jobs, save_of, minutes=0, run=run)) == []


def test_a_job_whose_time_is_up_is_saved_where_it_is_said_and_the_process_takes_the_next(tmp_path):
    long, short = study_of(tmp_path, "long", "short").narrowed(seeds=[0]).jobs
    ends = [event for event in execute([long, short], save_of, run=run) if event.is_end]
    assert [(end.job, end.is_saved) for end in ends] == [(long, True), (short, False)]
    assert save_of(long).exists() and ends[1].result.variant == "short" and not any(end.failure for end in ends)


def test_closing_it_ends_the_workers(tmp_path):
    events = execute(study_of(tmp_path, "endless").jobs, save_of, workers=2, run=run)
    while next(events).progress == 0:
        pass
    assert len(active_children()) == 2
    events.close()
    assert not active_children()


def test_workers_that_have_nothing_left_to_do_tidy_up(tmp_path):
    list(execute(study_of(tmp_path, "tidies").jobs[:1], save_of, run=run))
    assert (tmp_path / "tidy").exists()


def test_workers_do_not_outlive_their_parent(tmp_path):
    study = study_of(tmp_path, "endless")
    script = (
        "from pathlib import Path\nfrom multiprocessing import active_children\n"
        "from proof.lab.fake import run, save_of\nfrom skerry.proof.lab.study import read\n"
        "from skerry.proof.lab.workers import execute\n"
        f"for event in execute(read(Path({study.file!r})).jobs, save_of, run=run):\n"
        "    if event.progress: print(active_children()[0].pid, flush=True)\n"
    )
    tests = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script], cwd=tests, stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        parent.kill()
    until(lambda: not is_running(worker), "the worker to be gone")
