"""The learner's side of a process: a node thread and a client beside the training loop.

The training thread calls `step` and `close`; everything else happens on the node thread. `start` waits for the first
bases, because no step may be taken without one; after that nothing here waits for the network until `close`.
How long a learner waits for a syncer that is not there is one rule (`Patience`), for `start` and `fetch_config` alike.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import secrets
import threading
import time

from skerry import algo
from skerry import config as configs
from skerry.algo.fragments import Layout
from skerry.core.messages import Answer, Ask, Message, Refused, Welcome
from skerry.errors import ConfigError, JoinTimeout, ProtocolError, RefusedError
from skerry.node.driver import LearnerDriver
from skerry.node.learner import Parameters
from skerry.wire.tcp import Client
from skerry.wire.transport import Inbox, Opened, Received, WireEvent

INBOX_MAX = 1024
TICK_S = 0.05
POLL_S = 0.005  # how often a standing training thread looks for boundary work
LAST_TURN_S = 5.0  # for the node thread to end its turn
ANSWER_POLL_S = 0.1  # how often one who waits for an answer looks at the time
WAITING_SAYS_S = 10.0  # how often a learner that cannot join says so

log = logging.getLogger("skerry.learner")


class Patience:
    """How long to wait for a syncer that is not there, and what is said meanwhile; a limit of 0 is for ever."""

    def __init__(self, client: Client, limit_s: float) -> None:
        self.client, self.limit_s = client, limit_s
        self._began_at = self._said_at = time.monotonic()

    def refresh(self) -> None:
        """The syncer is there: whatever takes time now is its own, or the link's."""
        self._began_at = time.monotonic()

    def look(self, word: str = "") -> None:
        """Say now and then that nobody takes it in; `JoinTimeout` when that has been so for too long.

        `word` is what a syncer that was reached has against it at present, or has sent so far.
        """
        now, trouble = time.monotonic(), word or self.client.trouble or "connected, and no answer yet"
        if self.limit_s and now - self._began_at >= self.limit_s:
            raise JoinTimeout(
                f"no syncer took this learner in at {self.client.address} for {self.limit_s:g} s: {trouble}; check the "
                "address, or wait longer with join_timeout_s (SKERRY_JOIN_TIMEOUT_S; 0 is for ever)"
            )
        if now - self._said_at >= WAITING_SAYS_S:
            self._said_at = now
            log.warning("waiting for syncer %s (%s)", self.client.address, trouble)


class LearnerShell:
    """Drives a learner against a syncer somewhere, in real time."""

    def __init__(
        self, name: str, layout: Layout, parameters: Parameters, host: str, port: int, token: bytes | None
    ) -> None:
        self.inbox = Inbox(INBOX_MAX)
        self.driver = LearnerDriver(name, layout, parameters, secrets.token_hex(8), time.monotonic)
        self.node, uplink = self.driver.node, self.driver.uplink
        self.client = Client(host, port, token, self.inbox, uplink.payload_bytes)
        uplink.endpoint = self.client
        self._finish = False
        self._stepped_at: float | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="skerry-node", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ training thread

    def start(self, join_timeout_s: float) -> None:
        """Wait until every fragment has a base and stands in the live parameters, or the run is over before that."""
        patience = Patience(self.client, join_timeout_s)
        while self.driver.is_joining and self._failure is None:
            if self.driver.is_linked:
                patience.refresh()
            patience.look(self.driver.uplink.turned_away or self.driver.has_come)
            self._stand()
        self._check()
        self._stepped_at = time.monotonic()

    def step(self, tokens: int, loss: float = 0.0) -> bool:
        """A step was taken; False once the run wants no more of them."""
        self._check()
        now = time.monotonic()
        step_s = now - (self._stepped_at or now)
        self._stepped_at = now
        self.driver.boundary(tokens, step_s, loss)
        self._wake()
        return self.is_running

    @property
    def is_running(self) -> bool:
        return self.driver.is_running

    def close(self, timeout_s: float | None = None) -> None:
        """Take no further step: hand over what is left, wait until the machine says that it may go, hang up."""
        self.driver.close(timeout_s)
        self._wake()
        while self.driver.left is None and self._failure is None:
            self._stand()
        self.driver.stand()  # the last versions may have come since it last looked
        self._finish = True
        self._wake()
        self._thread.join(timeout=LAST_TURN_S)
        self.client.close()

    def _stand(self) -> None:
        if self.driver.stand():
            self._wake()
        time.sleep(POLL_S)

    def _check(self) -> None:
        left = self.driver.left
        if left is not None and left.refused is not None:
            raise RefusedError(left.refused.text, left.refused.why)
        if self._failure is not None:
            raise RuntimeError("the learner's node thread died") from self._failure

    def _wake(self) -> None:
        with contextlib.suppress(queue.Full):  # it is awake then
            self.inbox.put_nowait(None)

    # ------------------------------------------------------------------------------------------ node thread

    def _run(self) -> None:
        try:
            # before it joins: the first contribution would wait for it, and everything behind that
            algo.warm_up(lambda: log.warning("%s", algo.COMPILING))
            while not self._finish:
                self._turn()
        except BaseException as error:
            self._failure = error
            log.exception("the learner's node thread died")

    def _turn(self) -> None:
        try:
            self._take(self.inbox.get(timeout=TICK_S))
            for _ in range(INBOX_MAX):
                self._take(self.inbox.get_nowait())
        except queue.Empty:
            pass
        self.driver.tick()

    def _take(self, event: WireEvent | None) -> None:
        if event is None:
            return
        self.driver.take(event)
        self.inbox.settle()
        if isinstance(event, Received) and isinstance(event.message, Welcome) and self.node.config is not None:
            wire = self.node.config.wire
            self.client.keep_time(wire.heartbeat_s, wire.timeout_s)
            self.client.keep_rate(wire.mbit_max_up)
            log.info("joined run %s as %s (life %d)", event.message.run, event.message.learner, event.message.life)


def fetch_config(host: str, port: int, token: bytes | None, join_timeout_s: float) -> configs.Config:
    """Ask a syncer what it trains, waiting for it if it is not there yet."""
    inbox = Inbox(INBOX_MAX)
    client = Client(host, port, token, inbox, _no_payload)
    patience = Patience(client, join_timeout_s)
    try:
        while True:
            patience.look()
            try:
                event = inbox.get(timeout=ANSWER_POLL_S)
            except queue.Empty:
                continue
            match event:
                case Opened():
                    client.send(event.peer, Ask())
                case Received(message=Answer() as answer):
                    return configs.decode(answer.config)
                case Received(message=Refused() as refused) if refused.is_final:
                    raise RefusedError(refused.text, refused.why)
    finally:
        client.close()


def _no_payload(message: Message) -> int:
    raise ProtocolError(f"{type(message).__name__} with a payload")


def learner_name(given: str | None) -> str:
    """The name given, or one of this host and process."""
    if given:
        return given
    host = "".join(c if c.isalnum() or c in "._-" else "-" for c in os.uname().nodename.lower())
    return f"{host[:48]}-{os.getpid()}"


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
