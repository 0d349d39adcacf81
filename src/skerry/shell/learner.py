"""The learner's side of a process: a node thread and a client beside the training loop.

The training thread calls `step` and `close`; everything else happens on the node thread. `start` waits for the first
bases, because no step may be taken without one; after that nothing here waits for the network until `close`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
import time

from skerry import config as configs
from skerry.algo.fragments import Layout
from skerry.core.messages import Answer, Ask, Message, Refused
from skerry.errors import ProtocolError, RefusedError
from skerry.node.driver import LearnerDriver
from skerry.node.learner import Parameters
from skerry.wire.tcp import Client
from skerry.wire.transport import Opened, Received, WireEvent

INBOX_MAX = 1024
TICK_S = 0.05
POLL_S = 0.005  # how often a standing training thread looks for boundary work
JOIN_S = 5.0  # for the node thread to end its turn
WAITING_SAYS_S = 10.0  # how often a learner that cannot join says so

log = logging.getLogger("skerry.learner")


class LearnerShell:
    """Drives a learner against a syncer somewhere, in real time."""

    def __init__(
        self, name: str, layout: Layout, parameters: Parameters, host: str, port: int, token: bytes | None
    ) -> None:
        self.inbox: queue.Queue[WireEvent | None] = queue.Queue(INBOX_MAX)
        self.driver = LearnerDriver(name, layout, parameters, secrets.token_hex(8), time.monotonic)
        self.node, uplink = self.driver.node, self.driver.uplink
        self.client = Client(host, port, token, self.inbox, uplink.payload_bytes)  # type: ignore[arg-type]
        uplink.endpoint = self.client
        self._finish = False
        self._stepped_at: float | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="skerry-node", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ training thread

    def start(self) -> None:
        """Wait until every fragment has a base and stands in the live parameters, or the run is over before that."""
        said_at = time.monotonic()
        while self.driver.is_joining and self._failure is None:
            self._stand()
            if time.monotonic() - said_at > WAITING_SAYS_S:
                said_at = time.monotonic()
                log.warning("waiting for syncer %s (%s)", self.client.address, self.client.trouble or "joining")
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
        self._thread.join(timeout=JOIN_S)
        self.client.close()

    def _stand(self) -> None:
        if self.driver.stand():
            self._wake()
        time.sleep(POLL_S)

    def _check(self) -> None:
        left = self.driver.left
        if left is not None and left.way == "refused":
            raise RefusedError(left.refusal)
        if self._failure is not None:
            raise RuntimeError("the learner's node thread died") from self._failure

    def _wake(self) -> None:
        with contextlib.suppress(queue.Full):  # it is awake then
            self.inbox.put_nowait(None)

    # ------------------------------------------------------------------------------------------ node thread

    def _run(self) -> None:
        try:
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
        if event is not None:
            self.driver.take(event)


def fetch_config(host: str, port: int, token: bytes | None) -> configs.Config:
    """Ask a syncer what it trains, waiting for it if it is not there yet."""
    inbox: queue.Queue[WireEvent] = queue.Queue(INBOX_MAX)
    client = Client(host, port, token, inbox, _no_payload)
    try:
        while True:
            try:
                event = inbox.get(timeout=WAITING_SAYS_S)
            except queue.Empty:
                log.warning("waiting for syncer %s (%s)", client.address, client.trouble or "no answer yet")
                continue
            match event:
                case Opened():
                    client.send(event.peer, Ask())
                case Received(message=Answer() as answer):
                    return configs.decode(answer.config)
                case Received(message=Refused() as refused):
                    raise RefusedError(refused.reason)
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
