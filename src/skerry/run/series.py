"""Figures over time in a bounded number of bins: as a run gets longer its bins get wider, and no sum is lost.

A bin is so many seconds; when there would be more bins than are kept, each two become one. So a series of a week has as
many points as one of an hour. It knows no clock: seconds come in, and they never go back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

How = Literal["sum", "mean", "last"]
"""What becomes of the values of one bin: they are added up, averaged by their weight, or the newest stays."""

_Cell = list[float]  # a value, and for a mean the weight that it has


class Series:
    """Named columns over the same bins; a bin in which a column was given nothing has None there."""

    def __init__(self, bins_max: int, columns: Mapping[str, How]) -> None:
        assert bins_max >= 2, bins_max
        self.width_s = 1.0
        self._bins_max = bins_max
        self._columns = dict(columns)
        self._bins: dict[int, dict[str, _Cell]] = {}  # by their number, in order

    def __repr__(self) -> str:
        return f"<series of {', '.join(self._columns)}: {len(self._bins)} bins of {self.width_s:g} s>"

    def add(self, t: float, weight: float = 1.0, **values: float) -> None:
        """What was measured at second `t`, which is in the newest bin or later."""
        while t // self.width_s >= self._bins_max:
            self._halve()
        cells = self._bins.setdefault(int(t // self.width_s), {})
        for name, value in values.items():
            self._put(cells, name, [value * weight if self._columns[name] == "mean" else value, weight])

    def record(self, is_dense: bool = False) -> dict[str, Any]:
        """`t` is where each bin begins, in seconds; beside it a list for each column, and `width_s`.

        Bins of which nothing was said are left out; dense, those in between are there, and their sums are 0.
        """
        numbers: Iterable[int] = range(min(self._bins), max(self._bins) + 1) if is_dense and self._bins else self._bins
        bins = [(number * self.width_s, self._bins.get(number, {})) for number in numbers]
        columns = {name: [self._shown(name, cells) for _, cells in bins] for name in self._columns}
        return {"width_s": self.width_s, "t": [t for t, _ in bins], **columns}

    def _halve(self) -> None:
        """Half as many bins, twice as wide."""
        before, self._bins = self._bins, {}
        self.width_s *= 2
        for number, cells in before.items():
            into = self._bins.setdefault(number // 2, {})
            for name, cell in cells.items():
                self._put(into, name, cell)

    def _put(self, cells: dict[str, _Cell], name: str, cell: _Cell) -> None:
        if name in cells and self._columns[name] != "last":
            cell = [a + b for a, b in zip(cells[name], cell, strict=True)]
        cells[name] = cell

    def _shown(self, name: str, cells: Mapping[str, _Cell]) -> float | None:
        if name not in cells:
            return 0.0 if self._columns[name] == "sum" and not cells else None
        value, weight = cells[name]
        if self._columns[name] != "mean":
            return value
        return value / weight if weight else None
