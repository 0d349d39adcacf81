"""Stretches of one load in turn, alone and disturbed by others, who are in a process of their own.

The second pair is the other way round, so that what else this machine does falls on both.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

from skerry.python import module_argv

STRETCHES = (False, True, True, False)  # whether each is disturbed
END_S = 10.0  # for the others to end

Found = TypeVar("Found")


def in_turn(
    disturb: Callable[[], AbstractContextManager[None]], measure: Callable[[bool], Found]
) -> tuple[list[Found], list[Found]]:
    """What is measured of the stretches alone, and of those that are disturbed; `measure` is told which it is."""
    alone: list[Found] = []
    disturbed: list[Found] = []
    for is_disturbed in STRETCHES:
        with disturb() if is_disturbed else contextlib.nullcontext():
            (disturbed if is_disturbed else alone).append(measure(is_disturbed))
    return alone, disturbed


@contextlib.contextmanager
def others(module: str, *words: str) -> Iterator[bytes]:
    """This module as a process, which ends when its stdin does; what it said first, which is when it has begun."""
    process = subprocess.Popen(module_argv(module, *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline()
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
