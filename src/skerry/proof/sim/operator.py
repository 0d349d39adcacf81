"""The operator of a simulated run, who gives it orders, takes it back to a kept version between two syncers, or turns a
learner out by its key."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from skerry import config as configs
from skerry.core.messages import DropLearner, ExtendRun, FinishRun, Order, Outcome, ReadmitLearner, SetKeys
from skerry.core.orders import carry_out
from skerry.core.state import RunState, state_of
from skerry.errors import FileDamaged, Refusal, StoreError
from skerry.proof.sim.files import Crash, Session
from skerry.proof.sim.oracle import need
from skerry.proof.sim.syncer import ROOT
from skerry.run.rollback import way_back
from skerry.store.files import FileSystem
from skerry.store.store import Store

if TYPE_CHECKING:
    from skerry.proof.sim.world import World


AGAIN_S = 1.0  # after which an operator who found nothing kept looks again
PATIENCE_S = 5.0  # after which one who heard no answer gives the order again
OFFLINE_SHARE = 0.5  # of the orders that find no syncer: they are given to the directory
TO_THE_START = 0.1  # how likely it is each time that the start will do


def want_rollback(world: World) -> None:
    """Once something is kept, end the syncer, in order or not; before the next one starts the run is rolled back."""
    state, syncer = world.oracle.audit.state, world.syncer
    assert state is not None
    if not state.kept and state.phase in ("created", "training") and world.operator_random.random() > TO_THE_START:
        world.at(AGAIN_S, lambda: want_rollback(world))
        return
    world.is_to_roll_back = True
    if syncer is not None and world.operator_random.random() < 0.5:
        syncer.interrupt()
    elif syncer is not None:
        world.syncer_died(syncer)


def expel(world: World) -> None:
    """Turn a learner out for good, whatever it is doing; a syncer that starts later hears of it as it starts."""
    world.expelled = world.scenario.expelled
    world.tell("operator expels", world.expelled)
    if world.syncer is not None:
        world.syncer.expel(world.expelled)


# ---------------------------------------------------------------------------------------------- orders


def begin_order(world: World, kind: str) -> None:
    """Make up an order of this kind that fits the run as it stands, and give it until it is answered."""
    order = _drawn(world, kind)
    if order is not None:
        world.tell("operator orders", order)
        _give(world, order)


def _drawn(world: World, kind: str) -> Order | None:
    state, r = world.oracle.audit.state, world.order_random
    assert state is not None
    config = configs.decode(state.config)
    match kind:
        case "finish":
            return FinishRun()
        case "set":
            return SetKeys(_settings(world, config))
        case "extend":
            by, run = r.choice([0.6, 1.2, 1.6]), config.run
            if run.minutes:
                return ExtendRun(minutes=run.minutes * by)
            steps, tokens = round(run.steps * by), round(run.tokens * by)
            return ExtendRun(tokens=tokens) if run.tokens else ExtendRun(steps=max(1, steps))
    out = {world.scenario.gone, world.scenario.expelled, *state.dropped}
    stays = [name for name in world.scenario.learners if name not in out]
    needed = config.sync.quorum if isinstance(config.sync.quorum, int) else 1
    if len(stays) <= needed:
        return None
    return DropLearner(r.choice(stays))


def _settings(world: World, config: configs.Config) -> dict[str, bool | int | float | str]:
    """One key or two; no quorum that those who stay could not reach."""
    r, scenario = world.order_random, world.scenario
    quorum: list[int | float] = [0.3, 0.5, 0.99]
    if not scenario.is_hostile:  # it brings nothing, and a number counts whoever is there
        quorum += [1, 1]
    choices: dict[str, list[int | float]] = {
        "sync.quorum": quorum,
        "sync.sync_every": [every for every in (1, 2, 4, 8) if every >= config.sync.fragment_sync_delay],
        "sync.grace": [0.0, 0.5],
        "sync.stall_s": [2.0, 3.0, 5.0],
        "sync.cool_share": [0.0, 0.3],
        "outer.lr": [0.1, 0.7],
        "store.checkpoint_every": [1, 3, 16],
        "store.keep_every": [0.0, 0.2, 2.0],
    }
    return {key: r.choice(choices[key]) for key in r.sample(sorted(choices), r.choice([1, 1, 2]))}


def _give(world: World, order: Order) -> None:
    """To the syncer, or to the directory while there is none; whoever hears no answer gives it again."""
    syncer = world.syncer
    if syncer is None and world.order_random.random() < OFFLINE_SHARE:
        world.orders_here.append(order)
    elif syncer is None or not syncer.is_serving:
        world.at(AGAIN_S, lambda: _give(world, order))
    else:
        is_answered: list[Outcome] = []

        def look() -> None:
            if not is_answered and world.oracle.is_open:
                world.saw["order given again"] += 1
                _give(world, order)

        def hear(outcome: Outcome) -> None:
            is_answered.append(outcome)
            answered(world, order, outcome)

        syncer.order(order, hear)
        world.at(PATIENCE_S, look)


def answered(world: World, order: Order, outcome: Outcome) -> None:
    """What became of it is durable by now, and somebody who was dropped may be let in again later."""
    world.tell("operator hears", outcome.text)
    world.saw[f"{type(order).__name__} {'done' if outcome.is_done else 'refused'}"] += 1
    if outcome.is_done:
        world.oracle.check_order(order)
    if isinstance(order, DropLearner) and outcome.is_done:
        for _ in range(3):  # whoever runs that machine knows nothing of it
            world.at(world.order_random.uniform(0.5, 10.0), lambda: _start_again(world, order.learner))
        if world.order_random.random() < 0.5:
            back = ReadmitLearner(order.learner)
            world.at(world.order_random.uniform(0.5, 4.0), lambda: _give(world, back))


def _start_again(world: World, learner: str) -> None:
    if world.processes[learner].is_dead and world.oracle.is_open:
        world.boot(learner)


def order_here(world: World, order: Order) -> None:
    """On the directory, before the next syncer starts; the process that does it may die on the way."""
    session = Session(world.disk)
    try:
        store = Store.open(ROOT, files=cast(FileSystem, session), clock=world.wall_clock)
        world.oracle.recovered(store)
        _order_here(world, store, state_of(store.records), order)
    except Crash:
        world.saw["order: crashed"] += 1
        world.orders_here.append(order)
    except StoreError:
        world.saw["order: stopped by a disk error"] += 1
    finally:
        session.close()


def _order_here(world: World, store: Store, state: RunState, order: Order) -> None:
    carried = carry_out(order, state, "the run directory", state.elapsed_s)
    if carried.fact is not None:
        records = world.oracle.trying = [msgspec.msgpack.encode(carried.fact)]
        store.commit(records)
        world.oracle.acked(store, records)
        world.saw["order carried out on the directory"] += 1
    answered(world, order, carried.outcome)


# ---------------------------------------------------------------------------------------------- rollbacks


def roll_back(world: World) -> None:
    """As `skerry rollback` does; its process may die on the way, or its disk fail, as a syncer's may."""
    session = Session(world.disk)
    try:
        _roll_back(world, Store.open(ROOT, files=cast(FileSystem, session), clock=world.wall_clock))
    except Crash:
        world.saw["rollback: crashed"] += 1
    except Refusal:
        world.saw["rollback: too late"] += 1
    except FileDamaged as error:  # nothing here rots
        need(False, "I18 kept versions", error)
    except StoreError:
        world.saw["rollback: stopped by a disk error"] += 1
    finally:
        session.close()


def _roll_back(world: World, store: Store) -> None:
    world.oracle.recovered(store)
    state = state_of(store.records)
    number = world.operator_random.choice([0, *(version.number for version in state.kept)])
    facts = way_back(store, state, number, world.algebra)
    records = world.oracle.trying = [msgspec.msgpack.encode(fact) for fact in facts]
    store.commit(records)
    world.oracle.acked(store, records)
