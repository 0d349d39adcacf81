"""skerry bench syncer: a small real run gives a record that adds up. Nothing here asserts how long something takes."""

import contextlib
import json
import os

import msgspec
import pytest

from cli.called import called
from e2e.processes import status_of, until
from skerry import config as configs
from skerry.algo import codecs
from skerry.algo.fragments import split
from skerry.engines.supervisor import LocalRun
from skerry.plan.layouts import even
from skerry.proof.bench import cores, viewers
from skerry.proof.bench.cores import Cores, Usage
from skerry.proof.bench.swarm import Blank, Blanks, Swarm
from skerry.proof.bench.syncer import DECIDING, Load, create, measure, prepared

LOAD = Load(learners=2, step_s=0.05, sync_every=2, fragments=3, parameters=10_000, seconds=2.0)


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def measured(told):
    return measure(prepared(LOAD), told.append)


def test_the_counts_of_a_small_run_add_up(measured):
    assert measured.load == LOAD and not measured.pinned
    assert measured.joined == LOAD.learners and measured.merges > 0
    assert measured.merges_per_s == pytest.approx(measured.merges / measured.seconds)
    assert measured.contributors_mean * measured.merges == pytest.approx(measured.contributions)
    assert measured.merges <= measured.contributions <= LOAD.learners * measured.merges
    assert measured.merges_per_s_asked == pytest.approx(3 / (2 * 0.05))
    assert measured.steps_per_s_asked == pytest.approx(2 / 0.05)
    assert (measured.fast_forwards, measured.links_lost) == (0, 0)
    assert measured.refused.keys() <= {"duplicate"}  # one that was pulled while it was on its way by order comes twice


def test_no_more_steps_are_merged_than_were_taken(measured):
    """Each fragment's contributions tile a learner's steps: those of the stretch, and at most a few begun before it."""
    spanned = measured.span_steps_mean * measured.contributions / LOAD.fragments
    assert 0 < measured.gain_mean <= 1 <= measured.span_steps_mean
    assert spanned <= measured.steps_per_s * measured.seconds + LOAD.learners * 10 * LOAD.sync_every


def test_delays_are_of_merges_that_learners_saw(measured):
    for spread in (measured.quorum_to_publication_s, measured.sent_to_settled_s):
        assert 0 < spread.p50 <= spread.p99 <= spread.max


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system tells no thread's CPU time")
def test_the_cpu_of_the_threads_is_that_of_the_process(measured):
    assert measured.cpu == pytest.approx(sum(measured.cpu_by_thread.values()))
    assert measured.cpu_deciding == measured.cpu_by_thread[DECIDING]
    assert "skerry-server" in measured.cpu_by_thread and measured.cpu_missed >= 0
    assert measured.memory_peak_bytes >= measured.memory_idle_bytes > measured.memory_state_bytes > 12 * LOAD.parameters


def test_what_a_merged_parameter_costs(measured):
    assert (measured.learners, measured.parameters) == (LOAD.learners, LOAD.parameters)
    assert 0 < measured.merged_parameters_per_s <= measured.merges_per_s * LOAD.parameters
    assert measured.fsyncs_per_s > 0 and measured.merges_per_fsync > 0
    assert measured.quorum_to_publish_p99_ms == pytest.approx(1e3 * measured.quorum_to_publication_s.p99)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system tells no thread's CPU time")
def test_what_the_system_tells_is_for_a_merged_parameter(measured):
    merged = measured.merged_parameters_per_s * measured.seconds
    per_parameter_ns = measured.cpu_ns_per_parameter + measured.sockets_ns_per_parameter
    assert per_parameter_ns * merged / 1e9 == pytest.approx(measured.cpu * measured.seconds)
    assert 0 < measured.of_bandwidth < 10 and measured.bytes_written_per_parameter > 1
    assert measured.rss_bytes_per_parameter > 12


def test_each_learner_reports_the_bytes_of_its_own_connections(tmp_path):
    """Not those of all that share an endpoint: they would add up to eight times what came."""
    sync = configs.Sync(policy="fixed", num_fragments=3, sync_every=2, fragment_sync_delay=1)
    run = configs.Run(name="many", learners=8, minutes=60.0)
    config, layout = configs.validate(configs.Config(run=run, sync=sync)), even(10_000, 3)
    create(tmp_path / "run", config, layout)
    local = LocalRun(tmp_path / "run", [], [])

    def merging():
        status = status_of(tmp_path / "run")
        return status if status.get("merges", 0) > 20 else None

    with local.ends_everything():
        local.start_syncer()
        with contextlib.closing(Swarm(local.port, config, layout, 0.05, 8)) as swarm:
            until(lambda: swarm.joined == 8, "all to join")
            swarm.start()
            status = until(merging, "merges")
    up, down = ([each[way] for each in status["learners"].values()] for way in ("bytes_up", "bytes_down"))
    assert 0 < sum(up) < 2 * status["bytes_in"] and 0 < sum(down) < 2 * status["bytes_out"]


