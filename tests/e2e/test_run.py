"""One real run with both kills, and what its summary, its tape and its files must show.

Four learners, one of them three times slower; a learner is SIGKILLed a third of the way and the syncer halfway; both
come back. Everything is judged by order and counts, nothing by seconds: the budget is one of steps, and while a victim
is on its way back, however long its process takes to start on a busy machine, the others hardly step.
"""

import hashlib
import json
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors import safe_open

from e2e.processes import POLL_S, Running, facts_of, set_pace, skerry, status_of
from skerry.config import Config, Model
from skerry.core.facts import (
    Checkpointed,
    Committed,
    Decision,
    Discarded,
    EpochStarted,
    LifeStarted,
    PhaseChanged,
    RunCreated,
)
from skerry.train.loop import model_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RUN_S = 240  # limit of the whole run; it takes a fifth of this
LEARNERS = 4
SLOW, KILLED = "learner-3", "learner-1"
FAST = ("learner-0", "learner-2")  # neither slow nor killed
KILL_LEARNER, KILL_SYNCER = 0.33, 0.5
PACE = 0.1  # of everybody, while a victim is awaited


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The finished command."""
    folder = tmp_path_factory.mktemp("e2e")
    run_dir, deadline = folder / "run", time.monotonic() + RUN_S
    with Running(
        folder, "train", "--learners", LEARNERS, "--speeds", "1,1,1,0.33", "--model", "tiny", "--step-s", "0.1",
        "--steps", "180", "--kill-learner", KILL_LEARNER, "--kill-syncer", KILL_SYNCER, "--out", run_dir, "--json",
    ) as command:  # fmt: skip
        while command.process.poll() is None:
            assert time.monotonic() < deadline, command.said
            set_pace(run_dir, LEARNERS, PACE if awaits_a_victim(status_of(run_dir)) else 1)
            time.sleep(POLL_S)
    return command


def awaits_a_victim(status):
    """Somebody is killed, or just about to be, and not back."""
    progress, learners = status.get("progress", 0.0), status.get("learners", {})
    lives = learners[KILLED]["life"] if KILLED in learners else 1
    return (progress > KILL_LEARNER and lives == 1) or (progress > KILL_SYNCER and status["epoch"] == 1)


@pytest.fixture(scope="module")
def summary(done):
    assert done.process.returncode == 0, done.said
    return json.loads(done.out.read_text())


@pytest.fixture(scope="module")
def run_dir(summary):
    return Path(summary["run_dir"])


@pytest.fixture(scope="module")
def facts(run_dir):
    """The tape, in order, its chain verified."""
    return facts_of(run_dir)


@pytest.fixture(scope="module")
def commits(facts):
    return [fact for fact in facts if isinstance(fact, Committed)]


@pytest.fixture(scope="module")
def decisions(commits):
    return [commit.decision for commit in commits]


@pytest.fixture(scope="module")
def rows(facts):
    """Every settled stretch of work, in the order it was booked."""
    booked = (fact.decision if isinstance(fact, Committed) else fact for fact in facts)
    return [row for fact in booked if isinstance(fact, Decision | Discarded) for row in fact.rows]


# ---------------------------------------------------------------------------------------------- the summary


def test_stdout_is_exactly_one_json_object(done):
    out = done.out.read_text()
    assert out.count("\n") == 1 and out.startswith("{") and out.endswith("}\n")


def test_the_summary_holds_every_promised_key(summary):
    promised = {
        "val_loss_start", "val_loss_end", "merges", "tokens_produced", "tokens_merged", "tokens_pending",
        "tokens_discarded", "contributors_mean", "goodput", "goodput_of_capacity", "merge_gap_max_s",
        "learner_step_gap_max_s", "learner_restarts", "syncer_restarts", "bytes_up", "bytes_down",
        "bytes_data_parallel", "run_dir", "model_path", "model_sha256",
    }  # fmt: skip
    assert promised <= summary.keys()


def test_the_summary_is_also_in_the_run_directory(summary, run_dir):
    assert json.loads((run_dir / "summary.json").read_text()) == summary


def test_produced_is_merged_and_discarded_and_pending_exactly(summary):
    ledger = summary["ledger"]
    assert ledger["produced"] == ledger["merged"] + sum(ledger["discarded"].values()) + ledger["pending"]
    assert ledger["balance"] == 0 and ledger["pending"] == 0 and summary["tokens_pending"] == 0
    per = summary["fragments"]
    assert summary["tokens_produced"] * per == pytest.approx(ledger["produced"])
    assert summary["tokens_merged"] * per == pytest.approx(ledger["merged"])


def test_the_ledger_agrees_with_a_sum_over_the_tape(summary, rows):
    booked = defaultdict(int)
    for row in rows:
        booked[row.fate] += row.tokens
    assert booked.pop("merged") == summary["ledger"]["merged"]
    assert booked == summary["ledger"]["discarded"]


def test_the_killed_learners_unmerged_work_is_booked_as_died(summary, rows):
    assert summary["tokens_discarded"]["died"] > 0
    assert {(row.learner, row.life) for row in rows if row.fate == "died"} == {(KILLED, 1)}


def test_both_restarts_are_counted(summary):
    assert (summary["learner_restarts"], summary["syncer_restarts"]) == (1, 1)
    assert {name: learner["lives"] for name, learner in summary["learners"].items()} == {
        f"learner-{i}": 2 if f"learner-{i}" == KILLED else 1 for i in range(LEARNERS)
    }


def test_the_loss_of_the_global_model_falls_clearly(summary):
    assert summary["val_loss_end"] < summary["val_loss_start"] - 1.0
    assert summary["val_loss_before_close"] < summary["val_loss_start"] - 1.0


def test_nothing_was_refused(summary):
    assert not set(summary["refused"]) - {"duplicate", "one is held"}  # a restart may ask for the same bytes twice


def test_traffic_is_a_fraction_of_data_parallel(summary):
    steps, parameters = summary["steps"], summary["parameters"]
    assert summary["bytes_data_parallel"] == round(2 * (LEARNERS - 1) / LEARNERS * 4 * parameters * steps)
    assert summary["bytes_up"] > 0 and summary["bytes_down"] > 0
    assert summary["bytes_up"] + summary["bytes_down"] < summary["bytes_data_parallel"] / 10


# ---------------------------------------------------------------------------------------------- the slow learner


def test_the_slow_learner_is_never_left_out_for_long(summary, decisions):
    """It is asked ahead of a round, and what still comes too late is held for the next: in one of two at least."""
    pairs = [
        (a, b)
        for p in range(summary["fragments"])
        for a, b in pairwise(one for one in decisions if one.fragment == p and one.stage == "steady")
    ]
    present = sum(any(row.learner == SLOW for decision in pair for row in decision.rows) for pair in pairs)
    assert present / len(pairs) > 0.9
    assert summary["learners"][SLOW]["merges_share"] > 0.5


def test_the_slow_learner_has_about_a_third_of_a_fast_ones_weight(summary):
    fast = sum(summary["learners"][name]["weight_share"] for name in FAST) / len(FAST)
    assert 0.15 < summary["learners"][SLOW]["weight_share"] / fast < 0.6


def test_the_slow_learner_slows_nobody(summary):
    """Three times as many steps for a fast one: it never stood waiting."""
    steps = {name: learner["steps"] for name, learner in summary["learners"].items()}
    assert all(steps[name] > 2 * steps[SLOW] for name in FAST)


# ---------------------------------------------------------------------------------------------- the tape


def test_rows_tile_each_lifes_work_without_gap_or_overlap(rows):
    ends = defaultdict(lambda: (0, 0))
    for row in rows:
        key = (row.learner, row.life, row.fragment)
        assert (row.from_step, row.from_tokens) == ends[key], row
        assert row.to_step > row.from_step and row.to_tokens > row.from_tokens, row
        ends[key] = (row.to_step, row.to_tokens)
    lives = {key[:2] for key in ends}
    for life in lives:  # and every fragment of a life is settled up to the same, its last, step
        assert len({end for key, end in ends.items() if key[:2] == life}) == 1, life


def test_nothing_is_merged_twice(rows):
    merged = [(row.learner, row.life, row.fragment, row.seq) for row in rows if row.fate == "merged"]
    assert len(merged) == len(set(merged)) and all(seq > 0 for *_, seq in merged)
    for key in {name[:3] for name in merged}:
        seqs = [name[3] for name in merged if name[:3] == key]
        assert seqs == sorted(seqs)


def test_versions_run_without_a_gap_and_each_names_its_parent(facts, commits, summary):
    (created,) = [fact for fact in facts if isinstance(fact, RunCreated)]
    for p, genesis in enumerate(created.digests):
        mine = [commit for commit in commits if commit.decision.fragment == p]
        assert [commit.decision.version for commit in mine] == list(range(1, len(mine) + 1))
        digests = [genesis, *(commit.result.digest for commit in mine)]
        assert [commit.decision.parent for commit in mine] == digests[:-1]
        assert summary["versions"][p] == len(mine)
    assert summary["merges"] == len(commits)


def test_the_restarted_syncer_goes_on_where_the_tape_ends(facts):
    epochs = [fact.epoch for fact in facts if isinstance(fact, EpochStarted)]
    assert epochs == [1, 2]
    current = 0
    merged_in = set()
    for fact in facts:
        if isinstance(fact, EpochStarted):
            current = fact.epoch
        elif isinstance(fact, Committed):
            assert fact.decision.epoch == current
            merged_in.add(current)
    assert merged_in == {1, 2}


def test_the_run_went_through_its_phases_and_stages_once(facts, decisions):
    phases = [fact.phase for fact in facts if isinstance(fact, PhaseChanged)]
    assert phases == ["training", "closing", "closed"]
    order = {"warm": 0, "steady": 1, "cool": 2, None: 3}
    for p in {decision.fragment for decision in decisions}:  # a merge takes its time, and its round's stage is its own
        mine = [decision for decision in decisions if decision.fragment == p]
        ranks = [order[decision.stage] for decision in mine]
        assert ranks == sorted(ranks)
        assert all(a.progress <= b.progress for a, b in pairwise(mine))
    assert {decision.stage for decision in decisions} == order.keys()
    *_, last = (fact for fact in facts if not isinstance(fact, Checkpointed))
    assert isinstance(last, PhaseChanged)


def test_learners_that_were_not_killed_live_on_over_the_syncers_death(facts, rows):
    lives = [(fact.learner, fact.life) for fact in facts if isinstance(fact, LifeStarted)]
    assert sorted(lives) == sorted([*((f"learner-{i}", 1) for i in range(LEARNERS)), (KILLED, 2)])
    at = next(i for i, fact in enumerate(facts) if isinstance(fact, EpochStarted) and fact.epoch == 2)
    after = {row.learner for fact in facts[at:] if isinstance(fact, Committed) for row in fact.decision.rows}
    assert after == {f"learner-{i}" for i in range(LEARNERS)}


def test_a_merge_weighs_every_row_and_its_contributors_are_ready(decisions):
    for decision in decisions:
        merged = [row for row in decision.rows if row.fate == "merged"]
        assert len(decision.parts) == len(merged) >= 1 and all(part.weight > 0 for part in decision.parts)
        assert [row.learner for row in merged] == sorted({row.learner for row in merged})
        assert {row.fragment for row in decision.rows} == {decision.fragment}


# ---------------------------------------------------------------------------------------------- the restarted learner


def test_the_restarted_learner_is_merged_within_one_sync_cycle(facts, decisions):
    """Its first merged stretch is at most two cycles of its own steps long, and it is in soon after it is back."""
    at = next(i for i, f in enumerate(facts) if isinstance(f, LifeStarted) and (f.learner, f.life) == (KILLED, 2))
    since = [fact.decision for fact in facts[at:] if isinstance(fact, Committed)]
    mine = [[r for r in decision.rows if (r.learner, r.life) == (KILLED, 2)] for decision in since]
    first = next(i for i, found in enumerate(mine) if found)
    fragments = len({decision.fragment for decision in decisions})
    assert first <= 2 * fragments
    (row,) = mine[first]
    assert row.fate == "merged" and row.to_step <= 2 * since[first].sync_every


def test_the_restarted_learner_took_no_step_before_it_had_adopted_a_base(rows, decisions):
    """Its work on every fragment begins at step 0, is merged from there, and drew on a version of this run."""
    firsts = {}
    for row in rows:
        if (row.learner, row.life) == (KILLED, 2):
            firsts.setdefault(row.fragment, row)
    assert firsts.keys() == {decision.fragment for decision in decisions}
    assert all((row.from_step, row.from_tokens) == (0, 0) for row in firsts.values())
    assert all(row.fate == "merged" for row in firsts.values())  # nothing of it had to be thrown away


# ---------------------------------------------------------------------------------------------- the model


def test_the_model_loads_without_skerry_and_has_the_right_names(summary):
    with safe_open(summary["model_path"], framework="numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        total = sum(file.get_tensor(name).size for name in shapes)
    model = model_of(Config(model=Model(preset="tiny")))
    assert shapes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert total == summary["parameters"]


def test_the_hash_in_the_summary_is_the_files(summary, run_dir):
    path = run_dir / "model.safetensors"
    assert summary["model_path"] == str(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == summary["model_sha256"]


def test_export_writes_the_same_file_again(summary, run_dir, tmp_path):
    done = skerry("export", run_dir, "--out", tmp_path / "again.safetensors", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["model_sha256"] == summary["model_sha256"]
    assert hashlib.sha256((tmp_path / "again.safetensors").read_bytes()).hexdigest() == summary["model_sha256"]
    assert (record["phase"], record["merges"]) == ("closed", summary["merges"])


def test_a_report_of_it_has_losses_commands_and_what_the_kills_cost(run_dir, summary, tmp_path):
    numbers = json.loads(skerry("report", run_dir, "--json").stdout)
    h = numbers["history"]
    assert h["goodput"] == summary["goodput"] <= summary["goodput_of_capacity"] <= 1
    for name, learner in h["learners"].items():
        losses = [loss for loss in learner["series"]["loss"] if loss is not None]
        norms = [norm for norm in learner["series"]["grad_norm"] if norm is not None]
        assert losses and norms and min(losses + norms) > 0, name
    commands = [one["command"] for one in numbers["commands"]]
    assert commands[0].startswith("skerry train") and sum(c.startswith("skerry syncer") for c in commands) == 2
    lost = next(e for e in h["events"] if e["kind"] == "lost" and e["who"] == KILLED)
    restart = next(e for e in h["events"] if e["kind"] == "restart")
    assert lost["cost_s"] > 0 and lost["cost_tokens"] > 0 and restart["cost_s"] > 0
    assert numbers["audit"]["violations"] == [] and numbers["audit"]["checks"] > h["merges"]
    out = tmp_path / "report.html"
    assert skerry("report", run_dir, "--out", out).returncode == 0 and KILLED in out.read_text()


def test_the_syncers_log_has_a_line_for_each_transition(run_dir):
    said = (run_dir / "logs" / "syncer.log").read_text()
    for words in ("training begins", "the steady stage is under way", "the budget is spent", "the run is closed"):
        assert said.count(words) >= 1, words
