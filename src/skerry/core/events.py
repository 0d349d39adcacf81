"""The vocabulary: messages between learner and syncer, the events and actions of both machines, and durable facts.

Rules that hold here: everything is a frozen struct of plain numbers and strings. A *message* crosses the wire (a bulk
message is followed by a payload that only the nodes see); an *event* is a past fact handed to a machine; an *action* is
an order it gives; a *fact* is written to the tape before anything that follows it in a list of actions is carried out.
Nothing here knows how any of them travels or is stored.
"""

from __future__ import annotations

from msgspec import Struct

PROTOCOL = 1
FULL = -1  # base_version of a publication that needs no base, and of a fragment that was never adopted


# ---------------------------------------------------------------------------------------------- messages: learner ->


class Hello(Struct, frozen=True, tag=True):
    """First message of a learner: who it is and what it trains. `life` is 0 for a new process."""

    protocol: int
    learner: str
    process: str  # drawn once per process: tells a reconnecting life from an impostor
    life: int
    layout: bytes  # the model's parameters, encoded; compared by the syncer's node, not by its core
    layout_digest: str


class Ask(Struct, frozen=True, tag=True):
    """What is trained here? For a process that builds its model from the run's configuration, before its hello."""


class FragmentPosition(Struct, frozen=True, array_like=True):
    """Where a learner stands on one fragment: what it holds, what is settled, what is on its way."""

    base_version: int
    mark_step: int
    mark_tokens: int
    outstanding_seq: int  # 0: none
    want_full: bool = False  # the base is unusable: send the whole fragment


class Report(Struct, frozen=True, tag=True):
    """A learner's whole position, after an inner step; an older `number` is ignored."""

    learner: str
    life: int
    number: int
    step: int
    tokens: int
    step_s: float  # duration of the last inner step, pacing included
    state: str  # "training" | "stopped" (the run is closing) | "leaving" | "left"
    positions: tuple[FragmentPosition, ...]
    step_gap_s_max: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    loss: float = 0.0


class Contribution(Struct, frozen=True, tag=True):
    """Bulk: the drift of one fragment over the work in (from, to], relative to the base the learner holds."""

    learner: str
    life: int
    seq: int
    fragment: int
    base_version: int
    from_step: int
    from_tokens: int
    to_step: int
    to_tokens: int
    codec: str
    digest: bytes  # xxh3-128 of the payload

    @property
    def steps(self) -> int:
        return self.to_step - self.from_step

    @property
    def tokens(self) -> int:
        return self.to_tokens - self.from_tokens


# ---------------------------------------------------------------------------------------------- messages: syncer ->


class Welcome(Struct, frozen=True, tag=True):
    """The life number, the run's whole configuration and where the data stream goes on."""

    run: str
    epoch: int
    learner: str
    life: int
    index: int  # order of first joining: picks the data shard
    config: bytes
    prior_steps: int  # produced in earlier lives of this learner
    prior_tokens: int
    progress: float


class Answer(Struct, frozen=True, tag=True):
    """The run's name and configuration."""

    run: str
    config: bytes


class Refused(Struct, frozen=True, tag=True):
    """The syncer will not have this peer; `reason` is one line for a person."""

    reason: str


class Pull(Struct, frozen=True, tag=True):
    """Contribute this fragment at the next step boundary; the same bytes again if one is outstanding."""

    epoch: int
    life: int
    fragment: int
    settled_seq: int
    lossless: bool
    progress: float


class Publication(Struct, frozen=True, tag=True):
    """Bulk: version `version` of a fragment, whole (base_version FULL) or as a delta on base_version."""

    epoch: int
    life: int
    fragment: int
    version: int
    base_version: int
    codec: str
    digest: bytes  # sha256 of the resulting published values
    settled_seq: int  # cumulative: the newest of this life's contributions that is in `version` or before
    settled_step: int
    progress: float


