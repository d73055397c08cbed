"""The log as a file, which a full disk does not turn into tracebacks."""

from __future__ import annotations

import contextlib
import logging
import sys


class LogFile(logging.FileHandler):
    """The handler behind `train.log` and `evaluate.log`.

    That it cannot be written is said once, on standard error; what is logged then may be missing.
    """

    _said = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)  # errors of writing go to `handleError`, those of opening do not
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)  # a mistake in the program
        elif not self._said:
            self._said = True
            print(
                f"the log {self.baseFilename} cannot be written ({error.strerror or error}):"
                " lines of it will be missing",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is missing was said to be
            super().close()
