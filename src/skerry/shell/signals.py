"""When a process should end: it was told to, or whoever started it is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDINGS = (signal.SIGTERM, signal.SIGINT)
AT_ONCE = 130  # the exit code of who was told twice
PARENT_POLL_S = 0.5


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
