"""Files that whoever reads them finds whole, as they were or as they are now."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(OSError):
    """There is no room for a file; the message says for which, and what to do."""

    def __str__(self) -> str:
        return self.strerror or ""


def write_whole(path: Path, text: str) -> None:
    """Writes `text`, as it is, in place of the file; a failure or a crash leaves the one before.

    Raises OSError, naming the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path):
            with temporary.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """While a file is written: an OSError that names none by itself is given this name.

    Raises DiskFull where that is the reason.
    """
    try:
        yield
    except DiskFull:
        raise
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(
                error.errno, f"cannot write to {path}: {error.strerror}. Make room, then go on"
            ) from error
        if error.filename is None:
            error.filename = str(path)
        raise
