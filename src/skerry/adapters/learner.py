"""What a learner is to a training loop, whatever framework the loop is in.

An adapter makes its model an `Attachment` (which carries fragments to and from it) and its layout, and hands both to
`_join`; everything else that a loop says to a learner, or hears from it, is here. Without a syncer's address nothing
happens: the loop trains by itself. What stands behind a learner is a `Place`: the learner of one process, or one rank
of an island of several.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, TypedDict

from skerry import config as configs
from skerry.adapters.claims import Claim
from skerry.adapters.metrics import Metrics, OnMetrics
from skerry.algo.fragments import Layout
from skerry.errors import ConfigError, ModelError
from skerry.node.training import Carrier
from skerry.shell.address import parse_addresses
from skerry.shell.beside import Kind
from skerry.shell.home import Home
from skerry.shell.identity import check_private, identity
from skerry.shell.learner import Handover, LearnerShell, Standing, join_timeout
from skerry.shell.signals import Notice

JOIN_TIMEOUT_S = 300.0  # longer than a syncer takes to come back, shorter than anyone watches a loop that stands
TOKENS_MAX = 1 << 40  # of one step: more is a slip of the pen
VARIABLES = tuple(
    f"SKERRY_{word}" for word in ("SYNCER", "NAME", "KEY_FILE", "TOKEN_FILE", "JOIN_TIMEOUT_S", "NODE", "STATE")
)  # of the environment, that a learner reads

log = logging.getLogger("skerry.learner")


class Attachment(Carrier, Protocol):
    """A model, as it was attached."""

    def let_go(self) -> str:
        """The model may be changed from here on; how it was already, if it was."""


class Place(Protocol):
    """What a loop takes its steps through."""

    home: Home | None
    speaks: bool  # for its learner, of which it may be one of several processes,
    is_called_away: bool  # and another of them was told to leave
    leaves_alone: bool  # else its wish to leave is one of several processes', which all leave at one boundary

    def start(self, join_timeout_s: float) -> None: ...
    def step(self, tokens: int, loss: float, grad_norm: float) -> bool: ...
    def close(self, timeout_s: float | None = None) -> Handover: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def standing(self) -> Standing: ...
    @property
    def node_pid(self) -> int | None: ...


class Options(TypedDict, total=False):
    """What every adapter's learner can be told; each has its meaning in `BaseLearner`."""

    name: str | None
    key_file: str | Path | None
    token_file: str | Path | None
    insecure: bool
    join_timeout_s: float | None
    leave_timeout_s: float | None
    required: bool
    wait: bool
    on_sigterm: Literal["leave"] | None
    is_wanted: Callable[[], bool]
    on_metrics: OnMetrics | None


