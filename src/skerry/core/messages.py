"""The messages that learner and syncer exchange; a bulk one is followed by a payload that only the nodes see.

Every message about a fragment restates a cumulative truth, so no single one matters: a lost one is healed by the next.
Nothing here knows how a message travels. A field that is added later comes last and with a default, as on the tape.

What either may say is bounded here, field by field, and a frame that breaks a bound is not decoded: whoever sent it
loses its connection. Numbers are counts, and short enough to be added up; what one of them means beside another, and
beside what is known already, is looked at in `core/admission.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from skerry.core.facts import COUNT_MAX, Count, Stretch
from skerry.core.vocabulary import NOT_FOR_GOOD, Dismissal, LearnerState, Refusal

PROTOCOL = 3  # of what is said behind the handshake; whoever speaks another is turned away, but not for good
BUFFERS_BYTES_MAX = 8 << 20  # of all buffers together; a message of more would not go through
FULL = -1  # base_version of a publication that needs no base, and of a fragment that was never adopted

NORM_MAX = 1e30  # of a gradient: what is larger has diverged
STEP_S_MIN, STEP_S_MAX = 1e-6, 3600.0  # of a step: quicker ones there are not, and a longer pause is none
LAYOUT_BYTES_MAX = 8 << 20  # a hundred thousand tensors,
FROZEN_MAX = 100_000  # also of those that are not trained
CONFIG_BYTES_MAX = 1 << 20  # as JSON; a long one has a few thousand
TEXT_CHARS_MAX = 1 << 14  # of a refusal, for a person

Name = Annotated[str, Meta(max_length=256)]  # of a learner: whoever has one that is no name, and no longer, is told so
Printable = Annotated[str, Meta(max_length=64, pattern=r"\A[\x20-\x7e]*\Z")]
Digest = Annotated[bytes, Meta(max_length=32)]
Version = Annotated[int, Meta(ge=FULL, le=COUNT_MAX)]
Progress = Annotated[float, Meta(ge=0.0, le=1.0)]  # share of the run's budget that is spent
Seconds = Annotated[float, Meta(ge=0.0, le=float(COUNT_MAX))]
Norm = Annotated[float, Meta(ge=0.0, le=NORM_MAX)]
StepSeconds = Annotated[float, Meta(ge=0.0, le=STEP_S_MAX)]


Frozen = Annotated[dict[str, Digest], Meta(max_length=FROZEN_MAX)] | Literal["any"] | None
"""What a learner says of parameters that it does not train: their digests by name, that it takes them as it has them,
or nothing, as builds do that know nothing of it."""


# ---------------------------------------------------------------------------------------------- learner ->


class Hello(Struct, frozen=True, tag=True):
    """First message of a learner: who it is and what it trains. `life` is 0 for a new process."""

    protocol: Count
    learner: Name
    process: Printable  # drawn once per process: tells a reconnecting life from an impostor
    life: Count
    layout: Annotated[bytes, Meta(max_length=LAYOUT_BYTES_MAX)]  # encoded; compared by the syncer's node
    layout_digest: Printable
    frozen: Frozen = None  # which must be the run's


class Ask(Struct, frozen=True, tag=True):
    """What is trained here? For a process that builds its model from the run's configuration, before its hello."""


class FragmentPosition(Struct, frozen=True, array_like=True):
    """Where a learner stands on one fragment: what it holds, what is settled, what is on its way."""

    base_version: Version
    mark_step: Count
    mark_tokens: Count
    outstanding_seq: Count  # 0: none
    want_full: bool = False  # the base is unusable: send the whole fragment
    order: Count = 0  # that stands: unsettled steps at which it contributes by itself; 0: none does


