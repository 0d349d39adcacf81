"""The journal: entries lie where their places say, and what no place names is nobody's."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from skerry.errors import FileDamaged, FileMissing
from skerry.memory import PAGE_BYTES
from skerry.proof.sim.files import CrashFiles
from skerry.store import Store
from skerry.store.files import LONG_BYTES, DiskFiles, FileSystem
from skerry.store.journal import FILE_BYTES_MAX, JOURNAL, Journal, Place, read, where

DATA = [b"first", b"", b"the third one", bytes(range(256))]


def opened(files: FileSystem, file_bytes: int = FILE_BYTES_MAX) -> Journal:
    journal = Journal(files)
    journal.file_bytes = file_bytes
    return journal


def placed(journal: Journal, *data: bytes) -> list[tuple[Place, bytes]]:
    return [(journal.place(len(d), xxhash.xxh3_128_digest(d)), d) for d in data]


def appended(journal: Journal, *data: bytes) -> list[Place]:
    entries = placed(journal, *data)
    journal.append(entries)
    return [place for place, _ in entries]


def test_entries_lie_one_after_the_other_in_the_order_of_their_places() -> None:
    files = CrashFiles()
    journal = opened(files)
    first = placed(journal, *DATA)
    second = placed(journal, b"later")
    assert [(p.file, p.offset, p.size) for p, _ in first] == [(1, 0, 5), (1, 5, 0), (1, 5, 13), (1, 18, 256)]
    journal.append(first)
    journal.append(second)
    assert files.read(f"{JOURNAL}/000001.log") == b"".join(DATA) + b"later"
    assert [read(files, place) for place, _ in first + second] == [*DATA, b"later"]


def test_a_long_entry_begins_on_a_page(tmp_path: Path) -> None:
    """From there the disk can take it as it lies in memory."""
    long = bytes(range(256)) * (LONG_BYTES // 256) + b"and a bit"
    data = [b"short", long, b"another", long, long]
    disk = DiskFiles(tmp_path)
    disk.make_dir(JOURNAL)
    for files in (CrashFiles(), disk):
        journal = opened(files)
        places = appended(journal, *data[:2]) + appended(journal, *data[2:])
        assert [place.offset % PAGE_BYTES for place in places] == [0, 0, 9, 0, 0]
        assert places[2].offset == places[1].offset + len(long), "a short one follows at once"
        assert [read(files, place) for place in places] == data
    disk.close()


def test_on_a_real_disk_too(tmp_path: Path) -> None:
    with Store.open(tmp_path / "run") as store:
        entries = [(store.place(len(d), xxhash.xxh3_128_digest(d)), d) for d in DATA]
        store.commit([b"two"], entries=entries[:2])
        store.commit([b"more"], entries=entries[2:])
        assert [store.entry(place) for place, _ in entries] == DATA
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert [store.entry(place) for place, _ in entries] == DATA


def test_an_entry_is_a_buffer_of_any_shape() -> None:
    """The node hands in what it encoded, without a copy."""
    files = CrashFiles()
    journal = opened(files)
    data = memoryview(bytes(12)).cast("f")
    place = journal.place(12, xxhash.xxh3_128_digest(data))
    journal.append([(place, data)])
    assert read(files, place) == bytes(12)


def test_entries_are_durable_on_return_and_the_file_they_are_in() -> None:
    for seed in range(20):
        files = CrashFiles(seed)
        journal = opened(files)
        places = appended(journal, *DATA) + appended(journal, b"later")
        placed(journal, b"not appended")
        files.power_cut()
        assert [read(files, place) for place in places] == [*DATA, b"later"]


def test_one_fsync_serves_all_that_are_appended_together() -> None:
    files = CrashFiles()
    appended(opened(files), *DATA)
    syncs = [line for line in files.log if line.startswith("sync ")]
    assert syncs == [f"sync {JOURNAL}/000001.log"]


def test_entries_out_of_their_order_are_our_mistake() -> None:
    journal = opened(CrashFiles())
    first, second = placed(journal, b"one", b"another")
    with pytest.raises(AssertionError):
        journal.append([second, first])


def test_every_process_begins_a_file_of_its_own() -> None:
    """So a tail that a crash tore is never appended to."""
    files = CrashFiles()
    before = appended(opened(files), b"one")
    files.append(f"{JOURNAL}/000001.log", b"a torn ta")
    after = appended(opened(files), b"two")
    assert [place.file for place in before + after] == [1, 2] and after[0].offset == 0
    assert [read(files, place) for place in before + after] == [b"one", b"two"]


def test_a_process_that_appends_nothing_leaves_nothing() -> None:
    files = CrashFiles()
    placed(opened(files), b"never appended")
    opened(files).append([])
    assert files.names(JOURNAL) == []


def test_strange_names_in_its_folder_are_no_files_of_the_journal() -> None:
    files = CrashFiles()
    for name in ("000007.log.bak", "7.log", "notes", "1000007.log"):
        files.write(f"{JOURNAL}/{name}", [b"x"])
    journal = opened(files)
    assert appended(journal, b"one")[0].file == 1_000_008
    journal.collect(())
    assert files.names(JOURNAL) == ["000007.log.bak", "1000008.log", "7.log", "notes"]


def test_a_file_is_left_behind_when_it_is_long_enough() -> None:
    """An entry is never in two files, so one may be longer than the limit, and the next begins another."""
    files = CrashFiles()
    journal = opened(files, file_bytes=10)
    entries = placed(journal, b"123456", b"123456", b"x" * 25, b"", b"end")
    assert [(p.file, p.offset) for p, _ in entries] == [(1, 0), (1, 6), (2, 0), (3, 0), (3, 0)]
    journal.append(entries)
    assert files.names(JOURNAL) == ["000001.log", "000002.log", "000003.log"]
    assert [read(files, place) for place, _ in entries] == [data for _, data in entries]
    files.power_cut()
    assert [read(files, place) for place, _ in entries] == [data for _, data in entries]


def test_collecting_keeps_what_is_needed_and_the_file_that_is_written_to() -> None:
    files = CrashFiles()
    journal = opened(files, file_bytes=1)
    places = appended(journal, *[b"one"] * 5)
    assert journal.collect({2, 4}) == 2
    assert files.names(JOURNAL) == ["000002.log", "000004.log", "000005.log"]
    assert [read(files, place) for place in places if place.file in (2, 4, 5)] == [b"one"] * 3
    assert journal.collect(()) == 2 and files.names(JOURNAL) == ["000005.log"]


def test_collecting_keeps_what_is_placed_and_not_yet_appended() -> None:
    files = CrashFiles()
    journal = opened(files, file_bytes=1)
    appended(journal, b"one", b"two")
    waiting = placed(journal, b"three", b"four")
    assert journal.collect(()) == 1, "the first alone: the second is the one that is written to"
    journal.append(waiting)
    assert [read(files, place) for place, _ in waiting] == [b"three", b"four"]


def test_files_of_earlier_processes_are_collected_and_their_numbers_are_not_given_out_again() -> None:
    files = CrashFiles()
    appended(opened(files, file_bytes=1), b"one", b"two")
    later = opened(files)
    later.known = 2
    assert later.collect({1}) == 1 and files.names(JOURNAL) == ["000001.log"]
    assert [place.file for place in appended(later, b"three")] == [3]
    assert later.collect(()) == 1 and files.names(JOURNAL) == ["000003.log"]


def test_a_file_that_no_record_speaks_of_is_not_written_over_either() -> None:
    """A crash came between its entries and their record; how far it was written nobody knows."""
    files = CrashFiles()
    appended(opened(files), b"of no record")
    assert [place.file for place in appended(opened(files), b"one")] == [2]


# ------------------------------------------------------------------------------------------ damage


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, list[Place]]:
    with Store.open(tmp_path / "run") as store:
        entries = [(store.place(len(d), xxhash.xxh3_128_digest(d)), d) for d in (b"x" * 100, b"y" * 200)]
        store.commit([b"both"], entries=entries)
    return tmp_path / "run", [place for place, _ in entries]


def test_a_rotten_entry_is_named_by_its_file_and_byte_and_the_others_are_had(written: tuple[Path, list[Place]]) -> None:
    root, (first, second) = written
    path = root / "journal" / "000001.log"
    data = bytearray(path.read_bytes())
    data[150] ^= 1
    path.write_bytes(data)
    with Store.open(root) as store:
        assert store.entry(first) == b"x" * 100
        with pytest.raises(FileDamaged) as caught:
            store.entry(second)
    said = "200 bytes are not what was written: restore the file from a copy"
    assert str(caught.value) == f"{path} at byte 100: {said}"
    assert where(second) == "journal/000001.log at byte 100"


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut short", "missing"])
def test_a_file_that_is_missing_or_cut_short_is_named_too(written: tuple[Path, list[Place]], is_cut: bool) -> None:
    root, (first, second) = written
    path = root / "journal" / "000001.log"
    if is_cut:
        path.write_bytes(path.read_bytes()[:299])
    else:
        path.unlink()
    with Store.open(root) as store:
        if is_cut:
            assert store.entry(first) == b"x" * 100
        said = "200 bytes are not what was written" if is_cut else "the file is missing: restore it from a copy"
        with pytest.raises(FileDamaged if is_cut else FileMissing, match=f"^{path} at byte 100: {said}"):
            store.entry(second)


def test_a_torn_tail_is_nobodys(written: tuple[Path, list[Place]]) -> None:
    """What lies behind the last entry that a record names is not looked at, whatever it is."""
    root, places = written
    path = root / "journal" / "000001.log"
    path.write_bytes(path.read_bytes() + b"half an en")
    with Store.open(root) as store:
        assert [len(store.entry(place)) for place in places] == [100, 200]
        place = store.place(3, xxhash.xxh3_128_digest(b"new"))
        store.commit([b"third"], entries=[(place, b"new")])
        assert (place.file, place.offset) == (2, 0) and store.entry(place) == b"new"
    assert path.read_bytes().endswith(b"half an en")


def test_part_of_an_entry_can_be_read_from_a_real_file(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    files.write("one", [b"0123456789"])
    assert [files.read_at("one", *at) for at in ((0, 3), (4, 2), (8, 5), (10, 1), (99, 1))] == [
        b"012", b"45", b"89", b"", b"",
    ]  # fmt: skip
    files.close()
