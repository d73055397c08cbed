"""Parts that die: how often they may, what is known of how they did, and signs of life."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from impala.messages import NO_TASK
from impala.patience import Patience

LONGEST_BACKOFF_S = 30.0


@dataclass(frozen=True)
class Restarts:
    """What a run puts up with.

    per_task: times that actors which failed in a task are started again, over the run.
    backoff_s: seconds before the first of them; doubled each time, up to half a minute.
    then: once more than `per_task` have failed: "stop" ends the run with the cause, "continue" goes
        on without the task, unless it is the last.
    step_timeout_s: seconds that an environment may take to be built, to reset or to step; then its
        actor is killed, which counts as a failure. None waits for ever.
    """

    per_task: int = 0
    backoff_s: float = 0.5
    then: str = "stop"
    step_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.then not in ("stop", "continue"):
            raise ValueError(f"restarts.then={self.then}: expected stop or continue")


@dataclass(frozen=True)
class Fault:
    """An actor failed and was dealt with."""

    actor: int
    task: int  # in which it failed, or NO_TASK
    aborted: Sequence[int]  # the task of each game that nobody will finish
    restarted: bool
    lost: int  # the task that the run goes on without, or NO_TASK


class Budget:
    """Counts the failures in each task against `Restarts`."""

    def __init__(self, restarts: Restarts) -> None:
        self._restarts = restarts
        self._failures: Counter[int] = Counter()

    def spend(self, task: int) -> float | None:
        """Another failure in this task: seconds to wait before a restart, None if spent."""
        self._failures[task] += 1
        count = self._failures[task]
        if count > self._restarts.per_task:
            return None
        return min(self._restarts.backoff_s * 2.0 ** (count - 1), LONGEST_BACKOFF_S)

    def text(self, task: int) -> str:
        return f"{self._failures[task]} of {self._restarts.per_task}"


_BEAT = np.dtype([("time_s", "<f8"), ("task", "<i8"), ("playing", "<i8")])


class Heartbeats:
    """Signs of life of each actor, and which environment it waits for, in memory that they share.

    Times are of the monotonic clock, which is one for all processes of a machine.
    """

    def __init__(self, num_actors: int, memory: NDArray[np.uint8]) -> None:
        size = self.size(num_actors)
        self._beats: NDArray[np.void] = memory[:size].view(_BEAT)

    @staticmethod
    def size(num_actors: int) -> int:
        return num_actors * _BEAT.itemsize

    def clear(self, actor: int) -> None:
        self._beats[actor] = (time.monotonic(), NO_TASK, 0)

    def waits_for(self, actor: int, task: int) -> None:
        """The actor is about to call an environment of this task; NO_TASK: it came back."""
        beat = self._beats[actor]
        beat["time_s"] = time.monotonic()
        beat["task"] = task

    def plays(self, actor: int) -> None:
        """All its environments are in a game. Said again every second, if not more often."""
        self._beats[actor]["time_s"] = time.monotonic()
        self._beats[actor]["playing"] = 1

    def task(self, actor: int) -> int:
        return int(self._beats[actor]["task"])

    def playing(self, actor: int) -> bool:
        return bool(self._beats[actor]["playing"])

    def hanging(self, patience: Patience, at_start: Patience) -> list[int]:
        """Actors that wait for an environment in vain, or give no sign of life."""
        begun = (self._beats["task"] != NO_TASK) | (self._beats["playing"] != 0)
        horizon_s = np.where(begun, patience.horizon_s(), at_start.horizon_s())
        return np.flatnonzero(self._beats["time_s"] < horizon_s).tolist()
