"""Processes that this one starts: signals to the program end it, and with it them."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEATED_S = 1.0  # within which another signal is the same request, delivered again
DEATH_S = 10.0  # that processes may take to end with their parent
_PARENT = "IMPALA_PARENT"  # variable of the environment, which a child has from the first moment


class StopRequests:
    """Tells a further request to stop from another delivery of the same one.

    Some supervisors send their signal twice within milliseconds, and what a terminal sends to all
    processes a launcher may pass on as well.
    """

    def __init__(self) -> None:
        self._since_s = -math.inf

    def is_new(self) -> bool:
        """To be asked at each signal."""
        now_s = time.monotonic()
        if now_s - self._since_s < REPEATED_S:
            return False
        self._since_s = now_s
        return True


@contextmanager
def signals_held() -> Iterator[None]:
    """For starting processes: SIGINT and SIGTERM wait until the block ends, and they see neither.

    A terminal sends Ctrl-C, and `timeout` its signal, to all processes of the program at once. It
    is for the first of them to stop the others, from the very beginning of their lives.
    """
    os.environ[_PARENT] = str(os.getpid())
    resource_tracker.ensure_running()  # of multiprocessing; its start would unblock them again
    # The mask is what children inherit. It does not keep handlers from running, as any thread's
    # signal is handled by the main one.
    with signals_deferred():
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """For what is to be done as a whole: SIGINT and SIGTERM are handled when the block ends."""
    caught: list[int] = []
    handlers = {n: signal.signal(n, lambda number, _: caught.append(number)) for n in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in caught[:1]:
            signal.raise_signal(number)


def how_it_ended(exit_code: int | None) -> str:
    """Of a process that said nothing itself."""
    if exit_code is not None and exit_code < 0:
        return f"its process was killed by {signal.Signals(-exit_code).name}"
    return f"its process ended with exit code {exit_code} and left no traceback"


def kill_all(processes: Collection[BaseProcess]) -> None:
    """Ends them at once, and waits until they and those that they started are gone."""
    import psutil  # which children that only play do without

    started = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            started += psutil.Process(process.pid).children(recursive=True)
        process.kill()
    for process in processes:
        process.join()
    end = time.monotonic() + DEATH_S
    while time.monotonic() < end and any(_lives(process) for process in started):
        time.sleep(0.01)


def _lives(process: Any) -> bool:
    """Unlike one that waits for somebody to ask how it ended: in a container that may be nobody.

    Its first thread can be done before others are, and until then its files are open.
    """
    import psutil

    with suppress(psutil.NoSuchProcess):
        ended = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1
        return process.is_running() and not ended
    return False


def die_with_parent(parent: int | None = None) -> None:
    """On Linux the kernel ends this process when its parent ends, even by SIGKILL.

    parent: its process; of those started under `signals_held` it is known. As early in the life of
    a process as can be.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != (parent or int(os.environ[_PARENT])):  # it has ended already
            sys.exit(0)
