"""An operator's order to a run that nobody serves: carried out on its directory, under the run's lock.

What it changes is what it would have changed in a syncer that serves the run (`core/orders.py`); the next one that does
goes by it from its first moment on. A run that is to be finished is closed by that next one, which asks the learners
for their last work as at every end: there is nobody here to ask.
"""

from __future__ import annotations

import msgspec

from skerry.core.messages import Order, Outcome, PauseRun
from skerry.core.orders import carry_out
from skerry.core.state import RunState
from skerry.store.store import Store

BY = "the run directory"  # whoever can write there could do anything to the run


def carry_out_here(store: Store, state: RunState, order: Order) -> Outcome:
    """What becomes of the order, durable on return; `state` has it in it then. Nobody may be serving the run."""
    assert not isinstance(order, PauseRun), "there is nobody to be ended"
    carried = carry_out(order, state, BY, state.elapsed_s)
    if carried.fact is not None:
        store.commit([msgspec.msgpack.encode(carried.fact)])
        state.apply(carried.fact)
    return carried.outcome
