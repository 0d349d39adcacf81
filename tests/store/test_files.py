"""Files beside the store: what is written to a place where others may write too."""

import os

import pytest

from skerry.store.files import DiskFiles, appended, contents, fresh, opened, put_in_place, temporary


def test_no_link_that_somebody_has_put_at_a_temporary_name_is_followed(tmp_path):
    """Status and exports are written beside what others may write to: what a link there points at stays as it is."""
    theirs, path = tmp_path / "theirs", tmp_path / "status.json"
    theirs.write_text("mine")
    (tmp_path / "status.json.tmp").symlink_to(theirs)
    put_in_place(path, b"{}")
    assert path.read_bytes() == b"{}" and not path.is_symlink() and theirs.read_text() == "mine"
    link = tmp_path / "link"
    link.symlink_to(theirs)
    with fresh(link) as file:
        file.write(b"other")
    assert theirs.read_text() == "mine" and link.read_bytes() == b"other"


def test_a_log_is_this_users_alone_and_is_written_through_no_link(tmp_path):
    """A run directory may be one that others can write to: a link in it leads nobody's log into another file."""
    theirs, path = tmp_path / "theirs", tmp_path / "syncer.log"
    theirs.write_text("mine")
    path.symlink_to(theirs)
    with pytest.raises(OSError):
        appended(path)
    assert theirs.read_text() == "mine"
    path.unlink()
    for line in (b"one\n", b"two\n"):
        with appended(path) as file:
            file.write(line)
    assert path.read_bytes() == b"one\ntwo\n" and path.stat().st_mode & 0o777 == 0o600


def test_what_is_written_for_others_to_read_is_not_for_them_to_write(tmp_path):
    before = os.umask(0)
    try:
        put_in_place(tmp_path / "status.json", b"{}")
    finally:
        os.umask(before)
    assert (tmp_path / "status.json").stat().st_mode & 0o777 == 0o644


def test_what_cannot_be_put_in_its_place_is_named_and_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError) as failed:
        put_in_place(tmp_path / "taken", b"a report")
    assert failed.value.filename == str(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_nobody_can_foresee_the_name_of_what_is_being_written(tmp_path):
    names = {temporary(tmp_path / "model.safetensors").name for _ in range(3)}
    assert len(names) == 3 and all(name.startswith("model.safetensors.") for name in names)


def test_only_a_plain_file_of_bounded_length_is_read_and_nothing_is_waited_for(tmp_path):
    """A pipe that nobody writes to would hold up whoever looks at a directory that somebody else has made."""
    plain, pipe, link = tmp_path / "plain", tmp_path / "pipe", tmp_path / "link"
    plain.write_bytes(b"12345678")
    os.mkfifo(pipe)
    link.symlink_to(plain)
    assert contents(plain, 8) == b"12345678"
    with opened(link, through_link=True) as file:
        assert file.read() == b"12345678"
    for path in (pipe, link, tmp_path):
        with pytest.raises(OSError):
            contents(path)
    with pytest.raises(OSError, match="longer than 7 bytes"):
        contents(plain, 7)
    files = DiskFiles(tmp_path)
    with pytest.raises(OSError):
        files.append("pipe", b"nobody reads it")
    files.close()
