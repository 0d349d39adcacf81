"""A function of somebody else's that says what a model is worth: found by name, called, and its answer understood.

It is handed the model as {name: numpy array}, each array its own to keep or change, and returns a number or
{name: number}. What is trained is float32; what is not has its own type, bfloat16 as float32. What goes wrong in it is
its author's: the error says so and carries theirs as its cause. What it prints goes to stderr, because stdout is for
the answer.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt

from skerry.errors import HookFailed

Hook = Callable[[dict[str, npt.NDArray[Any]]], Any]
NUMBER = "value"  # what a number by itself is called


def find(name: str) -> Hook:
    """`module:function`, as Python would import it from the working directory."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise HookFailed(f"{name!r} names no function: write module:function, like judge:score")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = importlib.import_module(module)
    except SystemExit as error:
        raise HookFailed(f"{module} cannot be imported (it called sys.exit({error.code!r})): it may not") from None
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module  # its own code has no part in it
        said = f"{module} cannot be imported ({type(error).__name__}: {error}): check the name"
        raise HookFailed(said) from None if is_missing else error
    hook = getattr(found, function, None)
    if not callable(hook):
        raise HookFailed(f"{module} has no function {function}: check the name")
    return hook  # type: ignore[no-any-return]


def ask(hook: Hook, name: str, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, float]:
    """What it says of this model."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            said = hook(arrays)
    except SystemExit as error:
        raise HookFailed(f"{name} called sys.exit({error.code!r}): return a number, or raise an error") from None
    except Exception as error:
        raise HookFailed(f"{name} raised {type(error).__name__}: {error}") from error
    return understood(said, name)


def understood(said: Any, name: str) -> dict[str, float]:
    """A number, or numbers by name, at least one; whatever Python takes for one, an array of one element too."""
    if not isinstance(said, Mapping):
        return {NUMBER: _number(said, name)}
    if not said:
        raise HookFailed(f"{name} returned an empty {type(said).__name__}: return at least one number by name")
    return {str(key): _number(value, name, f" for {str(key)!r}") for key, value in said.items()}


def _number(said: Any, name: str, what: str = "") -> float:
    try:
        if isinstance(said, str | bytes):  # which float() would read
            raise TypeError
        return float(said)
    except (TypeError, ValueError):
        kind = type(said).__name__
        raise HookFailed(f"{name} returned a {kind}{what}: return a number, or a dict of numbers by name") from None
    except OverflowError:
        raise HookFailed(
            f"{name} returned a number{what} that is larger than a float can be: return a smaller one"
        ) from None
