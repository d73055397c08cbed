"""Folders for the temporary files of engines, which go when their process has ended, however."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Scratch:
    """A folder of this process, in a place that all processes of this user share.

    It is locked for as long as the process lives, which the system sees to: a folder without a lock
    has lost its owner, to SIGKILL as well, and whoever makes the next one removes it, or `sweep`.
    """

    def __init__(self) -> None:
        with _alone() as place:
            _remove_abandoned(place)
            self.path = Path(tempfile.mkdtemp(dir=place))
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Removes it; safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Removes the folders of processes that have ended."""
    with _alone() as place:
        _remove_abandoned(place)


@contextmanager
def _alone() -> Iterator[Path]:
    """The place, in which nobody else makes or removes folders meanwhile."""
    place = Path(tempfile.gettempdir()) / f"impala_dmlab_{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield place
    finally:
        os.close(descriptor)


def _remove_abandoned(place: Path) -> None:
    for folder in place.iterdir():
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:  # its owner lives
                pass
            finally:
                os.close(descriptor)
