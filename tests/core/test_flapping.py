"""However often learners come and go, what a run has to remember of them stays small; simulated, in virtual time."""

from __future__ import annotations

import msgspec

from core.hand import TOKENS_PER_STEP, Desk, config_of, of, only
from skerry.config import Wire
from skerry.core.admission import LIFE_S, LIVES_AT_ONCE, names_max
from skerry.core.audit import Audit
from skerry.core.events import Dismiss
from skerry.core.facts import Row, Seen
from skerry.core.ledger import Ledger
from skerry.core.messages import Welcome
from skerry.core.state import decode_fact, fold

MONTH_LIVES = 1000  # of a learner that flaps; one a minute is 43,200, and the cost of each is the same
ROUND = 10  # lives, of which one brings something


def flap(desk: Desk, lives: int) -> Welcome:
    """One name with so many lives: each takes some steps, now and then one is merged, and then it is gone."""
    for n in range(lives):
        desk.now += 60.0
        welcome = only(desk.join("flapper", f"process-{n}"), Welcome)
        desk.report("flapper", 0)
        desk.report("flapper", 5)
        if n % ROUND == 0:
            desk.contribute("flapper", 0)
        desk.report("flapper", 6)
        desk.depart("flapper")
        desk.report("stays", desk.peers["stays"].step + 10)
        for p in range(desk.count):
            desk.contribute("stays", p)
    return welcome


def test_a_learner_that_flaps_for_a_month_leaves_sums():
    desk = Desk(config_of({"learners": 2}))
    desk.ready("stays")
    flap(desk, 100)
    size = len(msgspec.msgpack.encode(desk.machine.state))
    welcome = flap(desk, MONTH_LIVES - 100)
    state = desk.machine.state
    assert (
        welcome.prior_steps == 6 * (MONTH_LIVES - 1) and welcome.prior_tokens == welcome.prior_steps * TOKENS_PER_STEP
    )
    assert len(state.ledger.accounts) <= ROUND and len(desk.machine.books.unwritten()) <= ROUND
    assert len(msgspec.msgpack.encode(state)) < size + 1500  # a merge or two more since the last checkpoint
    totals = state.ledger.totals()
    assert totals.balance == 0 and totals.produced == 2 * (6 + 10) * MONTH_LIVES * TOKENS_PER_STEP


def test_what_is_summed_up_is_on_the_tape_and_survives_restarts():
    config = config_of({"learners": 2})
    desk = Desk(msgspec.structs.replace(config, wire=Wire(codec_up="fp32")))
    for _ in range(3):
        desk.ready("stays")
        flap(desk, 7)
        desk.start()
    audit = Audit()
    for record in desk.tape:
        audit.take(decode_fact(record))
    assert not audit.violations, audit.violations
    told = fold(decode_fact(record) for record in desk.tape).ledger
    assert told.past == desk.machine.state.ledger.past and told.past["flapper"].lives > 15


def test_a_run_has_room_for_so_many_names():
    desk = Desk(config_of({"learners": 1}))
    for n in range(names_max(1)):
        desk.join(f"name-{n}")
        desk.depart(f"name-{n}")
    assert only(desk.join("one-more"), Dismiss).why == "full"
    assert of(desk.join("name-7", "again"), Welcome), "a name that has been here"


def test_a_sighting_that_comes_after_its_life_was_summed_up_changes_nothing():
    """A merge was decided before, and has ended since."""
    ledger = Ledger(1)
    late = Seen("a", 1, 4, 40, 0, 0, 0.0)
    ledger.see(late)
    ledger.book([Row("a", 1, 0, 0, 0, 4, 40, "died")])
    ledger.fold("a", 1)
    assert not ledger.see(late) and not ledger.accounts
    ledger.check()


def test_a_name_that_begins_lives_without_end_has_to_wait_and_no_other_does():
    desk = Desk(config_of({"learners": 2}))
    for n in range(LIVES_AT_ONCE):
        only(desk.join("flapper", f"process-{n}"), Welcome)
        desk.depart("flapper")
    refused = only(desk.join("flapper", "one more"), Dismiss)
    assert refused.why == "full" and "one is let in every 10 s" in refused.text, "not for good"
    assert desk.machine.state.lives["flapper"].life == LIVES_AT_ONCE
    only(desk.join("stays", "process"), Welcome)
    only(desk.join("flapper", f"process-{LIVES_AT_ONCE - 1}"), Welcome)  # the same process comes back: no life begins
    desk.depart("flapper")
    desk.now += LIFE_S
    only(desk.join("flapper", "one more"), Welcome)