class BaseLearner:
    """Makes a training loop a learner of a shared run; without a syncer's address it does nothing.

    `syncer` is "host:port" or "skerry://host:port", or several with commas between them, which are tried in turn
    (default: the environment's SKERRY_SYNCER); with `required` it is an error that there is none. `name` identifies
    the learner over restarts (SKERRY_NAME); from another machine than the syncer's it is proved by `key_file`
    (SKERRY_KEY_FILE), which says the name too, or where that has no keys by a shared secret, `token_file`
    (SKERRY_TOKEN_FILE). Without a key another machine is dialled only if `insecure` (SKERRY_INSECURE=1) says so, as
    inside a VPN: what is sent can be read and changed on the way.

    The constructor returns once the model holds the run's current values, or with `wait` = False at once: then
    `wait_for_start` waits for that, or the first step. If no syncer takes it in for `join_timeout_s`
    (SKERRY_JOIN_TIMEOUT_S, else 300; 0 is for ever), that raises `skerry.JoinTimeout`. `is_wanted` is asked while it
    waits to be taken in, at first or after its node has died; where it says no, that ends with a `KeyboardInterrupt`.

    Used in a `with`, SIGTERM and Ctrl-C let the loop leave in order: the next `step` returns False, the end of the
    `with` hands over what is left, and then the process ends as the signal would have ended it. A second signal does
    so at once. With `on_sigterm` = None, or where the program has handlers of its own, signals are its own matter.
    To hand over may take `leave_timeout_s` (default: what the run's `learner.leave_timeout_s` says).

    `on_metrics` is called in `step`, once a second at most, with a small dict for a dashboard (`adapters/metrics.py`).
    """

    def __init__(
        self,
        syncer: str | None = None,
        *,
        name: str | None = None,
        key_file: str | Path | None = None,
        token_file: str | Path | None = None,
        insecure: bool = False,
        join_timeout_s: float | None = None,
        leave_timeout_s: float | None = None,
        required: bool = False,
        wait: bool = True,
        on_sigterm: Literal["leave"] | None = "leave",
        is_wanted: Callable[[], bool] = lambda: True,
        on_metrics: OnMetrics | None = None,
    ) -> None:
        self._address = address_given(syncer, required)
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"name is a {type(name).__name__}: give a string, or leave it out")
        if name is not None and not name.strip():
            raise ConfigError("name is given and empty: give one that stays the same over restarts, or leave it out")
        self._name, self._is_wanted, self._waits = name, is_wanted, wait
        self._secrets, self._insecure = (token_file, key_file), insecure
        self._join_timeout_s = join_timeout(join_timeout_s, JOIN_TIMEOUT_S) if self._address else 0.0
        self._leave_timeout_s = _leave_timeout(leave_timeout_s)
        self._metrics = Metrics(on_metrics) if on_metrics is not None else None
        self._notice = Notice() if _is_leaving(on_sigterm) else None
        self._place: Place | None = None
        self._attachment: Attachment | None = None
        self._claim: Claim | None = None
        self._refusal: ModelError | None = None
        self._has_started = self._is_closed = False
        self._steps_by_itself = 0  # without a syncer

    @property
    def _has_syncer(self) -> bool:
        """An address was given: this loop is to be a learner."""
        return bool(self._address)

    @contextmanager
    def _claimed(self, tensors: Mapping[str, object]) -> Iterator[None]:
        """These are this learner's until it is closed, if what is done in here succeeds."""
        self._claim = Claim(tensors)
        try:
            yield
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        if self._claim is not None:
            self._claim.let_go()

    def _join(self, layout: Layout, attachment: Attachment, node: Kind, home: Home | None = None) -> None:
        """As the learner of one process, with its node half there, and its arrays."""
        self._take(self._shell(layout, attachment, node, home), attachment)

    def _shell(self, layout: Layout, carrier: Carrier, node: Kind, home: Home | None = None) -> LearnerShell:
        (host, port), *others = addresses = parse_addresses(self._address)
        who = identity(self._name, *self._secrets)
        check_private(addresses, who.key_file, self._insecure)
        return LearnerShell(
            who.name,
            layout,
            carrier,
            host,
            port,
            who.token,
            node,
            home,
            lambda: self._is_wanted() and not self._is_told_to_leave,
            tuple(others),
            who.key_file,
        )

    def _take(self, place: Place, attachment: Attachment) -> None:
        self._place, self._attachment = place, attachment
        if self._waits:
            self.wait_for_start()

    def wait_for_start(self) -> None:
        """Return once the model holds the run's current values; at once where it does, or where no syncer is named."""
        if self._place is None or self._has_started:
            return
        try:
            with self._obeying():
                self._place.start(self._join_timeout_s)
        except BaseException:
            self._is_closed = True
            self._place.close(timeout_s=0.0)
            self._let_go()
            raise
        self._has_started = True

    @contextmanager
    def _obeying(self) -> Iterator[None]:
        """Who waits to be taken in and is told to end does so as the signal would have it."""
        try:
            yield
        except KeyboardInterrupt:
            if self._notice is not None:
                self._notice.obey()
            raise

    def step(self, tokens: int, loss: float = 0.0, grad_norm: float = 0.0) -> bool:
        """Call after each optimizer step; never waits for the network. False once no more steps are wanted."""
        going = self._step(tokens, loss, grad_norm)
        if self._metrics is not None and self._tells:
            self._metrics.stepped(tokens, loss, self.status)
        return going

    def _step(self, tokens: int, loss: float, grad_norm: float) -> bool:
        if self._is_closed:
            raise RuntimeError("step() after close(): attach the model to another skerry.Learner to go on")
        if self._place is None:
            self._steps_by_itself += 1
            return not self._leaves
        if self._refusal is not None:
            raise self._refusal
        count, loss, grad_norm = _tokens(tokens), _real("loss", loss), _real("grad_norm", grad_norm)
        self.wait_for_start()
        try:
            with self._obeying():
                return self._place.step(count, loss, grad_norm) and not self._leaves
        except ModelError as error:
            self._refusal = error
            raise

    def close(self) -> Handover:
        """Hand over what is left and leave the run, and say what became of it.

        Of a model that is another since, what was learned before is handed over.
        """
        self._is_closed = True
        if self._place is None or self._attachment is None:
            return Handover()
        change = self._attachment.let_go()
        if change and self._refusal is None:
            log.warning("%s; it does not get the run's last values", change)
        try:
            return self._place.close(self._leave_timeout_s)
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        if self._notice is not None:
            self._notice.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            handover = self.close()
            if self._tells and (self._is_told_to_leave or self._is_called_away or kind is not None):
                log.warning("left: %s", handover)
        finally:
            if self._notice is not None:
                self._notice.restore()
        if self._notice is not None and kind is None:
            self._notice.obey()

    @property
    def _tells(self) -> bool:
        """What became of a learner is said once, by whichever of its processes speaks for it."""
        return self._place is None or self._place.speaks

    @property
    def _is_called_away(self) -> bool:
        """Another process of this learner was told to leave."""
        return self._place is not None and self._place.is_called_away

    @property
    def _is_told_to_leave(self) -> bool:
        return self._notice is not None and self._notice.came is not None

    @property
    def _leaves(self) -> bool:
        """It was told to, and nobody else has to be."""
        return self._is_told_to_leave and (self._place is None or self._place.leaves_alone)

    @property
    def is_running(self) -> bool:
        """Further steps are wanted: by the run, and by whoever could end this process."""
        return self._is_running_there and not self._leaves

    @property
    def _is_running_there(self) -> bool:
        if self._place is None or not (self._has_started or self._is_closed):
            return True  # alone, or not taken in yet
        return self._place.is_running

    def status(self) -> Standing:
        """Where this learner stands."""
        if self._place is None:
            return Standing(trouble="no syncer's address was given", steps=self._steps_by_itself)
        if self._has_started or self._is_closed:
            return self._place.standing
        return replace(self._place.standing, is_running=True, trouble="it has not joined yet")

    @property
    def connected(self) -> bool:
        """A syncer has it at present; without one it trains on and dials again."""
        return self.status().connected

    @property
    def alone_steps(self) -> int:
        """Steps taken since the syncer was lost; 0 while there is one. Beyond a bound they spend no budget."""
        return self.status().alone_steps

    @property
    def progress(self) -> float:
        """Share of the run's budget that is spent, for learning-rate schedules; 0 without a syncer."""
        return self.status().progress

    @property
    def config(self) -> configs.Config | None:
        """The run's configuration, as the syncer gave it."""
        return self.status().config

    @property
    def index(self) -> int:
        """This learner's number in the run, by order of first joining: picks what it draws from the data."""
        return self.status().index

    @property
    def prior_steps(self) -> int:
        """Steps of this learner's earlier lives: where its data stream goes on."""
        return self.status().prior_steps

    @property
    def ramp(self) -> float:
        """Factor for the inner learning rate: rises to 1 over `join_warmup` steps after joining a run under way."""
        return self.status().ramp

    @property
    def node_pid(self) -> int | None:
        """The process beside this one, for who measures; None where its work is done in a thread."""
        return self._place.node_pid if self._place else None

    @property
    def state(self) -> str:
        """Where its state is, "host" or "device", for who measures."""
        return "host" if self._place is None or self._place.home is None else "device"


