"""A learner around a training loop, in real time.

The training thread calls `step` and `close`; everything else happens beside it (`shell/beside.py`). `start` waits for
the first bases, because no step may be taken without one; after that nothing here waits for the network until `close`.
A fast-forward is waited for as the first bases are, because a step on half a model is of no use. So is another node,
where the first has died: however long its syncer is away, that ends no loop.
How long a learner waits for a syncer that is not there is one rule (`Patience`), for `start` and `fetch_config` alike.
Whatever becomes of what runs beside the loop, `close` keeps to the run's limit and a little; nothing else ends it by
force, but a loop that stands says whom it waits for. A learner is of the process that made it, and of one thread at a
time.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import msgspec

from skerry import config as configs
from skerry.algo.fragments import Layout
from skerry.core.learner import patience_s
from skerry.core.messages import Answer, Ask, Frozen, Message, Refused
from skerry.core.vocabulary import WayOut
from skerry.errors import ConfigError, JoinTimeout, ProtocolError, RefusedError
from skerry.node.training import Carrier, TrainingHalf
from skerry.shell.beside import Kind, NodeProcess, Silence, can_be_process, start_beside
from skerry.shell.home import Home
from skerry.shell.identity import tls_of
from skerry.shell.node import INBOX_MAX, LAST_TURN_S, Who
from skerry.wire.client import Client
from skerry.wire.transport import Inbox, Opened, Received

START_S_MAX = 300.0  # of what runs beside the loop, where kernels are to be compiled and the machine is busy
DEATHS_MAX = 3  # of what runs beside the loop,
DEATHS_S = 60.0  # within so long, before it is given up
STATES = ("host", "device", "auto")
POLL_S = 0.005  # how often a standing training thread looks for boundary work
ANSWER_POLL_S = 0.1  # how often one who waits for an answer looks at the time
WAITING_SAYS_S = 10.0  # how often a learner that cannot join or go on says so
ANSWER_S_MAX = 10.0  # for the node to say that a closing is over, beyond what it may take

log = logging.getLogger("skerry.learner")


class Patience:
    """How long to wait for a syncer that is not there, and what is said meanwhile; a limit of 0 is for ever."""

    def __init__(self, address: str, limit_s: float) -> None:
        self.address, self.limit_s = address, limit_s
        self._began_at = self._said_at = time.monotonic()

    def refresh(self) -> None:
        """The syncer is there: whatever takes time now is its own, or the link's."""
        self._began_at = time.monotonic()

    def look(self, trouble: str = "") -> None:
        """Say now and then that nobody takes it in; `JoinTimeout` when that has been so for too long.

        `trouble` is why there is no syncer, what one that was reached has against it at present, or has sent so far.
        """
        now, trouble = time.monotonic(), trouble or "connected, and no answer yet"
        if self.limit_s and now - self._began_at >= self.limit_s:
            raise JoinTimeout(
                f"no syncer took this learner in at {self.address} for {self.limit_s:g} s: {trouble}; check the "
                "address, or wait longer with join_timeout_s (SKERRY_JOIN_TIMEOUT_S; 0 is for ever)"
            )
        if now - self._said_at >= WAITING_SAYS_S:
            self._said_at = now
            log.warning("waiting for syncer %s (%s)", self.address, trouble)


@dataclass(frozen=True)
class Standing:
    """Where a learner stands, for the loop that it is of; without a syncer's address all of it is as here."""

    name: str = ""
    is_running: bool = True  # the run wants further steps
    connected: bool = False  # to a syncer that has taken it in
    trouble: str = ""  # why it is not
    alone_steps: int = 0  # taken since it lost its syncer; 0 while it has one
    steps: int = 0  # taken since this process joined,
    steps_merged: int = 0  # and how many of those are known to be in the run
    prior_steps: int = 0  # of its earlier lives
    index: int = 0  # this learner's number in the run
    progress: float = 0.0  # share of the run's budget that is spent
    ramp: float = 1.0  # factor for the inner learning rate
    config: configs.Config | None = field(default=None, repr=False)  # the run's, once a syncer has taken it in


@dataclass(frozen=True)
class Handover:
    """What became of a learner's steps, when it left."""

    steps_merged: int = 0  # that are known to be in the run
    steps_lost: int = 0  # the others: given up on the way, or not handed in; never merged twice, maybe once
    reason: str = "there is no syncer: nothing was shared"

    def __str__(self) -> str:
        return f"{self.steps_merged} steps merged, {self.steps_lost} not: {self.reason}"


