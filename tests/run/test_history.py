"""The history of a run, read behind its syncer: its totals are the tape's, and it sees every whole commit once."""

import json
from functools import partial

import msgspec
import pytest

from node.pair import STEP_S, Loop, Pair, config_of
from run.test_prune import config as with_segments
from run.test_prune import pruned, train
from skerry.core.events import Closing, Expelled, Interrupted, OrderGiven, Unlinked
from skerry.core.facts import (
    Committed,
    Evaluated,
    Injected,
    LifeStarted,
    Ordered,
    Paused,
    PhaseChanged,
    Sample,
    Sampled,
)
from skerry.core.messages import DropLearner, ExtendRun, FinishRun, PauseRun, ReadmitLearner, SetKeys
from skerry.core.state import RunState
from skerry.errors import StoreError, TapeDamaged
from skerry.node import telemetry
from skerry.node.transitions import Transitions
from skerry.page.feed import Feed
from skerry.report.document import FAILURES
from skerry.report.numbers import numbers_of
from skerry.run import evaluations, history
from skerry.run.facts import facts_of
from skerry.run.history import History, history_in
from skerry.run.orders import carry_out_here
from skerry.run.summary import Kill, goodput_of, summarise
from skerry.run.tail import tail
from skerry.run.tally import tally
from skerry.store import Store


def caught_up(facts):
    """What a tail has to give just now."""
    return list(iter(lambda: next(facts), None))


def history_of(root):
    seen = History()
    for at, fact in caught_up(tail(root)):
        seen.take(at, fact)
    return seen


@pytest.fixture
def troubled(tmp_path):
    """A run in which a link was lost, a process was lost and came again, and the syncer was killed."""
    with Pair(tmp_path / "run", config_of(learners=2, steps=400, sync={"quorum": 1})) as pair:
        pair.join("a")
        pair.join("b", 2)
        pair.until(lambda: min(pair.versions) >= 2)
        pair.unlink("a")
        pair.run(20)
        pair.link("a")
        pair.until(lambda: min(pair.versions) >= 5)
        pair.unlink("b")
        pair.run(10)
        pair.loops.pop("b")
        pair.join("b", 2, kind=partial(Loop, process="next"))
        pair.until(lambda: min(pair.versions) >= 8)
        pair.run(300)
        pair.restart()
        pair.close()
        pair.status = telemetry.status(pair.syncer.machine, 0, 0, 0.0)
    return pair


def test_its_totals_are_those_of_the_summary(troubled):
    record = history_of(troubled.root).record()
    with Store.open(troubled.root, readonly=True) as store:
        summary = summarise(tally(store), troubled.status, [], {})
    assert record["merges"] == summary["merges"] == sum(record["series"]["merges"]["merges"]) > 20
    assert record["tokens"]["merged"] == pytest.approx(sum(record["series"]["merges"]["tokens"]))
    assert record["tokens"]["merged"] == pytest.approx(summary["tokens_merged"])
    assert record["tokens"]["produced"] == pytest.approx(summary["tokens_produced"])
    assert record["tokens"]["discarded"] == pytest.approx(summary["tokens_discarded"])
    assert (record["traffic"]["up"], record["traffic"]["down"]) == (summary["bytes_up"], summary["bytes_down"])
    assert sum(record["series"]["traffic"]["up"]) == record["traffic"]["up"]
    assert record["traffic"]["data_parallel"] == summary["bytes_data_parallel"]
    assert record["versions"] == summary["versions"] == [series["version"][-1] for series in record["map"]]
    assert sum(record["closes"].values()) == record["merges"]
    for name, learner in record["learners"].items():
        assert learner["steps"] == summary["learners"][name]["steps"] == troubled.status["learners"][name]["steps"]
        assert learner["merged"] == pytest.approx(summary["learners"][name]["tokens_merged"])
    assert sum(one["merged_share"] for one in record["learners"].values()) == pytest.approx(1)
    assert json.loads(json.dumps(record, allow_nan=False)) == json.loads(json.dumps(record))


