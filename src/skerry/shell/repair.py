"""Before a run is served again: every fragment whose newest file is damaged is restored, or the run is not served.

What needs no learner is done at once; for the rest the run's address is served and every learner that dials is asked
for its copy. Each fragment is durable once it is restored, so a repair that is broken off goes on later. Learners are
hung up on at the end and dial again by themselves. It imports no torch.
"""

from __future__ import annotations

import logging
import queue
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from skerry import config as configs
from skerry.algo.fragments import decode_layout
from skerry.core.facts import Restored, SteppedBack
from skerry.core.messages import Answer, Ask, Hello, Lend, Lent, Message
from skerry.core.state import RunState, state_of
from skerry.errors import FileDamaged, ProtocolError
from skerry.node.algebra import FLOAT32
from skerry.node.peers import NAME
from skerry.run import repair
from skerry.run.keys import Keys
from skerry.run.repair import Damage
from skerry.shell.doorkeeper import Doorkeeper
from skerry.store.store import Store
from skerry.wire.quotas import QUEUED_BYTES_MAX, quotas_of
from skerry.wire.server import Server
from skerry.wire.transport import Inbox, Lost, Opened, Received, WireEvent

INBOX_MAX = 1024
TICK_S = 0.1
SAYS_S = 10.0

log = logging.getLogger("skerry.syncer")

Listen = tuple[str, int, bytes | None]  # host, port, token


def make_whole(
    store: Store,
    listen: Listen,
    previous: bool,
    keep_going: Callable[[], bool],
    genesis: Path | None = None,
    keys: Keys | None = None,
    insecure: bool = False,
) -> bool:
    """Restore what is damaged; False if `keep_going` ended it. Whoever goes on opens the store anew.

    `genesis` is a file that may have the run's first values. With `keys` only learners that have one are asked.
    """
    state = state_of(store.records)
    found = repair.mend_files(store, state, genesis)
    damage = repair.damaged(store, state)
    lost = ", ".join(map(str, damage))
    log.info("repair: %s", f"checkpoints and journal do not give {lost}" if damage else _without_damage(found.damaged))
    left = [d for d in damage if not _remade(store, state, d)]
    _leave_behind(store, state, found.broken, damage)
    if left and previous:  # all or none: a fragment does not lose work for a run that cannot go on anyway
        _commit(store, [repair.step_back(store, state, d) for d in left])
        return True
    for d in left:
        if not repair.can_be_lent(d):
            why = "not to be had again as it was, for the tape has no sha256 to check a learner's copy by"
            raise FileDamaged(f"{why}: {repair.explain(store, state, [d], tried='same')}")
    return not left or Lenders(store, state, left, listen, keys, insecure).wait(keep_going)


def _without_damage(found: int) -> str:
    return "the newest version of every fragment can be had; what is damaged is named above" if found else "no damage"


def _leave_behind(store: Store, state: RunState, broken: Sequence[Damage], damage: Sequence[Damage]) -> None:
    """Where the newest version can be had, a whole file of it alone: what is damaged before it is needed no more.

    Else no backup of the run could be whole until the syncer has written two checkpoints, a closed run's never.
    """
    lost = {d.fragment.index for d in damage}
    for d in broken:
        if d.fragment.index not in lost and _remade(store, state, d):
            log.info("repair: %s: what is damaged before it is needed no more", d)


def _remade(store: Store, state: RunState, damage: Damage) -> bool:
    fact = repair.remake(store, state, damage)
    if fact is not None:
        _commit(store, [fact])
    return fact is not None


def _commit(store: Store, facts: Sequence[Restored | SteppedBack]) -> None:
    store.commit([msgspec.msgpack.encode(fact) for fact in facts], [fact.file for fact in facts])
    for fact in facts:
        log.warning("fragment %d version %d: %s", fact.fragment, fact.version, _how(fact))


def _how(fact: Restored | SteppedBack) -> str:
    if isinstance(fact, Restored):
        return f"restored from {fact.source}"
    before, lost = fact.to, fact.version - 1
    return f"restored from version {before}: version {lost} could not be had, what was merged since is lost"


