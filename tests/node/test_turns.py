"""A turn: in order, one look, bounded by time, and one report of a peer in line."""

from __future__ import annotations

from skerry.core.messages import Contribution, Report
from skerry.node.turns import LINE_MAX, TURN_S, SyncerDriver
from skerry.wire.transport import Lost, Opened, Received
from wire.samples import sample


class Hand:
    """Stands for node, learners and clock: notes what it is given, and each event takes its time."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.now, self.takes_s = 0.0, takes_s
        self.unseen_bytes, self.has_unseen = 0, False
        self.log, self.is_full = self, False
        self.notes: list[object] = []
        self.driver = SyncerDriver(self, self, lambda: self.now)

    def take(self, event, now):
        self.now += self.takes_s
        self.notes.append(event)

    def finish(self, now):
        pass

    def look(self, now):
        self.notes.append("look")

    def turn(self, *events):
        for event in events:
            self.driver.offer(event)
        self.driver.turn()
        notes, self.notes = self.notes, []
        return notes


def report(peer: int, number: int) -> Received:
    return Received(peer, sample(Report, number=number), None)


def test_what_waits_is_taken_in_as_it_came_and_then_looked_at_once():
    hand = Hand()
    came = [Opened(1, ""), report(1, 1), Received(1, sample(Contribution), memoryview(b"")), Lost(1, "")]
    assert hand.turn(*came) == [*came, "look"]
    assert hand.turn() == ["look"], "time alone may make something due"


def test_a_newer_report_takes_the_place_of_the_one_that_waits():
    hand = Hand()
    bulk = Received(1, sample(Contribution), memoryview(b""))
    assert hand.turn(report(1, 1), bulk, report(2, 7), report(1, 3), report(1, 2)) == [
        report(1, 3), bulk, report(2, 7), "look",
    ]  # fmt: skip
    assert hand.turn(report(1, 4)) == [report(1, 4), "look"]


def test_a_turn_ends_when_its_time_is_over_and_the_rest_waits():
    hand = Hand(takes_s=0.4 * TURN_S)
    came = [report(peer, 1) for peer in range(5)]
    assert hand.turn(*came) == [*came[:3], "look"] and len(hand.driver) == 2
    hand.takes_s = 100.0
    assert hand.turn() == [came[3], "look"], "one at least, however long it takes"


def test_reports_do_not_fill_the_line_but_what_must_not_be_lost_does():
    hand = Hand()
    for number in range(2 * LINE_MAX):
        hand.driver.offer(report(1, number))
    assert len(hand.driver) == 1
    for peer in range(LINE_MAX - 1):
        hand.driver.offer(Opened(peer, ""))
    assert hand.driver.room == 0


def test_payloads_that_wait_in_line_or_are_looked_into_are_counted():
    hand = Hand(takes_s=100.0)
    for number in range(3):
        hand.driver.offer(Received(1, sample(Contribution, seq=number), memoryview(b"four")))
    assert hand.driver.waiting_bytes == 12
    hand.turn(report(1, 1))
    hand.unseen_bytes = 4  # the first is looked into
    assert hand.driver.waiting_bytes == 12
    hand.turn()
    hand.turn()
    hand.unseen_bytes = 0
    assert hand.driver.waiting_bytes == 0


def test_nothing_further_should_be_offered_while_too_much_waits_for_the_disk():
    hand = Hand()
    assert hand.driver.room == LINE_MAX
    hand.is_full = True
    assert hand.driver.room == 0
    assert hand.turn(report(1, 1)) == [report(1, 1), "look"], "what is in line is taken in"


def test_a_look_waits_for_contributions_that_are_being_looked_into_but_not_for_long():
    hand = Hand()
    assert hand.turn() == ["look"]
    hand.has_unseen = True
    assert hand.turn(report(1, 1)) == [report(1, 1)]
    hand.now += TURN_S
    assert hand.turn() == ["look"]
    assert hand.turn() == []
    hand.has_unseen = False
    assert hand.turn() == ["look"]


def test_what_waits_of_each_peer_is_known_in_line_and_while_it_is_looked_into():
    hand = Hand()
    hand.unseen_of, hand.peers_of = {"fern": 7}, {"fern": [2]}.get
    hand.driver.offer(Received(1, sample(Contribution), memoryview(b"four")))
    hand.driver.offer(Received(2, sample(Contribution), memoryview(b"four")))
    assert hand.driver.waiting_of == {1: 4, 2: 11}
    hand.turn()
    hand.unseen_of = {}
    assert hand.driver.waiting_of == {}
