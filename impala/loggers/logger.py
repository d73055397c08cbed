"""The contract of a logger. Only the main process logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class RunInfo:
    """What a logger may want to know of the run that it logs."""

    run_dir: Path
    name: str
    title: str  # for people: the suite and the algorithm
    config: dict[str, Any]  # resolved, plain types
    total_frames: int
    task_names: tuple[str, ...]
    headline: str  # the key of the suite's score that names *the* score, such as "median"
    resume_frames: int | None  # of the checkpoint a resumed run goes on from
    evaluated_frames: int | None = None  # of the checkpoint that is evaluated, where one is


class Logger(Protocol):
    def write(self, frames: int, metrics: Mapping[str, float]) -> None:
        """One point: flat "group/name" keys, and `frames`, environment frames, as the x-axis.

        While a run trains `metrics` also has the plain keys `updates` and `time_s`, and frames grow
        from call to call. An evaluation afterwards is one point, once its report is written.
        """
        ...

    def commit(self, frames: int) -> None:
        """A checkpoint of these frames exists: no later resume goes back before it."""
        ...

    def finish(self, exit_code: int) -> None:
        """Always called once, also when the run failed or was interrupted."""
        ...
