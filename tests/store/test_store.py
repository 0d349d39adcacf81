"""The store on a real directory: what users and operators meet."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from skerry.errors import DiskFull, FileDamaged, StoreError, StoreInUse, TapeDamaged, TapeUnknown
from skerry.memory import PAGE_BYTES, Arrays
from skerry.proof.sim.files import CrashFiles
from skerry.store import DiskFiles, Store
from skerry.store.files import LONG_BYTES
from skerry.store.store import RECORD


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_what_was_committed_is_there_after_reopening(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a" / "run") as store:
        digest = store.put([b"theta", b"", b"momentum"])
        store.commit([b"one", b"two"])
        store.rotate(b"fold")
        store.commit([b"three"])
        assert store.tape.number == 2
    with Store.open(tmp_path / "a" / "run") as store:
        assert store.records == [b"fold", b"three"]
        assert digest == xxhash.xxh3_128_hexdigest(b"thetamomentum")
        assert store.get(digest) == b"thetamomentum"
        assert [r.body for r in store.history()] == [b"one", b"two", b"fold", b"three"]


def test_what_learners_contributed_is_named_by_a_hash_that_nobody_can_meet_on_purpose(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        assert store.put([b"said ", b"once"], RECORD) == sha(b"said once")
        assert store.get(sha(b"said once"), RECORD) == b"said once"


def test_arrays_are_put_as_their_bytes(tmp_path: Path) -> None:
    arrays: list[Any] = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 4)),
        np.ones((), dtype=np.int8),
    ]
    with Store.open(tmp_path) as store:
        assert store.get(store.put(arrays)) == b"".join(a.tobytes() for a in arrays)


def test_a_file_is_written_once(tmp_path: Path) -> None:
    files = CrashFiles()
    with Store.open(tmp_path, files=files) as store:
        x = store.put([b"x"])
        store.put([b"x"])
        store.commit([b"one"], [x, x])
        store.put([b"x"])
        store.commit([b"two"], [x])
        writes = [call for call in files.log if call.startswith("write files/")]
        assert len(writes) == 1
        store.collect([])
        assert store.get(store.put([b"x"])) == b"x", "collected, so written again"


def test_a_file_put_while_another_commit_is_made_belongs_to_the_next(tmp_path: Path) -> None:
    """Its name may have come too late for that commit's sync, and its record is yet to be written."""
    files = CrashFiles()
    store = Store.open(tmp_path, files=files)
    late: list[str] = []
    sync_dir = files.sync_dir

    def put_meanwhile(directory: str) -> None:
        sync_dir(directory)
        if not late:
            late.append(store.put([b"late"]))

    files.sync_dir = put_meanwhile  # type: ignore[method-assign]
    store.commit([b"one"], [store.put([b"early"])])
    assert store.collect([]) == 1, "the early one; the late one waits for its commit"
    store.commit([b"two"], late)
    files.power_cut()
    assert Store.open(tmp_path, files=files).get(late[0]) == b"late"


