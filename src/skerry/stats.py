"""How sure a mean is: Student's 95 % interval, for tables over few seeds or trials."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Student's t at 97.5 %, for 1 to 30 degrees of freedom.
T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def half_width(numbers: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of the mean; beyond 30 degrees of freedom a little wider than need be."""
    count = len(numbers)
    if count < 2:
        return None
    middle = sum(numbers) / count
    variance = sum((number - middle) ** 2 for number in numbers) / (count - 1)
    return T[min(count - 1, len(T)) - 1] * math.sqrt(variance / count)
