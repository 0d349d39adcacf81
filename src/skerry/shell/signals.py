"""When a process should end: it was told to, or whoever started it is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENDINGS = (signal.SIGTERM, signal.SIGINT)
AT_ONCE = 130  # the exit code of who was told twice
PARENT_POLL_S = 0.5
ECHO_S = 5.0  # within which another SIGTERM is the same word: Slurm tells every process, and torchrun its own again


def until_signalled(parent: int) -> Callable[[], bool]:
    """True until SIGTERM or SIGINT comes (a second one ends the process at once) or the parent process is gone.

    A signal before the first look is an interrupt: nobody would see the note while a learner waits to join.
    """
    signals: list[int] = []
    looked = False

    def note(number: int, _: object) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(AT_ONCE)
        if not looked:
            raise KeyboardInterrupt

    def is_wanted() -> bool:
        nonlocal looked
        looked = True
        return not signals and (parent == 0 or os.getppid() == parent)

    for number in ENDINGS:
        signal.signal(number, note)
    return is_wanted


class Notice:
    """SIGTERM or SIGINT as a wish to leave in order: it is noted, and a second one does what it does by default.

    A SIGTERM soon after another is no second one: a scheduler tells all processes of a job, and torchrun its own.
    A signal that somebody has a handler of their own for is theirs; so are all where this is not the main thread, or in
    a fork of the process, such as one that loads data.
    """

    def __init__(self) -> None:
        self.came: signal.Signals | None = None
        self._came_at = 0.0
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}

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
        if is_ours and self.came == number == signal.SIGTERM and time.monotonic() - self._came_at < ECHO_S:
            return
        if self.came is not None or not is_ours:
            self.restore()
            signal.raise_signal(number)
        self.came, self._came_at = signal.Signals(number), time.monotonic()


@contextmanager
def held_back() -> Iterator[None]:
    """A signal that comes in here is answered when this ends; a second one ends the process at once.

    For a large library that is imported, or native code that calls back into Python: what a handler raises there is
    swallowed, or has nowhere to go.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main one alone
        yield
        return
    came: list[int] = []

    def note(number: int, _: object) -> None:
        came.append(number)
        if len(came) > 1:
            os._exit(AT_ONCE)

    before = [(number, signal.signal(number, note)) for number in ENDINGS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    for one in came:
        signal.raise_signal(one)


def end_with(parent: int) -> None:
    """Have SIGTERM sent to this process once its parent is gone, whatever it waits for then."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    if parent:
        threading.Thread(target=watch, name="skerry-parent", daemon=True).start()
