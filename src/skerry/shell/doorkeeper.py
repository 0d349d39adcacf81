"""The run's keys at the syncer's door: who is let in, and who has to leave when the book says so.

The book is asked at every connection, on the thread that takes it, and looked at twice a second: a key that was issued
is good at once, and one that is revoked turns its learner out within a second, whatever it is at.
"""

from __future__ import annotations

from skerry.node.peers import Learners
from skerry.run.keys import Book, Keys, revoked
from skerry.wire.tls import Tls


class Doorkeeper:
    """Of one syncer process; the run's authority and the syncer's own key are made where there are none."""

    def __init__(self, keys: Keys) -> None:
        key_file = keys.syncer_file()
        keys.admin_file()  # by which who is on this machine gives orders
        self.book = Book(keys.run)
        self.tls = Tls(key_file, self.book.refusal)
        # Name -> serial of its good key; of whoever has none, nothing. What the book has lost is remembered: whoever
        # was turned out stays so until there is a good key for the name.
        self._seen: dict[str, str] = {}
        self._changes: dict[str, str] = {}  # name -> what became of its key, since the last look

    def look(self, learners: Learners, now: float) -> None:
        """Turn out who has lost its key, and let in again who has another.

        Connections that were let in with the key before are ended twice: some may have waited in the inbox.
        """
        self.book.look()
        self.book.warn(now)
        standings, changes = self.book.standings(), self._changes
        self._changes = {}
        for name, serial in standings.items():
            if serial != self._seen.get(name):
                self._changed(learners, name, serial, now)
        self._seen |= standings
        for name, why in (changes | self._changes).items():
            learners.hang_up(name, why)

    def _changed(self, learners: Learners, name: str, serial: str, now: float) -> None:
        """Who was here before this process has to be known as turned out, too: its work would be waited for."""
        before = self._seen.get(name)
        if not serial and (before is not None or name in learners.node.machine.state.lives):
            learners.expel(name, "its key is revoked", now)
            self._changes[name] = revoked(name)
        elif serial and before is not None:
            learners.readmit(name, now)
            if before:  # else its connections were ended when it was revoked, and those of now may be the new key's
                self._changes[name] = f"another key was issued for {name}"
