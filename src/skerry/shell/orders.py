"""The way that an order takes: to a syncer's address, to the process that serves a directory, or to the directory.

On the machine that serves a run nothing has to be given but its directory: the syncer has left the credential there,
and its status says where it listens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from skerry.core.messages import Order, Outcome, PauseRun
from skerry.core.state import RunState
from skerry.errors import NoAnswer, Refusal, StoreInUse, Unanswered, one_line
from skerry.node import telemetry
from skerry.run.holding import HELD_S, LOOK_S, busy
from skerry.run.last_words import STATUS, open_to_write, state_in
from skerry.run.orders import carry_out_here
from skerry.run.status import check_unserved, holders_of, status_of
from skerry.shell.address import parse_address
from skerry.shell.identity import ADMIN_KEY, ADMIN_TOKEN, read_admin_token, secrets_of, tls_of
from skerry.shell.syncer import write_json
from skerry.wire.inquiry import give_order

ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where one listens that listens everywhere


class Answered(NamedTuple):
    """What became of an order, and who carried it out."""

    outcome: Outcome
    is_served: bool  # by a syncer; else on the directory


def give(
    target: str,
    order: Order,
    token_file: str | None = None,
    key_file: str | None = None,
    spelled: Callable[[str], str] = str,
) -> Answered:
    """Have an order carried out, wherever its run is; one that is refused is a `Refusal` with the reason."""
    if Path(target).is_dir():
        if token_file or key_file:
            raise Refusal(f"{target}: is a run directory, which needs no key or token: leave it out, or give host:port")
        answered = _give_here(Path(target), order)
    elif Path(target).exists() or ":" not in target:
        raise Refusal(f"{target}: is no run directory: check the path, or name a syncer as host:port")
    else:
        token, key = secrets_of(token_file, key_file, spelled)
        answered = Answered(give_order(*parse_address(target), order, token, tls=tls_of(key)), True)
    if not answered.outcome.is_done:
        raise Refusal(one_line(f"{target}: {answered.outcome.text}"))
    return answered


def record_of(outcome: Outcome) -> dict[str, Any]:
    """What a syncer says of it besides words; it need not be one of ours."""
    try:
        return msgspec.json.decode(outcome.record, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}


def _give_here(root: Path, order: Order, within_s: float = HELD_S) -> Answered:
    """To the syncer, or on the directory; who starts, or carries out another order just now, is waited for."""
    until = time.monotonic() + within_s
    while True:
        status = status_of(root)
        if status["serving"] == "served":
            return Answered(_give_to_syncer(root, status, order), True)
        if status["serving"] not in ("starting", "away"):
            try:
                return Answered(_carry_out(root, order), False)
            except StoreInUse:
                pass  # somebody took it just now
        if time.monotonic() > until:
            raise busy(root, within_s)
        time.sleep(LOOK_S)


def _give_to_syncer(root: Path, status: dict[str, Any], order: Order) -> Outcome:
    """A syncer may end before it answers; then the run is named, and what is known of the order."""
    try:
        return _asked(root, status, order)
    except NoAnswer as error:
        syncer, _ = holders_of(root)
        if syncer is not None and syncer.pid == status["pid"]:
            raise Unanswered(
                f"{root}: process {syncer.pid} serves it and did not answer, it may be stopped or short of time; the "
                f"order may be in force later or not: see skerry status {root} ({error})"
            ) from None
        raise Unanswered(_ended_before(root, str(error))) from None


def _ended_before(root: Path, why: str) -> str:
    now = status_of(root)
    if now["serving"] == "closed":
        return f"{root}: the run was closed before its syncer answered: skerry status {root} shows what is in force"
    return (
        f"{root}: its syncer ended before it answered, and the order may be in force or not: give it again, or see "
        f"skerry status {root} ({why})"
    )


def _asked(root: Path, status: dict[str, Any], order: Order) -> Outcome:
    if not status["is_here"]:
        raise Refusal(
            f"{root}: process {status['pid']} serves it on another machine, in another container or as another user: "
            "give its address, like host:7077, with --key-file or --token-file"
        )
    host, port = parse_address(str(status["address"]))
    named = str(status.get("admin") or ADMIN_TOKEN)
    if named not in (ADMIN_TOKEN, ADMIN_KEY):  # a status may say anything
        raise Refusal(f"{root / STATUS}: names {named!r:.80} for orders, which no syncer does: start the syncer again")
    token, key = (None, str(root / named)) if named == ADMIN_KEY else (read_admin_token(root), None)
    return give_order(ANYWHERE.get(host, host), port, order, token, tls=tls_of(key))


def _carry_out(root: Path, order: Order) -> Outcome:
    """On the directory: what is wrong is said before anything is written."""
    if isinstance(order, PauseRun):
        raise NoAnswer(f"{root}: nobody serves it")
    check_unserved(root)
    with open_to_write(root) as store:
        state: RunState = state_in(store)
        outcome = carry_out_here(store, state, order)
        with contextlib.suppress(OSError):  # a last word, by which a tape that loses this commit is known
            write_json(root / STATUS, telemetry.recorded(state, time.time()))
    return outcome
