"""The node half of a learner from outside: what is called beside its training loop, whoever has clock and threads.

    driver.take(event)      for everything the wire brings
    driver.tick()           now and then, and after the training half has said something

The process of a learner calls it in real time; simulator, laboratory and twin call it in virtual time, and the training
half with it. Nothing here waits, and nothing here decides: when a learner may go is said by `core.learner`.
"""

from __future__ import annotations

from collections.abc import Callable

from skerry.algo.fragments import Layout
from skerry.core.events import Ticked
from skerry.core.messages import Frozen
from skerry.node.algebra import FLOAT32, LearnerAlgebra
from skerry.node.cells import Boxes, Lay
from skerry.node.learner import LearnerNode
from skerry.node.mailbox import Mailbox, mailbox
from skerry.node.observers import UNWATCHED, LearnerObserver
from skerry.node.peers import Uplink
from skerry.node.training import Carrier, TrainingHalf
from skerry.wire.transport import WireEvent


class LearnerDriver:
    """Owns a learner's node and its uplink; the uplink is given its endpoint by whoever makes the driver."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        process: str,
        clock: Callable[[], float],
        post: Mailbox,
        lay: Lay,
        algebra: LearnerAlgebra = FLOAT32,
        observer: LearnerObserver = UNWATCHED,
        frozen: Frozen = None,
    ) -> None:
        self.uplink = Uplink()
        self.node = LearnerNode(name, layout, self.uplink, process, clock, post, lay, algebra, observer, frozen)
        self.uplink.node = self.node

    def take(self, event: WireEvent) -> None:
        """What the wire brought; what the training half did before comes before it."""
        self.node.catch_up()
        self.uplink.take(event)
        self.node.tell_news(self.uplink.turned_away)

    def tick(self, trouble: str = "") -> None:
        """Time has passed, or the training half has done something; `trouble` is the wire's."""
        self.node.catch_up()
        if self.node.machine is not None:
            self.node.handle(Ticked())
        self.node.tell_news(self.uplink.turned_away or trouble)


def both_halves(
    name: str,
    layout: Layout,
    carrier: Carrier,
    process: str,
    clock: Callable[[], float],
    algebra: LearnerAlgebra = FLOAT32,
    observer: LearnerObserver = UNWATCHED,
) -> tuple[TrainingHalf, LearnerDriver]:
    """A learner in one thread: its values may be of any kind, and what one half says the other hears at once."""
    ours, theirs = mailbox()
    boxes = Boxes()
    driver = LearnerDriver(name, layout, process, clock, theirs, boxes, algebra, observer)
    return TrainingHalf(layout, carrier, ours, boxes), driver
