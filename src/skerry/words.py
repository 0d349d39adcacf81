"""What is said to people, the same way everywhere: 2 learners, 1.2 GB, did you mean sync?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, or all there are."""
    names = list(known)
    close = difflib.get_close_matches(word, names, 1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"


def counted(n: int, thing: str) -> str:
    """1 learner, 2 learners."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def size(n: float) -> str:
    """Bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.4g} TB"
