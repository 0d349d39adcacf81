"""The handshake of one connection, as functions from what was heard to what to say.

    syncer  -> Challenge   a nonce, and the protocol it speaks behind the handshake
    learner -> Proof       on the control connection: a nonce of its own, the MAC of both under the token, and the
                           protocol that it speaks itself: where they differ it hangs up, and the syncer knows why
               or Attach   on a bulk connection: the same, the session of the control connection, and which one it is
               or Inquire  by whoever wants to know the status: as Proof; it comes as a message, behind the answer
               or Instruct by whoever orders something: the order, proved by an admin's token or key, which no learner
                           has; what became of it comes as a message, behind the answer
    syncer  -> Attached    the session, how many bulk connections it has, the syncer's own MAC; or Denied, with a reason

Rules that hold here: each side proves the token over the other's fresh nonce, and the token itself is never
sent. A refusal is one line that says what to do about it; it is for good if the token is wrong, but not if one side is
older: it may be upgraded at any time, and the other one must still be there then. Nothing here knows sockets, peers or
time.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from typing import Literal

from skerry.errors import ProtocolError, WireError
from skerry.wire.frames import (
    NONCE_BYTES,
    SESSION_BYTES,
    Attach,
    Attached,
    Challenge,
    Denied,
    FromLearner,
    Inquire,
    Instruct,
    Proof,
)

HANDSHAKE = 2  # its own version. Builds of 0.2 that hear another number give up for good: what changes is `PROTOCOL`

WRONG_ADMIN = (
    "an order is proved by the admin token, which the syncer keeps as admin.token in its run directory: name a copy "
    "of it with --token-file (the learners' token gives no order)"
)
STREAMS_MAX = 64  # bulk connections of one session, whatever the other side asks for

Who = Literal["proof", "attach", "inquire", "instruct", "syncer"]


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one side brings to every handshake; without a token all proofs are empty."""

    token: bytes | None
    protocol: int  # spoken behind the handshake
    name: str = ""  # a learner's

    def __post_init__(self) -> None:
        if self.token is not None and not self.token.strip():
            raise WireError("the token is empty: put at least one line of random text into the token file")

    def __repr__(self) -> str:
        return f"<Credentials {'with' if self.token else 'without'} token, protocol {self.protocol}>"


# ------------------------------------------------------------------------------------------------- the syncer


def challenge(mine: Credentials, nonce: bytes) -> Challenge:
    return Challenge(HANDSHAKE, nonce, mine.token is not None, mine.protocol)


def refusal(mine: Credentials, nonce: bytes, said: FromLearner) -> Denied | None:
    """Why the learner that said this to our nonce is turned away; None if it is welcome."""
    if said.protocol != HANDSHAKE:
        return Denied(mismatch(syncer=HANDSHAKE, learner=said.protocol), final=False)
    if (reason := _disproof(mine, nonce, said)) is not None:
        return Denied(reason, final=True)
    if isinstance(said, Proof) and said.speaks not in (0, mine.protocol):
        return Denied(mismatch(syncer=mine.protocol, learner=said.speaks), final=False)
    return None


def out_of_role(name: str, is_admin: bool, said: FromLearner) -> Denied | None:
    """Why a key is not good for what its owner wants of the syncer; either kind may ask for the status."""
    if is_admin and isinstance(said, Proof | Attach):
        way = "join with a learner's key, made with skerry keys issue RUN NAME"
        return Denied(f"the key of {name} is an admin's, which gives orders and joins nothing: {way}", final=True)
    if not is_admin and isinstance(said, Instruct):
        way = "orders need a key made with skerry keys issue RUN NAME --admin"
        return Denied(f"the key of {name} is a learner's, which gives no order: {way}", final=True)
    return None