def test_what_went_wrong_is_in_the_log_with_what_it_cost(troubled):
    record = history_of(troubled.root).record()
    events = record["events"]
    assert events == sorted(events, key=lambda event: event["t"])
    link, died = (next(e for e in events if e["kind"] == "lost" and e["who"] == who) for who in "ab")
    assert "trained on" in link["text"] and "cost_s" not in link
    assert died["cost_s"] > 0 and record["learners"]["b"]["away_s"] == pytest.approx(died["cost_s"])
    assert 0 < died["cost_tokens"] == pytest.approx(record["learners"]["b"]["discarded"]["died"])
    restart = next(e for e in events if e["kind"] == "restart")
    assert restart["cost_s"] > 0 and record["epoch"] == 2
    assert [e["text"] for e in events if e["kind"] == "phase"][-1] == "closed"
    assert record["learners"]["a"]["state"] == "finished" and record["learners"]["b"]["life"] == 2


def leave(pair, name):
    """Its loop ends in order: it hands over, says that it left, and its link ends."""
    loop = pair.loops[name]
    loop.node.handle(Closing())
    pair.until(lambda: loop.machine.state == "left")
    pair.deliver()
    pair.unlink(name)
    pair.loops.pop(name)


@pytest.fixture
def parted(tmp_path):
    """A learner left, and came again as another process after a while; so did the syncer."""
    with Pair(tmp_path / "parted", config_of(learners=2, steps=10**4, sync={"quorum": 1})) as pair:
        pair.join("a")
        pair.join("b")
        pair.until(lambda: min(pair.versions) >= 2)
        leave(pair, "b")
        pair.run(80)
        pair.join("b", kind=partial(Loop, process="next"))
        pair.run(40)
        pause(pair)
        pair.restart()
        pair.run(40)
        leave(pair, "b")
    return pair


def test_who_left_in_order_and_came_again_has_not_failed(parted):
    record = history_of(parted.root).record()
    left = [e for e in record["events"] if e["kind"] == "left"]
    assert left[0]["text"].startswith("b left, and all its work is settled; its next process stepped 10 s later")
    assert left[0]["cost_s"] == pytest.approx(10, abs=1) == record["learners"]["b"]["away_s"]
    assert record["learners"]["b"]["state"] == "left" and len(left) == 2
    assert not [e for e in record["events"] if e["kind"] in FAILURES]


def test_neither_that_nor_an_operators_pause_is_a_recovery(parted, troubled):
    def restarts(pair):
        with Store.open(pair.root, readonly=True) as store:
            told = tally(store)
        return told.learner_restarts, told.syncer_restarts

    assert restarts(parted) == (0, 0) and restarts(troubled) == (1, 1)


def test_who_was_turned_out_with_its_key_has_not_failed_either(tmp_path):
    with Pair(tmp_path / "run", config_of(learners=2, steps=10**4, sync={"quorum": 1})) as pair:
        pair.join("a")
        pair.join("b")
        pair.until(lambda: min(pair.versions) >= 2)
        pair.syncer.handle(Expelled("b", "its key was revoked"), pair.now)
        pair.unlink("b")
        pair.loops.pop("b")
        pair.run(10)
        record = history_of(pair.root).record()
    assert [e["text"] for e in record["events"] if e["kind"] == "expelled"] == ["b was turned out"]
    assert not [e for e in record["events"] if e["kind"] in FAILURES]


def test_who_is_not_served_is_told_alike_by_status_and_report(parted):
    """With the work of all lives."""
    seen = history_of(parted.root)
    status, told = telemetry.recorded(seen.state, 0.0)["learners"], seen.record()["learners"]
    assert {name: (one["steps"], one["tokens"]) for name, one in status.items()} == {
        name: (one["steps"], one["tokens"]) for name, one in told.items()
    }
    assert status["b"]["life"] == 2 and status["b"]["tokens"] == 8 * status["b"]["steps"] > 8 * status["b"]["step"]
    assert status["b"]["state"] == told["b"]["state"] == "left" and status["a"]["state"] == "away"


def test_who_is_served_is_told_with_the_work_of_all_lives(tmp_path):
    with Pair(tmp_path / "run", config_of(learners=2, steps=10**4, sync={"quorum": 1})) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 2)
        leave(pair, "a")
        pair.join("a", kind=partial(Loop, process="next"))
        pair.until(lambda: min(pair.versions) >= 4)
        one = telemetry.status(pair.syncer.machine, 0, 0, 0.0)["learners"]["a"]
    assert one["life"] == 2 and one["tokens"] == 8 * one["steps"] > 8 * one["step"] > 0


