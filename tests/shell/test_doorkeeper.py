"""The run's keys at the syncer's door: whose connections are ended when the book changes."""

import pytest

from skerry.run.keys import BOOK, Keys
from skerry.shell.doorkeeper import Doorkeeper


class Learners:
    """What the doorkeeper orders, in order."""

    def __init__(self):
        self.ordered = []

    def expel(self, name, why, now):
        self.ordered.append(f"expel {name}")

    def readmit(self, name, now):
        self.ordered.append(f"readmit {name}")

    def hang_up(self, name, why):
        self.ordered.append(f"hang up on {name}")


@pytest.fixture
def keys(tmp_path):
    keys = Keys(tmp_path / "run")
    keys.issue("a")
    return keys


@pytest.fixture
def looked(keys):
    """Look at the book; what came of it."""
    door, learners = Doorkeeper(keys), Learners()

    def looked():
        learners.ordered.clear()
        door.look(learners, 0.0)
        return list(learners.ordered)

    assert not looked()
    return looked


def test_who_comes_with_a_key_that_was_issued_after_a_revocation_is_not_hung_up_on(keys, looked):
    keys.revoke("a")
    assert looked() == ["expel a", "hang up on a"]
    assert looked() == ["hang up on a"] and not looked()  # who had waited in the inbox
    keys.issue("a")
    assert looked() == ["readmit a"] and not looked()  # who is there by now has the new key


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_who_was_turned_out_comes_in_with_another_key_though_the_book_has_lost_its_line(keys, looked, is_looked_at):
    book = keys.folder / BOOK
    keys.issue("b")
    looked()
    before_c = book.read_bytes()
    keys.issue("c")
    looked()
    keys.revoke("c")
    assert looked()[0] == "expel c" and looked() and not looked()
    book.write_bytes(before_c)  # an older copy of it
    assert not (is_looked_at and looked())
    keys.issue("c")
    assert looked() == ["readmit c"] and not looked()


@pytest.mark.parametrize("is_revoked", [False, True])
def test_a_key_that_took_the_place_of_another_since_the_last_look_ends_its_connections(keys, looked, is_revoked):
    if is_revoked:
        keys.revoke("a")
    keys.issue("a")
    assert looked() == ["readmit a", "hang up on a"]
    assert looked() == ["hang up on a"] and not looked()
