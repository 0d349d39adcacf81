"""Chaos on real processes: one run with faults of most kinds, judged by its tape; and a tape by hand, by arithmetic."""

import json
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from e2e.processes import Running, facts_of, processes_naming, skerry, until
from skerry import config as configs
from skerry.algo.fragments import Tensor, layout_of
from skerry.core.audit import Audit
from skerry.core.facts import (
    RULES,
    Checkpointed,
    Committed,
    Decision,
    Entry,
    EpochStarted,
    Injected,
    LifeStarted,
    Part,
    PhaseChanged,
    Result,
    Row,
    RunCreated,
    Seen,
    Witnessed,
)
from skerry.proof.chaos import report
from skerry.proof.chaos.plan import Fault
from skerry.proof.chaos.proxy import CLEAR, Lane, Weather
from skerry.proof.chaos.supervisor import weather_of
from skerry.run.tally import Tally, tally
from skerry.store.store import Store

pytestmark = pytest.mark.timeout(300)
RUN_S = 140  # limit of a run; it takes a fifth of this
LEARNERS = {"learner-0", "learner-1", "learner-2"}
PLAN = """
name = "test"
minutes = 0.25
learners = 3
[[fault]]
kind = "kill"
target = "learner-0"
at = 0.1
for_s = 0.5
[[fault]]
kind = "stop"
target = "learner-1"
at = 0.15
for_s = 1.5
[[fault]]
kind = "disk_full"
target = "syncer"
at = 0.25
for_s = 0.2
[[fault]]
kind = "partition"
target = "learner-2"
at = 0.45
for_s = 1.5
[[fault]]
kind = "corrupt"
target = "learner-1"
at = 0.55
[[fault]]
kind = "kill"
target = "syncer"
at = 0.65
for_s = 0.2
[[fault]]
kind = "kill_node"
target = "learner-0"
at = 0.72
[[fault]]
kind = "slow"
target = "learner-1"
at = 0.8
for_s = 1.0
speed = 0.5
"""
FAULTS = {"corrupt": 1, "disk_full": 1, "kill": 2, "kill_node": 1, "partition": 1, "slow": 1, "stop": 1}


