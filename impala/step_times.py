"""How long environments take for a step, from few of their steps."""

from __future__ import annotations

from collections import defaultdict

SAMPLED = 7  # one of so many steps, a number that lengths of games and unrolls are rarely made of


class StepTimes:
    """Sums of an actor, by task."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = defaultdict(float)
        self._steps: dict[int, int] = defaultdict(int)

    def add(self, task: int, seconds: float, environments: int) -> None:
        """So many environments of the task made a step together, which took so long."""
        self._seconds[task] += seconds
        self._steps[task] += environments

    def take(self) -> tuple[tuple[int, float, int], ...]:
        """Since the last call: task, seconds, steps of single environments."""
        taken = tuple((task, self._seconds[task], steps) for task, steps in self._steps.items())
        self._seconds.clear()
        self._steps.clear()
        return taken
