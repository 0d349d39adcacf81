"""Many seeds of world.py: safety under faults, then liveness, then the books; and bugs planted to be found.

A failing seed prints the one command that replays it. SKERRY_SEEDS=1000 looks at more of them.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache

import pytest
from msgspec.structs import replace

from core.world import Learner, Plan, World
from skerry import config as configs
from skerry.core.events import MergeDone, Publish, Record
from skerry.core.learner import LearnerMachine
from skerry.core.ledger import Settled
from skerry.core.membership import Member
from skerry.core.messages import Contribution, Publication, Pull
from skerry.core.syncer import SyncerMachine

SEEDS = range(int(os.environ.get("SKERRY_SEEDS", "150")))


@cache
def outcome(seed: int) -> Counter[str]:
    try:
        return World(seed).run()
    except AssertionError as error:
        replay = f"python -m pytest 'tests/core/test_world.py::test_safe_then_live[{seed}]'"
        raise AssertionError(f"{error}\nreplay with: SKERRY_SEEDS={seed + 1} {replay}") from error


@pytest.mark.parametrize("seed", SEEDS)
def test_safe_then_live(seed):
    outcome(seed)


def test_a_seed_replays_to_the_byte():
    first, second = World(7), World(7)
    first.run(), second.run()
    assert first.tape == second.tape


RARE = [
    "merge at bare quorum",
    "merge of all",
    "late, held for the next round",
    "crash between commit and broadcast",
    "rejoined in a new life",
    "told it was taken over",
    "an old life's contribution merged",
    "left",
    "unusable",
    "refused: duplicate",
    "refused: damaged",
    "refused: full",
    "fast-forward: stale",
    "fast-forward: w holds values that are not finite",
    "discarded: died",
    "discarded: fast-forward",
]


@pytest.mark.parametrize("what", RARE)
def test_rare_things_happened(what):
    assert sum((outcome(seed)[what] for seed in SEEDS), 0) > 0, f"over {len(SEEDS)} seeds, never: {what}"


# ---------------------------------------------------------------------------------------------- one fault at a time


def quiet(**sync: object) -> Plan:
    """Three equal learners, no faults, fast small rounds of deltas."""
    config = configs.Config(
        run=configs.Run(learners=3, minutes=1.0),
        sync=configs.Sync(
            **{"num_fragments": 1, "sync_every": 2, "fragment_sync_delay": 1, "quorum": 1, "policy": "fixed"} | sync
        ),
        store=configs.Store(deltas_kept=4),
    )
    return Plan(config, ("a", "b", "c"), dict.fromkeys("abc", 0.3), 0.005, 0.02, 0.0, 0.0, 0.0, 1.0, 0.0)


def slow_uplink(world: World, extra_s: float) -> None:
    """Every contribution of c takes this much longer."""
    carry = world.carry

    def slowly(link, message, payload, take, sent=None):
        if isinstance(message, Contribution) and link.process.name == "c":
            world.at(extra_s, lambda: carry(link, message, payload, take, sent))
        else:
            carry(link, message, payload, take, sent)

    world.carry = slowly


def test_a_learner_whose_upload_is_longer_than_a_round_still_merges():
    """Its contributions wait for the next round."""
    world = World(1, plan=quiet(quorum=2))
    slow_uplink(world, 3.0)
    world.run_until(50)
    assert world.merged_to["c", 1, 0] > world.processes["c"].step_count - 30


def lose_one(world: World, kind: type) -> None:
    """The next such message to or from c is lost, though its link is fine."""
    carry, lost = world.carry, []

    def losing(link, message, payload, take, sent=None):
        if isinstance(message, kind) and link.process.name == "c" and not lost:
            lost.append(message)
            carry(link, message, payload, lambda *_: None, sent)
        else:
            carry(link, message, payload, take, sent)

    world.carry = losing


@pytest.mark.parametrize("kind", [Publication, Pull])
def test_one_lost_message_is_healed_while_rounds_go_on_faster_than_repeats(kind):
    world = World(1, plan=quiet(stale_versions_max=1000))
    world.run_until(20)
    lose_one(world, kind)
    world.run_until(30)
    assert world.processes["c"].machine.positions[0].base_version >= world.durable[0] - 2
    assert world.merged_to["c", 1, 0] > world.merged_to["a", 1, 0] - 12


def test_a_fragment_that_does_not_decode_is_sent_whole_while_rounds_go_on():
    world = World(1, plan=quiet())
    world.run_until(20)
    process: Learner = world.processes["c"]
    struck = iter([True])
    world.is_struck = lambda chance: chance == 0.02 and next(struck, False)
    world.run_until(30)
    assert world.saw["unusable"] == 1
    assert min(p.machine.positions[0].base_version for p in (process, *world.processes.values())) > 40


def test_memory_for_two_contributions_is_enough_for_any_quorum():
    """Rounds that fill it do not wait for each other for ever, and nobody is booked absent at the end."""
    plan = quiet(num_fragments=4, quorum=3)
    small = configs.Wire(held_bytes_max=20)
    config = configs.Config(run=plan.config.run, sync=plan.config.sync, store=plan.config.store, wire=small)
    world = World(1, plan=Plan(**{**plan.__dict__, "config": config}))
    world.run()
    assert world.saw["discarded: absent at close"] == 0 and min(world.durable) > 10


# ---------------------------------------------------------------------------------------------- planted bugs


class ForgetsSettled(World):
    """A restarted syncer does not know what is settled."""

    def restored(self, state):
        for account in state.ledger.accounts.values():
            account.settled = [Settled() for _ in account.settled]
        return state


class ForgetsSeq(World):
    """... or knows the positions, but not the contributions."""

    def restored(self, state):
        for account in state.ledger.accounts.values():
            for settled in account.settled:
                settled.seq = 0
        return state


class TakesSecondSnapshot(LearnerMachine):
    """A second contribution replaces one of unknown fate."""

    def _pull(self, message):
        self.positions[message.fragment].outstanding = None
        super()._pull(message)


class Unguarded(World):
    """Nobody looks at the learners: only the syncer stands between their bugs and the model."""

    def check_contribution(self, *_):
        pass

    check_learner = fast_forwarded = check_contribution


class AdoptsAnyDelta(LearnerMachine):
    def _publication(self, message):
        if message.version > self.positions[message.fragment].base_version >= 0:
            base = self.positions[message.fragment].base_version
            message = replace(message, base_version=base)
        super()._publication(message)


class KeepsOutstanding(LearnerMachine):
    """A fast-forward drops the drift, but not the contribution that was to be taken out of it."""

    def _fast_forward(self, reason, reset_optimizer=False):
        kept = [p.outstanding for p in self.positions]
        super()._fast_forward(reason, reset_optimizer)
        for position, outstanding in zip(self.positions, kept, strict=True):
            position.outstanding = outstanding


class TakesOverlap(SyncerMachine):
    """Accepts a contribution that starts before what is settled; with a learner that takes second snapshots."""

    def _verdict(self, event, c):
        reason, harmful = super()._verdict(event, c)
        return ("", False) if reason == "overlap" else (reason, harmful)


class TellsOnlyThisRound(SyncerMachine):
    """A publication names only what its own round merged, not what is settled in all."""

    def step(self, event, now):
        rows = event.fact.rows if isinstance(event, MergeDone) else ()
        mine = {(row.learner, row.fragment) for row in rows}
        return [
            a if not isinstance(a, Publish) or (a.learner, a.fragment) in mine else replace(a, settled_seq=0)
            for a in super().step(event, now)
        ]


class WelcomesFirst(SyncerMachine):
    """A life number leaves before it is durable."""

    def step(self, event, now):
        actions = super().step(event, now)
        return sorted(actions, key=lambda a: isinstance(a, Record))


class AsksOnce(SyncerMachine):
    """Pulls are never repeated."""

    def _may_pull(self, member, p):
        return p not in member.pulled_at and super()._may_pull(member, p)

    def _hold(self, member, c, payload_bytes):
        member.pulled_at.setdefault(c.fragment, self._now)
        super()._hold(member, c, payload_bytes)


class NeverHeals(SyncerMachine):
    def __init__(self, *args):
        super().__init__(*args)
        self.members = Members()


class Members(dict[str, Member]):
    def __setitem__(self, key, member):
        member.heal = lambda now, resend_s: None
        super().__setitem__(key, member)


PLANTED = {
    "settled forgotten at restart": lambda seed: ForgetsSettled(seed),
    "settled_seq forgotten at restart": lambda seed: ForgetsSeq(seed),
    "second snapshot while one is outstanding": lambda seed: World(seed, learner_machine=TakesSecondSnapshot),
    "overlap accepted": lambda seed: Unguarded(seed, TakesOverlap, TakesSecondSnapshot),
    "delta adopted on any base": lambda seed: World(seed, learner_machine=AdoptsAnyDelta),
    "outstanding kept through a fast-forward": lambda seed: World(seed, learner_machine=KeepsOutstanding),
    "publication names one round only": lambda seed: World(seed, TellsOnlyThisRound),
    "welcome before the life is durable": lambda seed: World(seed, WelcomesFirst),
    "pulls never repeated": lambda seed: World(seed, AsksOnce),
    "lost publications never healed": lambda seed: World(seed, NeverHeals),
}


def test_the_syncer_alone_keeps_the_model_right():
    """Learners that snapshot twice lose work of their own, and none of it is merged twice."""
    for seed in range(5):
        world = Unguarded(seed, learner_machine=TakesSecondSnapshot)
        world.run_until(30)


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_caught(bug):
    for seed in range(40):
        try:
            PLANTED[bug](seed).run()
        except (AssertionError, KeyError):
            return
    pytest.fail(f"40 seeds did not notice: {bug}")