@pytest.mark.parametrize("is_closed", [False, True])
def test_of_a_run_that_is_paused_or_closed_nobody_trains(tmp_path, is_closed):
    with Pair(tmp_path / "run", config_of(learners=2, steps=10**4, sync={"quorum": 1})) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 2)
        give(pair, FinishRun() if is_closed else PauseRun())
        pair.close() if is_closed else pair.until(lambda: pair.syncer.finished)
        seen = history_of(pair.root)
    states = [
        told["a"]["state"] for told in (telemetry.recorded(seen.state, 0.0)["learners"], seen.record()["learners"])
    ]
    assert states == ["finished" if is_closed else "away"] * 2


def test_an_evaluation_is_where_it_was_made_whatever_pauses_came_after_it(tmp_path):
    with Pair(tmp_path / "run", config_of(steps=10**4)) as pair:
        pair.join("a")
        made = []
        for _ in range(3):
            pair.run(40)
            made.append((pair.now, history_of(pair.root).t))
            pause(pair)
            pair.now += 3600
            pair.restart()
        pair.run(8)
        evaluated = [Evaluated((1, 1, 1), 0.5, 30, {"loss": 2.5}, at) for at, _ in made]
        faults = [Injected("slow", "a", at, at, "speed 0.5") for at, _ in made]
        with_them = history_of(pair.root)
        for fact in (*evaluated, *faults):
            with_them.take(pair.now, fact)
        record = with_them.record()
    seconds = [pytest.approx(t, abs=STEP_S) for _, t in made]
    assert [point["t"] for point in record["curve"]] == seconds
    assert [e["t"] for e in record["events"] if e["kind"] == "fault"] == seconds


def test_an_operators_pause_is_no_time_of_the_run(tmp_path):
    with Pair(tmp_path / "run", config_of(steps=10**4)) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 3)
        pair.syncer.handle(Interrupted(), pair.now)
        pair.until(lambda: pair.syncer.finished)
        stopped = pair.now
        paused = history_of(pair.root).record()
        pair.now += 86400
        pair.restart()
        pair.until(lambda: min(pair.versions) >= 6)
        record = history_of(pair.root).record()
    assert paused["is_paused"] and not record["is_paused"]
    assert [e["kind"] for e in record["events"] if e["kind"] in ("pause", "resume", "restart")] == ["pause", "resume"]
    assert record["paused_s"] == pytest.approx(86400, abs=5)
    assert record["t"] == pytest.approx(stopped + (pair.now - stopped - 86400), abs=5)


def give(pair, order):
    """An order over the wire, which is carried out."""
    outcomes = []
    pair.reply = lambda ticket, outcome: outcomes.append(outcome)
    pair.syncer.handle(OrderGiven(order, "admin.token", 7), pair.now)
    pair.syncer.look(pair.now)
    assert [outcome.is_done for outcome in outcomes] == [True], outcomes


def pause(pair):
    give(pair, PauseRun())
    pair.until(lambda: pair.syncer.finished)
    cut(pair)


def cut(pair):
    """Learners have no syncer from here on."""
    for loop in pair.loops.values():
        loop.is_linked = False
        loop.node.handle(Unlinked())
    pair.wires.clear()


def drop(pair, name):
    give(pair, DropLearner(name))
    pair.loops.pop(name).is_linked = False


@pytest.fixture
def steered(tmp_path):
    """A run that was given every order there is, and ended by one."""
    with Pair(tmp_path / "run", config_of(learners=2, steps=400, sync={"quorum": 1})) as pair:
        pair.join("a")
        pair.join("b", 2)
        pair.until(lambda: min(pair.versions) >= 2)
        give(pair, SetKeys({"sync.quorum": 2, "sync.stall_s": 9.0}))
        pair.until(lambda: min(pair.versions) >= 4)
        give(pair, ExtendRun(steps=800))
        drop(pair, "b")
        pair.run(80)
        give(pair, ReadmitLearner("b"))
        pair.join("b", 2, kind=partial(Loop, process="next"))
        pair.until(lambda: min(pair.versions) >= 8)
        pause(pair)
        pair.restart()
        pair.until(lambda: min(pair.versions) >= 10)
        give(pair, FinishRun())
        pair.close()
    return pair


