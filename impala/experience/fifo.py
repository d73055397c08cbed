"""First in, first out: every unroll is learned from exactly once, as in IMPALA."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from impala.experience.experience import Batch
from impala.trajectory import Trajectory, gather, map_structure


class Fifo:
    """See `experience.Experience`.

    batch_size: columns (unrolls) of a batch.
    micro_batch: columns that go through the network at once. Losses are sums, so the gradient is
        that of the whole batch; on a CPU about 160 rows keep activations in the cache.
    pin: whether batches are laid in page-locked memory, for asynchronous copies to a GPU.
    """

    def __init__(
        self, storage: Trajectory, *, batch_size: int, micro_batch: int, pin: bool = False
    ) -> None:
        self._storage = storage
        self._batch_size = batch_size
        self._waiting: deque[int] = deque()
        edges = [*range(0, batch_size, micro_batch), batch_size]
        self._edges = list(pairwise(edges))
        self._parts = [_columns_like(storage, end - start, pin) for start, end in self._edges]

    def insert(self, slots: NDArray[np.int64]) -> None:
        self._waiting.extend(slots.tolist())

    def ready(self) -> bool:
        return len(self._waiting) >= self._batch_size

    def sample(self) -> Batch:
        slots = np.array([self._waiting.popleft() for _ in range(self._batch_size)])
        for part, (start, end) in zip(self._parts, self._edges, strict=True):
            gather(self._storage, torch.from_numpy(slots[start:end]), part)
        return Batch(
            parts=self._parts,
            task=self._storage.task.numpy()[slots],
            version=self._storage.version.numpy()[slots],
            released=slots,
        )

    @property
    def waiting(self) -> int:
        return len(self._waiting)


def _columns_like(storage: Trajectory, columns: int, pin: bool) -> Trajectory:
    """An empty trajectory of `columns` columns."""

    def rows(leaf: torch.Tensor) -> torch.Tensor:
        shape = (leaf.shape[0], columns, *leaf.shape[2:])
        return torch.empty(shape, dtype=leaf.dtype, pin_memory=pin)

    def once(leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty(columns, *leaf.shape[1:], dtype=leaf.dtype, pin_memory=pin)

    return Trajectory(
        steps=map_structure(rows, storage.steps),
        outputs=map_structure(rows, storage.outputs),
        core_state=map_structure(once, storage.core_state),
        task=once(storage.task),
        version=once(storage.version),
    )
