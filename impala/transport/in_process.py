"""Everything in one process and one thread: repeats itself bit for bit, for tests and debugging."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from impala.actor import Actor, Unroll
from impala.agents.agent import Agent
from impala.trajectory import allocate
from impala.transport.restarts import Fault, Restarts
from impala.transport.transport import ActorBuilder, Delivery, Slots
from impala.weights import Weights


class InProcess:
    """Actors take turns, one unroll each; see `transport.Transport`.

    restarts: not used. The first error is raised in its own place, for a debugger to see.
    """

    def __init__(
        self,
        *,
        builder: ActorBuilder,
        slots_per_environment: int = 2,
        restarts: Restarts | None = None,
    ) -> None:
        self._builder = builder
        self._slots = Slots([len(tasks) for tasks in builder.tasks], slots_per_environment)
        self.total_slots = self._slots.total
        self.storage = allocate(builder.layout, self.total_slots)
        self._actors: list[Actor] = []
        self._unrolls: deque[tuple[int, Iterator[Unroll]]] = deque()
        self._free: list[deque[slice]] = [deque(sets) for sets in self._slots.sets]

    def start(self, agent: Agent, version: int, seed: int) -> None:
        self._weights = Weights(agent, torch.zeros(Weights.size(agent), dtype=torch.uint8))
        self.publish(agent, version)
        for index, free in enumerate(self._free):
            actor = self._builder.build(index, self.storage, self._weights, seed)
            self._actors.append(actor)
            self._unrolls.append((index, actor.unrolls(free.popleft)))

    def receive(self, timeout_s: float) -> list[Delivery]:
        """Plays one unroll of the next actor that has a free set, if there is one."""
        for _ in range(len(self._unrolls)):
            index, unrolls = self._unrolls[0]
            self._unrolls.rotate(-1)
            if self._free[index]:
                unroll = next(unrolls)
                slots = np.arange(unroll.slots.start, unroll.slots.stop)
                self._slots.taken(slots)
                return [Delivery(index, slots, unroll.games, *unroll.seconds)]
        return []

    def faults(self) -> list[Fault]:
        return []

    def release(self, slots: NDArray[np.int64]) -> None:
        for actor, index in self._slots.released(slots):
            self._free[actor].append(self._slots.sets[actor][index])

    def publish(self, agent: Agent, version: int) -> None:
        self._weights.publish(agent, version)

    def close(self) -> None:
        while self._actors:
            self._actors.pop().close()
        self._unrolls.clear()