def test_every_order_is_in_the_log_with_who_gave_it_and_what_it_changed(steered):
    record = history_of(steered.root).record()
    told = [e["text"] for e in record["events"] if e["kind"] == "order"]
    assert told[0] == "admin.token set sync.quorum from 1 to 2, sync.stall_s from 20.0 to 9.0"
    assert told[1].startswith("admin.token changed the budget, run.steps from 400 to 800: ")
    assert told[2].startswith("admin.token turned b out, for ") and told[3] == "admin.token let b in again"
    assert told[4].startswith("admin.token finished the run, at ") and len(told) == 5
    assert [e["text"] for e in record["events"] if e["kind"] == "pause"] == [
        "the run was paused by an order of admin.token"
    ]


def test_a_run_that_an_order_finished_says_so_and_not_that_its_budget_is_spent(steered):
    record = history_of(steered.root).record()
    with Store.open(steered.root, readonly=True) as store:
        facts = [fact for _, fact in facts_of(store) if not isinstance(fact, RunState)]
    finish = next(fact for fact in facts if isinstance(fact, Ordered) and fact.verb == "finish")
    assert 0 < finish.progress < 1
    why = f"closed by an order of admin.token, at {100 * finish.progress:.0f} % of its budget"
    assert record["closed_by"] == why
    assert [e["text"] for e in record["events"] if e["kind"] == "phase"][1:] == [f"{why}: the run closes", why]
    logged = [template % values for template, values in Transitions().lines(facts)]
    assert f"{why}: learners stop and hand in what is left" in logged
    assert not [line for line in logged if "budget is spent" in line]
    plain = Transitions().lines(fact for fact in facts if isinstance(fact, PhaseChanged))
    assert any("the budget is spent" in template for template, _ in plain)


def test_a_syncer_that_finds_the_order_to_finish_on_its_tape_says_that_an_order_ends_the_run(tmp_path, caplog):
    caplog.set_level("INFO", "skerry.syncer")
    with Pair(tmp_path / "run", config_of(steps=10**4)) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 2)
        pause(pair)
        assert carry_out_here(pair.store, pair.syncer.machine.state, FinishRun()).is_done
        pair.restart()
        pair.close()
    assert "closed by an order of an operator: learners stop and hand in what is left" in caplog.messages
    assert "budget is spent" not in caplog.text


def test_who_was_dropped_and_let_in_again_has_not_failed(steered):
    record = history_of(steered.root).record()
    events = record["events"]
    out, back = (next(e for e in events if e["kind"] == "order" and words in e["text"]) for words in ("out", "again"))
    came = next(e for e in events if e["kind"] == "join" and e["who"] == "b" and e["t"] > out["t"])
    assert back["t"] - out["t"] == pytest.approx(10) and came["t"] >= back["t"]
    assert "cost_s" not in out and record["learners"]["b"]["away_s"] == 0
    assert 0 < out["cost_tokens"] == pytest.approx(record["learners"]["b"]["discarded"]["expelled"])
    assert not [e for e in events if e["kind"] in ("lost", "expelled", "restart", "given up")]
    assert record["learners"]["b"]["life"] == 2 and record["learners"]["b"]["state"] == "finished"


def test_who_was_lost_before_it_was_dropped_had_failed_until_then(tmp_path):
    with Pair(tmp_path / "run", config_of(learners=2, steps=10**4, sync={"quorum": 1})) as pair:
        pair.join("a")
        pair.join("b")
        pair.until(lambda: min(pair.versions) >= 2)
        pair.unlink("b")
        pair.run(40)
        drop(pair, "b")
        pair.run(40)
        record = history_of(pair.root).record()
    lost = next(e for e in record["events"] if e["kind"] == "lost")
    assert lost["cost_s"] == pytest.approx(5) == record["learners"]["b"]["away_s"]
    assert record["learners"]["b"]["state"] == "expelled"


