"""Text that people write and read, the same way everywhere.

Read: numbers with their units, like 1.2e6, 150k, 2.4M; 1y, 30d, 2h, 10min, 45s; 5Gbit; 10%. Each reader gives a float,
or raises ValueError with a plain reason that names the text and what is legal. Nothing here is negative: no option that
takes such a number has a use for that. k, M, G are for what has no unit: 200M of Mbit/s is refused, as nobody who
writes it means 200,000,000 of them.

Written: 2 learners, 1.2 GB, did you mean sync?
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
SECONDS = {
    "": 1.0,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 7 * 86400.0,
    "y": 365.25 * 86400.0,
}
BITS_PER_S = {"kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9, "Tbit": 1e12}

_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*?)\s*", re.DOTALL)


def count(text: str) -> float:
    """A number of things: plain, 1.2e6, or with k, M, G (or B), T."""
    return _parse(text, COUNTS, "a number like 1200, 1.2e6, 150k or 2.4M")


def number(text: str) -> float:
    """Plain, without any unit: a factor."""
    return _parse(text, {"": 1.0}, "a plain number like 1 or 0.5")


def share(text: str) -> float:
    """Of a whole: plain, or in per cent."""
    return _parse(text, {"": 1.0, "%": 0.01}, "a share like 0.1 or 10%")


def seconds(text: str) -> float:
    """A time in seconds: plain, or with ms, s, min, h, d, w, y (365.25 days)."""
    return _parse(text, SECONDS, "a time like 45s, 10min, 2h, 30d or 1y")


def milliseconds(text: str) -> float:
    """A time in seconds of which a plain number is milliseconds."""
    return _parse(text, SECONDS | {"": 1e-3}, "milliseconds like 50, or a time like 50ms or 0.2s")


def days(text: str) -> float:
    """A time in days, of which a plain number is days."""
    day = SECONDS["d"]
    return _parse(text, {unit: s / day for unit, s in SECONDS.items()} | {"": 1.0}, "days like 30, or 30d, 12h or 1y")


def bits_per_s(text: str) -> float:
    """The rate of a link: kbit, Mbit, Gbit or Tbit, with or without /s."""
    return _parse(text.strip().removesuffix("/s"), BITS_PER_S, "a rate like 200Mbit or 5Gbit (bits, not bytes)")


def mbit_per_s(text: str) -> float:
    """The rate of a link in bit/s, of which a plain number is Mbit/s."""
    known = {"": 1e6} | BITS_PER_S
    return _parse(text.strip().removesuffix("/s"), known, "Mbit/s like 200, or 200Mbit or 1Gbit (bits, not bytes)")


class Kind(NamedTuple):
    """What an option takes: how its text is read, and from where to where it goes."""

    read: Callable[[str], float]
    low: float
    high: float
    limits: str = ""  # for people, where they are not read as written

    def value(self, text: str) -> float:
        value = self.read(text)
        if not self.low <= value <= self.high:
            shown = _time if self.read is seconds else "{:g}".format
            raise ValueError(f"{text!r} must be from {self.limits or f'{shown(self.low)} to {shown(self.high)}'}")
        return value

    def values(self, text: str, count: int) -> list[float]:
        """One for each of so many: as listed with commas, or the one for all."""
        values = [self.value(one) for one in text.split(",")]
        if len(values) not in (1, count):
            raise ValueError(f"{len(values)} values for {counted(count, 'learner')}: write one, or one for each")
        return values * count if len(values) == 1 else values


def _time(n: float) -> str:
    """As an option takes it: 1min, 30d, 10000y."""
    for unit in ("y", "d", "h", "min"):
        if n and n % SECONDS[unit] == 0:
            return f"{n / SECONDS[unit]:.10g}{unit}"
    return f"{n:g}s"


def _parse(text: str, units: Mapping[str, float], legal: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {legal}")
    number, unit = match.groups()
    if unit not in units:
        names = [name for name in units if name]
        known = f"known are {', '.join(names)}; " if names else ""
        said = f"has the unknown unit {unit!r}" if unit else "has no unit"
        raise ValueError(f"{text!r} {said}: {known}write {legal}")
    value = float(number) * units[unit]
    if value < 0:
        raise ValueError(f"{text!r} is negative: write {legal}")
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is larger than any number: write {legal}")
    return value


# ---------------------------------------------------------------------------------------------- written


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


def amount(n: float) -> str:
    """A number of things in a few letters: 940, 12.3k, 4.56M, 7.89G."""
    if not math.isfinite(n):
        return "–"
    for unit in ("", "k", "M", "G"):
        if abs(n) < 999.5:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.4g}T"


def lasting(s: float) -> str:
    """A time in seconds, as short as it can be said: 0.4 ms, 20 ms, 1.2 s, 45 s, 12 min, 3.5 h, 2.1 d."""
    if s < 0.9995:
        return f"{1000 * s:.1f} ms" if s < 0.00995 else f"{1000 * s:.0f} ms"
    if s < 59.5:
        return f"{s:.1f} s" if s < 9.95 else f"{s:.0f} s"
    if s < 3570:
        return f"{s / 60:.0f} min"
    return f"{s / 3600:.1f} h" if s < 48 * 3600 else f"{s / 86400:.1f} d"
