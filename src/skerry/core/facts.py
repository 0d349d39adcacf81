"""What is written to the tape: facts, each durable before anything that follows from it is done.

The state of a run is a fold over them (`core/state.py`); nothing else is true after a crash. Facts hold no wall-clock
time: the store stamps each commit, and nothing is decided by that stamp.

A tape outlives the version that wrote it. So a field that is added to a struct here, or to one on the wire, comes last
and with the default that says what was true before it; none is taken away or given another meaning.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from skerry.core.vocabulary import Closes, Fate, Phase, Sight, Stage, Verb

RULES = 3  # of decisions; a run and its audit go by those it began with

COUNT_MAX = 1 << 53  # of anything that is counted
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Whole = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # in a file beside the tape, which holds none larger
Moment = Annotated[float, Meta(ge=-1e9, le=1e11)]  # as the tape takes time stamps


class Lineage(Struct, frozen=True):
    """Where the first values of a run came from: another run, as it was at one commit."""

    run: str  # its name
    head: bytes  # the hash of that commit, which names all of the tape before it
    versions: tuple[int, ...]  # of its fragments
    kept: int | None = None  # the number of the kept version that it was; None: the newest


class RunCreated(Struct, frozen=True, tag=True):
    """Genesis: the run's identity, configuration, model layout and the first version of every fragment."""

    run: str
    rules: int
    config: bytes
    layout: bytes  # the model's tensors, encoded
    fragments: bytes  # the table of which tensor lies where in which fragment, encoded (`algo/fragments.py`)
    files: tuple[str, ...]  # each fragment's first checkpoint, version 0
    digests: tuple[bytes, ...]  # of its published values
    states: tuple[bytes, ...]  # of its whole state
    thetas: tuple[bytes, ...]  # sha256 of its published values
    contents: bytes = b""  # what else the model's state_dict holds, encoded (`algo/contents.py`); empty: nobody said
    fixed: str = ""  # sha256 of the file with what of that is not trained; empty: there is none
    lineage: Lineage | None = None  # None: the values came from a file


class EpochStarted(Struct, frozen=True, tag=True):
    """A syncer process took the run over; everything it writes carries this epoch."""

    epoch: int


class Row(Struct, frozen=True, array_like=True):
    """One settled stretch of one learner's work on one fragment; rows of a (life, fragment) tile (0, settled]."""

    learner: str
    life: Count
    fragment: Count
    from_step: Count
    from_tokens: Count
    to_step: Count
    to_tokens: Count
    fate: Fate
    seq: Count = 0  # of the contribution, for merged rows

    @property
    def steps(self) -> int:
        return self.to_step - self.from_step

    @property
    def tokens(self) -> int:
        return self.to_tokens - self.from_tokens


class Stretch(Struct, frozen=True, array_like=True):
    """Work of one life on every fragment, (from, to]; from the beginning to the beginning: none."""

    from_step: Count = 0
    from_tokens: Count = 0
    to_step: Count = 0
    to_tokens: Count = 0


class Seen(Struct, frozen=True, array_like=True):
    """The highest position of a life the syncer has seen, with its cumulative traffic."""

    learner: str
    life: Count
    step: Count
    tokens: Count
    bytes_up: Count
    bytes_down: Count
    step_gap_s_max: float
    alone: Stretch = Stretch()  # the last that spends no budget: it was done without a syncer


class LifeStarted(Struct, frozen=True, tag=True):
    learner: str
    life: int
    process: str
    index: int
    elapsed_s: float
    folded: int = 0  # earlier lives of the learner up to this one are settled: the books have them in sum from here on
    seen: tuple[Seen, ...] = ()  # of those, what no fact before this one holds
    forgotten: tuple[str, ...] = ()  # names that never took a step and make room in the books for this one


class Part(Struct, frozen=True, array_like=True):
    """One merged contribution: how it came, the version it is relative to, and what it weighs."""

    codec: str
    base_version: int
    weight: float