class Report(Struct, frozen=True, tag=True):
    """A learner's whole position, after an inner step; an older `number` is ignored."""

    learner: Name
    life: Count
    number: Count
    step: Count
    tokens: Count
    step_s: StepSeconds  # duration of the last inner step, pacing included
    state: LearnerState
    positions: tuple[FragmentPosition, ...]
    step_gap_s_max: Seconds = 0.0
    bytes_up: Count = 0
    bytes_down: Count = 0
    loss: float = 0.0
    fast_forwards: Count = 0  # of this life: how often it gave its drift up
    payload_bytes: Count = 0  # of publications received in this life,
    payload_s: Seconds = 0.0  # and the seconds from their first bytes to their last
    encoded: Count = 0  # parameters that it encoded in this life,
    encode_s: Seconds = 0.0  # and the seconds its node thread took for that
    adopted: Count = 0  # likewise of versions that it decoded, checked and prepared
    adopt_s: Seconds = 0.0
    round_steps: Count = 0  # from a snapshot to the boundary that adopts the version with it, less those that it lay
    #                       waiting for its round to close; of the last that saw no outage
    alone: Stretch = Stretch()  # the last that it did without a syncer for longer than `learner.alone_steps_max`
    grad_norm: Norm = 0.0  # of the last inner step; 0: not said, as of a loss


class Contribution(Struct, frozen=True, tag=True):
    """Bulk: the drift of one fragment over the work in (from, to], relative to the base the learner holds."""

    learner: Name
    life: Count
    seq: Count
    fragment: Count
    base_version: Version
    from_step: Count
    from_tokens: Count
    to_step: Count
    to_tokens: Count
    codec: Printable
    digest: Digest  # xxh3-128 of the payload

    @property
    def steps(self) -> int:
        return self.to_step - self.from_step

    @property
    def tokens(self) -> int:
        return self.to_tokens - self.from_tokens


class Buffers(Struct, frozen=True, tag=True):
    """The buffers that training has changed, as they were after so many steps: values, in a small safetensors file."""

    learner: Name
    life: Count
    step: Count
    tokens: Count
    data: Annotated[bytes, Meta(max_length=BUFFERS_BYTES_MAX)]


class Lent(Struct, frozen=True, tag=True):
    """Bulk: the published values of a version that this learner holds as its base, as float32."""

    learner: Name
    fragment: Count
    version: Count
    digest: Digest  # of the values as the learner has them; the syncer believes the tape's


# ---------------------------------------------------------------------------------------------- syncer ->


class Welcome(Struct, frozen=True, tag=True):
    """The life number, the run's whole configuration and where the data stream goes on."""

    run: Printable
    epoch: Count
    learner: Name
    life: Count
    index: Count  # order of first joining: picks its batches
    config: Annotated[bytes, Meta(max_length=CONFIG_BYTES_MAX)]
    fragments: bytes  # the run's table of them, encoded as on its tape
    prior_steps: Count  # produced in earlier lives of this learner
    prior_tokens: Count
    progress: Progress
    since: tuple[Count, ...] = ()  # by fragment, the version that the last rollback made; nothing before it counts
    wants_buffers: bool = False  # the run's model has some
    budget: Count = 0  # of which `progress` is a share: the run's first, or how many came after it


class Answer(Struct, frozen=True, tag=True):
    """The run's name and configuration."""

    run: Printable
    config: Annotated[bytes, Meta(max_length=CONFIG_BYTES_MAX)]


class Status(Struct, frozen=True, tag=True):
    """Where the syncer and each learner stand, for whoever asked in a handshake; it is not said to learners."""

    record: bytes  # JSON, as in status.json; empty if there is none yet
    age_s: Seconds  # since it was made, by the syncer's clock


class Refused(Struct, frozen=True, tag=True):
    """The syncer will not have this peer; `text` is one line for a person."""

    text: Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
    why: Dismissal = "unfit"

    @property
    def is_final(self) -> bool:
        """Else it ends the connection alone: something is wrong on the syncer's side, one side is to be upgraded, or
        there is no place at present, and until that is put right a learner trains on and dials again."""
        return self.why not in NOT_FOR_GOOD


