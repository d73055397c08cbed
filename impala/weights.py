"""Versioned whole snapshots of an agent's weights in memory that processes share."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from impala.agents.agent import Agent

_FENCE = threading.Lock()
_LATEST, _SEQUENCE, _VERSION = 0, 1, 3  # header: newest buffer, then one entry for each of the two


def _fence() -> None:
    """Keeps loads and stores on either side apart on processors that reorder them (ARM).

    Two passes through a lock are a full fence; on x86 the order holds anyway.
    """
    for _ in range(2):
        with _FENCE:
            pass


class Weights:
    """Two buffers and a sequence number for each: a reader never sees a torn snapshot.

    One process publishes, any number read, nobody waits for a lock, so that a process killed at
    any moment blocks no other. A number is odd while its buffer is being written; a reader that
    finds it odd or changed after its copy reads again, from the newer buffer.

    memory: uint8, at least `Weights.size(agent)` bytes, zero at first.
    """

    def __init__(self, agent: Agent, memory: Tensor) -> None:
        self._header = memory[:64].view(torch.int64)
        total = self.size(agent)
        half = (total - 64) // 2
        self._buffers = []
        for start in (64, 64 + half):
            views: list[Tensor] = []
            offset = start
            for value in agent.state_dict().values():
                end = offset + value.numel() * value.element_size()
                views.append(memory[offset:end].view(value.dtype).view(value.shape))
                offset = start + aligned(end - start)
            self._buffers.append(views)

    @staticmethod
    def size(agent: Agent) -> int:
        """Bytes needed for the weights and buffers of `agent`."""
        return 64 + 2 * sum(
            aligned(value.numel() * value.element_size()) for value in agent.state_dict().values()
        )

    def publish(self, agent: Agent, version: int) -> None:
        header = self._header
        target = 1 - int(header[_LATEST])
        header[_SEQUENCE + target] += 1
        _fence()
        for shared, value in zip(self._buffers[target], agent.state_dict().values(), strict=True):
            shared.copy_(value)
        header[_VERSION + target] = version
        _fence()
        header[_SEQUENCE + target] += 1
        header[_LATEST] = target

    def load(self, agent: Agent, version: int) -> int:
        """Copies the newest snapshot into `agent` unless it is `version`; returns its version."""
        header = self._header
        values = list(agent.state_dict().values())
        while True:
            source = int(header[_LATEST])
            before = int(header[_SEQUENCE + source])
            _fence()
            found = int(header[_VERSION + source])
            if before % 2 == 0:
                if found != version:
                    for value, shared in zip(values, self._buffers[source], strict=True):
                        value.copy_(shared)
                _fence()
                if int(header[_SEQUENCE + source]) == before:
                    return found
                version = -1  # `agent` now holds a torn copy: it must be read again
            time.sleep(0)


def aligned(size: int) -> int:
    """The next multiple of 64 bytes, a cache line, where shared arrays begin."""
    return -(-size // 64) * 64
