"""The contract of a logger. Only the main process logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Logger(Protocol):
    def write(self, frames: int, metrics: Mapping[str, float]) -> None:
        """One point: flat "group/name" keys, and `frames`, environment frames, as the x-axis.

        `metrics` also has the plain keys `updates` and `time_s`. Frames grow from call to call.
        """
        ...

    def commit(self, frames: int) -> None:
        """A checkpoint of these frames exists: no later resume goes back before it."""
        ...

    def finish(self, exit_code: int) -> None:
        """Always called once, also when the run failed or was interrupted."""
        ...
