"""What the processes of a run share: unrolls, weights, signs of life, and counts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from impala.agents.agent import Agent
from impala.inference_server import Answers
from impala.memory import SharedMemory
from impala.mix import Ledger
from impala.trajectory import Trajectory, allocate
from impala.transport.restarts import Heartbeats
from impala.transport.transport import ActorBuilder
from impala.weights import Weights, aligned


class Shared:
    """Blocks of shared memory; it is sent to a process by being an argument of its start."""

    def __init__(self, builder: ActorBuilder, total_slots: int) -> None:
        actors, tasks = len(builder.crews), len(builder.task_names)
        self._size = builder.layout, total_slots, actors, tasks
        self._blocks = [
            SharedMemory(size)
            for size in (
                carved_size(builder.layout, total_slots),
                Weights.size(builder.agent),
                Heartbeats.size(actors),
                Ledger.size(actors, tasks),
                Answers.size(),
            )
        ]

    def storage(self) -> Trajectory:
        layout, total_slots, _, _ = self._size
        return carve(layout, total_slots, tensor(self._blocks[0]))

    def weights(self, agent: Agent) -> Weights:
        return Weights(agent, tensor(self._blocks[1]))

    def beats(self) -> Heartbeats:
        _, _, actors, _ = self._size
        return Heartbeats(actors, self._blocks[2].array())

    def ledger(self) -> Ledger:
        _, _, actors, tasks = self._size
        return Ledger(actors, tasks, self._blocks[3].array())

    def answers(self) -> Answers:
        return Answers(self._blocks[4].array())

    def close(self) -> None:
        """Gives up the descriptors. What was taken from the blocks stays."""
        for block in self._blocks:
            block.close()


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
