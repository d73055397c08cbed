"""One block of memory that processes share and that no name outlives."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray


class SharedMemory:
    """Zeroed shared memory behind a file descriptor that has no name in any file system.

    Whatever ends the processes, SIGKILL included, the kernel frees it with the last of them. It is
    sent to a child by being an argument of the child's process while that is started.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.size = size
        self.descriptor = _anonymous_file(size) if descriptor is None else descriptor
        self._map = mmap.mmap(self.descriptor, size)

    def array(self) -> NDArray[np.uint8]:
        """All of it as uint8 [size]."""
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Gives up the descriptor; the mapping goes with the last array upon it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __reduce__(self) -> tuple[Callable[..., SharedMemory], tuple[Any, ...]]:
        return _attach, (self.size, reduction.DupFd(self.descriptor))


def _attach(size: int, descriptor: Any) -> SharedMemory:
    return SharedMemory(size, descriptor.detach())


def _anonymous_file(size: int) -> int:
    """A descriptor of `size` zero bytes: Linux's memfd, else an unlinked file in shared memory."""
    available = psutil.virtual_memory().available
    if size > available:
        raise ValueError(
            f"the slots and weights need {size / 2**20:.0f} MB of shared memory, and there are"
            f" {available / 2**20:.0f} MB left: set a smaller envs_per_actor, num_actors,"
            " algorithm.unroll_length or transport.slots_per_environment"
        )
    if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm, and never seen there
        descriptor = os.memfd_create("impala", os.MFD_CLOEXEC)
    else:
        folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
        free = shutil.disk_usage(folder).free
        if size > free:
            raise ValueError(
                f"the slots and weights need {size / 2**20:.0f} MB and {folder} has"
                f" {free / 2**20:.0f} MB free: enlarge it, or set a smaller envs_per_actor,"
                " num_actors, algorithm.unroll_length or transport.slots_per_environment"
            )
        descriptor, path = tempfile.mkstemp(dir=folder)
        os.unlink(path)
    os.ftruncate(descriptor, size)
    return descriptor
