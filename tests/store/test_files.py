"""Files beside the store: what is written to a place where others may write too."""

from skerry.store.files import fresh, put_in_place


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
