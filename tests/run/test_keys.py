"""A run's own keys: who can play whom, what the book says, and whose files these are."""

import datetime as dt
import errno
import logging
import os
import ssl
import stat
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from skerry.errors import DiskFull, KeysError
from skerry.run import keys as module
from skerry.run.keys import BOOK, Book, Keys
from skerry.shell.doorkeeper import Doorkeeper

DAY = dt.timedelta(days=1)


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path / "run")


def issued(keys: Keys, name: str, folder: Path) -> Path:
    path = folder / f"{name}.key"
    path.write_bytes(keys.issue(name).pem)
    return path


def authority_of(key_file: Path) -> str:
    """The last certificate of a key file."""
    return "-----BEGIN CERT" + key_file.read_text().rpartition("-----BEGIN CERT")[2]


def side(key_file: Path | None, purpose: int, trusted: str) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=trusted)
    if key_file is not None:
        context.load_cert_chain(key_file)
    return context


def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """A whole handshake in memory; the server's side of it."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    there = server.wrap_bio(up, down, server_side=True)
    here = client.wrap_bio(down, up, server_hostname="syncer")
    waiting = [here, there]
    for _ in range(10):
        for one in list(waiting):
            try:
                one.do_handshake()
                waiting.remove(one)
            except ssl.SSLWantReadError:
                continue
    assert not waiting
    return there


def test_a_learner_and_the_syncer_know_each_other_by_the_keys_of_their_run(keys, tmp_path):
    syncer, learner = keys.syncer_file(), issued(keys, "island-a", tmp_path)
    trusted = authority_of(learner)
    server = side(syncer, ssl.PROTOCOL_TLS_SERVER, trusted)
    told = shake(server, side(learner, ssl.PROTOCOL_TLS_CLIENT, trusted)).getpeercert()
    assert told["subject"] == ((("commonName", "island-a"),),)
    assert int(told["serialNumber"], 16) == int(keys.rows()[0].serial, 16)


def test_no_learner_can_play_the_syncer_and_the_syncer_is_no_learner(keys, tmp_path):
    syncer, learner, other = keys.syncer_file(), issued(keys, "a", tmp_path), issued(keys, "b", tmp_path)
    trusted = authority_of(learner)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(side(other, ssl.PROTOCOL_TLS_SERVER, trusted), side(learner, ssl.PROTOCOL_TLS_CLIENT, trusted))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(side(syncer, ssl.PROTOCOL_TLS_SERVER, trusted), side(syncer, ssl.PROTOCOL_TLS_CLIENT, trusted))


def test_the_keys_of_another_run_are_worth_nothing(keys, tmp_path):
    other = Keys(tmp_path / "other")
    ours, theirs = issued(keys, "a", tmp_path), issued(other, "b", tmp_path)
    server = side(keys.syncer_file(), ssl.PROTOCOL_TLS_SERVER, authority_of(ours))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(server, side(theirs, ssl.PROTOCOL_TLS_CLIENT, authority_of(ours)))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(server, side(theirs, ssl.PROTOCOL_TLS_CLIENT, authority_of(theirs)))


def test_files_are_their_owners_alone(keys, tmp_path):
    before = os.umask(0)
    try:
        keys.issue("a")
        keys.syncer_file()
    finally:
        os.umask(before)
    assert stat.S_IMODE(keys.folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in keys.folder.iterdir()}
    assert modes == {"ca.pem": 0o600, "syncer.pem": 0o600, "issued.json": 0o600}


def test_a_name_has_one_good_key_at_most(keys):
    first = keys.issue("a")
    assert first.replaced is None
    second = keys.issue("a")
    assert second.replaced == first.row
    states = [row.state(dt.datetime.now(dt.UTC)) for row in keys.rows()]
    assert states == ["revoked", "good"] and first.row.serial != second.row.serial
    keys.revoke("a")
    with pytest.raises(KeysError, match="a: its key is revoked already: skerry keys issue"):
        keys.revoke("a")
    with pytest.raises(KeysError, match=r"b: no key of this name was issued \(there are keys for a\)"):
        keys.revoke("b")


def test_the_book_says_who_may_come_at_this_moment(keys):
    one, other = keys.issue("a").row, keys.issue("b").row
    book = Book(keys.run)
    assert book.refusal("a", one.serial) == "" == book.refusal("b", other.serial)
    assert "is not in the run's book" in book.refusal("a", other.serial)  # a certificate of that serial, another's name
    keys.revoke("a")
    assert "the key of a is revoked" in book.refusal("a", one.serial)
    assert book.refusal("b", other.serial) == ""
    late = keys.issue("c").row  # while it is served
    assert book.refusal("c", late.serial) == ""
    again = keys.issue("a").row
    assert book.refusal("a", again.serial) == "" != book.refusal("a", one.serial)
    assert book.standings() == {"a": again.serial, "b": other.serial, "c": late.serial}


def test_a_book_that_cannot_be_read_says_what_it_said_last(keys, caplog):
    row = keys.issue("a").row
    book = Book(keys.run)
    (keys.folder / BOOK).write_text("{")
    assert book.refusal("a", row.serial) == "" and "cannot be read, what it said last holds" in caplog.text
    (keys.folder / BOOK).unlink()
    assert book.refusal("a", row.serial) == ""
    with pytest.raises(KeysError, match=r"issued\.json: is missing: restore it"):
        keys.issue("b")


def test_it_is_said_once_that_the_book_can_be_read_again(keys, caplog):
    """Also where the very same file was away and is brought back."""
    caplog.set_level(logging.INFO)
    row = keys.issue("a").row
    book, path, aside = Book(keys.run), keys.folder / BOOK, keys.folder / "aside"

    def said():
        lines = [(record.levelname, record.message) for record in caplog.records]
        caplog.clear()
        return lines

    good = f"the book of keys can be read again: {path}"
    for _ in range(2):
        path.rename(aside)
        assert not book.look() and not book.look()
        assert [level for level, _ in said()] == ["WARNING"]
        aside.rename(path)
        assert not book.look() and not book.look() and said() == [("INFO", good)]
    whole = path.read_bytes()
    path.write_text("{")
    assert not book.look() and [level for level, _ in said()] == ["WARNING"]
    path.write_bytes(whole)
    os.utime(path, ns=(0, 0))  # another file than the one that was read
    assert book.look() and not book.look() and said() == [("INFO", good)]
    assert book.refusal("a", row.serial) == ""


@pytest.mark.parametrize("mended", [(b"Z", b""), (b'"a"', b'"\xff"'), (b"[", b"[" * 100_000)])
def test_a_book_that_was_mended_wrongly_by_hand_is_refused_and_ends_no_syncer(keys, mended, caplog):
    keys.issue("a")
    book, path = Book(keys.run), keys.folder / BOOK
    path.write_bytes(path.read_bytes().replace(*mended))
    book.look()
    book.warn(0.0)
    assert "cannot be read, what it said last holds" in caplog.text
    with pytest.raises(KeysError, match=r"issued\.json: cannot be read .*: restore it from a copy"):
        keys.rows()


@pytest.mark.parametrize("damage", ["cut off", "gone"])
def test_a_syncer_does_not_begin_with_a_book_that_cannot_be_read(keys, damage):
    keys.issue("a")
    book = keys.folder / BOOK
    book.write_bytes(book.read_bytes()[:100]) if damage == "cut off" else book.unlink()
    with pytest.raises(KeysError, match=r"issued\.json: .*: restore it from a copy"):
        Doorkeeper(keys)


def test_a_book_of_many_thousand_keys_is_read_and_changed(keys):
    row = keys.issue("a").row
    rows = [msgspec.structs.replace(row, name=f"learner-{n}", revoked=row.issued) for n in range(8000)]
    (keys.folder / BOOK).write_bytes(module._encoded([*rows, row]))
    keys.issue("b")
    assert keys.revoke("a").revoked and len(keys.rows()) == 8002


def test_a_key_that_cannot_be_handed_over_leaves_the_one_before_good(keys):
    before = keys.issue("a").row

    def full(pem: bytes) -> None:
        raise DiskFull("no room")

    with pytest.raises(DiskFull):
        keys.issue("a", hand_over=full)
    assert keys.rows() == [before]


def test_commands_at_the_same_time_lose_no_line(keys):
    keys.init()
    threads = [threading.Thread(target=keys.issue, args=(f"learner-{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(row.name for row in keys.rows()) == [f"learner-{n}" for n in range(8)]


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="this system does not tell who has locked what")
def test_a_lock_that_stays_is_refused_by_the_id_of_who_holds_it(keys, monkeypatch):
    keys.init()
    monkeypatch.setattr(module, "LOCK_S", 0.1)
    hold = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(1, flush=True); input()"
    words = [sys.executable, "-c", hold, str(keys.folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(KeysError, match=f"keys: process {holder.pid} has held it for 0.1 s: end that first"):
            keys.rows()
        holder.communicate(b"\n")
    assert keys.rows() == []


def test_the_syncers_certificate_is_renewed_when_less_than_a_third_is_left(keys, monkeypatch, caplog):
    first, now = keys.syncer_file().read_bytes(), module._now()
    assert keys.syncer_file().read_bytes() == first
    monkeypatch.setattr(module, "_now", lambda: now + 480 * DAY)
    assert keys.syncer_file().read_bytes() == first
    monkeypatch.setattr(module, "_now", lambda: now + 490 * DAY)
    assert keys.syncer_file().read_bytes() != first and "was renewed" in caplog.text


def test_a_syncers_certificate_of_a_clock_that_was_ahead_is_made_anew(keys, monkeypatch, caplog):
    keys.init()
    now = module._now()
    monkeypatch.setattr(module, "_now", lambda: now + 400 * DAY)
    early = keys.syncer_file().read_bytes()
    monkeypatch.undo()
    Doorkeeper(keys)  # the syncer begins
    assert (keys.folder / "syncer.pem").read_bytes() != early and "it was not good before" in caplog.text


@pytest.mark.parametrize(
    ("junk", "said"),
    [
        (lambda pem, other: b"", "the file held no key of a syncer"),
        (lambda pem, other: b"\xff" * 100, "the file held no key of a syncer"),
        (lambda pem, other: pem.rpartition(b"-----BEGIN CERT")[0], "the file was not whole"),
        (lambda pem, other: other, "it was of another authority"),
    ],
)
def test_junk_in_the_file_that_the_syncer_makes_by_itself_is_made_anew_and_said(keys, tmp_path, caplog, junk, said):
    keys.issue("a")
    path, other = keys.syncer_file(), Keys(tmp_path / "other").syncer_file()
    path.write_bytes(junk(path.read_bytes(), other.read_bytes()))
    Doorkeeper(keys)
    assert f"syncer.pem: the syncer's certificate was renewed: {said}" in caplog.text


def test_an_authority_of_a_clock_that_was_ahead_is_refused_with_both_dates(keys, monkeypatch):
    now = module._now()
    monkeypatch.setattr(module, "_now", lambda: now + 400 * DAY)
    keys.issue("a")
    monkeypatch.undo()
    with pytest.raises(KeysError, match=r"ca\.pem: .* not good before .*, and this machine has .*: set the clock, or"):
        keys.issue("b")
    keys.revoke("a")


def test_expiry_is_said_ahead_once_a_day(keys, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    keys.issue("short", days=20)
    keys.issue("long")
    book = Book(keys.run)
    for second in (0.0, 1.0, 86_401.0):
        book.warn(second)
    assert caplog.text.count("the key of short expires in") == 2 and "long" not in caplog.text
    now = module._now()
    monkeypatch.setattr(module, "_now", lambda: now + 21 * DAY)
    book.warn(200_000.0)
    assert "the key of short has expired" in caplog.text
    monkeypatch.setattr(module, "_now", lambda: now + 3640 * DAY)
    keys.syncer_file()
    assert "the run's authority expires in" in caplog.text


def test_of_a_thousand_keys_that_end_there_is_one_line_with_their_number_and_the_first_names(keys, monkeypatch, caplog):
    row = keys.issue("a", days=20).row
    rows = [msgspec.structs.replace(row, name=f"l{n:03}", expires=row.expires + n * DAY / 200) for n in range(1000)]
    (keys.folder / BOOK).write_bytes(module._encoded(rows[::-1]))
    Book(keys.run).warn(0.0)
    now = module._now()
    monkeypatch.setattr(module, "_now", lambda: now + 40 * DAY)
    Book(keys.run).warn(0.0)
    first, second = (record.getMessage() for record in caplog.records)
    names = "l000, l001, l002, l003, l004, l005, l006, l007 and 992 more: issue others"
    day = f"{row.expires:%Y-%m-%d}"
    assert first.startswith(f"1000 keys expire within 30 days, the first on {day}: {names}")
    assert second.startswith(f"1000 keys have expired, the first on {day}: {names}")


def test_a_lost_authority_is_not_made_anew_over_keys_that_are_out(keys):
    keys.issue("a")
    (keys.folder / "ca.pem").unlink()
    with pytest.raises(KeysError, match=r"ca\.pem: is missing, and issued\.json names keys"):
        keys.syncer_file()


def test_a_syncer_serves_where_the_authority_is_not_and_makes_no_key_there(keys, tmp_path, monkeypatch):
    keys.issue("a")
    names = [keys.syncer_file().name, keys.admin_file().name, BOOK]
    there = Keys(tmp_path / "elsewhere")
    there.folder.mkdir(mode=0o700, parents=True)
    for name in names:
        (there.folder / name).write_bytes((keys.folder / name).read_bytes())
        (there.folder / name).chmod(0o600)
    there.check()
    door = Doorkeeper(there)
    assert (there.folder / "admin.pem").is_file()
    assert door.book.standings()["a"]
    with pytest.raises(KeysError, match=r"ca\.pem: is missing"):
        there.issue("b")
    assert sorted(path.name for path in there.folder.iterdir()) == sorted(names)
    now = module._now()
    monkeypatch.setattr(module, "_now", lambda: now + 800 * DAY)
    with pytest.raises(KeysError, match=r"syncer\.pem: the syncer's key has expired on .*bring both from where"):
        there.syncer_file()


def test_without_the_authority_keys_are_listed_and_revoked_and_what_needs_it_names_the_file(keys):
    keys.issue("a")
    (keys.folder / "ca.pem").unlink()
    assert [row.name for row in keys.rows()] == ["a"]
    assert keys.revoke("a").revoked and keys.rows()[0].revoked
    with pytest.raises(KeysError, match=r"ca\.pem: is missing, .* restore it from a copy, or move .*keys away"):
        keys.issue("b")


def test_an_authority_that_was_not_finished_is_made_the_next_time(keys, monkeypatch):
    put = module._Folder.put

    def full(self, name, data):
        if name == module.AUTHORITY:
            raise module._failure(self.path / name, OSError(errno.ENOSPC, "No space left on device"))
        put(self, name, data)

    monkeypatch.setattr(module._Folder, "put", full)
    with pytest.raises(DiskFull, match=r"ca\.pem: No space left on device: free space"):
        keys.issue("a")
    monkeypatch.undo()
    assert keys.issue("a").row in keys.rows()


def test_no_link_is_followed(keys, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    keys.run.mkdir()
    keys.folder.symlink_to(elsewhere)
    with pytest.raises(KeysError, match=r"keys: .*: (a link is not followed|a folder belongs there)"):
        keys.issue("a")
    assert not list(elsewhere.iterdir())
    keys.folder.unlink()
    keys.issue("a")
    target = tmp_path / "target"
    (keys.folder / BOOK).rename(target)
    (keys.folder / BOOK).symlink_to(target)
    with pytest.raises(KeysError, match="a link is not followed"):
        keys.issue("b")


def test_a_folder_that_others_may_enter_is_refused(keys):
    keys.issue("a")
    keys.folder.chmod(0o755)
    with pytest.raises(KeysError, match="others may enter it: chmod 700"):
        keys.rows()


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o606])
@pytest.mark.parametrize("name", ["ca.pem", "syncer.pem", BOOK])
def test_a_file_that_others_may_read_or_change_is_refused_with_what_mends_it(keys, name, mode):
    keys.issue("a")
    path = keys.syncer_file().parent / name
    path.chmod(mode)
    with pytest.raises(KeysError, match=f"{name}: others may read or change it: chmod 600 {path}$"):
        Doorkeeper(keys)
    path.chmod(0o600)
    Doorkeeper(keys)


def test_a_book_that_others_may_change_is_not_believed_while_it_is_served(keys, caplog):
    row = keys.issue("a").row
    book = Book(keys.run)
    keys.revoke("a")
    (keys.folder / BOOK).chmod(0o666)
    assert book.refusal("a", row.serial) == "" and "others may read or change it: chmod 600" in caplog.text
    (keys.folder / BOOK).chmod(0o600)
    assert "the key of a is revoked" in book.refusal("a", row.serial)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of somebody else's")
def test_a_file_of_somebody_else_is_refused(keys):
    keys.issue("a")
    os.chown(keys.folder / BOOK, 4242, 4242)
    with pytest.raises(KeysError, match=r"issued\.json: belongs to another user \(id 4242\)"):
        keys.rows()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of somebody else's")
def test_a_run_of_somebody_else_is_refused(keys):
    keys.run.mkdir()
    os.chown(keys.run, 4242, 4242)
    with pytest.raises(KeysError, match=r"belongs to another user \(id 4242\): run this as that user"):
        keys.issue("a")
    assert not keys.folder.exists()


def test_files_that_hold_something_else_are_refused(keys):
    keys.issue("a")
    (keys.folder / "ca.pem").write_text("nothing")
    with pytest.raises(KeysError, match=r"ca\.pem: holds no key and certificate: restore it"):
        keys.issue("b")


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_run_directory_that_others_may_change_has_no_keys(tmp_path, mode):
    """They could put a folder of their own in the place of the keys."""
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(mode)
    with pytest.raises(KeysError, match="others may change what is in it: chmod go-w"):
        Keys(run).init()
    assert not (run / "keys").exists()


def test_a_run_whose_keys_are_gone_says_that_it_makes_others(tmp_path, caplog):
    (tmp_path / "tape").mkdir()
    tmp_path.chmod(0o700)
    Keys(tmp_path).init()
    assert "made an authority; if the run had another before, no key of that is good any more" in caplog.text
