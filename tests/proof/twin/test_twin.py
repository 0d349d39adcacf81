"""Twins: what is read from a tape, a twin against a simulated run, and against a real one."""

import json
import logging
import math
from dataclasses import replace
from typing import get_args

import pytest

from e2e.processes import skerry
from skerry import config as configs
from skerry.algo.fragments import Tensor, layout_of, split
from skerry.core.facts import EpochStarted, Injected, PhaseChanged, Sampled
from skerry.core.messages import FULL
from skerry.errors import MeasurementError
from skerry.proof.twin import measurements, twin
from skerry.proof.twin.measurements import Life, Measurements, Window, measurements_of, numbers
from skerry.run.delays import PYTHON_S, Delays
from skerry.run.facts import Stamped, facts_of
from skerry.run.tally import Tally

LAYOUT = layout_of([Tensor(f"w{p}", (4096,)) for p in range(4)])
STEP_S = {"a": 0.2, "b": 0.2, "c": 0.6}
COMPARED = ("goodput", "merges", "contributors_mean")


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def made_up(faults=(), away=(), lives=None, s_per_byte=0.0, codec="int4"):
    """The story of a run that never was; its payloads take no time, for the tape of a twin has other sizes."""
    config = configs.Config(
        run=configs.Run(learners=3, minutes=1.0),
        sync=configs.Sync(num_fragments=4, sync_every=8, quorum=2),
        wire=configs.Wire(codec_up=codec, codec_down=codec),
    )
    tally = Tally(training_at=0.0, closing_at=60.0)
    tally.epochs.append(Stamped(0.0, EpochStarted(1)))
    return Measurements(
        config, split(LAYOUT, 4), tally,
        lives=lives or [Life(name, 1, 0.1 * n, math.inf) for n, name in enumerate(STEP_S)],
        windows={name: [Window(1e9, (0.9 * s, s, 1.1 * s), s_per_byte, s_per_byte)] for name, s in STEP_S.items()},
        step_tokens=dict.fromkeys(STEP_S, 100), syncer_away=list(away), faults=list(faults),
    )  # fmt: skip


def tape_of(world):
    """The facts a twin wrote."""
    world.run()
    with twin.Store.open(twin.ROOT, files=world._files(), readonly=True) as store:
        return list(facts_of(store))


FAULTS = (
    Injected("kill", "a", "", 15.0, 20.0),
    Injected("stop", "b", "", 25.0, 29.0),
    Injected("partition", "c", "", 30.0, 33.0),
    Injected("drop", "b", "", 35.0, 35.0),
    Injected("kill", "syncer", "", 40.0, 43.0),
    Injected("delay", "b", "delay_s 0.3", 45.0, 55.0),
)


def told_of(faults=FAULTS, seed=1, **said):
    """A run under faults, simulated, and the story its tape tells."""
    lives = [
        Life("a", 1, 0.0, 15.0),
        Life("b", 1, 0.1, math.inf),
        Life("c", 1, 0.2, math.inf),
        Life("a", 2, 20.0, math.inf),
    ]
    facts = tape_of(twin.Twin(made_up(faults, [(40.0, 43.0)], lives), seed))
    return measurements_of([*facts, *(Stamped(60.0, fault) for fault in faults)], "a tape", **said)


def test_a_tape_tells_who_lived_when_and_how_fast():
    found = told_of()
    assert [(life.learner, round(life.begins), life.ends) for life in found.lives] == [
        ("a", 0, pytest.approx(15.0)), ("b", 0, math.inf), ("c", 0, math.inf), ("a", 20, math.inf),
    ]  # fmt: skip
    ((at, until),) = found.syncer_away
    assert (at, until) == (pytest.approx(40.0), pytest.approx(43.0))
    for name, step_s in STEP_S.items():
        seen = [s for window in found.windows[name] for s in window.step_s]
        assert sum(seen) / len(seen) == pytest.approx(step_s, rel=0.05), name
        assert found.step_tokens[name] == 100 and found.rates[name] == pytest.approx(100 / step_s, rel=0.06)


def test_the_undisturbed_rate_is_the_pace_that_was_set_and_what_the_report_took_for_it():
    """So that goodput is the same number as `skerry chaos` has; that of `skerry train` goes by measured speeds."""
    found = told_of()
    found.config = configs.Config(learner=configs.Learner(step_s=0.25))
    assert found.undisturbed_s("a", speed=0.5) == 0.5  # whatever was measured
    assert told_of(rates={"b": 7.0}).rates == {**told_of().rates, "b": 7.0}


def test_a_twin_of_a_simulated_run_comes_to_the_same():
    """Everything is known here, so what is left is chance and what the tape does not say."""
    found = told_of()
    measured, predicted = numbers(found, found.tally), numbers(found, twin.live(found, seed=2))
    for key in COMPARED:
        assert predicted[key] == pytest.approx(measured[key], rel=0.05), (key, measured, predicted)