def _disproof(mine: Credentials, nonce: bytes, said: FromLearner) -> str | None:
    _check_nonce(said.nonce)
    if isinstance(said, Instruct):
        is_right = hmac.compare_digest(_mac(mine, "instruct", nonce, said.nonce, said.order), said.mac)
        return None if is_right else WRONG_ADMIN
    if mine.token is not None and not said.mac:
        return "this syncer requires a token: name a copy of its file as token_file (or SKERRY_TOKEN_FILE)"
    if mine.token is None and said.mac:
        return "this syncer has no token: leave token_file (or SKERRY_TOKEN_FILE) out, or give it one too"
    if isinstance(said, Attach):
        expected = _mac(mine, "attach", nonce, said.nonce, said.session)
    else:
        expected = _mac(mine, "inquire" if isinstance(said, Inquire) else "proof", nonce, said.nonce)
    if not hmac.compare_digest(expected, said.mac):
        return "wrong token: name a copy of the syncer's file as token_file (or SKERRY_TOKEN_FILE)"
    return None


def welcome(mine: Credentials, nonce: bytes, said: FromLearner, session: bytes, streams: int = 1) -> Attached:
    return Attached(session, _mac(mine, "syncer", said.nonce, nonce, session), streams)


# ------------------------------------------------------------------------------------------------ the learner


def disagreement(mine: Credentials, heard: Challenge) -> str:
    """Why nothing can be said to this syncer as long as neither side is upgraded; empty if it can."""
    if not can_be_told(heard):
        return mismatch(syncer=heard.protocol, learner=HANDSHAKE)
    return "" if heard.speaks == mine.protocol else mismatch(syncer=heard.speaks, learner=mine.protocol)


def answer(mine: Credentials, nonce: bytes, heard: Challenge, session: bytes, stream: int = 0) -> FromLearner:
    """What proves the token to a syncer of our handshake; `session` is empty on a control connection."""
    _check_nonce(heard.nonce)
    if session:
        return Attach(HANDSHAKE, nonce, session, _mac(mine, "attach", heard.nonce, nonce, session), stream)
    return Proof(HANDSHAKE, nonce, _mac(mine, "proof", heard.nonce, nonce), STREAMS_MAX, mine.protocol, mine.name)


def can_be_told(heard: Challenge) -> bool:
    """It reads what is said in a handshake, whatever it speaks behind that."""
    return heard.protocol == HANDSHAKE


def inquiry(mine: Credentials, nonce: bytes, heard: Challenge) -> Inquire:
    """What proves the token to a syncer that is only to tell its status."""
    _check_nonce(heard.nonce)
    return Inquire(HANDSHAKE, nonce, _mac(mine, "inquire", heard.nonce, nonce))


def instruction(mine: Credentials, nonce: bytes, heard: Challenge, order: bytes) -> Instruct:
    """An order, and what proves that an admin gives it."""
    _check_nonce(heard.nonce)
    return Instruct(HANDSHAKE, nonce, _mac(mine, "instruct", heard.nonce, nonce, order), order)


def check_welcome(mine: Credentials, nonce: bytes, heard_nonce: bytes, heard: Attached, session: bytes) -> None:
    """Raise ProtocolError unless the syncer holds the token and speaks of the session that we asked for, if any."""
    expected = _mac(mine, "syncer", nonce, heard_nonce, heard.session)
    if len(heard.session) != SESSION_BYTES or not hmac.compare_digest(expected, heard.mac):
        raise ProtocolError("what answers there does not hold the token")
    if session and heard.session != session:
        raise ProtocolError("bulk connection attached to another session")


# ------------------------------------------------------------------------------------------------------- both


def agreed(asked: int, offered: int) -> int:
    """How many bulk connections a session has; a side that says nothing of them has one."""
    return max(1, min(asked, offered, STREAMS_MAX))


def mismatch(*, syncer: int, learner: int) -> str:
    return f"the syncer speaks protocol {syncer} and the learner {learner}: upgrade the older"


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError(f"nonce of {len(nonce)} bytes")


def _mac(mine: Credentials, who: Who, their_nonce: bytes, own_nonce: bytes, session: bytes = b"") -> bytes:
    """HMAC under the token; `who` and fixed field lengths keep one proof from standing in for another."""
    if mine.token is None:
        return b""
    text = who.encode().ljust(8) + struct.pack("<Q", HANDSHAKE) + their_nonce + own_nonce + session
    return hmac.digest(mine.token, text, "sha256")