# ---------------------------------------------------------------------------------------------- a real run


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The finished command; it is run for longer where a busy machine does not start the killed learner in time."""
    short = plan_run(tmp_path_factory.mktemp("chaos"))
    if short.returncode != 0 or learners_merged_after_every_fault(json.loads(short.stdout)) == LEARNERS:
        return short
    return plan_run(tmp_path_factory.mktemp("longer"), "--minutes", "1")


def plan_run(folder, *words):
    (folder / "plan.toml").write_text(PLAN)
    return skerry(
        "chaos", folder / "plan.toml", "--model", "tiny", "--step-s", "0.1", "--twin-s", "1",
        "--sync.sync_every", "4", "--sync.num_fragments", "4", "--out", folder / "run", "--json", *words, timeout=RUN_S,
    )  # fmt: skip


def learners_merged_after_every_fault(result):
    with Store.open(Path(result["run_dir"]), readonly=True) as store:
        told = tally(store)
    last = max(fault.until for fault in told.injected)
    return {row.learner for at, decision in told.merges if at > last for row in decision.rows}


@pytest.fixture(scope="module")
def result(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def facts(result):
    return facts_of(Path(result["run_dir"]))


@pytest.mark.chaos
def test_nothing_is_violated_and_nothing_lost(done, result):
    assert done.stdout.count("\n") == 1
    assert result["violations"] == 0 and result["violated"] == [] and result["invariants_checked"] > 100
    assert result["ledger_balance"] == 0 and result["tokens_pending"] == 0


@pytest.mark.chaos
def test_every_fault_happened_and_the_report_holds_what_is_promised(result):
    assert result["faults"] == FAULTS
    assert {
        "goodput", "goodput_of_capacity", "live", "participation", "participation_of_ready", "merged_share",
        "recovery_s", "syncer_restart_to_merge_s", "merge_gap_max_s", "refused", "run_dir", "seed", "minutes", "wall_s",
    } <= result.keys()  # fmt: skip
    assert result["recovery_s"].keys() == {"detected", "stepping", "merged"}
    assert all(stage.keys() == {"p50", "p99", "n"} for stage in result["recovery_s"].values())
    assert result["recovery_s"]["merged"]["n"] >= 3
    # a twin is over so long after its first step, and a learner whose process began late has no rate then
    assert result["rates"] and result["rates"].keys() <= LEARNERS
    assert json.loads((Path(result["run_dir"]) / "chaos.json").read_text()) == result


@pytest.mark.chaos
def test_the_restarts_are_those_on_the_tape(result, facts):
    """A process that is struck while it starts was no life or epoch yet, so there may be fewer than kills."""
    epochs = [fact for fact in facts if isinstance(fact, EpochStarted)]
    lives = [fact.learner for fact in facts if isinstance(fact, LifeStarted)]
    assert result["syncer_restarts"] == len(epochs) - 1 in (1, 2)
    assert result["learner_restarts"] == len(lives) - len(set(lives)) in (0, 1, 2)


@pytest.mark.chaos
def test_the_tape_carries_the_faults_after_the_end(result, facts):
    first = next(n for n, fact in enumerate(facts) if isinstance(fact, Injected))
    *_, last = (fact for fact in facts[:first] if not isinstance(fact, Checkpointed))
    assert isinstance(last, PhaseChanged) and last.phase == "closed"
    injected = facts[first:]
    assert Counter(fact.kind for fact in injected) == FAULTS
    lines = [json.loads(line) for line in (Path(result["run_dir"]) / "faults.jsonl").read_text().splitlines()]
    begun = {line["fault"]: line["at"] for line in lines if line["what"] == "begins"}
    ended = {line["fault"]: line["at"] for line in lines if line["what"] == "ends"}
    assert [(fact.at, fact.until) for fact in injected] == [(begun[n], ended[n]) for n in sorted(begun)]
    assert all(fact.until >= fact.at for fact in injected)
    assert {fact.detail for fact in injected if fact.kind == "slow"} == {"speed 0.5"}


@pytest.mark.chaos
def test_everybody_is_merged_again_after_every_fault_without_a_hand(result):
    assert learners_merged_after_every_fault(result) == LEARNERS


@pytest.mark.chaos
def test_a_syncer_without_disk_stops_with_its_one_line(result):
    log = (Path(result["run_dir"]) / "logs" / "syncer.log").read_text()
    assert log.count("committed state is intact") == 1


@pytest.mark.chaos
def test_an_interrupt_lets_stopped_processes_go_and_leaves_none(tmp_path):
    (tmp_path / "plan.toml").write_text('[[fault]]\nkind = "stop"\ntarget = "all"\nat = 0.0\nshare = 1.0\n')
    words = ["--model", "tiny", "--learners", "1", "--step-s", "0.1", "--twin-s", "0", "--out", tmp_path / "run"]
    with Running(tmp_path, "chaos", tmp_path / "plan.toml", *words, "--json") as chaos:
        faults = tmp_path / "run" / "faults.jsonl"
        until(lambda: faults.exists() and "begins" in faults.read_text(), "the stop")
        chaos.signal(signal.SIGINT)
        assert chaos.wait() == 130
        assert json.loads(chaos.out.read_text())["error"] == "interrupted"
    assert not processes_naming(str(tmp_path / "run"))
    assert [fact.kind for fact in facts_of(tmp_path / "run") if isinstance(fact, Injected)] == ["stop"]


# ---------------------------------------------------------------------------------------------- a tape by hand

A, B = "learner-0", "learner-1"


def by_hand():
    """Two learners at 10 tokens/s from 100 to 200: one is killed, the other stopped, then slowed; the syncer dies."""
    config = configs.resolve(configs.local(), None, [("learner.step_s", 1.0), ("run.learners", 2), ("run.minutes", 2)])
    layout = msgspec.json.encode(layout_of([Tensor("w", (8, 8), "other")]))
    settled = Counter()

    def commit(at, epoch, **tokens):
        rows = []
        for key, count in sorted(tokens.items()):
            name, life = {"a": (A, 1), "b": (B, 1), "b2": (B, 2)}[key]
            start = settled[name, life]
            settled[name, life] += count
            rows.append(Row(name, life, 0, start // 10, start, (start + count) // 10, start + count, "merged", at))
        decision = Decision(
            epoch, 0, 1, b"", "rda", "sgd", 1.0, 0.0, 1, 0, 1.0, "int4", "bf16", 4, 1, "steady", "all in", len(rows),
            tuple(rows), (Part("int4", 0, 1.0),) * len(rows), (), 0.5, 1.0, 0.0,
        )  # fmt: skip
        return at, Committed(decision, Result(b"", b"", Entry(1, 0, 0, b"")))

    facts = [
        (90.0, RunCreated("hand", RULES, configs.encode(config), layout, b"[[]]", ("f",), (b"d",), (b"s",), (b"t",))),
        (91.0, EpochStarted(1)),
        (95.0, LifeStarted(A, 1, "pa", 0, 0.0)),
        (95.0, LifeStarted(B, 1, "pb", 1, 0.0)),
        (100.0, PhaseChanged("training", (), (), 0.0)),
        (100.0, Witnessed(A, 1, "stepping", 0.0)),
        (100.0, Witnessed(B, 1, "stepping", 0.0)),
        commit(110.0, 1, a=100, b=100),
        (120.5, Witnessed(B, 1, "lost", 0.0)),
        commit(122.0, 1, a=120),
        (126.0, LifeStarted(B, 2, "pb2", 1, 0.0)),
        (127.0, Witnessed(B, 2, "stepping", 0.0)),
        commit(155.0, 1, b2=280),
        commit(170.0, 1, b2=150),
        (192.0, EpochStarted(2)),
        commit(193.5, 2, a=500, b2=271),
        (200.0, PhaseChanged("closing", (), (seen(A, 1, 720), seen(B, 1, 100), seen(B, 2, 701)), 100.0)),
        (201.0, PhaseChanged("closed", (), (), 100.0)),
        (210.0, Injected("kill", B, "", 120.0, 124.0)),
        (210.0, Injected("stop", A, "", 150.0, 160.0)),
        (210.0, Injected("slow", A, "speed 0.25", 165.0, 185.0)),
        (210.0, Injected("kill", "syncer", "", 190.0, 191.0)),
    ]
    told = Tally()
    for at, fact in facts:
        told.take(at, fact)
    return told


def seen(name, life, tokens, gap_s=1.0):
    return Seen(name, life, tokens // 10, tokens, 0, 0, gap_s)


STATUS = {"refused": {"stale": 2}, "learners": {name: {"unsettled_tokens": 0, "step_s": 1.0} for name in (A, B)}}


@pytest.mark.parametrize("rates", [{A: 10.0, B: 10.0}, {}])
def test_the_numbers_of_a_tape_by_hand(rates):
    r = report.report(by_hand(), STATUS, rates, {})
    assert r["faults"] == {"kill": 2, "slow": 1, "stop": 1}
    assert (r["tokens_merged"], r["tokens_produced"], r["ledger_balance"]) == (1521, 1521, 0)
    assert r["goodput"] == pytest.approx(1521 / 2000, abs=0.01)
    # a kill took 6 s up to the hello, a stop 10 s, a slow-down three quarters of 20 s
    assert r["goodput_of_capacity"] == pytest.approx(1521 / (2000 - 60 - 100 - 150), abs=0.01)
    assert r["live"] == pytest.approx((90 + 93) / 200)
    assert r["participation"] == pytest.approx(7 / 8)  # the slowed one was missing once
    assert r["participation_undisturbed"] == 1.0
    assert r["participation_of_ready"] == 1.0 and r["merged_share"] == 1.0
    assert r["merge_gap_max_s"] == 33.0 and r["refused"] == {"stale": 2}
    assert r["recovery_s"] == {
        "detected": {"p50": 0.5, "p99": 0.5, "n": 1},
        "stepping": {"p50": 3.0, "p99": 3.0, "n": 1},
        "merged": {"p50": 2.5, "p99": 31.0, "n": 2},  # the syncer, the killed; the stopped was forestalled
    }
    assert (r["syncer_restart_to_merge_s"], r["syncer_epoch_to_merge_s"]) == (2.5, 1.5)


def test_a_twin_gives_the_rate_of_each_learner():
    tally = by_hand()
    tally.seen = {(A, 1): seen(A, 1, 1000), (B, 1): seen(B, 1, 510)}
    assert report.rates_of(tally) == {A: pytest.approx(9.9), B: pytest.approx(5.0)}


def test_what_counts_as_a_violation(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "syncer.log").write_text("all is well\n")
    tally, audit = by_hand(), Audit()
    assert report.violations(tally, audit, tmp_path, [], {}) == []
    audit.violations.append("I1: twice")
    (logs / "learner-1.log").write_text("Traceback (most recent call last):\n")
    tally.seen[B, 2] = seen(B, 2, 701, gap_s=6.5)
    tally.seen[A, 1] = seen(A, 1, 720, gap_s=18.5)  # explained by a stop of 10 s and a quarter of the pace
    found = report.violations(tally, audit, tmp_path, ["learner-0 crashed"], {})
    assert found[:2] == ["I1: twice", "learner-0 crashed"] and len(found) == 4
    assert found[2] == f"{B} life 2 waited: 6.5 s in a step, where 6.0 s can be explained"
    assert found[3].startswith("a traceback in ")


# ---------------------------------------------------------------------------------------------- small things


def test_faults_of_one_link_add_up():
    def fault(kind, **parameters):
        return Fault(kind, A, 0.0, 1.0, parameters)

    assert weather_of([]) == CLEAR
    assert weather_of([fault("partition")]) == Weather(Lane(blocked=True), Lane(blocked=True))
    assert weather_of([fault("half_open", direction="up")]) == Weather(Lane(blocked=True), Lane())
    both = weather_of([fault("delay", delay_s=0.1), fault("bandwidth", mbit=2.0), fault("bandwidth", mbit=8.0)])
    assert both == Weather(Lane(0.1, 2e6), Lane(0.1, 2e6))


def test_a_pace_file_slows_a_learner_while_it_is_there(tmp_path, monkeypatch):
    from skerry.train import loop

    now = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(loop.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    for period_s, paces in ((1.0, (1.0, 4.0, 4.0, 1.0)), (0.0, (0.25, 1.0, 1.0, 0.25))):
        pace, ends = loop.Pace(period_s, tmp_path / "pace"), [now[0]]
        for content in ("", "0.25", "0.25", ""):
            (tmp_path / "pace").write_text(content) if content else (tmp_path / "pace").unlink(missing_ok=True)
            now[0] += 0.25  # of work
            pace.wait()
            ends.append(now[0])
        assert [b - a for a, b in pairwise(ends)] == pytest.approx(paces)
