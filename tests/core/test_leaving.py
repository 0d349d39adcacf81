"""When a learner may go: each way out of `core.learner`, and that nothing follows it."""

import pytest

from core.hand import Bench, of, only
from skerry.core.events import Closing, Contribute, Leave, Linked, SendReport, Ticked, Told, Unlinked
from skerry.core.learner import CLOSE_MARGIN_S, LAST_VERSIONS_S
from skerry.core.messages import Done, Refused, Stop

DONE, STOP = Told(Done(1, 1)), Told(Stop(1, 1))


@pytest.fixture
def bench():
    """A learner with a step on both fragments that nobody has asked for yet."""
    bench = Bench(num_fragments=2)
    bench.boundary()
    return bench


def settle(bench):
    """Each fragment in turn is pulled, merged and published, while the loop stands; what follows from each."""
    for p in range(2):
        bench.pull(p)
        c = only(bench.boundary(0), Contribute)
        yield bench.publish(p, 1, settled_seq=c.seq, settled_step=c.to_step)


def wait(bench, seconds):
    bench.now += seconds
    return bench.step(Ticked())


def leaves(actions, way):
    """It says a last time where it stands, then goes."""
    assert [type(a) for a in actions[-2:]] == [SendReport, Leave] and actions[-1].way == way
    return True


def test_no_order_stands_once_the_loop_has_ended(bench):
    """Its syncer would wait for an order to be carried out, instead of asking for what is left."""
    bench.publish(0, 1, order=4)
    assert bench.report.positions[0].order == 4 and bench.machine.positions[0].snapshot_at == 4
    bench.step(Closing())
    assert bench.report.positions[0].order == 0 and bench.machine.positions[0].snapshot_at is None


def test_one_that_leaves_goes_when_its_work_is_settled(bench):
    assert not of(bench.step(Closing()), Leave)
    assert bench.machine.state == "leaving"
    first, second = settle(bench)
    assert not of(first, Leave) and leaves(second, "settled")
    assert bench.report.state == "left"


def test_one_that_leaves_with_nothing_to_hand_over_goes_at_once():
    assert leaves(Bench().step(Closing()), "settled")


def test_at_the_end_of_the_run_it_waits_for_the_word_that_all_is_done(bench):
    bench.step(STOP)
    bench.step(Closing())
    assert bench.machine.state == "stopped"
    assert not any(of(actions, Leave) for actions in settle(bench))
    assert leaves(bench.step(DONE), "done")


def test_the_word_that_all_is_done_may_overtake_the_last_versions(bench):
    bench.step(STOP)
    bench.step(Closing())
    published = settle(bench)
    next(published)
    assert not of(bench.step(DONE), Leave)
    assert not of(wait(bench, LAST_VERSIONS_S / 2), Leave)
    assert leaves(next(published), "done")


def test_it_waits_for_last_versions_only_so_long(bench):
    bench.step(STOP)
    bench.step(Closing())
    bench.step(DONE)
    assert not of(wait(bench, LAST_VERSIONS_S), Leave)
    assert leaves(wait(bench, 0.01), "no last versions")


def test_a_run_that_was_done_before_it_was_ready_keeps_nobody():
    bench = Bench()
    assert not of(bench.step(DONE), Leave), "the training loop is told first"
    assert bench.machine.is_done
    assert leaves(bench.step(Closing()), "done")


@pytest.mark.parametrize("is_linked", [True, False])
@pytest.mark.parametrize("way", ["by itself", "at the end"])
def test_nobody_waits_for_a_syncer_for_ever(bench, way, is_linked):
    config = bench.machine.config
    limit_s = config.learner.leave_timeout_s
    if way == "at the end":
        limit_s = config.sync.close_timeout_s + CLOSE_MARGIN_S
        bench.step(STOP)
    if not is_linked:
        bench.step(Unlinked())
    bench.step(Closing())
    assert not of(wait(bench, limit_s - 0.01), Leave)
    actions = wait(bench, 0.02)
    assert only(actions, Leave).way == "timeout" and len(of(actions, SendReport)) == is_linked


def test_a_stop_that_comes_while_it_leaves_gives_it_the_time_of_the_closing(bench):
    bench.step(Closing())
    bench.step(STOP)
    assert bench.machine.state == "stopped"
    assert not of(wait(bench, bench.machine.config.learner.leave_timeout_s + 1), Leave)


@pytest.mark.parametrize("limit_s", [0.0, 1.5])
def test_the_caller_may_have_less_patience(bench, limit_s):
    actions = bench.step(Closing(limit_s))
    if limit_s:
        assert not of(actions, Leave) and not of(wait(bench, limit_s - 0.01), Leave)
        actions = wait(bench, 0.02)
    assert leaves(actions, "timeout")


@pytest.mark.parametrize("is_closing", [True, False])
def test_a_refused_learner_goes_at_once_and_says_nothing_more(bench, is_closing):
    if is_closing:
        bench.step(Closing())
    refused = Refused("another took its name", "taken over")
    assert bench.step(Told(refused)) == [Leave("refused", refused)]


def test_after_it_has_left_nothing_happens_any_more(bench):
    bench.step(Closing(0.0))
    for event in (Ticked(), Unlinked(), Linked(), STOP, DONE, Closing()):
        bench.now += 10.0
        assert bench.step(event) == []
    assert bench.pull(0) == bench.publish(0, 1) == []
    assert bench.machine.positions[0].base_version == 0


def test_what_is_ordered_is_carried_out_before_it_goes(bench):
    """A version that comes when the time is over is adopted: bases and positions stay together."""
    c = bench.contribute(0)
    bench.step(Closing())
    bench.now += 1000.0
    actions = bench.publish(0, 1, settled_seq=c.seq, settled_step=c.to_step)
    assert leaves(actions, "timeout") and bench.machine.positions[0].base_version == 1
