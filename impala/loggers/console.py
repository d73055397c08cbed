"""The terminal: one live screen, or plain lines where the output is not a terminal."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from impala.loggers.json_lines import read_points
from impala.loggers.latest import (
    ACTOR_TIME,
    LEARNER_TIME,
    Latest,
    duration,
    memory,
    number,
    percent,
    small,
)
from impala.loggers.logger import RunInfo
from impala.loggers.screen import Screen

TIME_LINE_EVERY_S = 60.0  # of plain output


class Console:
    """A logger for people.

    live:    a screen (True) or lines (False); None: a screen if the output is a terminal.
    stream:  the output, standard output by default.

    Metrics that are missing show as "-": until every task has finished a game, some are.
    """

    def __init__(
        self, run: RunInfo, *, live: bool | None = None, stream: TextIO | None = None
    ) -> None:
        self._stream = stream or sys.stdout
        self._latest = Latest(run.total_frames, run.task_names, run.headline)
        if run.resume_frames is not None:
            before = list(read_points(run.run_dir / "metrics.jsonl"))
            self._latest.resume(run.resume_frames, before[-1] if before else {})
        self._title = run.title
        self._next_time_line_s = -math.inf
        if live is None:
            live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._live = live
        self._screen: Screen | None = None

    def write(self, frames: int, metrics: Mapping[str, float]) -> None:
        self._latest.update(frames, metrics)
        if self._live:
            # Not before: what fails on the way to the first point should find a plain terminal.
            self._screen = self._screen or Screen(self._latest, self._title, self._stream)
            self._screen.refresh()
            return
        self._print(progress_line(self._latest))
        time_s = metrics.get("time_s", 0.0)
        if self._next_time_line_s == -math.inf:
            self._next_time_line_s = time_s + TIME_LINE_EVERY_S
        elif time_s >= self._next_time_line_s:
            self._next_time_line_s = time_s + TIME_LINE_EVERY_S
            self._print(time_line(self._latest))

    def commit(self, frames: int) -> None:
        """Nothing: what was shown was shown."""

    def finish(self, exit_code: int) -> None:
        """Leaves the last screen standing and adds one closing line."""
        if self._screen is not None:
            self._screen.stop()
        self._print(closing_line(self._latest, exit_code))

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def progress_line(latest: Latest) -> str:
    return " | ".join(
        (
            f"frames {latest.frames:,} ({100 * latest.progress:.1f} %)",
            f"{number(latest.get('rate/frames_per_s'))} frames/s",
            f"{latest.score} (coverage {latest.coverage})",
            f"left {duration(latest.time_left_s)}",
            f"lag {number(latest.mean_lag)} max {number(latest.get('lag/max'))}",
            f"loss {small(latest.get('loss/total'))}",
        )
    )


def time_line(latest: Latest) -> str:
    """Where the time goes."""
    parts = []
    for who, names in (("learner", LEARNER_TIME), ("actor", ACTOR_TIME)):
        shares = [f"{name} {percent(share)}" for name, share in latest.times(names, who)]
        parts.append(f"{who} " + (", ".join(shares) or "-"))
    parts.append(f"queue {percent(latest.get('queue/fill'))} full")
    parts.append(f"memory {memory(latest.get('memory/rss_mb'))}")
    return "time: " + " | ".join(parts)


def closing_line(latest: Latest, exit_code: int) -> str:
    how = {0: "finished", 130: "stopped", 143: "stopped"}.get(
        exit_code, f"failed (exit code {exit_code})"
    )
    if not latest.metrics:
        return f"{how} before anything was learned from"
    where = ""
    if exit_code == 0 and latest.frames < latest.total_frames:
        how, where = "paused", " (stop_frames)"
    spent = duration(latest.get("time_s"))
    return (
        f"{how} at {latest.frames:,} of {latest.total_frames:,} frames{where}"
        f" after {spent}, {latest.score} (coverage {latest.coverage})"
    )
