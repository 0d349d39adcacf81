"""What a peer, an address and strangers may take: the reckoning, with a clock that a test moves."""

import pytest

from skerry.wire import quotas
from skerry.wire.quotas import Allowance, Intake, Places, Progress, Quotas, Strangers, quotas_of

ROOM = Quotas(peers_max=10, strangers_max=4, connections_max=100, payloads_burst=10, payload_bytes_burst=1e9)


def test_who_is_in_debt_waits_until_the_rate_has_paid_it():
    allowance = Allowance(10.0, 5.0, now=0.0)
    allowance.spend(5, 0.0)
    assert allowance.wait_s(0.0) == 0.0
    allowance.spend(20, 0.0)
    assert allowance.wait_s(0.0) == 2.0 and allowance.wait_s(1.5) == 0.5 and allowance.wait_s(2.0) == 0.0
    assert allowance.wait_s(1.0) == 0.0, "a clock that goes back takes nothing away"
    assert allowance.is_full(100.0)
    allowance.spend(5, 100.0)
    assert not allowance.is_full(100.0), "no more than the burst is saved up"


def test_an_honest_learner_is_never_held_back():
    """A hello of a large model, then a report every 50 ms, a heartbeat a second, and all fragments in each round."""
    allowed = quotas_of(learners=8, streams=4, fragments=24, parameters=1_200_000_000, files_max=1024, mbit_up=0)
    intake, now = Intake(allowed, 0.0), 0.0
    assert intake.came(False, 1, 8 << 20, now) == 0.0
    for tick in range(20 * 120):
        now += 0.05
        waits = [intake.came(False, 2 if tick % 20 == 0 else 1, 15_000, now)]
        if tick % 60 == 0:  # a round every three seconds, of 25 MB a fragment
            waits += [intake.came(True, 1, 25_000_000, now) for _ in range(24)]
        assert waits == [0.0] * len(waits) and not intake.is_flood(now)


def test_a_flood_of_messages_is_held_to_the_rate_and_ends_only_if_it_goes_on():
    intake, now, taken = Intake(ROOM, 0.0), 0.0, 0
    while now < quotas.FLOOD_S:
        assert not intake.is_flood(now)
        taken += 80  # what one read brings
        now += max(0.001, intake.came(False, 80, 16_000, now))
    assert taken <= quotas.MESSAGES_BURST + 1.1 * quotas.MESSAGES_PER_S * now
    assert intake.is_flood(now)


def test_a_burst_is_no_flood():
    intake = Intake(ROOM, 0.0)
    assert intake.came(False, 1000, 1000, 0.0) > 0
    assert intake.came(False, 1, 1000, 30.0) == 0.0
    assert not intake.is_flood(60.0)


def test_payloads_do_not_use_up_what_messages_may():
    intake = Intake(ROOM, 0.0)
    assert intake.came(True, 1000, 1000, 0.0) > 0
    assert intake.came(False, 1, 1000, 0.0) == 0.0


def test_what_stands_is_told_from_what_is_slow():
    progress, total = Progress(0.0, 0), 0
    for second in range(1, 1000):
        total += 15_000  # 2 Mbit/s over four streams, and a quarter of that
        assert not progress.stands(total, float(second), quotas.TRANSFER_BYTES_PER_S_MIN)
    assert not progress.stands(total, progress.since + quotas.TRANSFER_LOOK_S, quotas.TRANSFER_BYTES_PER_S_MIN)
    assert progress.stands(total, progress.since + quotas.TRANSFER_LOOK_S, quotas.TRANSFER_BYTES_PER_S_MIN)


def test_whoever_floods_makes_way_for_itself():
    strangers = Strangers[str](4)
    strangers.enter("honest", "10.0.0.2", 0.0)
    gone = []
    for number in range(1000):
        if (first := strangers.first_out(lambda who: True, float(number))) is not None:
            strangers.leave(first)
            gone.append(first)
        strangers.enter(f"flood {number}", "10.0.0.1", float(number))
    assert gone == [f"flood {number}" for number in range(997)] and len(strangers) == 4
    assert strangers.leave("honest") == "10.0.0.2" and strangers.leave("honest") is None


def test_who_is_awaited_takes_no_place_of_a_stranger_and_nothing_is_left_of_it():
    strangers = Strangers[str](2)
    strangers.await_from("a", 2)
    for who, place in (("1", "a"), ("2", "a"), ("3", "b"), ("4", "c")):
        assert strangers.first_out(lambda who: True, 0.0) is None, "who is awaited takes no place"
        strangers.enter(who, place, 0.0)
    assert strangers.first_out(lambda who: True, 0.0) == "3" and not strangers.is_awaited("a")
    strangers.await_from("a", -2)
    assert strangers.first_out(lambda who: True, 0.0) == "1"
    for who in "1234":
        strangers.leave(who)
    assert not len(strangers) and not strangers._of and not strangers._awaited


def test_addresses_that_did_nothing_for_a_while_are_forgotten_and_others_make_way(monkeypatch):
    monkeypatch.setattr(quotas, "PLACES_MAX", 3)
    places = Places(1.0, 2.0)
    for number in range(10):
        places.charge(str(number), 0.0)
    assert len(places) == 3
    for _ in range(4):
        places.charge("9", 0.0)
    assert places.wait_s("9", 0.0) == 3.0 and places.wait_s("1", 0.0) == 0.0
    assert places.wait_s("9", 60.0) == 0.0 and len(places) == 2


@pytest.mark.parametrize(("files_max", "learners", "peers"), [(1024, 8, 32), (1024, 1000, 144), (1 << 20, 1000, 2016)])
def test_descriptors_are_left_for_the_store_and_for_strangers(files_max, learners, peers):
    found = quotas_of(learners=learners, streams=4, fragments=24, parameters=1, files_max=files_max, mbit_up=0)
    assert found.peers_max == peers
    assert found.peers_max * 5 + found.strangers_max <= files_max - quotas.RESERVED_FILES


def test_a_rate_that_the_run_holds_learners_to_is_no_standstill():
    found = quotas_of(learners=1, streams=4, fragments=1, parameters=1, files_max=1024, mbit_up=0.1)
    assert found.transfer_bytes_per_s_min < 0.1e6 / 8 / 4 / 5


def test_nobody_is_kept_out_for_long_once_a_flood_is_over():
    strangers = Strangers[str](4)
    for _ in range(100_000):
        strangers.failures.charge("10.0.0.1", 0.0)
    assert strangers.failures.wait_s("10.0.0.1", 0.0) == quotas.FAILURES_DEBT_S
