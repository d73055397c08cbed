"""The contract of experience: what sits with the learner between arriving unrolls and batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from impala.trajectory import Trajectory


@dataclass(frozen=True)
class Batch:
    """Unrolls to learn from, in micro-batches whose gradients add up."""

    parts: list[Trajectory]  # each [T+1, b, ...]; valid until the next sample
    task: NDArray[np.int64]  # [B]: which task each column came from
    version: NDArray[np.int64]  # [B]: of the weights that acted
    released: NDArray[np.int64]  # slots that were read and may be filled again

    @property
    def fresh(self) -> int:
        """Columns that no batch before had: what counts as frames."""
        return len(self.released)


class Experience(Protocol):
    def insert(self, slots: NDArray[np.int64]) -> None:
        """New unrolls, in slots of the transport's storage."""
        ...

    def discard(self, oldest_version: int) -> NDArray[np.int64]:
        """Drops new unrolls in which an older version acted; returns their slots, to be freed."""
        ...

    def ready(self) -> bool:
        """Whether there is enough for a batch."""
        ...

    def sample(self) -> Batch:
        """A batch, copied out of the slots."""
        ...

    @property
    def waiting(self) -> int:
        """How many unrolls are in slots that were not yet released."""
        ...
