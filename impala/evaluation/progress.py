"""How far an evaluation is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from impala.loggers.screen import redirected_log_handlers

log = logging.getLogger(__name__)

LINE_EVERY_S = 30.0


class Progress:
    """total, finished: games, and how many of them are there already.

    live: a bar (True) or lines (False); None: a bar if standard output is a terminal.
    """

    def __init__(self, total: int, finished: int, live: bool | None = None) -> None:
        if live is None:
            live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._total = total
        self._live = live
        self._began_s = self._line_s = time.monotonic()
        self._bar = Bar(
            TextColumn("games"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(file=sys.stdout),
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, completed=finished, speed="")

    def __enter__(self) -> Progress:
        if self._live:
            self._bar.start()
            self._redirected = redirected_log_handlers(self._bar.console)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            for handler, stream in self._redirected:
                handler.setStream(stream)
            self._bar.stop()

    def show(self, finished: int, frames: int) -> None:
        """finished: games. frames: played since this began."""
        now_s = time.monotonic()
        speed = f"{frames / max(now_s - self._began_s, 1e-9):,.0f} frames/s"
        if self._live:
            self._bar.update(self._task, completed=finished, speed=speed)
        elif now_s - self._line_s > LINE_EVERY_S:
            self._line_s = now_s
            log.info("%d of %d games, %s", finished, self._total, speed)
