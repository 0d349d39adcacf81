"""What the machines are told and what they order: events are past facts, actions are orders.

    actions = machine.step(event, now)

Everything is a frozen struct of plain numbers and strings. Actions are carried out in list order; what is recorded is
durable before anybody hears of what is ordered behind it.
"""

from __future__ import annotations

from msgspec import Struct

from skerry.core.facts import Checkpointed, Committed, Decision, Fact
from skerry.core.messages import (
    Contribution,
    Done,
    Order,
    Outcome,
    Publication,
    Pull,
    Refused,
    Rejected,
    Report,
    Stop,
    SyncerMessage,
    Welcome,
)
from skerry.core.vocabulary import Dismissal, Ending, Flaw, GivenUp, WayOut

# ---------------------------------------------------------------------------------------------- syncer: events


class Started(Struct, frozen=True):
    """A syncer process begins, with the state its tape gave it."""


class Joined(Struct, frozen=True):
    """An authenticated learner with the right model said hello."""

    learner: str
    process: str
    life: int
    has_key: bool = False  # its connection proves the name, by the key that is that name's own


class Expelled(Struct, frozen=True):
    """An operator has turned the learner out: it takes part no longer, and not again while this process lives."""

    learner: str
    why: str  # one line for a person


class Readmitted(Struct, frozen=True):
    """The operator has thought better of it: a learner that was turned out may join again."""

    learner: str


class Departed(Struct, frozen=True):
    """The link of a life is gone; the life is not."""

    learner: str
    life: int


class Reported(Struct, frozen=True):
    report: Report


class Arrived(Struct, frozen=True):
    """A contribution is complete and was looked at; `flaw` says what is wrong with it, if anything."""

    contribution: Contribution
    payload_bytes: int
    flaw: Flaw | None = None
    payload_s: float = 0.0  # from its first byte to its last


class PublicationSent(Struct, frozen=True):
    """A publication has left completely; the next one of that fragment may follow."""

    learner: str
    life: int
    fragment: int
    version: int


class MergeDone(Struct, frozen=True):
    """The version is computed; the machine orders the record that makes it one."""

    fact: Committed


class CheckpointDone(Struct, frozen=True):
    """A version's file is written; the machine orders the record that makes it a checkpoint."""

    fact: Checkpointed


class BuffersStored(Struct, frozen=True):
    """A learner's buffers came and were looked at; the machine orders the record that makes the file theirs."""

    learner: str
    life: int
    step: int
    tokens: int
    file: str  # empty: they were no good


class Ticked(Struct, frozen=True):
    """Time has passed."""


class Interrupted(Struct, frozen=True):
    """The operator wants this process to end; the run goes on later."""

    by: str = ""  # who ordered it over the wire


class OrderGiven(Struct, frozen=True):
    """An operator who has proved an admin's credential gives an order, and waits for what becomes of it."""

    order: Order
    by: str
    ticket: int  # whom to answer


SyncerEvent = (
    Started
    | Joined
    | Expelled
    | Readmitted
    | Departed
    | Reported
    | Arrived
    | PublicationSent
    | MergeDone
    | CheckpointDone
    | BuffersStored
    | Ticked
    | Interrupted
    | OrderGiven
)


# ---------------------------------------------------------------------------------------------- syncer: actions


class Record(Struct, frozen=True):
    """Make the fact durable before anything behind it leaves this process."""

    fact: Fact


class Send(Struct, frozen=True):
    learner: str
    life: int
    message: Welcome | Refused | Pull | Rejected | Stop | Done


class Hold(Struct, frozen=True):
    """Keep the contribution's encoded payload until its merge."""

    learner: str
    fragment: int
    seq: int


class Drop(Struct, frozen=True):
    """Forget the payload that is held: it will not be merged."""

    learner: str
    fragment: int


class Publish(Struct, frozen=True):
    """Bring a learner that was handed base_version up to `version`."""

    learner: str
    life: int
    fragment: int
    base_version: int
    version: int
    settled_seq: int
    settled_step: int
    progress: float
    order: int = 0
    lay_s: float = 0.0
    budget: int = 0


class Merge(Struct, frozen=True):
    """Merge these contributions, which are held, as decided; take the outer step, commit."""

    decision: Decision
    contributions: tuple[Contribution, ...]  # in learner-id order, as the decision's parts


