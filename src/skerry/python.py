"""How a Python of ours is started: it imports nothing from the folder in which it happens to begin.

Python looks there before anywhere else for what runs by `-m` or `-c`, so whoever may write there would have his code
run. It is an option of each start: PYTHONSAFEPATH would be inherited by the user's own commands, which may well import
what lies beside them.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.context import SpawnContext

SAFE = "-P"


def module_argv(module: str, *words: str, python: str = "") -> list[str]:
    """By this Python, if no other one is named."""
    return [python or sys.executable, SAFE, "-m", module, *words]


def code_argv(code: str, *words: str, python: str = "") -> list[str]:
    return [python or sys.executable, SAFE, "-c", code, *words]


def spawning() -> SpawnContext:
    """For a process that starts only our own: what multiprocessing starts is told nothing but by the environment."""
    os.environ["PYTHONSAFEPATH"] = "1"
    return SpawnContext()
