"""First in, first out: every unroll is learned from once, as in IMPALA, or a few times."""

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
    passes: batches that each unroll is part of. `batch_size / passes` columns of a batch are fresh,
        the others are those of the batches just before; V-trace corrects for what changed since.
        Unlike the paper: it learns once from each unroll (1), or mixes in a large replay.
    pin: whether batches are laid in page-locked memory, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        storage: Trajectory,
        *,
        batch_size: int,
        micro_batch: int,
        passes: int = 1,
        pin: bool = False,
    ) -> None:
        if passes < 1 or batch_size % passes:
            raise ValueError(
                f"passes={passes}: expected a number of which batch_size={batch_size} is a multiple"
            )
        self._storage = storage
        self._fresh = batch_size // passes
        self._waiting: deque[int] = deque()
        edges = [*range(0, self._fresh, micro_batch), self._fresh]
        self._edges = list(pairwise(edges))
        # The newest batches' fresh columns, the newest first; the oldest is overwritten.
        self._kept = deque(
            [_columns_like(storage, end - start, pin) for start, end in self._edges]
            for _ in range(passes)
        )
        self._filled = 0

    def insert(self, slots: NDArray[np.int64]) -> None:
        self._waiting.extend(slots.tolist())

    def discard(self, oldest_version: int) -> NDArray[np.int64]:
        waiting = np.array(self._waiting, np.int64)
        old = self._storage.version.numpy()[waiting] < oldest_version
        if old.any():
            self._waiting = deque(waiting[~old].tolist())
        return waiting[old]

    def ready(self) -> bool:
        return len(self._waiting) >= self._fresh

    def sample(self) -> Batch:
        slots = np.array([self._waiting.popleft() for _ in range(self._fresh)])
        self._kept.rotate(1)
        self._filled = min(self._filled + 1, len(self._kept))
        for part, (start, end) in zip(self._kept[0], self._edges, strict=True):
            gather(self._storage, torch.from_numpy(slots[start:end]), part)
        parts = [part for kept in list(self._kept)[: self._filled] for part in kept]
        return Batch(
            parts=parts,
            task=torch.cat([part.task for part in parts]).numpy(),
            version=torch.cat([part.version for part in parts]).numpy(),
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
