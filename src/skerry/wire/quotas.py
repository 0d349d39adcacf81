"""What one peer, one address and all strangers together may take of a syncer: its time, memory and descriptors.

Rules that hold here: who takes too much is held back first, by not being read, so that TCP holds its sender back; only
who floods for long is lost. Honest learners come nowhere near any of it: each bound says what they do. Whom a bound is
held against is what cannot be chosen at will: a peer that proved itself, or the address of one that did not.

Nothing here knows sockets, messages or a clock: time is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from skerry.wire.frames import MESSAGE_BYTES_MAX

MESSAGES_PER_S = 100.0  # of one peer, heartbeats too; a learner reports 20 times a second at most
MESSAGES_BURST = 400.0
MESSAGES_AT_FIRST = 64.0  # of a new peer: little is gained by coming back for another burst
MESSAGE_BYTES_PER_S = float(1 << 20)  # of messages without payload; 20 reports on a thousand fragments are 0.3 MiB
MESSAGE_BYTES_BURST = float(32 << 20)  # a hello of a hundred thousand tensors, or buffers, and more
PAYLOADS_PER_S = 200.0  # of one peer; a learner sends one a fragment in each round that it is in,
PAYLOADS_BURST = 400.0  # and those of all fragments four times over (`quotas_of`)
PAYLOAD_BYTES_PER_S = float(256 << 20)  # 2 Gbit/s, once twice the model in float32 has come quicker than that
PAYLOAD_BYTES_BURST = float(256 << 20)  # where the model is small
FLOOD_S = 60.0  # a peer that was held back for most of so long, for messages, is lost
FLOOD_SHARE = 0.8

TRANSFER_BYTES_MAX = 1 << 30  # of payloads on their way, of all peers; beyond it a peer has one stream's at a time
TRANSFER_LOOK_S = 30.0  # what has begun to come must go on: in so long it has to bring
TRANSFER_BYTES_PER_S_MIN = 2048.0  # so much, on all streams of its peer; a twentieth of a 0.5 Mbit/s link has 3,125

MESSAGE_BYTES_SPARE = 1 << 20  # of one message, beside twice what the run's own layout takes in a hello
BRIEF_S = 15.0  # a peer that is lost so soon after it came was refused, or has left:
BRIEF_BYTES_PER_S = float(1 << 20)  # what it said is charged to its name or address,
BRIEF_BYTES_BURST = float(4 << 20)  # once that is more than so much,
BRIEF_WAIT_S_MAX = 5.0  # and the next from there is not read for a while, so long at most

QUEUED_BYTES_MAX = 8 << 20  # of messages that wait for one peer to read them; a welcome is 1 MiB for many tensors
PEER_SHARE = 8  # of the inbox: a peer's payloads take no more than one part in so many, and one payload

SPARE_PEERS = 16  # beside each learner and the connection it lost: who asks for the configuration, who only begins
PEERS_PER_NAME = 4  # that a key proves: the link, those that it lost and are not known to be gone, and who asks first
RESERVED_FILES = 64  # descriptors for the store, the log, the status, the pools; a syncer has about 25 open
STRANGERS_MAX = 256  # connections that are not authenticated; but a quarter of the descriptors at most
FAILURES_PER_S = 50.0  # connections of one address that came to nothing; then it is not let in for a moment
FAILURES_BURST = 300.0  # more than all strangers at once, for a fleet may be cut off while it joins
FAILURES_DEBT_S = 2.0  # that it is kept out once no more of them come, however many came
SILENT_S = 0.5  # who has said nothing for so long is the first to make way; a learner speaks within a round trip
GREEDY_SHARE = 4  # an address with more than one part in so many of the strangers' places makes way before all others
GUESSES_PER_S = 2.0  # wrong proofs of one address that are answered at once; a learner with the wrong token makes one
GUESSES_BURST = 20.0
GUESS_DELAY_S = 0.5  # that others are answered late,
GUESSES_WAITING_MAX = 64  # of all addresses together; those that have waited for longest are hung up on
PLACES_MAX = 4096  # addresses of which something is remembered; the longest unheard makes way


@dataclass(frozen=True, slots=True)
class Quotas:
    """The bounds that follow from a run and from the system; without any, an endpoint is for peers that are trusted."""

    peers_max: int
    strangers_max: int
    connections_max: int  # of peers, of strangers, and of those whose last words are on their way
    payloads_burst: float
    payload_bytes_burst: float
    message_bytes_max: int = MESSAGE_BYTES_MAX
    transfer_bytes_max: int = TRANSFER_BYTES_MAX
    transfer_bytes_per_s_min: float = TRANSFER_BYTES_PER_S_MIN


def quotas_of(
    *,
    learners: int,
    streams: int,
    fragments: int,
    parameters: int,
    files_max: int,
    mbit_up: float,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
) -> Quotas:
    """What a syncer of so many learners can give; `files_max` descriptors are all that it has."""
    connections_max, strangers_max = _connections_max(files_max)
    least = TRANSFER_BYTES_PER_S_MIN
    if mbit_up:  # the learner holds itself to this, over all its streams: a tenth of it is a standstill
        least = min(least, mbit_up * 1e6 / 8 / streams / 10)
    return Quotas(
        peers_max=min(2 * learners + SPARE_PEERS, learners_max(files_max, streams)),
        strangers_max=strangers_max,
        connections_max=connections_max,
        payloads_burst=PAYLOADS_BURST + 4 * fragments,
        payload_bytes_burst=max(PAYLOAD_BYTES_BURST, 2.0 * 4 * parameters),
        message_bytes_max=min(message_bytes_max, MESSAGE_BYTES_MAX),
        transfer_bytes_per_s_min=least,
    )


def learners_max(files_max: int, streams: int) -> int:
    """That so many descriptors of a syncer are room for."""
    connections_max, strangers_max = _connections_max(files_max)
    return max(1, (connections_max - strangers_max) // (1 + streams))


def _connections_max(files_max: int) -> tuple[int, int]:
    """In all, and of those that are not authenticated."""
    connections_max = max(8, files_max - RESERVED_FILES)
    return connections_max, min(STRANGERS_MAX, connections_max // 4)


class Allowance:
    """A bucket that fills at a rate. What has come has come, so it may be in debt; who is in debt waits.

    It is never in more debt than is paid in `debt_s_max`, so that nobody pays for long for what is over.
    """

    def __init__(
        self, per_s: float, burst: float, now: float, at_first: float | None = None, debt_s_max: float = inf
    ) -> None:
        self.per_s, self.burst = per_s, burst
        self._least = -per_s * debt_s_max
        self._level, self._at = burst if at_first is None else at_first, now

    def spend(self, count: float, now: float) -> None:
        self._fill(now)
        self._level = max(self._least, self._level - count)

    def wait_s(self, now: float) -> float:
        """Until it is out of debt; 0 if it is not in any."""
        self._fill(now)
        return max(0.0, -self._level / self.per_s)

    def is_full(self, now: float) -> bool:
        self._fill(now)
        return self._level >= self.burst

    def _fill(self, now: float) -> None:
        self._level = min(self.burst, self._level + max(0.0, now - self._at) * self.per_s)
        self._at = max(now, self._at)


class Intake:
    """What one peer has sent, against what it may: messages on one side, payloads on the other."""

    def __init__(self, quotas: Quotas, now: float) -> None:
        self._messages = Allowance(MESSAGES_PER_S, MESSAGES_BURST, now, MESSAGES_AT_FIRST)
        self._message_bytes = Allowance(MESSAGE_BYTES_PER_S, MESSAGE_BYTES_BURST, now)
        self._payloads = Allowance(PAYLOADS_PER_S, quotas.payloads_burst, now)
        self._payload_bytes = Allowance(PAYLOAD_BYTES_PER_S, quotas.payload_bytes_burst, now)
        self._held_s, self._since = 0.0, now  # for how long it was held back for messages, since when

    def came(self, is_bulk: bool, count: int, bytes: int, now: float) -> float:
        """So much has come on a connection; for how long that is not to be read now."""
        each, size = (self._payloads, self._payload_bytes) if is_bulk else (self._messages, self._message_bytes)
        each.spend(count, now)
        size.spend(bytes, now)
        wait_s = max(each.wait_s(now), size.wait_s(now))
        if not is_bulk:
            self._held_s += wait_s
        return wait_s

    def is_flood(self, now: float) -> bool:
        """It was held back for most of the last while: this is no burst."""
        if now - self._since < FLOOD_S:
            return False
        share, self._held_s, self._since = self._held_s / (now - self._since), 0.0, now
        return share >= FLOOD_SHARE


@dataclass(slots=True)
class Progress:
    """Of what has begun to come on one connection and is not complete."""

    since: float
    bytes: int  # that the connection, or all of its peer that carry payloads, had brought by then

    def stands(self, bytes: int, now: float, per_s_min: float) -> bool:
        """Whether it has brought too little since the last look, which this is if that was long ago."""
        if now - self.since < TRANSFER_LOOK_S:
            return False
        too_little = bytes - self.bytes < per_s_min * (now - self.since)
        self.since, self.bytes = now, bytes
        return too_little


class Places:
    """An allowance for each address; those that have all of theirs need not be remembered."""

    def __init__(self, per_s: float, burst: float, debt_s_max: float = inf) -> None:
        self._per_s, self._burst, self._debt_s_max = per_s, burst, debt_s_max
        self._of: dict[str, Allowance] = {}  # the last that was charged last

    def __len__(self) -> int:
        return len(self._of)

    def charge(self, place: str, now: float, count: float = 1) -> None:
        allowance = self._of.pop(place, None) or Allowance(self._per_s, self._burst, now, debt_s_max=self._debt_s_max)
        allowance.spend(count, now)
        self._of[place] = allowance
        if len(self._of) > PLACES_MAX:
            del self._of[next(iter(self._of))]

    def wait_s(self, place: str, now: float) -> float:
        allowance = self._of.get(place)
        if allowance is None:
            return 0.0
        if allowance.is_full(now):
            del self._of[place]
        return allowance.wait_s(now)


Who = TypeVar("Who")


class Strangers(Generic[Who]):
    """Connections that have proved nothing, by address. None of them can be kept out by who says nothing.

    Where there is no room, one makes way. It is of the address that has most of them, if that has far more than its
    share; and of those it is the one that has been there for longest and said nothing, or else the oldest. So whoever
    comes has as long to prove itself as it takes to fill all places once, from however many addresses.

    Once a learner has proved itself on its control connection, those for payloads are awaited from its address. As
    many as are awaited take no places of strangers and do not make way: the peer's own places are there for them.
    """

    def __init__(self, count_max: int) -> None:
        self.count_max = count_max
        self.failures = Places(FAILURES_PER_S, FAILURES_BURST, FAILURES_DEBT_S)
        self.guesses = Places(GUESSES_PER_S, GUESSES_BURST)
        self._entered: dict[Who, tuple[str, float]] = {}  # place and time; the oldest first
        self._of: dict[str, dict[Who, None]] = {}  # likewise
        self._awaited: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entered)

    def first_out(self, is_silent: Callable[[Who], bool], now: float) -> Who | None:
        """Who makes way for one more; None if there is room."""
        spared = {place for place, count in self._awaited.items() if len(self._of.get(place, ())) <= count}
        taken = len(self._entered) - sum(min(count, len(self._of.get(p, ()))) for p, count in self._awaited.items())
        if taken < self.count_max:
            return None
        greedy = max((place for place in self._of if place not in spared), key=lambda place: len(self._of[place]))
        if len(self._of[greedy]) > self.count_max // GREEDY_SHARE:
            prey = list(self._of[greedy])
        else:
            prey = [who for who, (place, _) in self._entered.items() if place not in spared]
        silent = (who for who in prey if now - self._entered[who][1] > SILENT_S and is_silent(who))
        return next(silent, prey[0])

    def is_awaited(self, place: str) -> bool:
        """A connection from there is one that a learner was told to make."""
        return self._awaited.get(place, 0) > len(self._of.get(place, ()))

    def await_from(self, place: str, count: int) -> None:
        """So many more connections of peers are awaited from there, or fewer."""
        self._awaited[place] = self._awaited.get(place, 0) + count
        if not self._awaited[place]:
            del self._awaited[place]

    def enter(self, who: Who, place: str, now: float) -> None:
        self._entered[who] = (place, now)
        self._of.setdefault(place, {})[who] = None

    def leave(self, who: Who) -> str | None:
        """It is no stranger any more, or is gone; its place if it was one until now."""
        place, _ = self._entered.pop(who, (None, 0.0))
        if place is not None:
            del self._of[place][who]
            if not self._of[place]:
                del self._of[place]
        return place
