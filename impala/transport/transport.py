"""The contract of a transport: it owns processes and memory.

It starts the actors, brings full slots to the learner and takes weights back. Each environment
owns `slots_per_environment` slots of the storage; an actor fills one set of neighbouring slots, one
for each of its environments, while the learner has the others. When no set is free the actor waits:
nothing is dropped, and no unroll can be older than the sets it queued behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from impala.actor import Actor
from impala.agents.agent import Agent
from impala.trajectory import Trajectory
from impala.transport.restarts import Fault
from impala.weights import Weights


@dataclass(frozen=True)
class Delivery:
    """What an actor hands to the learner: indices and numbers, never arrays of observations."""

    actor: int
    slots: NDArray[np.int64]
    games: NDArray[np.void]  # of dtype impala.actor.GAME
    environments_s: float  # seconds the actor spent on it: see impala.actor.Unroll
    inference_s: float
    waiting_s: float


class ActorError(RuntimeError):
    """An actor failed; the message carries its own traceback, its number and its tasks."""


class ActorBuilder(Protocol):
    """Makes an actor where it lives; it is pickled to get there."""

    agent: Agent
    layout: Trajectory  # of impala.trajectory.Field
    tasks: Sequence[Sequence[int]]  # the task of each environment of each actor
    task_names: Sequence[str]

    def build(
        self,
        actor: int,
        storage: Trajectory,
        weights: Weights,
        seed: int,
        *,
        watch: Callable[[int], None] = ...,
        without: Collection[int] = (),
        life: int = 0,
    ) -> Actor:
        """See `impala.actor_pool.ActorPool.build`."""
        ...


class Slots:
    """Which slots belong to which actor, and when a set of them is free again."""

    def __init__(self, actor_sizes: Sequence[int], slots_per_environment: int) -> None:
        self.total = sum(actor_sizes) * slots_per_environment
        self.sets: list[list[slice]] = []
        owner = np.empty((self.total, 2), np.int64)
        start = 0
        for actor, size in enumerate(actor_sizes):
            self.sets.append([])
            for index in range(slots_per_environment):
                owner[start : start + size] = actor, index
                self.sets[actor].append(slice(start, start + size))
                start += size
        self._owner = owner
        self._out = np.zeros((len(actor_sizes), slots_per_environment), np.int64)

    def taken(self, slots: NDArray[np.int64]) -> None:
        """A whole set went to the learner."""
        actor, index = self._owner[slots[0]]
        self._out[actor, index] += len(slots)

    def free(self, actor: int) -> list[int]:
        """The sets of an actor of which the learner has nothing."""
        return np.flatnonzero(self._out[actor] == 0).tolist()

    def released(self, slots: NDArray[np.int64]) -> list[tuple[int, int]]:
        """The learner has read these slots; returns (actor, set) of the sets now wholly free."""
        np.subtract.at(self._out, tuple(self._owner[slots].T), 1)
        touched = np.unique(self._owner[slots], axis=0)
        return [(int(a), int(s)) for a, s in touched if self._out[a, s] == 0]


class Transport(Protocol):
    storage: Trajectory  # all slots, [T+1, slots, ...]
    total_slots: int

    def start(self, agent: Agent, version: int, seed: int) -> None:
        """Publishes the first weights and starts the actors. They are ready when they deliver."""
        ...

    def receive(self, timeout_s: float) -> list[Delivery]:
        """What came in, waiting up to `timeout_s` for the first.

        Raises ActorError for an actor that failed and is not to be started again.
        """
        ...

    def faults(self) -> list[Fault]:
        """What failed, and was dealt with, since the last call."""
        ...

    def release(self, slots: NDArray[np.int64]) -> None:
        """The learner has read these slots: their actor may fill them again."""
        ...

    def publish(self, agent: Agent, version: int) -> None:
        """A whole snapshot of the weights for actors to take at their next unroll."""
        ...

    def close(self) -> None:
        """Ends the actors and frees the memory; safe to call twice, and after a failure."""
        ...