def test_an_order_to_a_run_that_is_paused_makes_no_death_of_its_pause(steered):
    with Store.open(steered.root, readonly=True) as store:
        facts = list(facts_of(store))
    seen = History()
    for at, fact in facts:
        seen.take(at, fact)
        if isinstance(fact, Paused):
            progress = seen.state.progress
            seen.take(at, Ordered("drop", "the run directory", 0.0, "a", progress=progress, progress_before=progress))
            assert seen.record()["learners"]["a"]["state"] == "expelled"
    kinds = [e["kind"] for e in seen.record()["events"]]
    assert "resume" in kinds and "restart" not in kinds


def test_who_made_way_in_the_books_has_no_row_and_takes_nothing_from_the_sums(tmp_path):
    """Full books forget a name that never took a step, for one that is new; it may come again like any other."""

    def life(name, index, *forgotten):
        return msgspec.msgpack.encode(LifeStarted(name, 1, f"{name}1", index, 700.0, forgotten=forgotten))

    with Pair(tmp_path / "run", config_of(learners=2)) as pair:
        pair.join("a")
        pair.join("b")
        pair.until(lambda: min(pair.versions) >= 3)
        status = telemetry.status(pair.syncer.machine, 0, 0, 0.0)
    with Store.open(pair.root) as store:
        store.commit([life("nobody", 2)])
        before = history_of(pair.root).record()
        store.commit([life("next", 3, "nobody")])
    after = history_of(pair.root).record()
    assert before["learners"].keys() - after["learners"].keys() == {"nobody"} and "next" in after["learners"]
    for name in ("tokens", "merges", "steps", "closes", "goodput"):
        assert after[name] == before[name], name
    assert {"nobody", "next"} <= {event["who"] for event in after["events"] if event["kind"] == "join"}
    numbers = numbers_of(pair.root)
    assert not numbers["audit"]["violations"] and numbers["history"]["learners"].keys() == {"a", "b", "next"}
    assert "trouble" not in Feed(pair.root).look()
    with Store.open(pair.root, readonly=True) as store:
        summarise(tally(store), status, [], {})
    with Store.open(pair.root) as store:
        store.commit([life("nobody", 4, "next")])
    assert history_of(pair.root).record()["learners"].keys() == {"a", "b", "nobody"}


def test_who_was_forgotten_in_what_was_pruned_before_it_was_read_has_no_row(troubled):
    with Store.open(troubled.root) as store:
        encoded = msgspec.msgpack.encode
        store.commit([encoded(LifeStarted("nobody", 1, "n1", 2, 700.0))])
        seen = history_of(troubled.root)
        fold = history_in(Store.open(troubled.root, readonly=True)).state
    fold.apply(LifeStarted("next", 1, "p1", 3, 1400.0, forgotten=("nobody",)))
    seen.take(seen.at + 1.0, fold)
    assert seen.record()["learners"].keys() == {"a", "b", "next"}


def test_time_counts_from_when_the_run_was_first_served(tmp_path):
    """It may have been created long before that, and evaluated."""
    with Pair(tmp_path / "run", config_of(steps=10**4)) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 2)
        created, begun, *others = caught_up(tail(pair.root))
    seen = History()
    seen.take(begun.at - 3600.0, created.fact)
    seen.take(begun.at - 1800.0, Evaluated((0,) * len(pair.versions), 0.0, 0, {"loss": 1.0}, begun.at - 1800.0))
    for at, fact in (begun, *others):
        seen.take(at, fact)
    record = seen.record()
    assert record["started_at"] == begun.at and record["t"] == pytest.approx(others[-1].at - begun.at)
    assert [event["t"] for event in record["events"]][:2] == [0.0, pytest.approx(others[0].at - begun.at)]
    assert 0.0 <= record["learners"]["a"]["joined_t"] < 60.0 and record["curve"][0]["t"] == 0.0
    assert min(one["opened"] for one in record["rounds"]) >= 0.0


PAUSE_TICKS = 800  # far more than there is of the run beside them