def test_it_says_how_far_it_is(measured, told):
    assert told and all(isinstance(line, str) for line in told)


def test_two_rows_as_json(capsys):
    words = ["--rows", "1x20,2x10", "--every", "2", "--parameters", "10k", "--fragments", "2", "--seconds", "0.5"]
    code, out, err = called(capsys, "bench", "syncer", "--json", *words)
    rows = json.loads(out)["rows"]
    assert code == 0 and out.count("\n") == 1 and err.startswith("1 x 20/s, 0.01M: ")
    assert [(row["load"]["learners"], row["load"]["step_s"]) for row in rows] == [(1, 0.05), (2, 0.1)]


def test_several_models_as_json(capsys):
    words = ["--learners", "1", "--step-s", "0.05", "--every", "2", "--parameters", "10k,20k", "--fragments", "2"]
    code, out, _ = called(capsys, "bench", "syncer", "--json", *words, "--seconds", "0.5")
    rows = json.loads(out)["rows"]
    assert code == 0 and [(row["learners"], row["parameters"]) for row in rows] == [(1, 10_000), (1, 20_000)]


# ---------------------------------------------------------------------------------------------- parts


def test_a_blank_answers_with_a_payload_that_passes_inspection():
    fragment = split(even(1000, 1), 1)[0]
    payload = Blanks().encode("int4", Blank(fragment.size))
    assert len(payload) == codecs.payload_bytes("int4", fragment.size)
    assert Blanks().inspect("int4", payload, fragment).finite
    assert Blank(fragment.size) - Blank(1) == Blank(fragment.size)


def test_cpu_that_no_living_named_thread_accounts_for_is_the_rest():
    before, after = Usage(5.0, {1: 3.0, 2: 1.0}), Usage(9.0, {1: 5.0, 3: 1.0})
    assert cores.spent(before, after, {1: "deciding", 2: "gone", 3: "server"}) == {
        "deciding": 2.0,
        "server": 1.0,
        "other": 1.0,
    }


@pytest.mark.skipif(not cores.can_pin() or len(os.sched_getaffinity(0)) < 2, reason="nothing can be pinned here")
def test_syncer_and_learners_share_no_core():
    allowed = os.sched_getaffinity(0)
    division = cores.divided(1)
    assert len(division.own) == 1 and division.own | division.others == allowed
    assert not division.own & division.others
    with cores.confined(division.own):
        assert os.sched_getaffinity(0) == division.own
    assert os.sched_getaffinity(0) == allowed


def test_without_a_number_of_cores_nobody_is_pinned():
    assert cores.divided(0) == Cores(None, None)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--learners", "0"], "'0' must be from 1 to 4096"),
        (["--learners", "2.5"], "'2.5' is not a whole number"),
        (["--step-s", "0"], "'0' must be from 0.001s to 1h"),
        (["--step-s", "-1"], "'-1' is negative"),
        (["--every", "0"], "'0' must be from 1 to"),
        (["--seconds", "0"], "'0' must be from 0.5s to 1h"),
        (["--parameters", "7", "--fragments", "8"], "--parameters 7: fewer than the 8 fragments"),
        (["--cores", "4000"], "--cores 4000: of the"),
        (["--rows", "64"], "'64' is not learners x steps/s, like 64x5"),
        (["--rows", "64x0"], "'0' must be from"),
        (["--rows", "64x5", "--learners", "3"], "--rows: says the learners and their steps"),
        (["--sync.sync_every", "4"], "--sync.sync_every: say --every"),
        (["--sync.quorum", "9", "--learners", "8"], "sync.quorum = 9"),
        (["--sync.bogus", "9"], "unknown key sync.bogus"),
        (["--lerners", "9"], "did you mean --learners?"),
    ],
)
def test_bad_options_are_refused_in_one_line(capsys, words, reason):
    code, out, err = called(capsys, "bench", "syncer", *words)
    assert (code, out) == (2, "") and reason in err and err.count("\n") == 1


def test_an_unknown_subject_is_refused(capsys):
    code, out, err = called(capsys, "bench", "nothing")
    assert (code, out) == (2, "") and "syncer" in err and err.count("\n") == 1


def test_the_same_with_a_key_for_each_learner():
    row = measure(prepared(msgspec.structs.replace(LOAD, tls=True)), lambda text: None)
    assert row.merges > 0 and row.joined == 2 and row.links_lost == 0


def test_viewers_of_a_page_come_and_go_beside_a_load():
    found = viewers.measure(prepared(msgspec.structs.replace(LOAD, seconds=1.0)), 3, lambda _: None)
    assert (found.viewers, len(found.alone), len(found.watched)) == (3, 2, 2)
    for stretch in (*found.alone, *found.watched):
        assert stretch.merges_per_s > 0
        assert 0 < stretch.turn_s.p50 <= stretch.turn_s.p99 <= stretch.turn_s.max
        assert stretch.quorum_to_publication_s.p50 <= stretch.quorum_to_publication_s.p99
