"""A learner from outside: what its training loop calls and what its node thread calls, whoever has clock and threads.

    training loop                                   node thread
    while driver.is_joining: driver.stand()         driver.take(event)   for everything the wire brings
    while driver.is_running: step; driver.boundary()    driver.tick()    now and then, and after a boundary
    driver.close()
    while not driver.left: driver.stand()

The process of a learner calls it from two threads in real time; simulator, laboratory and twin call it in virtual time.
Nothing here waits, and nothing here decides: when a learner may go is said by `core.learner`.
"""

from __future__ import annotations

from collections.abc import Callable

from skerry.algo.fragments import Layout
from skerry.core.events import Leave, Ticked
from skerry.node.algebra import FLOAT32, Algebra
from skerry.node.learner import LearnerNode, Parameters
from skerry.node.observers import UNWATCHED, LearnerObserver
from skerry.node.peers import Uplink
from skerry.wire.transport import WireEvent


class LearnerDriver:
    """Owns a learner's node and its uplink; the uplink is given its endpoint by whoever makes the driver."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        parameters: Parameters,
        process: str,
        clock: Callable[[], float],
        algebra: Algebra = FLOAT32,
        observer: LearnerObserver = UNWATCHED,
    ) -> None:
        self.uplink = Uplink()
        self.node = LearnerNode(name, layout, parameters, self.uplink, process, clock, algebra, observer)
        self.uplink.node = self.node
        self.is_closing = False

    # ------------------------------------------------------------------------------------------ training thread

    @property
    def is_joining(self) -> bool:
        """No step may be taken yet: a fragment has no base, and the run may still give it one."""
        machine = self.node.machine
        is_done = machine is not None and machine.is_done
        return not self.node.is_adopted and not is_done and self.left is None

    @property
    def is_linked(self) -> bool:
        """A syncer has welcomed it and is there."""
        return self.node.machine is not None and self.node.machine.linked

    @property
    def has_come(self) -> str:
        """How much of the model is here, for a person; empty where no syncer is."""
        count = len(self.node.fragments)
        return f"{len(self.node.applied)} of {count} fragments have come" if self.is_linked else ""

    @property
    def is_running(self) -> bool:
        """The run wants further steps."""
        machine = self.node.machine
        return machine is not None and not machine.is_stop_asked and not machine.is_done and self.left is None

    @property
    def left(self) -> Leave | None:
        """Why nothing is left to do; None while there is something."""
        return self.node.left

    def boundary(self, tokens: int, step_s: float, loss: float = 0.0) -> None:
        """A step was taken."""
        self.node.boundary(1, tokens, step_s, loss)

    def stand(self) -> bool:
        """The loop stands still: pass a boundary without a step if there is work for one; whether there was."""
        has_work = self.node.has_work
        if has_work:
            self.node.boundary(0, 0, 0.0)
        return has_work

    def close(self, limit_s: float | None = None) -> None:
        """Take no further step; the loop stands from now on until `left` is set."""
        self.is_closing = True
        self.node.close(limit_s)

    # ------------------------------------------------------------------------------------------ node thread

    def take(self, event: WireEvent) -> None:
        """What the wire brought; what the training thread did before comes before it."""
        self.node.catch_up()
        self.uplink.take(event)

    def tick(self) -> None:
        """Time has passed, or the training thread has done something."""
        self.node.catch_up()
        if self.node.machine is not None:
            self.node.handle(Ticked())
