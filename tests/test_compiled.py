"""Compiled code that somebody else could have put there is not loaded: what is loaded is run."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from skerry.compiled import is_private

CODE = """
from pathlib import Path
from skerry.compiled import kernel
import probe
print(probe.twice(21), probe.twice.stats.cache_path)
"""
PROBE = "from skerry.compiled import kernel\n\n\n@kernel\ndef twice(x):\n    return 2 * x\n"


class Planted:
    """A pickle that leaves a mark when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def called(folder, cache, home):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    value, path = done.stdout.split()
    assert value == "42"
    return (None if path == "None" else Path(path)), done.stderr


@pytest.fixture
def places(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    for name in ("cache", "home"):
        (tmp_path / name).mkdir(mode=0o700)
    return tmp_path, tmp_path / "cache", tmp_path / "home"


def plant(path, mark):
    """What numba reads first, for every kernel kept there."""
    for file in path.glob("*.nbi"):
        file.write_bytes(pickle.dumps(Planted(mark)))


def test_a_planted_file_is_run_from_a_folder_of_ones_own_and_not_from_one_that_others_can_write(places):
    folder, cache, home = places
    mark = folder / "mark"
    path, _ = called(folder, cache, home)
    assert path.parent == cache and list(path.glob("*.nbi")), "one's own folder is used, wherever it is said to be"
    plant(path, mark)
    path.chmod(0o777)
    elsewhere, _ = called(folder, cache, home)
    assert not mark.exists() and elsewhere.is_relative_to(home / "skerry" / "kernels")
    assert (home / "skerry").stat().st_mode & 0o777 == 0o700 and list(elsewhere.glob("*.nbi"))
    again, _ = called(folder, cache, home)
    assert again == elsewhere, "and is kept there"
    path.chmod(0o700)
    with pytest.raises(subprocess.CalledProcessError):
        called(folder, cache, home)
    assert mark.exists(), "the planted file is one that runs: else this test would show nothing"


def test_a_file_that_others_can_write_or_a_link_spoils_a_folder(places):
    folder, cache, home = places
    path, _ = called(folder, cache, home)
    (file,) = path.glob("*.nbi")
    file.chmod(0o666)
    assert called(folder, cache, home)[0].is_relative_to(home)
    file.chmod(0o600)
    assert called(folder, cache, home)[0] == path
    file.rename(folder / "index")
    file.symlink_to(folder / "index")
    assert called(folder, cache, home)[0].is_relative_to(home)


def test_where_every_folder_can_be_written_by_others_nothing_is_kept(places):
    folder, cache, home = places
    for each in (cache, home):
        each.chmod(0o777)
    path, said = called(folder, cache, home)
    assert path is None and "NUMBA_CACHE_DIR" in said and not list(cache.rglob("*.nbi")) + list(home.rglob("*.nbi"))


def test_what_is_private_is_so_all_along_the_way(tmp_path):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True, mode=0o700)
    assert is_private(inner)
    inner.parent.chmod(0o777)
    assert not is_private(inner), "whoever can write above it can put another in its place"
    inner.parent.chmod(0o1777)
    assert is_private(inner), "as in /tmp, where nobody removes what is another's"
    link = tmp_path / "link"
    link.symlink_to(inner)
    assert is_private(link)
    inner.parent.chmod(0o777)
    assert not is_private(link), "nor by a link"
