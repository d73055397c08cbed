"""What a run measures about itself between two points of its metrics."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import psutil

from impala.experience.experience import Batch
from impala.transport.transport import Delivery


class Measures:
    """Lag and share of each task, rates, where time goes, memory and open files."""

    def __init__(self, task_names: Sequence[str]) -> None:
        self._names = task_names
        self._process = psutil.Process()
        self._clear()

    def _clear(self) -> None:
        size = len(self._names)
        self._since = time.perf_counter()
        self._columns = np.zeros(size, np.int64)
        self._lag_sum = np.zeros(size, np.int64)
        self._lag_max = 0
        self._updates = 0
        self._learner_s: dict[str, float] = defaultdict(float)
        self._actor_s = np.zeros(3)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._learner_s[part] += time.perf_counter() - start

    def batch(self, batch: Batch, version: int) -> None:
        """A batch was learned from; `version` is that of the weights it changed."""
        lag = version - batch.version
        np.add.at(self._columns, batch.task, 1)
        np.add.at(self._lag_sum, batch.task, lag)
        self._lag_max = max(self._lag_max, int(lag.max()))
        self._updates += 1

    def delivery(self, delivery: Delivery) -> None:
        self._actor_s += (delivery.environments_s, delivery.inference_s, delivery.waiting_s)

    def take(self, frames: int) -> dict[str, float]:
        """The metrics of the period that ends now, in which `frames` were learned from."""
        seconds = time.perf_counter() - self._since
        result = {
            "rate/frames_per_s": frames / seconds,
            "rate/updates_per_s": self._updates / seconds,
        }
        total = max(1, int(self._columns.sum()))
        for name, columns, lag in zip(self._names, self._columns, self._lag_sum, strict=True):
            result[f"share/{name}"] = float(columns / total)
            if columns:
                result[f"lag/{name}"] = float(lag / columns)
        if self._updates:
            result["lag/max"] = float(self._lag_max)
        for part, spent in self._learner_s.items():
            result[f"time/{part}"] = spent / seconds
        actor_s = float(self._actor_s.sum())
        for part, spent in zip(
            ("environments", "inference", "waiting"), self._actor_s, strict=True
        ):
            if actor_s:
                result[f"time/actor_{part}"] = float(spent / actor_s)
        processes = [self._process, *self._process.children(recursive=True)]
        result["memory/rss_mb"] = sum(_rss(process) for process in processes) / 2**20
        result["memory/open_files"] = float(self._process.num_fds())
        self._clear()
        return result


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:  # it ended between being listed and being asked
        return 0