@pytest.mark.parametrize("stands", [False, True])
def test_goodput_counts_a_pause_for_who_trained_on_through_it_and_for_nobody_else(tmp_path, stands):
    with Pair(tmp_path / "run", config_of(learners=2, steps=10**4, sync={"quorum": 1})) as pair:
        pair.join("a")
        pair.join("b")
        pair.run(200)
        pause(pair)
        if stands:
            pair.loops.pop("b")
        pair.run(PAUSE_TICKS)
        pair.restart()
        if stands:
            pair.join("b", kind=partial(Loop, process="next"))
        pair.run(200)
        seen, told = history_of(pair.root), tally(pair.store)
    record = seen.record()
    assert goodput_of(seen, told, []) == dict.fromkeys(("goodput", "goodput_of_capacity"), record["goodput"])
    assert record["paused_s"] == pytest.approx(PAUSE_TICKS / 8)
    assert record["tokens"]["merged"] > 1.5 * 8 * 8 * record["t"], "work of the pause is in the model"
    assert 0.95 < record["goodput"] <= 1
    assert max(filter(None, record["series"]["merges"]["goodput"])) < 2, "it is possible when it is merged, too"


def test_goodput_counts_the_time_without_a_syncer_that_died(tmp_path):
    with Pair(tmp_path / "run", config_of(learners=2, steps=10**4, sync={"quorum": 1})) as pair:
        pair.join("a")
        pair.join("b")
        pair.run(100)
        cut(pair)
        pair.store.close()
        for _ in range(PAUSE_TICKS):  # nobody but the learners notices the time
            pair.now += 1 / 8
            for loop in pair.loops.values():
                loop.step()
        pair.restart()
        pair.run(100)
        record = history_of(pair.root).record()
    assert record["paused_s"] == 0 and record["t"] > PAUSE_TICKS / 8
    assert 0.95 < record["goodput"] <= 1


def test_goodput_is_no_more_than_all_where_learners_were_faster_than_they_were_thought(tmp_path):
    seen = History()
    with Pair(tmp_path / "run", config_of(steps=10**4)) as pair:
        pair.join("a")
        pair.run(200)
        for at, fact in caught_up(tail(pair.root)):
            if not isinstance(fact, Sampled):
                seen.take(at, fact)
    assert seen.record()["goodput"] is None, "how fast it is nobody has said"
    seen.take(pair.now, Sampled((Sample("a", 1, 1, 8, (0.3,), 0, 0.0, 0, 0.0),), 1.0))
    assert seen.record()["goodput"] == 1


def test_what_a_kill_took_is_held_against_nobody_in_the_summarys_second_figure(troubled):
    with Store.open(troubled.root, readonly=True) as store:
        told, seen = tally(store), history_in(store)
    back = [at for at, life in told.lives if life.learner == "b"][1]
    of_all = goodput_of(seen, told, [Kill("b", 0.5, back - 5.0)])
    assert of_all["goodput"] == history_of(troubled.root).record()["goodput"]
    spared = goodput_of(seen, told, [Kill("b", 0.5), Kill("b", 0.5, back - 5.0)])["goodput_of_capacity"]
    assert of_all["goodput"] < spared == of_all["goodput_of_capacity"] <= 1
    assert goodput_of(seen, told, [Kill("b", 0.5, 0.0), Kill("a", 0.5, 0.0)])["goodput_of_capacity"] <= 1


def test_losses_are_drawn_by_learner_and_of_the_run(tmp_path):
    seen = History()
    with Pair(tmp_path / "run", config_of(learners=2, steps=10**4)) as pair:
        pair.join("a")
        pair.join("b")
        pair.until(lambda: min(pair.versions) >= 2)
        for at, fact in caught_up(tail(pair.root)):
            if not isinstance(fact, Sampled):
                seen.take(at, fact)
    samples = (Sample("a", 1, 3, 30, (0.1,), 0, 0.0, 0, 0.0, loss=4.0, grad_norm=1.0),)
    samples += (Sample("b", 1, 1, 10, (0.3,), 0, 0.0, 0, 0.0, loss=2.0), Sample("b", 1, 1, 5, (), 0, 0.0, 0, 0.0))
    seen.take(pair.now, Sampled(samples, 1.0))
    seen.take(pair.now, Sampled((Sample("a", 1, 1, 9, (), 0, 0.0, 0, 0.0, loss=float("nan")),), 1.0))
    record = seen.record()
    assert record["series"]["loss"]["loss"] == [3.5] and record["series"]["loss"]["grad_norm"] == [1.0]
    assert record["learners"]["b"]["series"]["loss"] == [2.0]
    assert json.dumps(record, allow_nan=False)


