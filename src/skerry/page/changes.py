"""What changed between two records of plain data, so that a page that is open is sent only that.

    changes(before, after)   a patch, or None where nothing changed
    applied(before, patch)   `after` again; static/changes.js does the same in a browser

A patch of a table has what was set (`set`), what changed inside (`in`) and which keys are gone (`gone`). A patch of a
list says up to where it is as before, and what follows there (`from`, `then`): series grow at their end, where the last
point may still change. Of everything else the value is set anew. Nothing here knows what a record is about.
"""

from __future__ import annotations

from typing import Any

Patch = dict[str, Any]


def changes(before: Any, after: Any) -> Patch | None:
    """How to make `after` of `before`, both tables or both lists."""
    if isinstance(before, list):
        same = _same(before, after)
        return None if same == len(before) == len(after) else {"from": same, "then": after[same:]}
    put: dict[str, Any] = {}
    inside: dict[str, Patch] = {}
    for key, value in after.items():
        old = before.get(key)
        if key in before and _is_deep(old, value):
            if (patch := changes(old, value)) is not None:
                inside[key] = patch
        elif key not in before or not _is_equal(old, value):
            put[key] = value
    gone = [key for key in before if key not in after]
    patch = {"set": put, "in": inside, "gone": gone}
    return {name: part for name, part in patch.items() if part} or None


def applied(before: Any, patch: Patch) -> Any:
    """The record that `patch` makes of `before`, which stays as it is."""
    if isinstance(before, list):
        return [*before[: patch["from"]], *patch["then"]]
    after = {key: value for key, value in before.items() if key not in patch.get("gone", ())}
    after |= {key: applied(before[key], part) for key, part in patch.get("in", {}).items()}
    return after | patch.get("set", {})


def _is_deep(old: Any, value: Any) -> bool:
    return type(old) is type(value) and isinstance(value, dict | list)


def _is_equal(old: Any, value: Any) -> bool:
    """A number that there is not (NaN) is the same as itself, and 1 is not true."""
    return type(old) is type(value) and (old == value or (old != old and value != value))


def _same(before: list[Any], after: list[Any]) -> int:
    """Up to where two lists are the same, found by halves: long series differ at their end, if at all."""
    low, high = 0, min(len(before), len(after))
    if before[:high] == after[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if before[low:middle] == after[low:middle]:
            low = middle
        else:
            high = middle
    return low