def address_given(syncer: str | None, required: bool) -> str:
    """What is given, else what the environment says; empty where neither says anything, and nobody must."""
    for name in sorted(os.environ.keys() - set(VARIABLES)):
        if near := difflib.get_close_matches(name, VARIABLES, 1, 0.8 if name.startswith("SKERRY_") else 0.9):
            log.warning("%s is set in the environment, and nothing reads it: is %s meant?", name, near[0])
    address = syncer if syncer is not None else os.environ.get("SKERRY_SYNCER")
    if address is not None and not isinstance(address, str):
        raise ConfigError(f'syncer is a {type(address).__name__}: give "host:port", or leave it out to train alone')
    if address is not None and not address.strip():
        where = "syncer" if syncer is not None else "SKERRY_SYNCER"
        raise ConfigError(f"{where} is given and empty: give host:port, or leave it out to train alone")
    if address is None and required:
        raise ConfigError("no syncer: give syncer (or SKERRY_SYNCER) = host:port, or leave required out to train alone")
    return address or ""


def _is_leaving(on_sigterm: str | None) -> bool:
    if on_sigterm not in ("leave", None):
        raise ConfigError(f'on_sigterm = {on_sigterm!r}: give "leave", or None to handle signals yourself')
    return on_sigterm == "leave"


def _leave_timeout(given: float | None) -> float | None:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is not None and not (is_number and 0 <= given < math.inf):
        raise ConfigError(f"leave_timeout_s = {given!r}: give seconds, 0 or more, or leave it out to go by the run's")
    return None if given is None else float(given)


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


def _real(name: str, given: object) -> float:
    if not isinstance(given, Real):  # like a tensor
        raise TypeError(f"{name} is a {type(given).__name__}: give a number, like {name}.item(), or leave it out")
    try:
        return float(given)
    except OverflowError:
        raise ValueError(
            f"{name}: is larger than a float can be: give a number, like {name}.item(), or leave it out"
        ) from None
