"""What a run measures about itself, and what went wrong in it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from impala.experience.experience import Batch
from impala.messages import NO_TASK
from impala.transport.restarts import Fault
from impala.transport.transport import Delivery

_KEPT_VERSIONS = 2**16  # whose age in seconds is known; an older one counts as the oldest kept


class Measures:
    """Lag, share and pace of each task, rates, where time goes, memory and open files.

    Lag is measured where an unroll is learned from: in updates made since the version that acted in
    it, and in seconds since that version was published.
    """

    def __init__(self, task_names: Sequence[str]) -> None:
        self._names = task_names
        self._process = psutil.Process()
        self._published_s = np.full(_KEPT_VERSIONS, time.monotonic())
        self._delivered = False
        self._clear()

    def _clear(self) -> None:
        size = len(self._names)
        self._since = time.perf_counter()
        self._task: list[NDArray[np.int64]] = []  # of each column, and its lag
        self._lag: list[NDArray[np.int64]] = []
        self._lag_s: list[NDArray[np.float64]] = []
        self._dropped = np.zeros(size, np.int64)
        self._down_weighted = np.zeros(size, np.int64)
        self._updates = 0
        self._learner_s: dict[str, float] = defaultdict(float)
        self._actor_s = np.zeros(3)
        self._level_cache = np.zeros(3, np.int64)
        self._step_s = np.zeros(size)  # that environments of each task took for
        self._steps = np.zeros(size, np.int64)  # so many steps that were timed

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._learner_s[part] += time.perf_counter() - start

    def published(self, version: int) -> None:
        """Actors can take these weights from now on."""
        self._published_s[version % _KEPT_VERSIONS] = time.monotonic()

    def batch(self, batch: Batch, version: int) -> None:
        """A batch was learned from; `version` is that of the weights it changed."""
        now = time.monotonic()
        lag = version - batch.version
        kept = np.maximum(batch.version, version - _KEPT_VERSIONS + 1)
        self._task.append(batch.task)
        self._lag.append(lag)
        self._lag_s.append(now - self._published_s[kept % _KEPT_VERSIONS])
        self._updates += 1

    def dropped(self, tasks: NDArray[np.int64]) -> None:
        """Unrolls of these tasks were left out as too old."""
        np.add.at(self._dropped, tasks, 1)

    def down_weighted(self, tasks: NDArray[np.int64]) -> None:
        """Columns of these tasks were given less weight for their age."""
        np.add.at(self._down_weighted, tasks, 1)

    def delivery(self, delivery: Delivery) -> None:
        if not self._delivered:  # what was before is start-up, and in no rate
            self._delivered = True
            self._since = time.perf_counter()
            self._learner_s.clear()
            self._published_s.fill(time.monotonic())
        self._actor_s += (delivery.environments_s, delivery.inference_s, delivery.waiting_s)
        self._level_cache += delivery.level_cache
        for task, seconds, steps in delivery.step_times:
            self._step_s[task] += seconds
            self._steps[task] += steps

    def take(self, frames: int) -> dict[str, float]:
        """The metrics of the period that ends now, in which `frames` were learned from."""
        seconds = time.perf_counter() - self._since
        result = {
            "rate/frames_per_s": frames / seconds,
            "rate/updates_per_s": self._updates / seconds,
        }
        result |= self._lags()
        for part, spent in self._learner_s.items():
            result[f"time/{part}"] = spent / seconds
        actor_s = float(self._actor_s.sum())
        for part, spent in zip(
            ("environments", "inference", "waiting"), self._actor_s, strict=True
        ):
            if actor_s:
                result[f"time/actor_{part}"] = float(spent / actor_s)
        if self._level_cache.any():
            for name, count in zip(("hits", "misses", "failures"), self._level_cache, strict=True):
                result[f"level_cache/{name}"] = float(count)
        for name, seconds, steps in zip(self._names, self._step_s, self._steps, strict=True):
            if steps:
                result[f"step_s/{name}"] = float(seconds / steps)
        processes = [self._process, *self._process.children(recursive=True)]
        result["memory/rss_mb"] = sum(_rss(process) for process in processes) / 2**20
        result["memory/open_files"] = float(self._process.num_fds())
        self._clear()
        return result

    def _lags(self) -> dict[str, float]:
        """Share of each task, and mean, 95th percentile and maximum of its lag."""
        result = {}
        task = np.concatenate([*self._task, np.zeros(0, np.int64)])
        lag = np.concatenate([*self._lag, np.zeros(0, np.int64)])
        lag_s = np.concatenate([*self._lag_s, np.zeros(0)])
        for index, name in enumerate(self._names):
            columns = task == index
            result[f"share/{name}"] = float(columns.mean()) if len(task) else 0.0
            if columns.any():
                for group, values in (("lag", lag[columns]), ("lag_s", lag_s[columns])):
                    result[f"{group}/{name}"] = float(values.mean())
                    result[f"{group}_p95/{name}"] = float(np.percentile(values, 95))
                    result[f"{group}_max/{name}"] = float(values.max())
            for group, counts in (
                ("dropped", self._dropped), ("down_weighted", self._down_weighted)
            ):  # fmt: skip
                if counts[index]:
                    result[f"{group}/{name}"] = float(counts[index])
        if len(lag):
            result["lag/max"], result["lag_s/max"] = float(lag.max()), float(lag_s.max())
        return result


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:  # it ended between being listed and being asked
        return 0


class FaultCounts:
    """Failures, interrupted games and tasks that were given up, over the whole run."""

    def __init__(self, task_names: Sequence[str]) -> None:
        self._names = task_names
        self._counts: dict[str, Counter[str]] = {"restarts": Counter(), "aborted": Counter()}
        self._lost: set[str] = set()

    def add(self, fault: Fault) -> None:
        if fault.restarted and fault.lost == NO_TASK:
            self._counts["restarts"][self._name(fault.task)] += 1
        self._counts["aborted"].update(self._name(task) for task in fault.aborted)
        if fault.lost != NO_TASK:
            self._lost.add(self._name(fault.lost))

    def metrics(self) -> dict[str, float]:
        return {
            f"{group}/{name}": float(count)
            for group, counts in self._counts.items()
            for name, count in counts.items()
        }

    def summary(self) -> dict[str, Any]:
        """restarts and aborted games of each task that had any; tasks an actor gave up."""
        return {group: dict(counts) for group, counts in self._counts.items()} | {
            "given_up": sorted(self._lost)
        }

    def load(self, summary: dict[str, Any]) -> None:
        """Counts go on; tasks that were given up are tried again by a resumed run."""
        for group, counts in self._counts.items():
            counts.update(summary.get(group, {}))

    def _name(self, task: int) -> str:
        return "none" if task == NO_TASK else self._names[task]
