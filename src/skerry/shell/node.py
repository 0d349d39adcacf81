"""The node half of a learner in real time, wherever it runs: a client, an inbox, and turns."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

import msgspec

from skerry.algo import COMPILING, Use
from skerry.algo.fragments import Layout
from skerry.core.messages import Frozen, Welcome
from skerry.node.driver import LearnerDriver
from skerry.node.mailbox import Mailbox
from skerry.shell.home import Home
from skerry.shell.identity import tls_of
from skerry.wire.client import Client
from skerry.wire.connection import addresses_of
from skerry.wire.transport import Inbox, Received, WireEvent

INBOX_MAX = 1024
TICK_S = 0.05
FIRST_HEARTBEAT_S = 0.2  # before the run has said how often: its syncer may be one of little patience
LAST_TURN_S = 5.0  # for what is under way at the end
COPY_POLL_S = 0.001  # while a device copies
AWAY_SAYS_S = 60.0  # how often it is said of a syncer that stays away

log = logging.getLogger("skerry.learner")


class Who(msgspec.Struct, frozen=True):
    """Who a learner is, and where its syncer is to be found."""

    name: str
    process: str  # of all that ever had this name, this one
    layout: Layout
    host: str
    port: int
    token: bytes | None
    others: tuple[tuple[str, int], ...] = ()  # where it may be too
    frozen: Frozen = None  # what it says of the parameters that it does not train
    key_file: str | None = None

    @property
    def address(self) -> str:
        return addresses_of(((self.host, self.port), *self.others))


class Absence:
    """What is said of a syncer that had this learner: that it is lost, now and then that it still is, its return."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._since: float | None = None
        self._said_at = 0.0

    @property
    def is_going_on(self) -> bool:
        return self._since is not None

    def look(self, is_there: bool, trouble: str, now: float) -> None:
        if is_there and self._since is not None:
            log.warning("syncer %s is back after %.0f s", self._address, now - self._since)
            self._since = None
        elif not is_there and (self._since is None or now - self._said_at >= AWAY_SAYS_S):
            trouble, self._said_at = trouble or "connected, and no answer yet", now
            if self._since is None:
                self._since = now
                log.warning("syncer %s is lost: %s; it is dialled on", self._address, trouble)
            else:
                away_s = now - self._since
                log.info("syncer %s is lost for %.0f s: %s; it is dialled on", self._address, away_s, trouble)


class NodeLoop:
    """Dials at once; whoever makes it calls `run`, then `close`."""

    def __init__(self, who: Who, post: Mailbox, home: Home) -> None:
        self.inbox = Inbox(INBOX_MAX)
        self.home = home
        self.driver = LearnerDriver(
            who.name, who.layout, who.process, time.monotonic, post, home.lay, home.algebra, frozen=who.frozen
        )
        uplink = self.driver.uplink
        where = (who.host, who.port, who.token)
        self.client = uplink.endpoint = Client(
            *where,
            self.inbox,
            uplink.payload_bytes,
            others=who.others,
            name=who.name,
            tls=tls_of(who.key_file),
            heartbeat_s=FIRST_HEARTBEAT_S,
        )
        self._absence = Absence(self.client.address)
        self._is_closed = False
        self._kernels = threading.Thread(target=self._warm_up, name="skerry-kernels", daemon=True)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Join once the kernels are there, else the first contribution would wait for them, and all others for it."""
        self._kernels.start()
        while self._kernels.is_alive() and not is_over():
            self._kernels.join(TICK_S)
            self.driver.node.catch_up()  # it says nothing before it can join: it is starting, and no syncer keeps it
        with self.home.entered():
            while not is_over():
                self._turn()

    @property
    def heartbeat_s(self) -> float:
        """How often it says that it lives, to whoever might wonder."""
        config = self.driver.node.config
        return FIRST_HEARTBEAT_S if config is None else config.wire.heartbeat_s

    def wake(self) -> None:
        """The training half has said something; from any thread."""
        with contextlib.suppress(queue.Full):  # it is awake then
            self.inbox.put_nowait(None)

    def _turn(self) -> None:
        wait_s = COPY_POLL_S if self.driver.node.is_waiting else TICK_S
        for event in self.inbox.drain(INBOX_MAX, wait_s):
            self._take(event)
        self.driver.tick(self.client.trouble)
        self._look_for_syncer()

    def _look_for_syncer(self) -> None:
        machine = self.driver.node.machine
        if machine is not None and self.driver.node.left is None and not self.driver.uplink.turned_away:
            self._absence.look(machine.linked or machine.is_done, self.client.trouble, time.monotonic())

    def close(self) -> None:
        self.client.close()
        self._is_closed = True
        self._kernels.join(LAST_TURN_S)

    def _take(self, event: WireEvent | None) -> None:
        if event is None:
            return
        self.driver.take(event)
        self.inbox.settle()
        config = self.driver.node.config
        if isinstance(event, Received) and isinstance(event.message, Welcome) and config is not None:
            self.client.keep_time(config.wire.heartbeat_s, config.wire.timeout_s)
            self.client.keep_rate(config.wire.mbit_max_up)
            if not self._absence.is_going_on:
                log.info("joined run %s as %s (life %d)", event.message.run, event.message.learner, event.message.life)

    def _warm_up(self) -> None:
        with self.home.entered():
            self.home.warm_up(lambda: log.warning("%s", COMPILING), self._load)

    def _load(self, use: Use) -> None:
        if not self._is_closed:  # a thread that is left behind in LLVM may crash the process's end
            use()