REASONS: dict[WayOut, str] = {
    "settled": "it left, and all that was still open is settled",
    "done": "the run is over, and all that was still open is settled",
    "no last versions": "the run is over; versions with the last of its work did not come in time, which may be merged",
    "timeout": "it waited as long as it may (leave_timeout_s) for the syncer to take in what is left, which may not be "
    "in the run",
    "refused": "the syncer will not have it",
}


class LearnerShell:
    """A learner around somebody's training loop, in real time; what else it does happens beside the loop."""

    speaks = leaves_alone = True  # it is of one process
    is_called_away = False

    def __init__(
        self,
        name: str,
        layout: Layout,
        carrier: Carrier,
        host: str,
        port: int,
        token: bytes | None,
        node: Kind = "thread",
        home: Home | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
        others: tuple[tuple[str, int], ...] = (),
        key_file: str | None = None,
    ) -> None:
        frozen: Frozen = getattr(carrier, "frozen", None)  # only a model that knows what it does not train says so
        self._who = Who(name, "", layout, host, port, token, others, frozen, key_file)
        self._carrier, self._node = carrier, node
        self.home, self._is_wanted = home, is_wanted
        self._stepped_at: float | None = None
        self._join_timeout_s = 0.0
        self._silence_s = math.inf  # without a sign of life of the node, until it is said that there is none
        self._deaths: list[float] = []
        self._has_joined = False  # with any node
        self._owner = os.getpid()
        self._calls = threading.RLock()  # a step or the closing is under way
        self._is_closed = False
        self._handover = Handover()
        self._steps = 0  # in all lives of this process,
        self._steps_merged = 0  # and of those before this one
        self._steps_over = 0  # of those before this one, merged or not
        self._lost_by: Counter[str] = Counter()  # obituary -> steps that were open then, whose fate nobody knows
        self._begin()

    def _begin(self) -> None:
        """A process of this name, of which no syncer has heard yet."""
        who = msgspec.structs.replace(self._who, process=secrets.token_hex(8))
        self.beside = start_beside(self._node, who, self.home)
        self.training = TrainingHalf(who.layout, self._carrier, self.beside.post, self.beside.lay)
        self._began_at = time.monotonic()
        self._silence = Silence()

    @property
    def _is_starting(self) -> bool:
        """What runs beside the loop has not begun to: that is not the syncer's fault."""
        return not self.training.has_heard and time.monotonic() - self._began_at < START_S_MAX

    def start(self, join_timeout_s: float) -> None:
        """Wait until every fragment has a base and stands in the live parameters, or the run is over before that.

        Whether it is wanted is asked here too: one whose node has died may wait for ever, and the loop that asks
        otherwise waits with it.
        """
        self._join_timeout_s = join_timeout_s
        patience = Patience(self._who.address, join_timeout_s)
        while self.training.must_stand and not self.beside.obituary:
            if not self._is_wanted():
                raise KeyboardInterrupt
            if self.training.is_linked or self._is_starting:
                patience.refresh()
            patience.look(self._waits_for)
            self._stand()
        self._check()
        if self.training.config is not None:
            self._silence_s = self.training.config.wire.timeout_s
        self._stepped_at = time.monotonic()

    @property
    def _waits_for(self) -> str:
        """Why it has not joined yet, as far as anybody here knows."""
        if self.beside.standstill or not self.training.has_heard:
            return self.beside.standstill or "what runs beside the loop is starting"
        return self.training.trouble or self.training.has_come

    def step(self, tokens: int, loss: float = 0.0, grad_norm: float = 0.0) -> bool:
        """A step was taken; False once the run wants no more of them."""
        if os.getpid() != self._owner:
            raise RuntimeError(f"step() in process {os.getpid()}: {self._whose}; step there, or attach a model here")
        if not self._calls.acquire(blocking=False):
            raise RuntimeError("step() is being called by two threads at once: take one step after the other")
        try:
            return self._step(tokens, loss, grad_norm)
        finally:
            self._calls.release()

    def _step(self, tokens: int, loss: float, grad_norm: float) -> bool:
        if self._is_closed:
            return False
        now = time.monotonic()
        before, self._stepped_at = self._stepped_at or now, now
        self.training.boundary(1, tokens, now - before, loss, grad_norm)
        self._steps += 1
        self.beside.wake()
        if before - self.beside.heard_at > self._silence_s or self._silence.trouble:
            self._silence.look(self.beside, self._silence_s, before)
        if self.training.is_forwarding:  # known since the boundary: `must_stand` would read the mailbox once more
            self._fast_forward()
        self._check()
        return self.training.wants_steps  # as of this boundary's look into the mailbox: another costs as much again

    def _fast_forward(self) -> None:
        """Stand while one is half done, and say so where that takes long."""
        began_at = said_at = time.monotonic()
        while self.training.must_stand and not self.beside.obituary:
            self._stand()
            now = time.monotonic()
            if now - said_at >= WAITING_SAYS_S:
                said_at, why = now, self.beside.standstill or "it is on its way"
                log.warning("the loop stands for %.0f s, until the run's model is whole: %s", now - began_at, why)

    @property
    def is_running(self) -> bool:
        """Whether the run wants further steps; `RefusedError` where it wants nothing more of this learner."""
        is_running = self.training.is_running
        self._check_refusal()
        return is_running

    @property
    def standing(self) -> Standing:
        half = self.training
        progress = half.progress  # looks into the mailbox, so what follows need not
        return Standing(
            name=self._who.name,
            is_running=half.wants_steps and not self._is_closed,
            connected=half.is_linked and not self._silence.trouble and not self._is_closed,
            trouble=self._silence.trouble or ("" if half.is_linked else half.trouble),
            alone_steps=half.alone_steps,
            steps=self._steps,
            steps_merged=self._steps_merged + half.steps_merged,
            prior_steps=half.prior_steps,
            index=half.index,
            progress=progress,
            ramp=half.ramp,
            config=half.config,
        )

    @property
    def node_pid(self) -> int | None:
        return self.beside.pid if isinstance(self.beside, NodeProcess) else None

    def close(self, timeout_s: float | None = None) -> Handover:
        """Take no further step: hand over what is left, wait until the machine says that it may go, hang up.

        Once is enough. In a fork of the process it does nothing: what is to be done at exit is done there too.
        """
        if os.getpid() != self._owner:
            log.warning("close() in process %d does nothing: %s", os.getpid(), self._whose)
            return Handover(reason=self._whose)
        if not self._calls.acquire(timeout=LAST_TURN_S):
            raise RuntimeError("close() while another thread is in step() or close(): end that first")
        try:
            if not self._is_closed:
                self._leave(timeout_s)
            return self._handover
        finally:
            self._calls.release()

    def abandon(self) -> None:
        """End at once, without handing over what is left: whoever carries the fragments cannot any more."""
        if not self._is_closed:
            self._is_closed = True
            self.beside.end()

    @property
    def _whose(self) -> str:
        return f"this learner is of process {self._owner}, from which this one was forked"

    def _leave(self, timeout_s: float | None) -> None:
        self._is_closed = True
        try:
            self._handover = self._handed_over("an error ended its closing before all was handed over")
            self._handover = self._handed_over(self._hand_over(timeout_s))
        finally:
            self.beside.end()

    def _handed_over(self, reason: str) -> Handover:
        merged = self._steps_merged + self.training.steps_merged
        return Handover(merged, self._steps - merged, "; after that: ".join([*self._losses, reason]))

    @property
    def _losses(self) -> list[str]:
        """What was lost with nodes that died, for a person."""
        lost = [f"{n} were open when {obituary}" for obituary, n in self._lost_by.items() if n]
        return [f"{' and '.join(lost)}, and may not be in the run"] if lost else []

    def _hand_over(self, timeout_s: float | None) -> str:
        """How it went. Who was never welcomed has nothing to hand over, so there is nothing to say of that."""
        began_at = time.monotonic()
        self.training.close(timeout_s)
        self.beside.wake()
        while self.training.left is None and not self.beside.obituary:
            waited_s = time.monotonic() - began_at - self._patience_s(timeout_s)
            if waited_s >= ANSWER_S_MAX or (waited_s >= 0 and not self._is_node_alive):
                break
            self._stand()
        self.training.stand()  # the last versions may have come since it last looked
        if self.training.left is not None:
            return REASONS[self.training.left.way]
        why = self.beside.obituary or self.beside.standstill or "what runs beside the loop says nothing"
        if self.training.config is not None:
            log.warning("%s: left without an answer: %s; its last work may not be in the run", self._who.name, why)
        return f"it left without an answer: {why}; its last work may not be in the run"

    @property
    def _is_node_alive(self) -> bool:
        return not self.beside.standstill and time.monotonic() - self.beside.heard_at <= self._silence_s

    def _patience_s(self, timeout_s: float | None) -> float:
        config = self.training.config
        return 0.0 if config is None else patience_s(config, self.training.is_stop_asked, timeout_s)

    def _stand(self) -> None:
        if self.training.stand():
            self.beside.wake()
        self.beside.flush()
        time.sleep(POLL_S)

    def _check(self) -> None:
        self._check_refusal()
        if self.beside.obituary and not self._is_closed:
            self._bury()

    def _check_refusal(self) -> None:
        left = self.training.left
        if left is not None and left.refused is not None:
            raise RefusedError(left.refused.text, left.refused.why)

    def _bury(self) -> None:
        """What ran beside the loop is gone, and with it what nobody else knew: the bases and what was outstanding.

        So this life is over, and another begins as after a restart of the whole process: its model is set to the run's.
        It is waited for, because steps taken meanwhile would be given up; where steps were taken before, for as long as
        a syncer is away, which ends no loop.
        """
        now, obituary = time.monotonic(), self.beside.obituary
        self._has_joined |= self.training.config is not None
        self._deaths = [at for at in self._deaths if now - at < DEATHS_S] + [now]
        if self._is_hopeless:
            times = f", {len(self._deaths)} times within {DEATHS_S:g} s" if len(self._deaths) > 1 else ""
            without = "" if self._node == "thread" else '; node="thread" (SKERRY_NODE=thread) does without that process'
            raise RuntimeError(
                f"{obituary}{times}: what it said last is in the log and on stderr{without}"
            ) from self.beside.failure
        log.warning(
            "%s: another takes its place; the loop stands until it has joined, and the model is the run's", obituary
        )
        self._steps_merged += self.training.steps_merged
        self._lost_by[obituary] += self._steps - self._steps_over - self.training.steps_merged
        self._steps_over = self._steps
        self.beside.end()
        self._begin()
        is_under_way = self._stepped_at is not None
        self.start(0.0 if is_under_way else self._join_timeout_s)

    @property
    def _is_hopeless(self) -> bool:
        """Another would end like the last one: it died of what this process has too, at once, or again and again."""
        never_began = isinstance(self.beside, NodeProcess) and self.beside.has_failed and not self._has_joined
        return self._node == "thread" or never_began or len(self._deaths) > DEATHS_MAX