class Rejected(Struct, frozen=True, tag=True):
    """A contribution was refused; `harmful` ones make the learner fast-forward, others are simply not held."""

    epoch: int
    life: int
    fragment: int
    seq: int
    reason: str
    harmful: bool


class Stop(Struct, frozen=True, tag=True):
    """The budget is spent: finish the step, contribute what is left, take no further step."""

    epoch: int
    life: int


class Done(Struct, frozen=True, tag=True):
    """Everything is settled and the run is closed."""

    epoch: int
    life: int


LearnerMessage = Ask | Hello | Report | Contribution
SyncerMessage = Answer | Welcome | Refused | Pull | Publication | Rejected | Stop | Done
Message = LearnerMessage | SyncerMessage


# ---------------------------------------------------------------------------------------------- facts (on the tape)


class RunCreated(Struct, frozen=True, tag=True):
    """Genesis: the run's identity, configuration, model layout and the first version of every fragment."""

    run: str
    config: bytes
    layout: bytes
    files: tuple[str, ...]  # content address of each fragment's version 0
    digests: tuple[bytes, ...]  # sha256 of its published values
    at: float


class EpochStarted(Struct, frozen=True, tag=True):
    """A syncer process took the run over; everything it writes carries this epoch."""

    epoch: int
    at: float


class LifeStarted(Struct, frozen=True, tag=True):
    learner: str
    life: int
    process: str
    index: int
    elapsed_s: float
    at: float


class Row(Struct, frozen=True, array_like=True):
    """One settled stretch of one learner's work on one fragment; rows of a (life, fragment) tile (0, settled]."""

    learner: str
    life: int
    fragment: int
    from_step: int
    from_tokens: int
    to_step: int
    to_tokens: int
    fate: str  # "merged" or the reason it was discarded
    seq: int = 0  # of the contribution, for merged rows

    @property
    def steps(self) -> int:
        return self.to_step - self.from_step

    @property
    def tokens(self) -> int:
        return self.to_tokens - self.from_tokens


class Seen(Struct, frozen=True, array_like=True):
    """The highest position of a life the syncer has seen, with its cumulative traffic."""

    learner: str
    life: int
    step: int
    tokens: int
    bytes_up: int
    bytes_down: int
    step_gap_s_max: float


class Committed(Struct, frozen=True, tag=True):
    """Version `version` of a fragment exists; everything about how it came to be, and what it settled."""

    epoch: int
    fragment: int
    version: int
    file: str
    digest: bytes
    parent: bytes  # digest of version - 1
    rule: str
    outer: str
    lr: float
    momentum: float
    codec: str
    sync_every: int
    quorum: int
    phase: str
    reason: str
    ready: int  # learners that were ready when it closed
    weights: tuple[float, ...]  # one per merged row, in order
    rows: tuple[Row, ...]
    seen: tuple[Seen, ...]
    progress: float
    open_s: float  # how long the round was open
    elapsed_s: float
    at: float


class Discarded(Struct, frozen=True, tag=True):
    """Work that will never be merged, with its reason, outside any commit."""

    rows: tuple[Row, ...]
    seen: tuple[Seen, ...]
    elapsed_s: float
    at: float


class PhaseChanged(Struct, frozen=True, tag=True):
    """The run entered `phase`: "training" (the first step), "closing" or "closed"; `files` pins the versions then."""

    phase: str
    files: tuple[str, ...]
    seen: tuple[Seen, ...]
    elapsed_s: float
    at: float


Fact = RunCreated | EpochStarted | LifeStarted | Committed | Discarded | PhaseChanged


# ---------------------------------------------------------------------------------------------- syncer: events


class Started(Struct, frozen=True):
    """A syncer process begins, with the state its tape gave it."""


class Joined(Struct, frozen=True):
    """An authenticated learner with the right model said hello."""

    learner: str
    process: str
    life: int


class Departed(Struct, frozen=True):
    """The link of a life is gone; the life is not."""

    learner: str
    life: int


