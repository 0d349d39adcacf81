"""What a learner is to a training loop, whatever framework the loop is in.

An adapter makes its model an `Attachment` (which carries fragments to and from it) and its layout, and hands both to
`_join`; everything else that a loop says to a learner, or hears from it, is here. Without a syncer's address nothing
happens: the loop trains by itself. What stands behind a learner is a `Place`: the learner of one process, or one rank
of an island of several.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from typing import Protocol, Self, TypedDict

from skerry import config as configs
from skerry.algo.fragments import Layout
from skerry.errors import ModelError
from skerry.node.training import Carrier
from skerry.shell.address import parse_address, read_token
from skerry.shell.beside import Kind
from skerry.shell.home import Home
from skerry.shell.learner import LearnerShell, Standing, join_timeout, learner_name

JOIN_TIMEOUT_S = 300.0  # longer than a syncer takes to come back, shorter than anyone watches a loop that stands
TOKENS_MAX = 1 << 40  # of one step: more is a slip of the pen

log = logging.getLogger("skerry.learner")


class Attachment(Carrier, Protocol):
    """A model, as it was attached."""

    def let_go(self) -> str:
        """The model may be changed from here on; how it was already, if it was."""


class Place(Protocol):
    """What a loop takes its steps through."""

    home: Home | None

    def start(self, join_timeout_s: float) -> None: ...
    def step(self, tokens: int, loss: float) -> bool: ...
    def close(self, timeout_s: float | None = None) -> None: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def standing(self) -> Standing: ...
    @property
    def node_pid(self) -> int | None: ...


class Options(TypedDict, total=False):
    """What every adapter's learner can be told; each has its meaning in `BaseLearner`."""

    name: str | None
    token_file: str | Path | None
    join_timeout_s: float | None
    is_wanted: Callable[[], bool]


class BaseLearner:
    """Makes a training loop a learner of a shared run; without a syncer's address it does nothing.

    `syncer` is "host:port" or "skerry://host:port" (default: the environment's SKERRY_SYNCER); `name` identifies
    the learner over restarts (SKERRY_NAME); the shared token is read from `token_file` (SKERRY_TOKEN_FILE).
    The constructor returns once the model holds the run's current values. If no syncer takes it in for
    `join_timeout_s` (SKERRY_JOIN_TIMEOUT_S, else 300; 0 is for ever), it raises `skerry.JoinTimeout`. `is_wanted` is
    asked while it waits to be taken in, at first or after its node has died; where it says no, that ends with a
    `KeyboardInterrupt`.
    """

    def __init__(
        self,
        syncer: str | None = None,
        *,
        name: str | None = None,
        token_file: str | Path | None = None,
        join_timeout_s: float | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._address = syncer if syncer is not None else os.environ.get("SKERRY_SYNCER", "")
        self._name, self._is_wanted = name, is_wanted
        self._token_file = token_file or os.environ.get("SKERRY_TOKEN_FILE")
        self._join_timeout_s = join_timeout(join_timeout_s, JOIN_TIMEOUT_S) if self._address else 0.0
        self._place: Place | None = None
        self._attachment: Attachment | None = None
        self._refusal: ModelError | None = None

    @property
    def _has_syncer(self) -> bool:
        """An address was given: this loop is to be a learner."""
        return bool(self._address)

    def _join(self, layout: Layout, attachment: Attachment, node: Kind, home: Home | None = None) -> None:
        """As the learner of one process, with its node half there, and its arrays."""
        host, port = parse_address(self._address)
        place = LearnerShell(
            learner_name(self._name or os.environ.get("SKERRY_NAME")),
            layout,
            attachment,
            host,
            port,
            read_token(self._token_file) if self._token_file else None,
            node,
            home,
            self._is_wanted,
        )
        self._take(place, attachment)

    def _take(self, place: Place, attachment: Attachment) -> None:
        self._place, self._attachment = place, attachment
        try:
            place.start(self._join_timeout_s)
        except BaseException:
            place.close(timeout_s=0.0)
            raise

    def step(self, tokens: int, loss: float = 0.0) -> bool:
        """Call after each optimizer step; never waits for the network. False once the run wants no more steps."""
        if self._place is None:
            return True
        if self._refusal is not None:
            raise self._refusal
        count, loss = _tokens(tokens), _loss(loss)
        try:
            return self._place.step(count, loss)
        except ModelError as error:
            self._refusal = error
            raise

    def close(self) -> None:
        """Hand over what is left and leave the run; of a model that is another since, what was learned before."""
        if self._place is None or self._attachment is None:
            return
        change = self._attachment.let_go()
        if change and self._refusal is None:
            log.warning("%s; it does not get the run's last values", change)
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        return True if self._place is None else self._place.is_running

    @property
    def progress(self) -> float:
        """Share of the run's budget that is spent, for learning-rate schedules; 0 without a syncer."""
        return self._place.standing.progress if self._place else 0.0

    @property
    def config(self) -> configs.Config | None:
        """The run's configuration, as the syncer gave it."""
        return self._place.standing.config if self._place else None

    @property
    def index(self) -> int:
        """This learner's number in the run, by order of first joining: picks what it draws from the data."""
        return self._place.standing.index if self._place else 0

    @property
    def prior_steps(self) -> int:
        """Steps of this learner's earlier lives: where its data stream goes on."""
        return self._place.standing.prior_steps if self._place else 0

    @property
    def ramp(self) -> float:
        """Factor for the inner learning rate: rises to 1 over `join_warmup` steps after joining a run under way."""
        return self._place.standing.ramp if self._place else 1.0

    @property
    def node_pid(self) -> int | None:
        """The process beside this one, for who measures; None where its work is done in a thread."""
        return self._place.node_pid if self._place else None

    @property
    def state(self) -> str:
        """Where its state is, "host" or "device", for who measures."""
        return "host" if self._place is None or self._place.home is None else "device"


def _tokens(given: object) -> int:
    """Of a step; a tensor's number would have to be waited for."""
    if isinstance(given, bool) or not isinstance(given, Integral):
        kind = type(given).__name__
        raise TypeError(f"tokens is a {kind}: give a whole number that the loop knows, like batch.numel()")
    count = int(given)
    if count < 1:
        raise ValueError(f"tokens = {count}: a step is of at least one token; it decides the weight of the work")
    if count > TOKENS_MAX:
        raise ValueError(f"tokens = {count}: no step is of more than {TOKENS_MAX}")
    return count


def _loss(given: object) -> float:
    if not isinstance(given, Real):  # like a tensor
        raise TypeError(f"loss is a {type(given).__name__}: give a number, like loss.item(), or leave it out")
    try:
        return float(given)
    except OverflowError:
        raise ValueError(
            "loss: is larger than a float can be: give a number, like loss.item(), or leave it out"
        ) from None
