"""How far a long piece of work is: one line, drawn anew; lines where there is no terminal."""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import time
from typing import TextIO

LINE_EVERY_S = 5.0


class ProgressLine:
    """total: of what `show` counts. stream: None is standard output."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._began_s = self._said_s = time.monotonic()
        self._line = ""

    def show(self, done: int, what: str) -> None:
        """The percentage done, `what`, and the time left, as long as nothing else is known."""
        now_s = time.monotonic()
        percentage = f"{100 * done // max(self._total, 1):3} %"
        left = "-"
        if done:
            left_s = (now_s - self._began_s) / done * (self._total - done)
            left = str(datetime.timedelta(seconds=round(left_s)))
        self._line = f"{percentage}  {what}; {left} left"
        if self._live:
            self._draw()
        elif not done or done == self._total or now_s - self._said_s >= LINE_EVERY_S:
            self._said_s = now_s
            self._write(f"{self._line}\n")

    def say(self, words: str) -> None:
        """A line that stays, above the other."""
        self._write(f"\r\x1b[K{words}\n" if self._live else f"{words}\n")
        if self._live:
            self._draw()

    def close(self) -> None:
        """The last line stays, too."""
        if self._live and self._line:
            self._write("\n")

    def _draw(self) -> None:
        width = shutil.get_terminal_size().columns - 1  # a longer one could not be drawn over
        self._write(f"\r\x1b[K{self._line[:width]}")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