class Checkpoint(Struct, frozen=True):
    """Write to a file the newest version that the fragment has when this is carried out; merges may go before it."""

    fragment: int


class Dismiss(Struct, frozen=True):
    """Tell a process why it is not wanted, and close its link."""

    learner: str
    life: int
    why: Dismissal
    text: str  # one line for a person


class Reply(Struct, frozen=True):
    """Tell whoever gave an order what became of it."""

    ticket: int
    outcome: Outcome


class Finish(Struct, frozen=True):
    """Nothing is left to do for this process."""

    reason: Ending


SyncerAction = Record | Send | Hold | Drop | Publish | Merge | Checkpoint | Dismiss | Reply | Finish


# ---------------------------------------------------------------------------------------------- learner: events


class Taken(Struct, frozen=True):
    """A snapshot of a fragment was taken at a step boundary, on the base it then had."""

    fragment: int
    base_version: int
    is_first: bool = False  # before the fragment was overwritten at that boundary


class Boundary(Struct, frozen=True):
    """A step boundary has passed: a step's work (none while the loop stands still), and what was done at it."""

    steps: int
    tokens: int
    step_s: float
    snapshots: tuple[Taken, ...] = ()
    loss: float = 0.0
    overwritten: tuple[int, ...] = ()  # fragments that were set to a version, whatever they held
    grad_norm: float = 0.0


class Linked(Struct, frozen=True):
    """The syncer can be reached."""


class Unlinked(Struct, frozen=True):
    """It cannot."""


class Told(Struct, frozen=True):
    """A message of the syncer came in (a publication's payload stays with the node)."""

    message: SyncerMessage


class Prepared(Struct, frozen=True):
    """A publication was decoded and its digest is right; it is adopted at the next boundary."""

    fragment: int
    version: int
    took_out: int  # the contribution taken out of the drift, 0: none


class Unusable(Struct, frozen=True):
    """A publication did not give what its digest says."""

    fragment: int


class Spoiled(Struct, frozen=True):
    """A snapshot holds values that are not finite; `parameter` is the first of them."""

    fragment: int
    parameter: str


class Closing(Struct, frozen=True):
    """The training loop has ended by itself or was told to: it takes no further step."""

    limit_s: float | None = None  # how long the caller waits at most; None: as the run's configuration says


LearnerEvent = Boundary | Linked | Unlinked | Told | Prepared | Unusable | Spoiled | Closing | Ticked


# ---------------------------------------------------------------------------------------------- learner: actions


class SayHello(Struct, frozen=True):
    life: int


class SendReport(Struct, frozen=True):
    """Send `machine.report`, with what the link has counted."""


class Snapshot(Struct, frozen=True):
    """Take the fragment's values, once: at the boundary after `step` steps, or if that is past at the next one.

    What is to be adopted at that boundary comes before it. A later order about the fragment takes this one's place.
    """

    fragment: int
    step: int = 0


class Spare(Struct, frozen=True):
    """Take no snapshot of the fragment, whatever was ordered before."""

    fragment: int


class Contribute(Struct, frozen=True):
    """Encode the snapshot's drift over the work in (from, to], keep the bytes until it is settled, and send them."""

    life: int
    seq: int
    fragment: int
    base_version: int
    from_step: int
    from_tokens: int
    to_step: int
    to_tokens: int
    codec: str


class Resend(Struct, frozen=True):
    """Send the outstanding contribution's same bytes again, unless they are still on their way."""

    fragment: int


class Adopt(Struct, frozen=True):
    """Decode the publication at hand; take the contribution `take_out` out of the drift if it is not 0."""

    publication: Publication
    take_out: int


class FastForward(Struct, frozen=True):
    """Set every fragment to its newest version, drop drift and outstanding contributions.

    It has ended when a boundary has said of each that it was overwritten; the optimizer is reset with the last.
    """

    reason: GivenUp
    detail: str  # the parameter, the refusal, how far behind
    reset_optimizer: bool


class Leave(Struct, frozen=True):
    """Nothing is left to do for this process: the training loop may end."""

    way: WayOut
    refused: Refused | None = None


LearnerAction = SayHello | SendReport | Snapshot | Spare | Contribute | Resend | Adopt | FastForward | Leave
