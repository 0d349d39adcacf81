"""The operator of a simulated run, who takes it back to a kept version between two syncer processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from skerry.core.state import state_of
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
