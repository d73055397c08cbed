"""Everything in one process and one thread: repeats itself bit for bit, for tests and debugging."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from impala.actor import Actor
from impala.agents.agent import Agent
from impala.crew import crew_size, seated
from impala.messages import Broken, Order, Said, Unroll
from impala.mix import Ledger
from impala.trajectory import allocate
from impala.transport.restarts import Fault, Restarts
from impala.transport.transport import ActorBuilder, ActorError, Delivery, Slots
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
        crews = builder.crews
        self._slots = Slots([crew_size(crew) for crew in crews], slots_per_environment)
        self.total_slots = self._slots.total
        self.storage = allocate(builder.layout, self.total_slots)
        self._actors: list[Actor] = []
        self._play: deque[tuple[int, Iterator[Said | None]]] = deque()
        self._orders: list[list[Order]] = []
        for actor, crew in enumerate(crews):
            self._slots.partition(actor, *seated(crew))
            self._orders.append([*self._slots.free(actor)])

    def start(self, agent: Agent, version: int, seed: int) -> None:
        self._weights = Weights(agent, torch.zeros(Weights.size(agent), dtype=torch.uint8))
        self.publish(agent, version)
        ledger = None
        if self._builder.mix is not None:
            size = len(self._orders), len(self._builder.task_names)
            ledger = Ledger(*size, np.zeros(Ledger.size(*size), np.uint8))
        for index in range(len(self._orders)):
            actor = self._builder.build(
                index, self.storage, seed, weights=self._weights, ledger=ledger
            )
            self._actors.append(actor)
            self._play.append((index, actor.play(lambda index=index: self._ordered(index))))

    def receive(self, timeout_s: float) -> list[Delivery]:
        """Plays one unroll of the next actor that has free slots, if there is one."""
        for _ in range(len(self._play)):
            index, play = self._play[0]
            self._play.rotate(-1)
            said = next(play)
            if isinstance(said, Unroll):
                slots = np.arange(said.slots.start, said.slots.stop)
                self._slots.taken(slots)
                return [
                    Delivery(
                        index, slots, said.games, *said.seconds, said.level_cache, said.step_times
                    )
                ]
            if isinstance(said, Broken):
                raise ActorError(
                    f"actor {index} failed in {self._builder.task_names[said.task]}:\n{said.cause}"
                )
        return []

    def exhausted(self) -> bool:
        return not any(self._slots.free(actor) for actor in range(len(self._orders)))

    def faults(self) -> list[Fault]:
        return []

    def metrics(self) -> dict[str, float]:
        return {}

    def release(self, slots: NDArray[np.int64]) -> None:
        for actor, free in self._slots.released(slots):
            self._orders[actor].append(free)

    def publish(self, agent: Agent, version: int) -> None:
        self._weights.publish(agent, version)

    def close(self) -> None:
        while self._actors:
            self._actors.pop().close()
        self._play.clear()

    def _ordered(self, actor: int) -> list[Order]:
        orders, self._orders[actor] = self._orders[actor], []
        return orders
