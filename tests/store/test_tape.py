"""The tape: what it gives back is what was written, cut or damaged as the file may be."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from skerry.errors import StoreError, TapeDamaged, TapeUnknown
from skerry.proof.sim.files import Crash, CrashFiles, Inode
from skerry.store import Tape, read_all
from skerry.store.files import DiskFiles
from skerry.store.tape import CUTS_MAX, LOOK_BYTES, SEGMENT_BYTES_MAX, Cut, Follower

GROUPS = [[b"a"], [b"bb", b"", b"bbb"], [b"cccc"], [b"d" * 20, b"dd"]]
SEGMENT_1, SEGMENT_2 = "tape/000001.seg", "tape/000002.seg"
HEADER_BYTES = 48
AT = 1.7e9  # when everything is committed here


def written(*steps: list[bytes] | bytes) -> tuple[CrashFiles, list[int]]:
    """A tape of groups (lists) and folds (bytes), and the size of the last segment after each."""
    files = CrashFiles()
    tape, _ = Tape.open(files)
    ends = []
    for step in steps:
        tape.rotate(step, AT) if isinstance(step, bytes) else tape.append(step, AT)
        ends.append(tape.size)
    return files, ends


def with_contents(**segments: bytes) -> CrashFiles:
    files = CrashFiles()
    for number, data in segments.items():
        files.cache[f"tape/{int(number[1:]):06d}.seg"] = Inode(cache=data)
    return files


def joined(groups: list[list[bytes]]) -> list[bytes]:
    return [body for group in groups for body in group]


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    for at in range(len(data)):
        for bit in range(8):
            yield at, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def test_records_come_back_in_order() -> None:
    files, _ = written(*GROUPS)
    assert Tape.open(files)[1] == joined(GROUPS)
    assert [r.body for r in read_all(files)] == joined(GROUPS)


def test_opening_reads_from_the_last_fold_and_history_reads_everything() -> None:
    files, _ = written([b"a"], [b"b"], b"fold of a b", [b"c"])
    tape, records = Tape.open(files)
    assert records == [b"fold of a b", b"c"]
    assert tape.number == 2
    rows = [(r.segment, r.number, r.is_fold, r.body) for r in read_all(files)]
    assert rows == [
        (1, 0, False, b"a"),
        (1, 1, False, b"b"),
        (2, 0, True, b"fold of a b"),
        (2, 1, False, b"c"),
    ]


def test_the_offset_of_a_record_points_at_its_length_and_body() -> None:
    files, _ = written(*GROUPS)
    data = files.read(SEGMENT_1)
    for r in read_all(files):
        assert data[r.offset : r.offset + 4 + len(r.body)] == struct.pack("<I", len(r.body)) + r.body


def test_a_cut_anywhere_leaves_the_whole_groups_before_it() -> None:
    files, ends = written(*GROUPS)
    data = files.read(SEGMENT_1)
    for size in range(len(data)):
        cut = with_contents(s1=data[:size])
        expected = joined(GROUPS[: sum(end <= size for end in ends)])
        assert [r.body for r in read_all(cut)] == expected
        assert Tape.open(cut, readonly=True)[1] == expected
        assert cut.read(SEGMENT_1) == data[:size], "a reader changes nothing"
        tape, records = Tape.open(cut)
        assert records == expected
        tape.append([b"next"], AT)
        assert Tape.open(cut)[1] == [*expected, b"next"]


def test_a_flipped_bit_is_damage_unless_it_may_be_a_torn_tail() -> None:
    files, ends = written(*GROUPS)
    last_group = ends[-2]
    for at, data in flips(files.read(SEGMENT_1)):
        damaged = with_contents(s1=data)
        if at >= last_group:
            assert Tape.open(damaged)[1] == joined(GROUPS[:-1])
            continue
        with pytest.raises((TapeDamaged, TapeUnknown), match=r"tape/000001\.seg"):
            Tape.open(damaged)
        with pytest.raises((TapeDamaged, TapeUnknown)):
            list(read_all(damaged))
        assert damaged.read(SEGMENT_1) == data, "damage is left as it is"


@pytest.mark.parametrize("size", [1, 7, 100, 5000])
def test_bytes_put_in_or_taken_out_are_damage_unless_the_last_group_is_hit(size: int) -> None:
    """What was committed behind them is whole, only elsewhere: no crash has torn it."""
    files, ends = written(*GROUPS)
    data = files.read(SEGMENT_1)
    for at in range(HEADER_BYTES, len(data)):
        before = joined(GROUPS[: sum(end <= at for end in ends)])
        grown, shrunk = data[:at] + b"?" * size + data[at:], data[:at] + data[at + size :]
        for changed, is_last_hit in ((grown, at > ends[-2]), (shrunk, at + size > ends[-2])):
            damaged = with_contents(s1=changed)
            if is_last_hit:
                assert Tape.open(damaged)[1] == before
                continue
            for look in (Tape.open, lambda files: list(read_all(files))):
                with pytest.raises(TapeDamaged, match=r"tape/000001\.seg is damaged from .* \(an intact one follows"):
                    look(damaged)
            assert damaged.read(SEGMENT_1) == changed


def test_damage_names_segment_record_and_byte() -> None:
    files, ends = written(*GROUPS)
    data = bytearray(files.read(SEGMENT_1))
    data[ends[1] + 70] ^= 1
    with pytest.raises(TapeDamaged, match=rf"tape/000001\.seg is damaged from record 4 at byte {ends[1]} \("):
        Tape.open(with_contents(s1=bytes(data)))


def test_a_flipped_bit_in_an_earlier_segment_stops_history() -> None:
    files, _ = written([b"a"], [b"b"], b"fold", [b"c"])
    good = [r.body for r in read_all(files)]
    for _, data in flips(files.read(SEGMENT_1)):
        damaged = with_contents(s1=data, s2=files.read(SEGMENT_2))
        found = []
        with pytest.raises((TapeDamaged, TapeUnknown)):
            for r in read_all(damaged):
                found.append(r.body)
        assert found == good[: len(found)]
        assert Tape.open(damaged)[1] == [b"fold", b"c"]


def test_an_earlier_segment_cut_at_a_group_stops_history() -> None:
    files, ends = written([b"a"], [b"b"], b"fold")
    cut = with_contents(s1=files.read(SEGMENT_1)[: ends[0]], s2=files.read(SEGMENT_2))
    with pytest.raises(TapeDamaged, match=r"000002\.seg does not continue"):
        list(read_all(cut))


def test_a_flipped_bit_in_the_fold_goes_back_only_while_nothing_follows() -> None:
    files, _ = written([b"a"], b"fold")
    before = files.read(SEGMENT_1)
    for at, data in flips(files.read(SEGMENT_2)):
        damaged = with_contents(s1=before, s2=data)
        if at >= HEADER_BYTES:
            assert Tape.open(damaged)[1] == [b"a"]
            continue
        with pytest.raises((TapeDamaged, TapeUnknown)):
            Tape.open(damaged)
    files, ends = written([b"a"], b"fold", [b"b"])
    for at, data in flips(files.read(SEGMENT_2)):
        if at < ends[-2]:
            with pytest.raises((TapeDamaged, TapeUnknown)):
                Tape.open(with_contents(s1=before, s2=data))


def test_a_rotation_cut_anywhere_recovers_to_the_segment_before() -> None:
    files, _ = written([b"a"], b"fold")
    before, after = files.read(SEGMENT_1), files.read(SEGMENT_2)
    for size in range(len(after)):
        torn = with_contents(s1=before, s2=after[:size])
        assert [r.body for r in read_all(torn)] == [b"a"]
        tape, records = Tape.open(torn)
        assert records == [b"a"]
        tape.append([b"b"], AT)
        tape.rotate(b"fold again", AT)
        assert Tape.open(torn)[1] == [b"fold again"]
        assert [r.body for r in read_all(torn)] == [b"a", b"b", b"fold again"]


def test_going_back_to_a_segment_that_is_not_whole_is_refused() -> None:
    """It was durable before its successor began, so a missing end is no torn tail."""
    files, _ = written([b"a"], [b"b"])
    data = files.read(SEGMENT_1)
    with pytest.raises(TapeDamaged, match=r"000001\.seg is damaged from record 1"):
        Tape.open(with_contents(s1=data[:-1], s2=b""))
    with pytest.raises(TapeDamaged, match=r"000001\.seg is missing"):
        Tape.open(with_contents(s2=b""))


def test_a_missing_segment_stops_history() -> None:
    files, _ = written([b"a"], b"fold 1", b"fold 2")
    with pytest.raises(TapeDamaged, match=r"000002\.seg is missing"):
        list(read_all(with_contents(s1=files.read(SEGMENT_1), s3=files.read("tape/000003.seg"))))


def test_groups_twice_swapped_or_from_another_tape_are_refused() -> None:
    files, ends = written(*GROUPS)
    data = files.read(SEGMENT_1)
    first, second, rest = data[: ends[0]], data[ends[0] : ends[1]], data[ends[1] :]
    header, group = data[:HEADER_BYTES], data[HEADER_BYTES : ends[0]]
    other = written([b"x"])[0].read(SEGMENT_1)
    for wrong in (first + group + second + rest, header + second + group + rest, other + second + rest):
        damaged = with_contents(s1=wrong)
        try:
            records = Tape.open(damaged)[1]
        except TapeDamaged:
            continue
        assert records in (joined(GROUPS[:1]), []), "cut off as a tail, never read"
    with pytest.raises(TapeDamaged):
        Tape.open(with_contents(s1=other + second + rest))


@pytest.mark.parametrize("length", [0, 64 << 20, (64 << 20) + 1, 2**31, 2**32 - 1])
def test_a_wrong_length_is_a_tail_at_the_end_and_damage_before_it(length: int) -> None:
    files, ends = written(*GROUPS)
    data = files.read(SEGMENT_1)

    def with_length_at(start: int) -> CrashFiles:
        return with_contents(s1=data[: start + 20] + struct.pack("<I", length) + data[start + 24 :])

    assert Tape.open(with_length_at(ends[-2]))[1] == joined(GROUPS[:-1])
    with pytest.raises(TapeDamaged):
        Tape.open(with_length_at(ends[0]))


FIRST = "was written by Skerry 0.1 (format 1); Skerry 0.3 reads format 3: export or finish this run with Skerry 0.1"
LATER = "has format 4; Skerry 0.3 reads format 3: use a later version"


@pytest.mark.parametrize(("version", "words"), [(1, FIRST), (4, LATER)])
def test_another_format_is_refused_by_the_name_of_who_reads_it(version: int, words: str) -> None:
    data = written(*GROUPS)[0].read(SEGMENT_1)
    other = with_contents(s1=data[:8] + struct.pack("<H", version) + data[10:])
    with pytest.raises(TapeUnknown) as caught:
        Tape.open(other)
    assert str(caught.value) == f"{SEGMENT_1} {words}"


def test_a_record_has_the_time_of_its_commit() -> None:
    files = CrashFiles()
    tape, _ = Tape.open(files)
    tape.append([b"a", b"b"], 5.0)
    tape.append([b"c"], 4.0)  # a wall clock may go back
    tape.rotate(b"fold", 7.5)
    assert [(record.at, record.body) for record in read_all(files)] == [
        (5.0, b"a"), (5.0, b"b"), (4.0, b"c"), (7.5, b"fold"),
    ]  # fmt: skip


@pytest.mark.parametrize("data", [b"", b"\0", b"\0" * 4096, b"SKRY"], ids=["empty", "byte", "zeros", "torn"])
def test_a_first_segment_with_nothing_in_it_begins_anew(data: bytes) -> None:
    files = with_contents(s1=data)
    tape, records = Tape.open(files)
    assert records == []
    tape.append([b"a"], AT)
    assert Tape.open(files)[1] == [b"a"]


def test_what_was_never_a_tape_is_refused_and_left_alone() -> None:
    """No crash leaves such bytes: whatever this is, it is not ours to begin anew over."""
    files = with_contents(s1=b"junk" * 100)
    for look in (Tape.open, lambda files: list(read_all(files))):
        with pytest.raises(TapeDamaged, match=r"tape/000001\.seg is no segment of a tape"):
            look(files)
    assert files.read(SEGMENT_1) == b"junk" * 100


def test_leftovers_are_removed_and_strangers_left_alone() -> None:
    files, _ = written([b"a"])
    for name in ("tape/000002.tmp", "tape/notes.txt"):
        files.write(name, [b"?"])
    assert Tape.open(files)[1] == [b"a"]
    assert files.names("tape") == ["000001.seg", "notes.txt"]


def test_a_record_that_looks_like_a_group_is_only_a_record() -> None:
    """A whole group inside a body proves nothing when that body is torn: it is not where it says it is."""
    inner = written([b"x"], [b"y"])[0].read(SEGMENT_1)
    files, _ = written([b"a"], [inner])
    assert Tape.open(files)[1] == [b"a", inner]
    torn = with_contents(s1=files.read(SEGMENT_1)[:-1])
    assert Tape.open(torn)[1] == [b"a"]


def test_mutated_tapes_raise_typed_errors_or_give_a_prefix() -> None:
    files, _ = written(*GROUPS)
    data = files.read(SEGMENT_1)
    rng = random.Random(0)
    damaged_count = 0
    for _ in range(2000):
        mutant = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at, length = rng.randrange(len(mutant)), rng.randrange(1, 40)
            kind = rng.randrange(4)
            if kind == 0:
                mutant[at : at + length] = rng.randbytes(length)
            elif kind == 1:
                del mutant[at : at + length]
            elif kind == 2:
                mutant[at:at] = mutant[at : at + length]
            else:
                mutant[at : at + length] = bytes(length)
        try:
            records = Tape.open(with_contents(s1=bytes(mutant)))[1]
        except StoreError:
            damaged_count += 1
            continue
        assert records == joined(GROUPS)[: len(records)]
    assert damaged_count > 100


# ------------------------------------------------------------------------------------------ what was cut off


def cuts_in(files: CrashFiles) -> dict[str, bytes]:
    return {name: files.read(f"tape/{name}") for name in files.names("tape") if name.endswith(".cut")}


def test_a_tail_is_kept_beside_the_tape_and_a_reader_leaves_it_in_place() -> None:
    files, ends = written(*GROUPS)
    data = files.read(SEGMENT_1)
    rotten = with_contents(s1=data[:-1] + b"?")
    tail = rotten.read(SEGMENT_1)[ends[-2] :]
    assert Tape.open(rotten, readonly=True)[0].cut == Cut(SEGMENT_1, ends[-2], tail)
    assert cuts_in(rotten) == {} and rotten.read(SEGMENT_1).endswith(tail)
    assert Tape.open(rotten)[0].cut == Cut(SEGMENT_1, ends[-2], tail, "tape/000001.1.cut")
    assert cuts_in(rotten) == {"000001.1.cut": tail} and rotten.read(SEGMENT_1) == data[: ends[-2]]
    assert Tape.open(rotten)[0].cut is None, "it is cut once"


def test_a_segment_that_holds_no_commit_is_kept_whole() -> None:
    files, _ = written([b"a"], b"fold")
    torn = with_contents(s1=files.read(SEGMENT_1), s2=files.read(SEGMENT_2)[:-1])
    tape, _ = Tape.open(torn)
    assert tape.cut is not None and (tape.cut.name, tape.cut.offset) == (SEGMENT_2, 0)
    assert cuts_in(torn) == {"000002.1.cut": files.read(SEGMENT_2)[:-1]}


def test_kept_tails_are_never_overwritten_and_bounded_in_number() -> None:
    files, _ = written([b"a"])
    for n in range(CUTS_MAX + 3):
        files.append(SEGMENT_1, b"tail %d" % n)
        tape, records = Tape.open(files)
        assert records == [b"a"]
        assert tape.cut is not None and bool(tape.cut.kept) == (n < CUTS_MAX)
    assert cuts_in(files) == {f"000001.{n + 1}.cut": b"tail %d" % n for n in range(CUTS_MAX)}


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_tail_is_durable_beside_the_tape_before_it_is_cut(power_cut: bool) -> None:
    """Opening is broken off at each of its operations: the tail is in the segment or beside it, once."""
    done, at = False, 0
    while not done:
        at += 1
        files, _ = written([b"a"])
        files.append(SEGMENT_1, b"tail")
        files.sync(SEGMENT_1)
        files.plan(crash_at=at)
        try:
            Tape.open(files)
            done = True
        except Crash:
            if power_cut:
                files.power_cut()
        files.plan()
        assert b"tail" in cuts_in(files).values() or files.read(SEGMENT_1).endswith(b"tail"), f"operation {at}"
        assert Tape.open(files)[1] == [b"a"]
        assert list(cuts_in(files).values()) == [b"tail"], f"operation {at}"
    assert at > 6


def test_a_follower_reads_groups_longer_than_a_look_and_each_once() -> None:
    files = CrashFiles()
    tape, _ = Tape.open(files)
    follower, seen = Follower(files), []
    for step in ([b"a"], [b"b" * (3 * LOOK_BYTES), b"bb"], b"fold", [b"c"] * 3, b"another", [b"d"]):
        tape.rotate(step, AT) if isinstance(step, bytes) else tape.append(step, AT)
        seen += list(follower.read())
        assert list(follower.read()) == []
    assert seen == list(read_all(files))
    assert list(Follower(files, 2).read()) == list(read_all(files, 2))


def test_a_follower_sees_a_torn_group_neither_before_nor_after_it_is_cut_off() -> None:
    files = CrashFiles()
    tape, _ = Tape.open(files)
    tape.append([b"a"], AT)
    follower = Follower(files)
    assert [record.body for record in follower.read()] == [b"a"]
    files.append(SEGMENT_1, b"\xf5GRP torn")
    assert list(follower.read()) == []
    tape, _ = Tape.open(files)
    tape.append([b"b"], AT)
    assert [record.body for record in follower.read()] == [b"b"]


def stamped(files: CrashFiles, at: float, start: int = HEADER_BYTES) -> CrashFiles:
    """The first segment with another time stamp on its last group, at `start`, and a hash that is right."""
    data = bytearray(files.read(SEGMENT_1))
    struct.pack_into("<d", data, start + 16, at)
    data[-32:] = sha256(data[start:-32]).digest()
    return with_contents(_1=bytes(data))


@pytest.mark.parametrize("at", [math.nan, math.inf, -math.inf, -1e10, 1e12])
def test_a_stamp_that_is_no_time_is_damage_by_its_place(at: float) -> None:
    files = stamped(written([b"a"])[0], at)
    for read in (lambda: Tape.open(files, readonly=True), lambda: list(read_all(files)), Follower(files).read):
        with pytest.raises(TapeDamaged, match=r"000001\.seg is damaged at byte 48: its time stamp, .* is no time"):
            list(read())
    with pytest.raises(AssertionError):
        Tape.open(CrashFiles())[0].append([b"a"], at)
    assert [record.at for record in read_all(stamped(files, 1e11))] == [1e11]


def test_a_segment_longer_than_any_is_refused_by_name_before_it_is_read(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    files.make_dir("tape")
    with (tmp_path / SEGMENT_1).open("wb") as file:
        file.truncate(SEGMENT_BYTES_MAX + (1 << 40))  # which takes no room on the disk, and cannot be in memory
    for read in (lambda: Tape.open(files, readonly=True), lambda: list(read_all(files))):
        with pytest.raises(TapeDamaged, match=r"000001\.seg is longer than \d+ bytes: restore it"):
            read()
    files.close()


def test_a_follower_reads_no_more_than_a_group_can_be_of_a_tail_without_end(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    files.make_dir("tape")
    Tape.open(files)[0].append([b"a"], AT)
    with (tmp_path / SEGMENT_1).open("r+b") as file:
        file.truncate(1 << 40)
    assert [record.body for record in Follower(files).read()] == [b"a"]
    files.close()
