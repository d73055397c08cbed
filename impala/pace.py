"""Which environments are too slow to be stepped together with others."""

from __future__ import annotations

import statistics
from collections import defaultdict

SAMPLES = 5
RATIO = 3.0
SHARE = 0.1


class Pace:
    """Watches environments that are stepped as one: sent to in turn, then received from in turn.

    How long one of them keeps the others waiting is seen when it is the last in turn, since the
    others are then done: what it still takes, and what sending to it took. Each is the last now and
    then. It is too slow if, in the median of `SAMPLES` such steps, that is more than `RATIO` times
    what each of the others takes and more than `SHARE` of the step.
    """

    def __init__(self) -> None:
        self._samples: dict[int, list[tuple[float, float]]] = defaultdict(list)

    def clear(self) -> None:
        """They are others now."""
        self._samples.clear()

    def too_slow(self, task: int, last_s: float, total_s: float, count: int) -> bool:
        """Whether that can be said now of the task that was last among `count`."""
        others_s = (total_s - last_s) / (count - 1)
        samples = self._samples[task]
        samples.append((last_s / max(others_s, 1e-9), last_s / total_s))
        if len(samples) < SAMPLES:
            return False
        ratio, share = (statistics.median(values) for values in zip(*samples, strict=True))
        samples.clear()
        return ratio > RATIO and share > SHARE
