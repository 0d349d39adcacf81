"""When a process should end: it was told to, or whoever started it is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

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
            os._exit(130)
        if not looked:
            raise KeyboardInterrupt

    def is_wanted() -> bool:
        nonlocal looked
        looked = True
        return not signals and (parent == 0 or os.getppid() == parent)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return is_wanted


def end_with(parent: int) -> None:
    """Have SIGTERM sent to this process once its parent is gone, whatever it waits for then."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    if parent:
        threading.Thread(target=watch, name="skerry-parent", daemon=True).start()
