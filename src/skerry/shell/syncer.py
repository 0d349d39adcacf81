"""The syncer process: a server, a node, its workers, one loop, and a status file for whoever looks. No torch here."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from skerry.core.events import Interrupted
from skerry.core.messages import BUFFERS_BYTES_MAX
from skerry.core.vocabulary import Ending
from skerry.node import telemetry
from skerry.node.durations import Durations
from skerry.node.log import Written
from skerry.node.peers import Learners
from skerry.node.syncer import SyncerNode, Work
from skerry.node.turns import LINE_MAX, SyncerDriver
from skerry.run import evaluations
from skerry.run.export import lineage_of
from skerry.run.keys import Keys
from skerry.run.room import DiskWatch
from skerry.shell.doorkeeper import Doorkeeper
from skerry.shell.identity import ADMIN_KEY, ADMIN_TOKEN, admin_token
from skerry.shell.workers import Workers
from skerry.store.files import put_in_place
from skerry.store.store import Store
from skerry.text import counted, size
from skerry.wire.quotas import MESSAGE_BYTES_SPARE, QUEUED_BYTES_MAX, Quotas, learners_max, quotas_of
from skerry.wire.server import Server
from skerry.wire.transport import Inbox, Opened

TICK_S = 0.02
GATHER_S = 0.002  # from the end of a turn to the next: most of what a turn costs it costs for one event as for ten
STATUS_S = 0.5
SWITCH_S = 0.0005  # workers need the GIL often and briefly: with Python's 5 ms they would wait longer than they work
POSITION_BYTES = 64  # of a report, for each fragment, at most
FAREWELL_S = 3.0  # for learners to take in the last message before this process ends

log = logging.getLogger("skerry.syncer")


class SyncerShell:
    """Runs a SyncerNode against the real clock, real sockets and a real disk."""

    def __init__(
        self,
        store: Store,
        host: str,
        port: int,
        token: bytes | None,
        keys: Keys | None = None,
        insecure: bool = False,
    ) -> None:
        _allow_files()
        self.inbox = Inbox(LINE_MAX)
        self.root = store.root
        self._is_status_waiting = False  # for the disk
        self._turned_at = 0.0  # when the last turn ended
        self._turns = Durations()  # of those that had something to take in
        self._is_woken = False  # the inbox has a word of the workers that something has ended
        self._status_trouble = ""  # why its file could not be written last
        self.learners = Learners()
        self.doorkeeper = Doorkeeper(keys) if keys else None
        cores = len(os.sched_getaffinity(0))
        self.node = self.learners.node = SyncerNode(store, self.learners, time.monotonic, threads=cores)
        self._lineage = lineage_of(self.node.machine.state.created)
        self.disk = DiskWatch(store.root, [each.size for each in self.node.fragments], self.node.config.store)
        sys.setswitchinterval(SWITCH_S)
        threads = min(self.node.config.merge.threads, max(2, cores))
        self.workers = self.node.pool = Workers[Work](threads, self._wake)
        self.writer = self.node.log.pool = Workers[Written](1, self._wake, "writer")
        self.driver = SyncerDriver(self.node, self.learners, time.monotonic)
        wire = self.node.config.wire
        self.server = self.learners.endpoint = Server(
            host,
            port,
            token,
            self.inbox,
            self.learners.payload_bytes,
            tls=self.doorkeeper.tls if self.doorkeeper else None,
            insecure=insecure,
            heartbeat_s=wire.heartbeat_s,
            timeout_s=wire.timeout_s,
            admin=None if self.doorkeeper else admin_token(store.root),
            takes_orders=True,
            streams=wire.streams,
            mbit_max=wire.mbit_max_down,
            queue_bytes_max=QUEUED_BYTES_MAX,
            quotas=self._quotas(),
            turned_away=self.learners.turned_away,
        )

        self.learners.answer = self.server.answer

    def _quotas(self) -> Quotas:
        config, files_max = self.node.config, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        quotas = quotas_of(
            learners=config.run.learners,
            streams=config.wire.streams,
            fragments=len(self.node.fragments),
            parameters=sum(fragment.size for fragment in self.node.fragments),
            files_max=files_max,
            mbit_up=config.wire.mbit_max_up,
            message_bytes_max=self._message_bytes_max(),
        )
        if quotas.peers_max < config.run.learners:
            log.warning(
                "%d open files are room for %s, and the run is for %d: raise the hard limit (ulimit -n)",
                files_max, counted(quotas.peers_max, "learner"), config.run.learners,
            )  # fmt: skip
        return quotas

    def _message_bytes_max(self) -> int:
        """Of what learners of this run have to say: what they train in a hello, positions in a report, and buffers."""
        created = self.node.machine.state.created
        least = 2 * (len(created.layout) + len(created.contents)) + POSITION_BYTES * len(self.node.fragments)
        return least + MESSAGE_BYTES_SPARE + (BUFFERS_BYTES_MAX if self.node.wants_buffers else 0)

    def run(self, keep_going: Callable[[], bool]) -> Ending:
        """Serve until the run is closed or `keep_going` says no; the reason it ended."""
        try:
            self._serve(keep_going)
            self._farewell()
        finally:
            self.workers.close()
            self.writer.close()
        assert self.node.finished is not None
        return self.node.finished

    def _serve(self, keep_going: Callable[[], bool]) -> None:
        status_at = 0.0
        while not self.node.finished:
            if not keep_going() and not self.node.machine.is_interrupted:
                self.node.handle(Interrupted(), time.monotonic())
            self._turn()
            self.node.tidy()
            if time.monotonic() - status_at > STATUS_S:
                status_at = time.monotonic()
                self._look_at_keys()
                self.write_status()
                if left_out := self.learners.left_out(time.monotonic()):
                    log.warning("left out here: %s about who came, went or was turned away", counted(left_out, "line"))

    def _turn(self) -> None:
        """Put what has come in line, after waiting a tick at most if there was nothing, and take a turn.

        Contributions, and what workers have done, come in bursts: a moment after the last turn they have come together,
        and none has waited for longer than that.

        The inbox is told what still waits to be looked at: while that is too much, no further payloads are read.
        """
        if self.node.log.is_full:
            time.sleep(TICK_S)  # nothing further is taken in before the disk has caught up
        early_s = self._turned_at + GATHER_S - time.monotonic()
        if early_s > 0 and not len(self.driver):
            time.sleep(early_s)
        wait_s = 0.0 if len(self.driver) else TICK_S
        came = self.inbox.drain(self.driver.room, wait_s) if self.driver.room else ()
        for event in came:
            if isinstance(event, Opened):
                self._look_at_keys()  # it may have the new key of somebody who was turned out
            if event is not None:  # else a worker's word that something has ended, which a turn takes in
                self.driver.offer(event)
        self._is_woken = False  # before the turn: what has ended by now it takes in, and who ends later wakes
        is_idle, began = not came and not len(self.driver), time.monotonic()
        self.driver.turn()
        self.inbox.settle(self.driver.waiting_bytes, self.driver.waiting_of)
        self._turned_at = time.monotonic()
        if not is_idle:
            self._turns.add(self._turned_at - began)

    def _look_at_keys(self) -> None:
        if self.doorkeeper is not None:
            self.doorkeeper.look(self.learners, time.monotonic())

    def _wake(self) -> None:
        """Called on a worker: once is enough, however many of them end their work before the next turn."""
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(queue.Full):  # it is awake then
                self.inbox.put_nowait(None)

    def _farewell(self) -> None:
        """Learners that were told the run is done report a last time and hang up; then this process may end."""
        deadline = time.monotonic() + (FAREWELL_S if self.node.finished == "closed" else 0.0)
        while self.learners.links and time.monotonic() < deadline:
            self._turn()
        self.write_status()
        self.server.close()

    def write_status(self) -> None:
        """The whole position as JSON, for who asks over the wire, and in a file that is replaced in one go.

        It is not durable, and nothing depends on it.
        """
        record = telemetry.status(self.node.machine, self.server.bytes_in, self.server.bytes_out, time.time())
        record |= {"pid": os.getpid(), "address": self.server.address, "unwritten_bytes": self.node.log.waiting_bytes}
        record["admin"] = ADMIN_KEY if self.doorkeeper else ADMIN_TOKEN
        record["turned_away"] = self.learners.turned_away.rows(time.monotonic())
        if self.node.is_disk_behind:
            record["waiting"] = f"for the disk: {size(self.node.log.waiting_bytes)} of merges are to be written"
        self.disk.look(time.monotonic())
        if self.disk.short is not None:
            record["disk"] = self.disk.short._asdict()
        if self._lineage is not None:
            record["lineage"] = self._lineage
        if evaluated := evaluations.newest(self.root):
            record["evaluated"] = evaluated
        record["threads"] = {t.native_id: t.name for t in threading.enumerate() if t.native_id}  # whose CPU is whose
        record["turns"] = self._turns.counts  # by length: `node/durations.py`
        status = msgspec.json.encode(record)
        self.server.show(status)
        if not self._is_status_waiting:  # a file must not tell of more than the tape does
            self._is_status_waiting = True
            self.node.log.then(partial(self._keep_status, status))

    def _keep_status(self, status: bytes) -> None:
        self._is_status_waiting = False
        trouble = ""
        try:
            write_json(self.root / "status.json", msgspec.Raw(status))
        except OSError as error:  # if the disk is full, the store says so at its next commit, and stops
            trouble = error.strerror or str(error)
        if trouble != self._status_trouble:
            log.warning("status.json %s", f"cannot be written: {trouble}" if trouble else "can be written again")
        self._status_trouble = trouble


def _allow_files() -> None:
    """As many sockets as the system lets this process have: a learner has several, and soft limits are often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS names a hard limit that it does not give
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def few_files(learners: int, streams: int) -> str:
    """Why a syncer that is started here would turn learners away; empty if it has room for so many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = learners if hard == resource.RLIM_INFINITY else learners_max(hard, streams)
    if room >= learners:
        return ""
    return f"{hard} open files are room for {counted(room, 'learner')}: raise the hard limit (ulimit -n)"


def write_json(path: Path, record: object) -> None:
    put_in_place(path, msgspec.json.encode(record))