def test_threads_may_put_side_by_side_also_the_same_contents(tmp_path: Path) -> None:
    contents = [b"%d" % (number % 7) * 5000 for number in range(84)]
    with Store.open(tmp_path) as store, ThreadPoolExecutor(6) as pool:
        puts = [pool.submit(store.put, [data]) for data in contents]
        for number in range(20):  # beside what the deciding thread does
            store.commit([b"%d" % number])
            store.rotate(b"fold")
            store.collect([])
        digests = [put.result() for put in puts]
        store.commit([b"all"], digests)
        assert [store.get(digest) for digest in digests] == contents
        assert len(os.listdir(tmp_path / "files")) == 7, "no temporary file is left"
        assert store.collect([]) == 7


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with Store.open(tmp_path / "run") as store:
            store.put([b"x"])
            store.commit([b"one"])
    finally:
        os.umask(previous)
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_collect_keeps_what_is_named_and_what_awaits_its_commit(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        kept, dropped = store.put([b"kept"]), store.put([b"dropped"])
        store.commit([b"one"], [kept, dropped])
        waiting = store.put([b"waiting"])
        (tmp_path / "files" / "notes.txt").write_bytes(b"?")
        assert store.collect({kept}) == 1
        assert sorted(os.listdir(tmp_path / "files")) == sorted([kept, waiting, "notes.txt"])
        with pytest.raises(FileDamaged, match=f"{dropped} is missing"):
            store.get(dropped)


@pytest.mark.parametrize("folder", ["files", "record"])
def test_what_a_put_that_did_not_end_has_left_is_removed_by_the_next_writer(tmp_path: Path, folder: str) -> None:
    with Store.open(tmp_path) as store:
        store.commit([b"one"])
    for name in (f"{sha(b'torn')}.0.tmp", "notes.tmp"):
        (tmp_path / folder / name).write_bytes(b"?")
    with Store.open(tmp_path, readonly=True):
        assert len(os.listdir(tmp_path / folder)) == 2, "a writer may be at it"
    with Store.open(tmp_path):
        assert os.listdir(tmp_path / folder) == ["notes.tmp"], "nothing of ours"


def test_a_changed_file_is_refused_by_name(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        digest = store.put([b"theta"])
        for wrong in (b"", b"thetb", b"theta+"):
            (tmp_path / "files" / digest).write_bytes(wrong)
            with pytest.raises(FileDamaged, match=f"{digest} differs"):
                store.get(digest)
        with pytest.raises(FileDamaged, match="no file digest"):
            store.get("../lock")
        assert store.get(store.put([b"fine"])) == b"fine", "a damaged file does not stop the store"


def test_putting_after_a_restart_mends_a_damaged_file(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        digest = store.put([b"theta"])
        store.commit([b"one"])
    (tmp_path / "files" / digest).write_bytes(b"rot")
    with Store.open(tmp_path) as store:
        assert store.get(store.put([b"theta"])) == b"theta"


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    with Store.open(tmp_path / "run") as store:
        (tmp_path / "outside").write_bytes(b"secret")
        link = tmp_path / "run" / "files" / sha(b"secret")
        link.symlink_to(tmp_path / "outside")
        with pytest.raises(StoreError):
            store.get(link.name)


def test_a_second_writer_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    script = """
import sys, pathlib
from skerry.errors import StoreInUse
from skerry.store import Store
try:
    Store.open(pathlib.Path(sys.argv[1]))
except StoreInUse as error:
    print(error)
"""
    with Store.open(tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == (
            f"{tmp_path} is in use by process {os.getpid()}: stop it, or choose another directory"
        )
        with pytest.raises(StoreInUse):
            Store.open(tmp_path)
    Store.open(tmp_path).close()


def test_a_failed_open_gives_the_lock_back(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        for body in (b"a", b"b", b"c"):
            store.commit([body])
    segment = tmp_path / "tape" / "000001.seg"
    good = segment.read_bytes()
    segment.write_bytes(good[:60] + b"\xff" + good[61:])
    for _ in range(2):
        with pytest.raises(TapeDamaged, match=f"^{segment} is damaged from record 0 at byte 48 "):
            Store.open(tmp_path)
    segment.write_bytes(good[:8] + b"\x04" + good[9:])
    with pytest.raises(TapeUnknown, match=f"^{segment} has format 4"):
        Store.open(tmp_path)
    segment.write_bytes(good)
    with Store.open(tmp_path) as store:
        assert store.records == [b"a", b"b", b"c"]


def test_a_reader_works_beside_a_live_writer_and_a_half_written_tail(tmp_path: Path) -> None:
    with Store.open(tmp_path) as writer:
        digest = writer.put([b"x"])
        writer.commit([b"one"])
        segment = tmp_path / "tape" / "000001.seg"
        before = segment.read_bytes()
        writer.commit([b"two"])
        after = segment.read_bytes()
        for size in range(len(before), len(after)):
            segment.write_bytes(after[:size])
            with Store.open(tmp_path, readonly=True) as reader:
                assert reader.records == [b"one"]
                assert reader.get(digest) == b"x"
                assert [r.body for r in reader.history()] == [b"one"]
            assert segment.read_bytes() == after[:size]
        segment.write_bytes(after)
        writer.commit([b"three"])
        with Store.open(tmp_path, readonly=True) as reader:
            assert reader.records == [b"one", b"two", b"three"]
            for call in (
                lambda: reader.put([b"y"]),
                lambda: reader.commit([b"y"]),
                lambda: reader.collect([]),
            ):
                with pytest.raises(StoreError, match="open for reading only"):
                    call()


def test_a_reader_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        Store.open(tmp_path / "absent", readonly=True)
    with pytest.raises(StoreError, match="holds no run"):
        Store.open(tmp_path, readonly=True)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "loop", tmp_path / ("x" * 300)):
        with pytest.raises(StoreError) as caught:
            Store.open(path)
        assert str(path)[:60] in str(caught.value) and "\n" not in str(caught.value)


def test_a_directory_we_may_not_enter_is_one_line(tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "tape")

    files = CrashFiles()
    files.names = refuse  # type: ignore[assignment]  # root may enter any real one
    with pytest.raises(StoreError, match=r"tape: Permission denied; check its owner and permissions$"):
        Store.open(tmp_path, files=files)


@pytest.mark.parametrize(
    ("code", "is_damage"), [(errno.EIO, True), (errno.EMFILE, False), (errno.ENOMEM, False), (errno.EACCES, False)]
)
def test_a_file_that_cannot_be_read_is_damaged_unless_the_machine_lacks_something(
    tmp_path: Path, code: int, is_damage: bool
) -> None:
    def refuse(name: str) -> bytes:
        raise OSError(code, os.strerror(code), name)

    files = CrashFiles()
    with Store.open(tmp_path, files=files) as store:
        digest = store.put([b"x"])
        files.read = refuse  # type: ignore[method-assign]
        with pytest.raises(StoreError, match=os.strerror(code)) as caught:
            store.get(digest)
    assert isinstance(caught.value, FileDamaged) == is_damage


@pytest.mark.parametrize("name", ["tape", "files", "record", "journal"])
def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("somebody put here")
    with pytest.raises(StoreError) as caught:
        Store.open(tmp_path)
    belongs = "a folder belongs there: move away what is in its place"
    assert str(caught.value) == f"open failed at {tmp_path}/{name}: Not a directory; {belongs}"


def test_a_full_disk_says_so_and_stops_the_store(tmp_path: Path) -> None:
    files = CrashFiles()
    store = Store.open(tmp_path, files=files)
    store.commit([b"one"])
    files.plan(fail_at=(1, errno.ENOSPC))
    with pytest.raises(StoreError) as full:
        store.commit([b"two"])
    assert str(full.value) == (
        f"the disk is full ({tmp_path}/somewhere); committed state is intact: free space and restart"
    )
    with pytest.raises(DiskFull, match="stopped after a failed write or fsync, restart: the disk is full"):
        store.commit([b"three"])
    store.close()
    assert Store.open(tmp_path, files=files).records == [b"one"]


def test_an_interrupt_in_a_commit_stops_the_store(tmp_path: Path) -> None:
    """Half a group may be in the file, so what came after it would never be read."""
    files = CrashFiles()
    store = Store.open(tmp_path, files=files)
    original = files.append

    def interrupted(name: str, data: bytes) -> None:
        original(name, data[:50])
        raise KeyboardInterrupt

    files.append = interrupted  # type: ignore[assignment,method-assign]
    with pytest.raises(KeyboardInterrupt):
        store.commit([b"one"])
    files.append = original  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="commit was broken off by KeyboardInterrupt"):
        store.commit([b"two"])
    assert Store.open(tmp_path, files=files).records == []


def test_a_closed_store_refuses(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.commit([b"one"])


def test_a_tape_replaced_under_us_stops_the_store(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.commit([b"one"])
        segment = tmp_path / "tape" / "000001.seg"
        copy = segment.read_bytes()
        segment.unlink()
        segment.write_bytes(copy)
        with pytest.raises(StoreError, match=r"000001\.seg: deleted or replaced while in use"):
            store.commit([b"two"])


def test_a_directory_renamed_under_us_goes_on(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a") as store:
        (tmp_path / "a").rename(tmp_path / "b")
        store.put([b"x"])
        store.commit([b"one"])
    assert Store.open(tmp_path / "b", readonly=True).records == [b"one"]


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    with Store.open(tmp_path) as store:
        digest = store.put([b"0123456789" * 5, b"abc"])
        store.commit([b"a record longer than seven bytes"])
    with Store.open(tmp_path) as store:
        assert store.get(digest) == b"0123456789" * 5 + b"abc"
        assert store.records == [b"a record longer than seven bytes"]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else []
    with Store.open(tmp_path) as store:
        for number in range(20):
            store.put([b"%d" % number])
            store.commit([b"%d" % number])
            store.rotate(b"fold")
        if before:
            assert len(os.listdir("/proc/self/fd")) <= len(before) + 4, "root, lock, and at most one tape"
    if before:
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_disk_files_name_the_file_that_failed(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    for call in (
        lambda: files.read("absent"),
        lambda: files.append("absent", b""),
        lambda: files.names("absent"),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert caught.value.filename == "absent"
    files.close()


def long_piece(rest_bytes: int, shift_bytes: int) -> memoryview:
    """Long enough to go past the page cache, so far behind the beginning of a page."""
    size = LONG_BYTES + rest_bytes
    array = Arrays().take(size + shift_bytes, np.uint8)
    array[:] = np.random.default_rng(rest_bytes).integers(0, 256, array.size, np.uint8)
    return array[shift_bytes:].data


@pytest.mark.parametrize("shift_bytes", [0, 3, 512], ids="{} behind a page".format)
@pytest.mark.parametrize("rest_bytes", [0, 9, 512, PAGE_BYTES - 1])
def test_what_is_long_is_written_as_it_is_wherever_it_begins(tmp_path: Path, rest_bytes: int, shift_bytes: int) -> None:
    """On a page of file and memory, on a sector, or on neither, and with any part of a sector at its end."""
    piece = long_piece(rest_bytes, shift_bytes)
    files = DiskFiles(tmp_path)
    files.write("long", [bytes(PAGE_BYTES), piece, piece])
    files.append("long", b"short")
    files.append("long", piece)
    files.sync("long")
    files.close()
    assert (tmp_path / "long").read_bytes() == bytes(PAGE_BYTES) + bytes(piece) * 2 + b"short" + bytes(piece)


def test_what_is_long_is_written_where_a_file_system_has_no_way_past_its_cache(tmp_path: Path, monkeypatch) -> None:
    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fcntl_of_the_system(fd, command, flags)

    fcntl_of_the_system = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    piece = long_piece(9, 0)
    files = DiskFiles(tmp_path)
    files.write("long", [piece])
    files.close()
    assert (tmp_path / "long").read_bytes() == bytes(piece)


def test_a_long_file_that_was_synced_goes_on_where_it_ended(tmp_path):
    """Its pages have left the memory by then, all but the last, which is not full."""
    files = DiskFiles(tmp_path)
    long = bytes(range(256)) * 8192 + b"and a bit"
    files.write("long", [long])
    files.sync("long")
    files.append("long", long)
    files.sync("long")
    files.close()
    assert (tmp_path / "long").read_bytes() == 2 * long
