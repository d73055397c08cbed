"""Which environments are too slow to be stepped together with others."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

SAMPLES = 16
LONG_S = 10.0  # that others have waited is enough to know, whatever the number of samples
RATIO = 8.0  # threads that share a core are done one after another, which looks like 3 or 4
RATIO_BY_TURN = 4.0  # medians of few samples differ by a factor of two
SHARE = 0.1
WORTH_S = 0.005  # of each step; less is not worth a process


class Pace:
    """Watches environments that are stepped as one: sent to in turn, then received from in turn.

    How long one of them keeps the others waiting is seen when it is received from last, since the
    others are then done: what it still takes, and what sending to it took. So whichever seemed to
    take longest is the last of every other step; in the steps between, each is in its turn. Of the
    last `SAMPLES` steps in which it was the last, a task is too slow if in three of four that is
    more than `RATIO` times what each of the others takes, more than `SHARE` of the step, more than
    `WORTH_S`, and more than `RATIO_BY_TURN` times what the others take when it is their turn to be
    last: on busy cores whoever is last waits for a core, now and then.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """They are others now."""
        self._samples: dict[int, deque[tuple[float, float, float]]] = {}
        self._turns: deque[tuple[int, float]] = deque(maxlen=SAMPLES)
        self._in_turn = False  # is the last of this step

    def next_last(self, seconds: Sequence[float]) -> int:
        """Which one is to be received from last in the next step, the others as in this one.

        seconds: that each took in this step, in the order in which they were received from.
        """
        self._in_turn = not self._in_turn
        return 0 if self._in_turn else max(range(len(seconds)), key=seconds.__getitem__)

    def too_slow(self, task: int, seconds: Sequence[float]) -> bool:
        """Whether that is now known of a task.

        seconds: that each took; the last one was received from last, and is of that task.
        """
        samples = self._samples.setdefault(task, deque(maxlen=SAMPLES))
        total_s, last_s = sum(seconds), seconds[-1]
        others_s = (total_s - last_s) / (len(seconds) - 1)
        samples.append((last_s / max(others_s, 1e-9), last_s / total_s, last_s))
        if self._in_turn:
            self._turns.append((task, last_s))
        ratios, shares, waited_s = zip(*samples, strict=True)
        if len(samples) < SAMPLES and (len(samples) < 2 or sum(waited_s) < LONG_S):
            return False
        quartiles = [sorted(each)[len(samples) // 4] for each in (ratios, shares, waited_s)]
        by_others_s = [each_s for other, each_s in self._turns if other != task] or [0.0]
        limits = RATIO, SHARE, max(WORTH_S, RATIO_BY_TURN * statistics.median(by_others_s))
        slow = all(least > limit for least, limit in zip(quartiles, limits, strict=True))
        if slow:
            samples.clear()
        return slow