class Lenders:
    """The run's address while fragments are missing: learners that dial are asked for their copies."""

    def __init__(
        self,
        store: Store,
        state: RunState,
        damage: Sequence[Damage],
        listen: Listen,
        keys: Keys | None = None,
        insecure: bool = False,
    ) -> None:
        self.store, self.created, self._config = store, state.created, state.config
        self.layout = decode_layout(state.created.layout)
        self.asked = {d.fragment.index: d for d in damage}
        self.missing = dict(self.asked)
        self.owed: set[tuple[int, int]] = set()  # peers and the fragments that each was asked for, once
        self.learners: dict[int, str] = {}  # peer -> who it said it is
        self.principals: dict[int, str] = {}  # peer -> who its key says it is
        self.ways_out = sorted({way for d in damage for way in repair.ways_out(store, state, d, "same")})
        self.refused = 0  # copies that were not what the tape says
        self.inbox = Inbox(INBOX_MAX)
        config = configs.decode(self._config)
        self.server = Server(
            *listen,
            self.inbox,
            self.payload_bytes,
            tls=Doorkeeper(keys).tls if keys else None,
            insecure=insecure,
            heartbeat_s=config.wire.heartbeat_s,
            timeout_s=config.wire.timeout_s,
            queue_bytes_max=QUEUED_BYTES_MAX,
            quotas=quotas_of(
                learners=config.run.learners,
                streams=1,
                fragments=len(self.asked),
                parameters=sum(d.fragment.size for d in damage),
                files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                mbit_up=config.wire.mbit_max_up,
            ),
        )

    def wait(self, keep_going: Callable[[], bool]) -> bool:
        """Until nothing is missing, however long that takes, or `keep_going` says no."""
        said_at = float("-inf")
        try:
            while self.missing and keep_going():
                if time.monotonic() - said_at > SAYS_S:
                    said_at = time.monotonic()
                    self._say()
                try:
                    self._take(self.inbox.get(timeout=TICK_S))
                    self.inbox.settle()
                except queue.Empty:
                    continue
        finally:
            self.server.close()
        return not self.missing

    def _say(self) -> None:
        log.warning(
            "repair: waiting on %s for a learner that holds %s; %d connected, %d wrong copies refused; "
            "to give up, stop this and restore it from a copy%s",
            self.server.address,
            ", ".join(map(str, self.missing.values())),
            len(self.learners),
            self.refused,
            "".join(f", or {way}" for way in self.ways_out),
        )

    def _take(self, event: WireEvent | None) -> None:
        match event:
            case Opened(principal=principal) if principal:
                self.principals[event.peer] = principal
            case Received(message=Ask()):
                self.server.send(event.peer, Answer(self.created.run, self._config))
            case Received(message=Hello() as hello):
                self._ask(event.peer, hello)
            case Received(message=Lent() as lent, payload=payload) if payload is not None:
                self._lent(event.peer, lent, payload)
            case Lost():
                self.learners.pop(event.peer, None)
                self.owed = {one for one in self.owed if one[0] != event.peer}
                self.principals.pop(event.peer, None)

    def _ask(self, peer: int, hello: Hello) -> None:
        """Ask for everything still missing; one that cannot take part hears so when the run is served."""
        is_itself = self.principals.get(peer, hello.learner) == hello.learner
        if hello.layout_digest != self.layout.digest or not NAME.fullmatch(hello.learner) or not is_itself:
            return
        if peer in self.learners:
            self.server.drop(peer, "a second hello")
            return
        self.learners[peer] = hello.learner
        for index, damage in self.missing.items():
            self.owed.add((peer, index))
            self.server.send(peer, Lend(index, damage.at.version))

    def _lent(self, peer: int, lent: Lent, payload: memoryview) -> None:
        if (peer, lent.fragment) not in self.owed:
            self.server.drop(peer, "a copy that it was not asked for")  # to look at one takes a hash of all of it
            return
        self.owed.discard((peer, lent.fragment))
        damage, learner = self.missing.get(lent.fragment), self.learners.get(peer)
        if damage is None or learner is None:
            return  # another was faster, or it is nobody who was asked
        fact = repair.take_copy(self.store, damage, learner, payload)
        if fact is None:
            self.refused += 1
            log.warning("repair: refused the copy of %s from %s: its digest is not the tape's", damage, learner)
            return
        _commit(self.store, [fact])
        del self.missing[lent.fragment]

    def payload_bytes(self, message: Message) -> int:
        """The only legal payload length of a bulk message; called by the I/O thread before it allocates."""
        damage = self.asked.get(message.fragment) if isinstance(message, Lent) else None
        if damage is None:
            raise ProtocolError(f"{type(message).__name__} while the run is being repaired")
        return FLOAT32.payload_bytes("fp32", damage.fragment)