class Pull(Struct, frozen=True, tag=True):
    """Contribute this fragment at the next step boundary, or what is outstanding of it once more.

    That is sent again only if the pull names it. One that the syncer had not heard of is on its way for the first time.
    """

    epoch: Count
    life: Count
    fragment: Count
    settled_seq: Count
    lossless: bool
    progress: Progress
    lacking_seq: Count = 0  # it is outstanding, by the learner's last report, and is not here; 0: none is
    budget: Count = 0  # of which `progress` is a share: the run's first, or how many came after it


class Publication(Struct, frozen=True, tag=True):
    """Bulk: version `version` of a fragment, whole (base_version FULL) or as a delta on base_version."""

    epoch: Count
    life: Count
    fragment: Count
    version: Count
    base_version: Version
    codec: Printable
    digest: Digest  # of the resulting published values
    settled_seq: Count  # cumulative: the newest of this life's contributions that is in `version` or before
    settled_step: Count
    progress: Progress
    order: Count = (
        0  # contribute again, unasked, at the boundary where so many steps are unsettled; 0: wait to be asked
    )
    lay_s: Seconds = 0.0  # how long the last of those contributions lay at the syncer until its round closed
    budget: Count = 0  # of which `progress` is a share: the run's first, or how many came after it


class Rejected(Struct, frozen=True, tag=True):
    """A contribution was refused; `harmful` ones make the learner fast-forward, others are simply not held."""

    epoch: Count
    life: Count
    fragment: Count
    seq: Count
    reason: Refusal
    harmful: bool


class Lend(Struct, frozen=True, tag=True):
    """This version's file is damaged here: send the published values if you hold exactly it, else nothing."""

    fragment: Count
    version: Count


class Stop(Struct, frozen=True, tag=True):
    """The budget is spent: finish the step, contribute what is left, take no further step."""

    epoch: Count
    life: Count


class Done(Struct, frozen=True, tag=True):
    """Everything is settled and the run is closed."""

    epoch: Count
    life: Count


# ---------------------------------------------------------------------------------------------- operator ->

SETTINGS_MAX = 32  # keys that one order sets
RECORD_BYTES_MAX = 1 << 16  # of what an operator is answered

Setting = bool | Annotated[int, Meta(ge=-COUNT_MAX, le=COUNT_MAX)] | float | Printable


class PauseRun(Struct, frozen=True, tag=True):
    """End the process that serves the run, in order; the run goes on later."""


class FinishRun(Struct, frozen=True, tag=True):
    """Close the run now, whatever is left of its budget: as at every end, what is unmerged is handed in first."""


class SetKeys(Struct, frozen=True, tag=True):
    """Change keys of the configuration: table.key and its value."""

    settings: Annotated[dict[Printable, Setting], Meta(min_length=1, max_length=SETTINGS_MAX)]


class ExtendRun(Struct, frozen=True, tag=True):
    """Let the whole budget be this, in the run's own unit; the other two are zero."""

    tokens: Count = 0
    steps: Count = 0
    minutes: Seconds = 0.0


class DropLearner(Struct, frozen=True, tag=True):
    """Turn a learner out, and keep it out."""

    learner: Name


class ReadmitLearner(Struct, frozen=True, tag=True):
    """Let a learner in again that was dropped."""

    learner: Name


Order = PauseRun | FinishRun | SetKeys | ExtendRun | DropLearner | ReadmitLearner


class Outcome(Struct, frozen=True, tag=True):
    """What became of an order, once that is durable: in one line for a person, and as a small record."""

    is_done: bool  # else it was refused, and the text says why
    text: Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
    record: Annotated[bytes, Meta(max_length=RECORD_BYTES_MAX)] = b"{}"  # JSON


LearnerMessage = Ask | Hello | Report | Contribution | Buffers | Lent
SyncerMessage = Answer | Status | Outcome | Welcome | Refused | Pull | Publication | Rejected | Lend | Stop | Done
Message = LearnerMessage | SyncerMessage