def test_a_twin_without_the_faults_does_not():
    """So the faults are what makes them agree."""
    found = told_of()
    calm = replace(found, faults=[], syncer_away=[], lives=[life for life in found.lives if life.begins < 10])
    calm.lives[0] = replace(calm.lives[0], ends=math.inf)
    measured, predicted = numbers(found, found.tally), numbers(found, twin.live(calm, seed=2))
    assert predicted["goodput"] > measured["goodput"] * 1.05


def test_the_same_seed_gives_the_same_twin():
    found = told_of()
    first, again = (numbers(found, twin.live(found, seed=5)) for _ in range(2))
    assert first == again


def test_a_twin_merges_no_more_than_one_interpreter_can(monkeypatch):
    """Three learners have seven contributions a second merged; where each takes 0.6 s there is no time for two."""
    found = replace(told_of(faults=()), delays=Delays(commit_s=0.001))
    contributions = []
    for python_s in (PYTHON_S, 0.6):
        monkeypatch.setattr(twin, "PYTHON_S", python_s)
        lived = numbers(found, twin.live(found, seed=2))
        contributions.append(lived["merges"] * lived["contributors_mean"] / lived["train_s"])
    free, bound = contributions
    assert bound < 1 / 0.6 and free > 7


@pytest.mark.parametrize("codec", get_args(configs.Codec))
def test_a_run_has_a_twin_whatever_its_codecs(codec):
    facts = tape_of(twin.Twin(made_up(codec=codec), 1))
    found = measurements_of(facts, "a tape")
    measured, predicted = numbers(found, found.tally), numbers(found, twin.live(found, seed=2))
    assert predicted["merges"] == pytest.approx(measured["merges"], rel=0.05)


def test_links_are_as_the_faults_make_them():
    found = made_up([
        Injected("half_open", "a", "direction up", 5.0, 8.0), Injected("delay", "a", "delay_s 0.1", 5.0, 8.0),
        Injected("bandwidth", "b", "mbit 2.0", 5.0, 8.0),
    ], s_per_byte=1e-7)  # fmt: skip
    assert found.blocked_until("a", "up", 6.0) == 8.0 and found.blocked_until("a", "down", 6.0) == 6.0
    assert found.worst("a", "delay", 6.0) == 0.1 and found.worst("a", "delay", 9.0) == 0.0
    assert found.s_per_byte("b", "up", 6.0) == pytest.approx(4e-6)
    assert found.s_per_byte("b", "up", 9.0) == pytest.approx(1e-7)
    assert found.size("int4", 0, 0) < found.size("int4", 0, FULL) == 4 * 4096


def test_a_tape_without_an_end_or_without_measurements_is_refused():
    facts = tape_of(twin.Twin(made_up(), 1))
    with pytest.raises(MeasurementError, match="end of its budget"):
        measurements_of(
            [told for told in facts if not isinstance(told.fact, PhaseChanged) or told.fact.phase == "training"], "x"
        )
    with pytest.raises(MeasurementError, match="no measured step of a"):
        measurements_of([told for told in facts if not isinstance(told.fact, Sampled)], "x")
    with pytest.raises(MeasurementError, match="no merge yet"):
        measurements_of(facts[:3], "x")


@pytest.mark.parametrize(
    "content", [b"{", b'{"speeds": [], "x": "\xff', b'{"x": ' + b"[" * 100_000], ids=lambda c: repr(c[:20])
)
def test_a_file_beside_the_tape_that_cannot_be_read_is_refused_by_name(tmp_path, content):
    (tmp_path / measurements.LOCAL).write_bytes(content)
    with pytest.raises(MeasurementError, match="mend it, or take it away"):
        measurements._told(tmp_path / measurements.LOCAL, measurements.Local([]))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_twin_of_a_short_real_run_agrees_with_it(tmp_path):
    """Real processes, a learner killed; the aim is 5 %, here with room for a machine that is busy.

    Spans and contributors, by stage: the rounds of the warm one follow each other so soon that it is the first to show
    what the product pays and a twin does not. A syncer that did not keep up had spans of 15.8 steps where H was 4.
    """
    out = tmp_path / "run"
    done = skerry(
        "train", "--learners", 3, "--speeds", "1,1,0.5", "--model", "tiny", "--step-s", "0.3", "--minutes", "0.5",
        "--kill-learner", "0.4", "--out", out, "--json", timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = skerry("simulate", "run", out, "--json", timeout=120)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert set(found["compared"]) == set(COMPARED)
    merges = found["measured"]["merges"] + found["measured"]["merges_closing"]
    summary = json.loads(done.stdout)
    assert merges == summary["merges"]
    assert found["measured"]["goodput"] == pytest.approx(summary["goodput"], rel=0.02)
    for key in COMPARED:
        assert abs(found["deviation"][key]) < 0.15, found
    for stage in ("warm", "steady"):
        assert abs(found["deviation"][f"span_{stage}"]) < 0.2, found
        assert abs(found["deviation"][f"contributors_{stage}"]) < 0.2, found
    assert all(found["delays"].values()), "it measured its own work, and the twin was charged for it"