class Decision(Struct, frozen=True):
    """Everything that was decided about a merge, by the machine alone: the values follow from it and the payloads."""

    epoch: int
    fragment: int
    version: int  # that the merge makes
    parent: bytes  # digest of version - 1
    rule: str
    outer: str
    lr: float
    momentum: float
    delay: int  # the outer rule's, as are lr and momentum
    restart: int
    gain: float  # how much of the merged delta the outer step gets
    codec: str  # of the published delta
    delta: str  # the codec to which the merged delta is rounded before the outer step, and in which the journal has it
    sync_every: int
    quorum: int
    stage: Stage | None  # when the round was opened; None: a merge of the closing
    reason: Closes
    ready: int  # learners that were ready when it closed
    rows: tuple[Row, ...]  # what it settles
    parts: tuple[Part, ...]  # one per merged row, in order
    seen: tuple[Seen, ...]  # of lives of which more was seen since the last fact that said so
    progress: float
    open_s: float  # how long the round was open
    elapsed_s: float
    asked_every: int = 0  # the H that was asked for, longer than `sync_every` where rounds take longer; 0: the same
    orders: int = 0  # of the operator's, that were in force when it was decided: it goes by the configuration they left

    @property
    def every(self) -> int:
        """The H that was asked for."""
        return self.asked_every or self.sync_every

    @property
    def is_closing(self) -> bool:
        """It merges the last work, after the end of training."""
        return self.stage is None


class Entry(NamedTuple):
    """Where the journal has the delta of a merge, and what it must be."""

    file: int  # its number
    offset: int
    size: int
    checksum: bytes


class Result(Struct, frozen=True):
    """What carrying a decision out gave, and what is needed to do it again."""

    digest: bytes  # of the published values, which learners check
    state: bytes  # digest of all of the version: published values, velocity, residual
    entry: Entry
    payloads: str = ""  # file with its contributions, one after the other, where the run records them


class Took(Struct, frozen=True, array_like=True):
    """Seconds that a merge took until it was durable, by what for; measured, and nothing is decided by them."""

    inspect_s: float  # looking through its contributions, before it was ordered
    wait_s: float  # from the order until a worker was free
    merge_s: float  # sum, outer step, published delta
    put_s: float  # the file with its contributions, where the run records them
    taken_s: float = 0.0  # from its end until the deciding thread took it in
    commit_s: float = 0.0  # of the last commit before its own, whose end is not known when this is written


class Committed(Struct, frozen=True, tag=True):
    """The version that was decided on exists."""

    decision: Decision
    result: Result
    took: Took | None = None


class Checkpointed(Struct, frozen=True, tag=True):
    """A version lies whole in a file: what came before it is not needed any more to have it again."""

    fragment: int
    version: int
    file: str
    theta: bytes  # sha256 of the published values: a learner could lend them, and it need not be believed


class SteppedBack(Struct, frozen=True, tag=True):
    """A new version with the values of an earlier one, which a file holds: what was merged since then is lost."""

    epoch: int
    fragment: int
    version: int
    parent: bytes  # digest of the version that is left
    to: int  # the version whose values it has
    file: str
    digest: bytes
    state: bytes
    theta: bytes  # sha256 of the published values


class Kept(Struct, frozen=True, tag=True):
    """The whole model as of about now is kept for good: checkpoints that are not collected, one of each fragment."""

    number: int  # what a person calls it by; 0 is the start, which is always kept
    versions: tuple[int, ...]  # by fragment
    files: tuple[str, ...]
    progress: float  # of the run when it was due
    elapsed_s: float


class RolledBack(Struct, frozen=True, tag=True):
    """In this commit every fragment stepped back to a kept version; work on any version before it is given up."""

    epoch: int
    number: int  # of the kept version


class Pruned(Struct, frozen=True, tag=True):
    """On purpose: the tape before `segment`, the contributions recorded there, and kept versions are removed."""

    segment: int  # with which the tape begins from now on
    kept: tuple[int, ...]  # numbers of the versions that are kept no longer


class Discarded(Struct, frozen=True, tag=True):
    """Work that will never be merged, with its reason, outside any commit."""

    rows: tuple[Row, ...]
    seen: tuple[Seen, ...]
    elapsed_s: float


