"""What a run that goes on for months may let go of: old tape, the contributions recorded there, kept versions.

    choice = choose(store, state, time.time(), days=30)
    carry_out(store, state, choice)

The tape can begin with any segment, because each but the first begins with the folded state. Where it is to begin
behind the newest one, a new one is begun. Going on, export, and repair from checkpoints and journal need nothing of
what is removed. Replay audits from the new beginning, and recomputes from the first kept version behind it.

First a record says what is removed, then it is: a prune that is broken off leaves files that nobody reads any more, and
the next one removes them. Where the disk has no room for the record, some of the files go before it (`make_way`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from skerry.core.facts import Committed, Kept, Pruned
from skerry.core.state import KeptVersion, RunState
from skerry.run.facts import history_of
from skerry.run.sense import fact_of, sensible
from skerry.store.store import FILES, RECORD, Store, make_room

DAY_S = 86400.0


class Choice(NamedTuple):
    """With which segment the tape is to begin, which kept versions go, and which recorded contributions stay."""

    first: int
    kept: tuple[int, ...]
    payloads: frozenset[str]
    merges: int  # of which the tape will not tell any more


@dataclass
class _Segment:
    """What matters of a segment of the tape."""

    versions: tuple[int, ...]  # of the fragments when it begins
    ended_at: float = 0.0
    merges: int = 0
    payloads: set[str] = field(default_factory=set)
    kept: list[int] = field(default_factory=list)  # numbers of the versions that were kept in it


def choose(
    store: Store,
    state: RunState,
    now: float,
    days: float | None = None,
    before: KeptVersion | None = None,
    kept: int | None = None,
) -> Choice:
    """What is older than so many days goes, or what is not needed to replay from a kept version on.

    With `kept`, so many kept versions stay, the newest, whatever their age.
    """
    segments = _segments(store, state)
    first = state.first_segment
    gone: set[int] = set()
    if days is not None:
        first = _first_since(segments, now - days * DAY_S)
        young = {number for at, segment in segments.items() if at >= first for number in segment.kept}
        gone = {version.number for version in state.kept} - young
    elif before is not None:
        first = _first_for(segments, before)
        gone = {version.number for version in state.kept if version.number < before.number}
    if kept is not None:
        gone = {version.number for version in state.kept[: max(0, len(state.kept) - kept)]}
    left = [segment for number, segment in segments.items() if number >= first]
    payloads = frozenset(file for segment in left for file in segment.payloads)
    return Choice(first, tuple(sorted(gone)), payloads, state.merges - sum(segment.merges for segment in left))


def _segments(store: Store, state: RunState) -> dict[int, _Segment]:
    segments: dict[int, _Segment] = {}
    for record in history_of(store):
        fact = fact_of(store.root, record)
        if record.segment not in segments:
            versions = (
                [at.version for at in fact.fragments] if isinstance(fact, RunState) else [0] * len(state.fragments)
            )
            segments[record.segment] = _Segment(tuple(versions))
        segment = segments[record.segment]
        segment.ended_at = max(segment.ended_at, record.at)
        if isinstance(fact, Committed):
            segment.merges += 1
            segment.payloads |= {fact.result.payloads} - {""}
        elif isinstance(fact, Kept):
            segment.kept.append(fact.number)
    return segments


def _first_since(segments: dict[int, _Segment], since: float) -> int:
    """The first segment that has something as young, or else the one that follows all."""
    return next((number for number, segment in segments.items() if segment.ended_at >= since), max(segments) + 1)


def _first_for(segments: dict[int, _Segment], version: KeptVersion) -> int:
    """The last segment that begins before, or with, every fragment of a kept version."""
    fits = [
        number
        for number, segment in segments.items()
        if all(begun <= wanted for begun, wanted in zip(segment.versions, version.versions, strict=True))
    ]
    return max(fits, default=min(segments))


def carry_out(store: Store, state: RunState, choice: Choice) -> None:
    """Nobody else may be writing in the store; `state` is what its tape says."""
    if choice.first > state.first_segment or choice.kept:
        if choice.first > store.tape.number:
            with sensible(lambda: f"{store.root}/tape"):  # sums may be larger than a tape can hold
                fold = msgspec.msgpack.encode(state)
            store.rotate(fold)
        fact = Pruned(choice.first, choice.kept)
        store.commit([msgspec.msgpack.encode(fact)])
        state.apply(fact)
    store.collect(state.files, state.journal)
    store.prune(choice.first, choice.payloads)


def make_way(root: Path, state: RunState, choice: Choice) -> None:
    """On a disk too full to write the record: remove checkpoints and contributions first, but nothing of the tape.

    The run goes on without them. If this is broken off, rollback and replay miss what was to go, until it is pruned.
    """
    make_room(root, state.files - _without(state, choice).files, choice.payloads)


def _without(state: RunState, choice: Choice) -> RunState:
    return msgspec.structs.replace(state, kept=[v for v in state.kept if v.number not in choice.kept])


# ---------------------------------------------------------------------------------------------- what it frees


def freed(root: Path, state: RunState, choice: Choice) -> dict[str, int]:
    """Bytes by what they are of, as they lie on the disk now."""
    needed = _without(state, choice).files
    return {
        "tape": _bytes(path for path in _in(root / "tape") if _is_before(path, choice.first)),
        "contributions": _bytes(path for path in _in(root / RECORD) if path.name[:64] not in choice.payloads),
        "checkpoints": _bytes(path for path in _in(root / FILES) if path.name not in needed),
    }


def _in(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def _is_before(path: Path, segment: int) -> bool:
    """Whether it is a file of the tape, and of an earlier segment."""
    number = path.name.partition(".")[0]
    return number.isdecimal() and int(number) < segment


def _bytes(paths: Iterator[Path]) -> int:
    return sum(map(_size, paths))


def _size(path: Path) -> int:
    """Of a link its own, wherever it leads; of what somebody removed since it was listed none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
