"""How a Python of ours is started: it imports nothing from the folder in which it happens to begin.

Python looks there before anywhere else for what runs by `-m` or `-c`, so whoever may write there would have his code
run. It is an option of each start: PYTHONSAFEPATH would be inherited by the user's own commands, which may well import
what lies beside them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess

SAFE, SAFE_VARIABLE = "-P", "PYTHONSAFEPATH"


def module_argv(module: str, *words: str, python: str = "") -> list[str]:
    """By this Python, if no other one is named."""
    return [python or sys.executable, SAFE, "-m", module, *words]


def code_argv(code: str, *words: str, python: str = "") -> list[str]:
    return [python or sys.executable, SAFE, "-c", code, *words]


@contextlib.contextmanager
def _safely() -> Iterator[None]:
    """What multiprocessing starts is told nothing but by the environment, which is as it was again behind it."""
    before = os.environ.get(SAFE_VARIABLE)
    os.environ[SAFE_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_VARIABLE]
        else:
            os.environ[SAFE_VARIABLE] = before


class Spawned(SpawnProcess):
    def start(self) -> None:
        with _safely():
            super().start()


class Spawning(SpawnContext):
    """For processes that start only our own."""

    Process = Spawned

    def __init__(self) -> None:
        super().__init__()
        with _safely():  # the process that looks after locks, which would begin with the first of them
            resource_tracker.ensure_running()
