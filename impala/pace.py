"""Which environments are too slow to be stepped together with others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

SAMPLES = 3
LONG_S = 10.0  # that others have waited is enough to know, whatever the number of samples
RATIO = 3.0
SHARE = 0.1


class Pace:
    """Watches environments that are stepped as one: sent to in turn, then received from in turn.

    How long one of them keeps the others waiting is seen when it is the last in turn, since the
    others are then done: what it still takes, and what sending to it took. So whichever seemed to
    take longest is the last of the next step. It is too slow if, in the median of `SAMPLES` such
    steps in a row, that is more than `RATIO` times what each of the others takes and more than
    `SHARE` of the step.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """They are others now."""
        self._last = -1
        self._samples: list[tuple[float, float]] = []
        self._waited_s = 0.0

    def longest(self, seconds: Sequence[float]) -> int:
        """Which one should be the last of the next step; `seconds` that each took, in turn."""
        return max(range(len(seconds)), key=seconds.__getitem__)

    def too_slow(self, last: int, seconds: Sequence[float]) -> bool:
        """Whether that is now known of `last`, a name of the last one in turn."""
        if last != self._last:
            self.clear()
            self._last = last
        total_s = sum(seconds)
        others_s = (total_s - seconds[-1]) / (len(seconds) - 1)
        self._samples.append((seconds[-1] / max(others_s, 1e-9), seconds[-1] / total_s))
        self._waited_s += seconds[-1]
        if len(self._samples) < SAMPLES and self._waited_s < LONG_S:
            return False
        ratio, share = (statistics.median(values) for values in zip(*self._samples, strict=True))
        self.clear()
        return ratio > RATIO and share > SHARE
