"""A bound on bytes a second: a bucket that fills at the rate, and is emptied by what leaves. It reads no clock."""

from __future__ import annotations

BURST_S = 0.05  # of the rate that may leave at once: longer than a busy I/O thread is away
BYTES_PER_MBIT = 1e6 / 8


class Bucket:
    """What may leave now; it begins empty, so nothing is gained by coming back."""

    def __init__(self, bytes_per_s: float, now: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._bytes, self._at = 0.0, now

    def allowed(self, now: float) -> int:
        """Whole bytes that may leave by now."""
        earned = max(0.0, now - self._at) * self.bytes_per_s
        self._bytes, self._at = min(max(1.0, self.bytes_per_s * BURST_S), self._bytes + earned), max(now, self._at)
        return max(0, int(self._bytes))

    def spend(self, count: int) -> None:
        self._bytes -= count