class Buffered(Struct, frozen=True, tag=True):
    """A learner's buffers as it had them after so many steps, by value; they take the place of those it gave before."""

    learner: str
    life: int
    step: int
    tokens: int
    file: str
    elapsed_s: float


class Paused(Struct, frozen=True, tag=True):
    """The operator ended this syncer process; the run goes on later."""

    seen: tuple[Seen, ...]
    elapsed_s: float
    by: str = ""  # who ordered it over the wire; empty: a signal did


class PhaseChanged(Struct, frozen=True, tag=True):
    """The run entered `phase`; `versions` are those that the closing began with, which are kept."""

    phase: Phase
    versions: tuple[int, ...]
    seen: tuple[Seen, ...]
    elapsed_s: float


class Change(Struct, frozen=True, array_like=True):
    """One key of the configuration, and what it was and is, as JSON."""

    key: str
    before: str
    after: str


class Ordered(Struct, frozen=True, tag=True):
    """An operator's order was carried out: what it changes holds from here on."""

    verb: Verb
    by: str  # the credential that gave it, in a word or two
    elapsed_s: float
    learner: str = ""  # whom it is about
    config: bytes = b""  # the whole configuration from here on; empty: it stays as it was
    changes: tuple[Change, ...] = ()  # what of it is another
    progress_before: float = 0.0  # share of the budget that was spent, as the syncer had measured it,
    progress: float = 0.0  # and of the budget from here on, which may be another


class Witnessed(Struct, frozen=True, tag=True):
    """What the syncer noticed of a life."""

    learner: str
    life: int
    what: Sight
    elapsed_s: float


class Sample(Struct, frozen=True, array_like=True):
    """One life over a few seconds: how long its steps took, its payloads on the way, and its node thread for them."""

    learner: str
    life: int
    steps: int
    tokens: int
    step_s: tuple[float, ...]  # as reported: not every step is
    up_bytes: int
    up_s: float  # from a payload's first byte here to its last
    down_bytes: int
    down_s: float  # likewise, at the learner
    encoded: int = 0  # parameters that it encoded for its contributions,
    encode_s: float = 0.0  # and the seconds from the snapshots until they could leave
    adopted: int = 0  # parameters of versions that it decoded, checked and prepared,
    adopt_s: float = 0.0  # and the seconds that took
    loss: float | None = None  # the mean of what it said of its steps; None: nothing,
    grad_norm: float | None = None  # and likewise


class Sampled(Struct, frozen=True, tag=True):
    """Measurements, so that a simulator can be fed from the tape; nothing is decided by them."""

    samples: tuple[Sample, ...]
    elapsed_s: float


class Injected(Struct, frozen=True, tag=True):
    """A fault that was done to this run on purpose, written by whoever did it once the syncer had ended."""

    kind: str
    target: str
    detail: str
    at: Moment
    until: Moment


class Evaluated(Struct, frozen=True, tag=True):
    """What the model was worth, by whoever measured it beside the run; written once the run was closed."""

    versions: tuple[Whole, ...]  # by fragment
    progress: Annotated[float, Meta(ge=0.0, le=1.0)]
    tokens: Whole  # that were merged into it, in tokens x fragments
    figures: dict[str, float | None]  # by name; "loss" is the built-in model's, in nats a byte; None: not finite
    at: Moment  # wall-clock seconds


class Restored(Struct, frozen=True, tag=True):
    """A fragment that could not be had has a whole file again: the same version and digest, from `source`."""

    fragment: int
    version: int
    file: str
    digest: bytes
    state: bytes  # another one where velocity or residual are lost
    theta: bytes  # sha256 of the published values
    source: str


Fact = (
    RunCreated
    | EpochStarted
    | LifeStarted
    | Committed
    | Checkpointed
    | SteppedBack
    | Kept
    | RolledBack
    | Pruned
    | Discarded
    | Paused
    | PhaseChanged
    | Ordered
    | Buffered
    | Witnessed
    | Sampled
    | Injected
    | Evaluated
    | Restored
)
