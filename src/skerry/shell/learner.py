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
from skerry.core.events import Closing, Gone, Ticked
from skerry.core.learner import LearnerMachine
from skerry.core.messages import Answer, Ask, Message, Refused
from skerry.errors import ProtocolError, RefusedError
from skerry.node.learner import LearnerNode, Parameters
from skerry.node.peers import Uplink
from skerry.wire.tcp import Client
from skerry.wire.transport import Opened, Received, WireEvent

INBOX_MAX = 1024
TICK_S = 0.05
POLL_S = 0.005  # how often a standing training thread looks for boundary work
LAST_VERSIONS_S = 2.0  # after the end, for versions still on their way
WAITING_SAYS_S = 10.0  # how often a learner that cannot join says so

log = logging.getLogger("skerry.learner")


class LearnerShell:
    """Runs a LearnerNode against a syncer somewhere."""

    def __init__(
        self, name: str, layout: Layout, parameters: Parameters, host: str, port: int, token: bytes | None
    ) -> None:
        self.inbox: queue.Queue[WireEvent | None] = queue.Queue(INBOX_MAX)
        self.uplink = Uplink()
        self.node = LearnerNode(name, layout, parameters, self.uplink, secrets.token_hex(8), time.monotonic)
        self.uplink.node = self.node
        self.client = Client(host, port, token, self.inbox, self.uplink.payload_bytes)  # type: ignore[arg-type]
        self.uplink.endpoint = self.client
        self._finish = False
        self._stepped_at: float | None = None
        self._ended_at: float | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="skerry-node", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ training thread

    def start(self) -> None:
        """Wait until every fragment has a base and stands in the live parameters, or the run is over before that."""
        said_at = time.monotonic()
        while not self.node.is_adopted:
            self._check()
            if self.node.ended:
                return
            if self.node.has_work:
                self._boundary(0, 0, 0.0)
            if time.monotonic() - said_at > WAITING_SAYS_S:
                said_at = time.monotonic()
                log.warning("waiting for syncer %s (%s)", self.client.address, self.client.trouble or "joining")
            time.sleep(POLL_S)
        self._stepped_at = time.monotonic()

    def step(self, tokens: int, loss: float = 0.0) -> bool:
        """A step was taken; False once the run wants no more of them."""
        self._check()
        now = time.monotonic()
        step_s = now - (self._stepped_at or now)
        self._stepped_at = now
        self._boundary(1, tokens, step_s, loss)
        return self.is_running

    @property
    def is_running(self) -> bool:
        machine = self.node.machine
        return machine is not None and not machine.is_stop_asked and not self.node.ended

    def close(self, timeout_s: float | None = None) -> None:
        """Take no further step: hand over what is left, wait until it is settled or the time is over, hang up."""
        machine, config = self.node.machine, self.node.config
        if machine is None or config is None or self._failure is not None:
            self._stop()
            return
        began = time.monotonic()
        self._post(Closing())
        while not self._is_over(machine):
            limit_s = config.sync.close_timeout_s + 5.0 if machine.is_stop_asked else config.learner.leave_timeout_s
            if time.monotonic() - began > (limit_s if timeout_s is None else timeout_s):
                break
            if self.node.has_work:
                self._boundary(0, 0, 0.0)
            time.sleep(POLL_S)
        self._boundary(0, 0, 0.0)
        self._post(Gone())
        self._stop()

    def _is_over(self, machine: LearnerMachine) -> bool:
        """All is settled and nobody asks for more; the word that the run is done may overtake its last versions."""
        if self.node.refused:
            return True
        if self.node.ended and self._ended_at is None:
            self._ended_at = time.monotonic()
        is_late = self._ended_at is not None and time.monotonic() - self._ended_at > LAST_VERSIONS_S
        return is_late or (machine.is_settled and (self.node.ended or machine.state == "leaving"))

    def _boundary(self, steps: int, tokens: int, step_s: float, loss: float = 0.0) -> None:
        self.node.boundary(steps, tokens, step_s, loss)
        self._wake()

    def _check(self) -> None:
        if self.node.refused:
            raise RefusedError(self.node.refused)
        if self._failure is not None:
            raise RuntimeError("the learner's node thread died") from self._failure

    def _wake(self) -> None:
        with contextlib.suppress(queue.Full):  # it is awake then
            self.inbox.put_nowait(None)

    def _post(self, event: Closing | Gone) -> None:
        self._posted = event
        self._wake()
        while self._posted is not None and self._thread.is_alive():
            time.sleep(POLL_S)

    _posted: Closing | Gone | None = None

    def _stop(self) -> None:
        self._finish = True
        self._wake()
        self._thread.join(timeout=5.0)
        self.client.close()

    # ------------------------------------------------------------------------------------------ node thread

    def _run(self) -> None:
        try:
            while not self._finish:
                self._turn()
        except BaseException as error:
            self._failure = error
            log.exception("the learner's node thread died")

    def _turn(self) -> None:
        posted = self._posted  # read first: boundaries passed before it was posted are handled before it
        try:
            event = self.inbox.get(timeout=TICK_S)
            self._take(event)
            for _ in range(INBOX_MAX):
                self._take(self.inbox.get_nowait())
        except queue.Empty:
            pass
        self.node.drain_boundaries()
        if self.node.machine is not None:
            if posted is not None:
                self.node.handle(posted)
            self.node.handle(Ticked())
        if posted is not None:
            self._posted = None

    def _take(self, event: WireEvent | None) -> None:
        if event is not None:
            self.uplink.take(event)


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