class Reported(Struct, frozen=True):
    report: Report


class Arrived(Struct, frozen=True):
    """A contribution is complete and was looked at; `fault` says what is wrong with its values, if anything."""

    contribution: Contribution
    payload_bytes: int
    fault: str = ""


class PublicationSent(Struct, frozen=True):
    """A publication has left completely; the next one of that fragment may follow."""

    learner: str
    life: int
    fragment: int
    version: int


class MergeDone(Struct, frozen=True):
    """The version is durable."""

    fact: Committed


class Ticked(Struct, frozen=True):
    """Time has passed."""


class Interrupted(Struct, frozen=True):
    """The operator wants this process to end; the run goes on later."""


SyncerEvent = Started | Joined | Departed | Reported | Arrived | PublicationSent | MergeDone | Ticked | Interrupted


# ---------------------------------------------------------------------------------------------- syncer: actions


class Record(Struct, frozen=True):
    """Make the fact durable before carrying out anything behind it in the list."""

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


class Merge(Struct, frozen=True):
    """Merge the held contributions, in this (learner-id) order, take the outer step, commit."""

    fragment: int
    version: int
    contributions: tuple[Contribution, ...]
    rule: str
    outer: str
    lr: float
    momentum: float
    sync_every: int
    quorum: int
    phase: str
    reason: str
    ready: int
    rows: tuple[Row, ...]
    seen: tuple[Seen, ...]
    progress: float
    open_s: float
    elapsed_s: float


class Dismiss(Struct, frozen=True):
    """Tell a superseded process why, and close its link."""

    learner: str
    life: int
    reason: str


class Finish(Struct, frozen=True):
    """Nothing is left to do for this process."""

    reason: str


SyncerAction = Record | Send | Hold | Publish | Merge | Dismiss | Finish


# ---------------------------------------------------------------------------------------------- learner: events


class Taken(Struct, frozen=True):
    """A snapshot of a fragment was taken at a step boundary, on the base it then had."""

    fragment: int
    base_version: int


class Boundary(Struct, frozen=True):
    """A step boundary has passed: a step's work (none while the loop stands still), and what was done at it."""

    steps: int
    tokens: int
    step_s: float
    snapshots: tuple[Taken, ...]
    fast_forwarded: bool
    loss: float = 0.0


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
    """A snapshot holds values that are not finite."""

    fragment: int


class Closing(Struct, frozen=True):
    """The training loop has ended by itself or was told to: take no further step."""


class Gone(Struct, frozen=True):
    """This process is about to end."""


LearnerEvent = Boundary | Linked | Unlinked | Told | Prepared | Unusable | Spoiled | Closing | Gone | Ticked


# ---------------------------------------------------------------------------------------------- learner: actions


class SayHello(Struct, frozen=True):
    life: int


class SendReport(Struct, frozen=True):
    report: Report


class Snapshot(Struct, frozen=True):
    """Take the fragment's values at the next boundary, after what is to be adopted there."""

    fragment: int


class Contribute(Struct, frozen=True):
    """Encode the snapshot's drift, keep the bytes until it is settled, and send them."""

    contribution: Contribution  # without digest


class Resend(Struct, frozen=True):
    """Send the outstanding contribution's same bytes again, unless they are still on their way."""

    fragment: int


class Adopt(Struct, frozen=True):
    """Decode the publication at hand; take the contribution `take_out` out of the drift if it is not 0."""

    publication: Publication
    take_out: int


class FastForward(Struct, frozen=True):
    """At the next boundary adopt the published state everywhere, drop drift and outstanding contributions."""

    reason: str
    reset_optimizer: bool


class End(Struct, frozen=True):
    """The run is over for this learner; `refused` holds the syncer's words if it will not have it."""

    refused: str = ""


LearnerAction = SayHello | SendReport | Snapshot | Contribute | Resend | Adopt | FastForward | End
