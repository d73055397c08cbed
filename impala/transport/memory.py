"""The storage of all unrolls and the weights, laid out in one block of shared memory each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from impala.memory import SharedMemory
from impala.trajectory import Trajectory, allocate
from impala.weights import aligned


def tensor(memory: SharedMemory) -> Tensor:
    """All of it as uint8 [size]."""
    return torch.from_numpy(memory.array())


def carve(layout: Trajectory, columns: int, memory: Tensor) -> Trajectory:
    """Arrays of `layout` laid out in `memory` (uint8), each at a multiple of 64 bytes."""
    used = 0

    def place(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nonlocal used
        start, end = used, used + _bytes(shape, dtype)
        used = aligned(end)
        return memory[start:end].view(dtype).view(shape)

    return allocate(layout, columns, place)


def carved_size(layout: Trajectory, columns: int) -> int:
    """Bytes that `carve` needs."""
    used = 0

    def count(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nonlocal used
        used += aligned(_bytes(shape, dtype))
        return torch.empty(0)

    allocate(layout, columns, count)
    return used


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