def fetch_config(
    host: str,
    port: int,
    token: bytes | None,
    join_timeout_s: float,
    others: tuple[tuple[str, int], ...] = (),
    key_file: str | None = None,
) -> configs.Config:
    """Ask a syncer what it trains, waiting for it if it is not there yet."""
    inbox = Inbox(INBOX_MAX)
    client = Client(host, port, token, inbox, _no_payload, others=others, tls=tls_of(key_file))
    patience = Patience(client.address, join_timeout_s)
    try:
        while True:
            patience.look(client.trouble)
            try:
                event = inbox.get(timeout=ANSWER_POLL_S)
            except queue.Empty:
                continue
            match event:
                case Opened():
                    client.send(event.peer, Ask())
                case Received(message=Answer() as answer):
                    return _offered(answer.config, client.address)
                case Received(message=Refused() as refused) if refused.is_final:
                    raise RefusedError(refused.text, refused.why)
    finally:
        client.close()


def _offered(data: bytes, address: str) -> configs.Config:
    try:
        return configs.offered(data)
    except ConfigError as error:
        raise ProtocolError(f"{address}: says what no run is configured with: {error}") from None


def _no_payload(message: Message) -> int:
    raise ProtocolError(f"{type(message).__name__} with a payload")


def join_timeout(given_s: float | str | None, default_s: float) -> float:
    """How long to wait for a syncer: what is given, else what the environment says, else the default."""
    words = given_s if given_s is not None else os.environ.get("SKERRY_JOIN_TIMEOUT_S") or default_s
    try:
        limit_s = float(words)
    except (TypeError, ValueError):
        limit_s = math.nan
    if not 0 <= limit_s < math.inf:
        raise ConfigError(f"join_timeout_s (SKERRY_JOIN_TIMEOUT_S) = {words}: give seconds, or 0 to wait for ever")
    return limit_s


def asked_for(node: str | None) -> str:
    """Where somebody wants the node half, if anybody says."""
    return node or os.environ.get("SKERRY_NODE") or ""


def state_kind(given: str | None) -> str:
    """Where a learner's arrays are: what is given, else what the environment says, else the host."""
    word = given or os.environ.get("SKERRY_STATE") or "host"
    if word not in STATES:
        raise ConfigError(f'state (SKERRY_STATE) = {word}: give "host", "device" or "auto"')
    return word


def node_kind(given: str | None) -> Kind:
    """Where the node half runs: what is given, else what the environment says, else a process if there can be one."""
    word = asked_for(given) or ("process" if can_be_process() else "thread")
    if word not in ("process", "thread"):
        raise ConfigError(f'node (SKERRY_NODE) = {word}: give "process" or "thread"')
    if word == "process" and not can_be_process():
        raise ConfigError('node (SKERRY_NODE) = process: this system has no memfd_create; give "thread"')
    return cast(Kind, word)
