"""One thing at a time in a simulated world: what a user relies on when a single part of it goes wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from safetensors.numpy import load

from skerry import config as configs
from skerry.algo.contents import Contents, Fixed
from skerry.core.facts import Buffered
from skerry.core.messages import Contribution, Publication, Pull
from skerry.core.state import decode_fact, state_of
from skerry.node import training
from skerry.proof.sim import hostile
from skerry.proof.sim.algebra import BYTES
from skerry.proof.sim.files import Session
from skerry.proof.sim.learner import LearnerProcess
from skerry.proof.sim.network import SimLink
from skerry.proof.sim.scenario import Scenario
from skerry.proof.sim.syncer import ROOT
from skerry.proof.sim.world import World
from skerry.store import Store
from skerry.wire.transport import Sent


def quiet(**sync: object) -> Scenario:
    """Three equal learners, no faults, fast small rounds of deltas."""
    config = configs.Config(
        run=configs.Run(learners=3, minutes=1.0),
        sync=configs.Sync(
            **{"num_fragments": 1, "sync_every": 2, "fragment_sync_delay": 1, "quorum": 1, "policy": "fixed"} | sync
        ),
    )
    return Scenario(config, dict.fromkeys("abc", 0.3), 0.005, 0.02, 0.0, 0.0, (), 1.0, 0.0)


@pytest.fixture
def mind(monkeypatch):
    """`mind(look)`: look(learner, message) is asked about every message; seconds more on its way, or None: lost."""
    carry = SimLink.carry

    def install(look):
        def carefully(link, sender, message, payload, tag):
            extra_s = look(link.learner, message)
            if extra_s is None:
                sent = Sent(sender.peer, tag)  # the sender believes that it went
                link.world.at(0.01, lambda: link._tell(sender, sent))
            else:
                link.world.at(extra_s, lambda: carry(link, sender, message, payload, tag))

        monkeypatch.setattr(SimLink, "carry", carefully)

    return install


def once(kind: type, learner: str):
    """The next such message to or from this learner, and no other."""
    found = []

    def is_it(name: str, message: object) -> bool:
        if name == learner and isinstance(message, kind) and not found:
            found.append(message)
            return True
        return False

    return is_it


def behind(world: World, learner: str) -> int:
    """Steps of a learner's present life that are not merged yet."""
    process = world.processes[learner]
    life = process.node.machine.life
    return process.step_count - world.oracle.merged_to.get((learner, life, 0), 0)


def test_a_learner_whose_upload_is_longer_than_a_round_still_merges(mind):
    """Its contributions wait for the next round."""
    mind(lambda learner, message: 3.0 if learner == "c" and isinstance(message, Contribution) else 0.0)
    world = World(1, scenario=quiet(quorum=2))
    world.run_until(50)
    assert behind(world, "c") < 30


@pytest.mark.parametrize("kind", [Publication, Pull])
def test_one_lost_message_is_healed_while_rounds_go_on_faster_than_repeats(mind, kind):
    world = World(1, scenario=quiet(stale_versions_max=1000))
    world.run_until(20)
    is_it = once(kind, "c")
    mind(lambda learner, message: None if is_it(learner, message) else 0.0)
    world.run_until(30)
    position = world.processes["c"].node.machine.positions[0]
    assert position.base_version >= world.oracle.versions[0] - 2 and behind(world, "c") < 12


def test_a_fragment_that_does_not_decode_is_sent_whole_while_rounds_go_on(monkeypatch):
    world = World(1, scenario=quiet())
    world.run_until(20)
    node = world.processes["c"].node
    is_right, spoiled = node._is_right, []

    def wrong_once(base, publication):
        spoiled.append(publication)
        return len(spoiled) > 1 and is_right(base, publication)

    monkeypatch.setattr(node, "_is_right", wrong_once)
    world.run_until(30)
    whole = [p for p in spoiled if p.base_version == -1]
    assert spoiled[0].base_version >= 0 and whole, "a delta went wrong, and the whole came"
    assert min(p.node.machine.positions[0].base_version for p in world.processes.values()) > 40


