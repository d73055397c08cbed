"""The processor cores that this process may use, and one of them to stay on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_ALL = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def available_cores() -> int:
    """Honours taskset and containers' CPU sets where the system has them."""
    return len(_ALL) if _ALL else os.cpu_count() or 1


def stay_on(core: int) -> None:
    """This thread, and those it starts, stay on the `core`-th of the cores, where that can be."""
    if _ALL:
        os.sched_setaffinity(0, {sorted(_ALL)[core % len(_ALL)]})


@contextmanager
def on_any_core() -> Iterator[None]:
    """For starting processes that are not to stay where this thread does."""
    if not _ALL:
        yield
        return
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _ALL)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)