def test_a_tail_gives_each_commit_once_as_the_run_goes_on(tmp_path):
    with Pair(tmp_path / "run", with_segments()) as pair:
        facts, got = tail(pair.root), []
        pair.join("a")
        pair.join("b", 2)
        while pair.store.tape.number < 4:
            pair.run(3)
            pair.syncer.tidy()
            got += caught_up(facts)
        assert caught_up(facts) == []
        with Store.open(pair.root, readonly=True) as store:
            assert got == list(facts_of(store)), "every fact once, and no fold but where a tape begins"


def test_a_commit_that_is_being_written_is_not_there_yet(troubled):
    segment = troubled.root / "tape/000001.seg"
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-1])
    facts = tail(troubled.root)
    got = caught_up(facts)
    assert caught_up(facts) == []
    segment.write_bytes(whole)
    got += caught_up(facts)
    with Store.open(troubled.root, readonly=True) as store:
        assert got == list(facts_of(store))


def test_a_tape_that_is_replaced_is_refused(troubled):
    segment = troubled.root / "tape/000001.seg"
    whole = segment.read_bytes()
    facts = tail(troubled.root)
    caught_up(facts)
    segment.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TapeDamaged, match="was replaced while it was read: read it from its beginning"):
        next(facts)


def test_a_pruned_run_begins_with_its_fold_and_has_its_totals(tmp_path):
    pair = train(tmp_path / "run", with_segments())
    before = history_of(pair.root).record()
    facts = tail(pair.root)
    first = next(facts)
    pruned(pair.root, before=2)
    seen = History()
    for at, fact in [first, *caught_up(facts)]:  # of which the second segment went before it was read
        seen.take(at, fact)
    after = history_of(pair.root)
    assert after.record()["is_pruned"] and isinstance(next(tail(pair.root)).fact, RunState)
    for record in (after.record(), seen.record()):
        for total in ("merges", "tokens", "traffic", "versions", "phase", "progress"):
            assert record[total] == before[total], total
        assert sum(record["closes"].values()) < record["merges"]


def test_what_is_evaluated_beside_the_run_is_told_once(tmp_path):
    with Pair(tmp_path / "run", config_of(steps=60)) as pair:
        pair.join("a")
        facts = tail(pair.root)
        caught_up(facts)
        found = Evaluated((1, 1, 1), 0.5, 30, {"loss": 2.5}, pair.now)
        evaluations.keep(pair.root, found)
        assert [one.fact for one in caught_up(facts)] == [found]
        pair.close()
    evaluations.put_on_tape(pair.root)
    assert not [one for one in caught_up(facts) if one.fact == found]
    record = history_of(pair.root).record()
    assert [point["figures"] for point in record["curve"]] == [{"loss": 2.5}]


def test_rounds_events_and_bins_are_bounded(troubled, monkeypatch):
    monkeypatch.setattr(history, "ROUNDS_MAX", 5)
    monkeypatch.setattr(history, "EVENTS_MAX", 4)
    monkeypatch.setattr(history, "BINS_MAX", 4)
    record = history_of(troubled.root).record()
    with Store.open(troubled.root, readonly=True) as store:
        commits = [fact for _, fact in facts_of(store) if isinstance(fact, Committed)]
    last = commits[-1].decision
    assert len(record["rounds"]) == 5 and record["rounds"][-1]["version"] == last.version
    assert len(record["events"]) == 4 and record["events_left_out"] > 0
    assert len(record["series"]["merges"]["t"]) <= 4
    assert sum(record["series"]["merges"]["merges"]) == len(commits), "nothing is lost of a sum"


def test_no_run_and_an_empty_one(tmp_path):
    with pytest.raises(StoreError, match="check the path"):
        next(tail(tmp_path / "nowhere"))
    Store.open(tmp_path / "run").close()
    assert next(tail(tmp_path / "run")) is None and History().record() == {}
    (tmp_path / "run/tape/000001.seg").unlink()
    assert next(tail(tmp_path / "run")) is None, "its syncer is about to write it"
