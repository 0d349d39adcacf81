"""When a process should end: it was told to, or whoever started it is gone."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENDINGS = (signal.SIGTERM, signal.SIGINT)
PARENT_POLL_S = 0.5
ECHO_S = 5.0  # within which another SIGTERM is the same word: Slurm tells every process, and torchrun its own again


class Word:
    """What a process was told, if it was: the first signal that came. A second one ends it at once.

    But a SIGTERM soon after another is no second one: a scheduler tells all processes of a job, torchrun its own, and
    `timeout` its child and then the child's group.
    """

    def __init__(self) -> None:
        self.came: signal.Signals | None = None
        self._came_at = 0.0

    def is_new(self, number: int) -> bool:
        """Note a signal; False where it is the one that was noted, said again."""
        if self.came is None:
            self.came, self._came_at = signal.Signals(number), time.monotonic()
            return True
        if not self.is_echo(number):
            os._exit(128 + number)
        return False

    def is_echo(self, number: int) -> bool:
        return self.came == number == signal.SIGTERM and time.monotonic() - self._came_at < ECHO_S


def until_signalled(parent: int) -> Callable[[], bool]:
    """True until SIGTERM or SIGINT comes (a second one ends the process at once) or the parent process is gone.

    A signal before the first look is an interrupt: nobody would see the note while a learner waits to join. A process
    that ends by itself is not ended by a SIGTERM before it has: Python puts handlers away first.
    """
    word = Word()
    looked = False

    def note(number: int, _: object) -> None:
        if word.is_new(number) and not looked:
            raise KeyboardInterrupt

    def is_wanted() -> bool:
        nonlocal looked
        looked = True
        return word.came is None and (parent == 0 or os.getppid() == parent)

    for number in ENDINGS:
        signal.signal(number, note)
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    return is_wanted


class Notice:
    """SIGTERM or SIGINT as a wish to leave in order: it is noted, and a second one does what it does by default.

    A signal that somebody has a handler of their own for is theirs; so are all where this is not the main thread, or in
    a fork of the process, such as one that loads data.
    """

    def __init__(self) -> None:
        self._word = Word()
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def came(self) -> signal.Signals | None:
        return self._word.came

    def listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ENDINGS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Signals mean what they meant; for whom one was noted this is the last moment before it is obeyed."""
        while self._before:
            signal.signal(*self._before.popitem())

    def obey(self) -> None:
        """End as the signal would have ended it, if one came."""
        if self.came == signal.SIGINT:
            raise KeyboardInterrupt
        if self.came is not None:
            raise SystemExit(128 + self.came)

    def _note(self, number: int, _: object) -> None:
        is_ours = os.getpid() == self._owner
        if is_ours and self._word.is_echo(number):
            return
        if self.came is not None or not is_ours:
            self.restore()
            signal.raise_signal(number)
        self._word.is_new(number)


@contextmanager
def held_back() -> Iterator[None]:
    """A signal that comes in here is answered when this ends; a second one ends the process at once.

    For a large library that is imported, or native code that calls back into Python: what a handler raises there is
    swallowed, or has nowhere to go.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main one alone
        yield
        return
    word = Word()

    def note(number: int, _: object) -> None:
        word.is_new(number)

    before = [(number, signal.signal(number, note)) for number in ENDINGS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    if word.came is not None:
        signal.raise_signal(word.came)


def end_with(parent: int) -> None:
    """Have SIGTERM sent to this process once its parent is gone, whatever it waits for then."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    if parent:
        threading.Thread(target=watch, name="skerry-parent", daemon=True).start()
