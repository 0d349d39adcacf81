"""What is written to the tape: facts, each durable before anything that follows from it is done.

The state of a run is a fold over them (`core/state.py`); nothing else is true after a crash. `at` is wall-clock time
and only a stamp: nothing is decided by it.
"""

from __future__ import annotations

from msgspec import Struct


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
    codecs: tuple[str, ...] = ()  # of the contributions, one per merged row
    bases: tuple[int, ...] = ()  # the versions they are relative to
    payloads: str = ""  # file with their bytes, one after the other, where the run records them
    delay: int = 1  # the outer rule's, as are lr and momentum
    restart: int = 0
    steps: int = 0  # of all learners, when it was decided
    gain: float = 1.0  # how much of the merged delta the outer step got


class Discarded(Struct, frozen=True, tag=True):
    """Work that will never be merged, with its reason, outside any commit."""

    rows: tuple[Row, ...]
    seen: tuple[Seen, ...]
    elapsed_s: float
    at: float


class Paused(Struct, frozen=True, tag=True):
    """The operator ended this syncer process; the run goes on later."""

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


class Witnessed(Struct, frozen=True, tag=True):
    """What the syncer noticed of a life: "lost" (its link is gone) or "stepping" (its first step on a new link)."""

    learner: str
    life: int
    what: str
    elapsed_s: float
    at: float


class Sample(Struct, frozen=True, array_like=True):
    """One life over a few seconds: how long its steps took, and what its payloads took on the way."""

    learner: str
    life: int
    steps: int
    tokens: int
    step_s: tuple[float, ...]  # as reported: not every step is
    up_bytes: int
    up_s: float  # from a payload's first byte here to its last
    down_bytes: int
    down_s: float  # likewise, at the learner


class Sampled(Struct, frozen=True, tag=True):
    """Measurements, so that a simulator can be fed from the tape; nothing is decided by them."""

    samples: tuple[Sample, ...]
    elapsed_s: float
    at: float


class Injected(Struct, frozen=True, tag=True):
    """A fault that was done to this run on purpose, written by whoever did it once the syncer had ended."""

    kind: str
    target: str
    detail: str
    at: float
    until: float


class Restored(Struct, frozen=True, tag=True):
    """A fragment's damaged file was replaced: the same version and digest, `source` says where from."""

    fragment: int
    version: int
    file: str
    digest: bytes
    source: str
    at: float


Fact = (
    RunCreated
    | EpochStarted
    | LifeStarted
    | Committed
    | Discarded
    | Paused
    | PhaseChanged
    | Witnessed
    | Sampled
    | Injected
    | Restored
)