def test_memory_for_two_contributions_is_enough_for_any_quorum():
    """Rounds that fill it do not wait for each other for ever, and nobody is booked absent at the end."""
    scenario = quiet(num_fragments=4, quorum=3)
    small = configs.Wire(held_bytes_max=2 * BYTES["fp32"])
    config = configs.Config(run=scenario.config.run, sync=scenario.config.sync, wire=small)
    world = World(1, scenario=replace(scenario, config=config))
    world.run()
    assert world.saw["discarded: absent at close"] == 0 and min(world.oracle.versions) > 10


def test_a_machine_that_slept_for_a_day_has_lost_no_time():
    """The clock of a laptop that was closed, or of a stopped virtual machine: the budget is not spent by it."""
    world = World(1, scenario=quiet())
    world.run_until(10)
    machine = world.syncer.node.machine
    progress, merges = machine.progress, machine.state.merges
    world.syncer.clock_ahead_s += 86_400
    for process in world.processes.values():
        process.clock_ahead_s += 86_400
    world.run_until(15)
    assert machine.progress < progress + 0.2 and machine.state.merges > merges + 4
    assert machine.rounds.quorum_s < 5, "no round was open for a day"


def test_work_goes_on_below_the_quorum_and_merges_when_it_is_back():
    """Learners train on, nothing is discarded, and the first round takes what was held (L3)."""
    world = World(1, scenario=quiet(quorum=3))
    world.run_until(10)
    for name in "bc":
        world.faults.block(name, ("up", "down"), 20.0)
    world.run_until(14)
    merges, steps = world.syncer.node.machine.state.merges, world.processes["a"].step_count
    world.run_until(28)
    assert world.syncer.node.machine.state.merges == merges, "nothing merges below the quorum"
    assert world.processes["a"].step_count > steps + 40
    world.run_until(50)
    assert world.syncer.node.machine.state.merges > merges + 5
    assert not world.syncer.node.machine.state.ledger.discarded
    assert max(behind(world, name) for name in "abc") < 12


def test_a_learner_that_hangs_at_the_end_costs_nobody_else_anything(monkeypatch):
    """Its link is alive and it never stops: the others' last work is merged all the same."""
    scenario = quiet(num_fragments=2, sync_every=8, close_timeout_s=20.0)
    config = configs.Config(run=configs.Run(learners=3, minutes=0.25), sync=scenario.config.sync)
    world = World(1, scenario=replace(scenario, config=config))
    world.run_until(12)
    monkeypatch.setattr(world.processes["c"], "turn", lambda: None)  # the training thread is stuck
    turn = LearnerProcess.turn
    monkeypatch.setattr(LearnerProcess, "turn", lambda self: None if self.name == "c" else turn(self))
    world.run_until(60)
    state = world.syncer.node.machine.state
    assert state.phase == "closed"
    for name in "ab":
        account = state.ledger.account(name, 1)
        merged = [world.oracle.merged_to[name, 1, p] for p in range(2)]
        assert merged == [account.step, account.step], "all of it"


@pytest.mark.parametrize("seed", [*range(24), 293])  # where a gift waited for a link, and was told of with a later step
def test_buffers_that_a_run_has_are_those_of_the_step_it_says_and_their_files_are_there(seed, monkeypatch):
    """Whatever is lost, late, doubled or killed; a learner gives them all the time here."""
    monkeypatch.setattr(training, "BUFFERS_EVERY", 3)
    world = World(seed, contents=Contents(fixed=(Fixed("count", "I64", (), "buffer"),)))
    world.run()
    with Store.open(ROOT, files=Session(world.disk), readonly=True) as store:
        state = state_of(store.records)
        found = {name: load(store.get(given.file))["count"] for name, given in state.buffers.items()}
        facts = [decode_fact(record.body) for record in store.history() if not record.is_fold]
    assert found == {name: given.step for name, given in state.buffers.items()}
    stepped = {name for name, at in state.lives.items() if state.ledger.seen(name, at.life).step}
    assert stepped - {hostile.NAME} <= set(found) <= set(state.lives) - {hostile.NAME}
    if world.hostile is None:  # who claims to have done it all may end so short a run before the others have done much
        assert found and sum(isinstance(fact, Buffered) for fact in facts) > len(found)
