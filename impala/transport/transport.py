"""The contract of a transport: it owns processes and memory.

It starts the actors, brings full slots to the learner and takes weights back. Each environment
owns `slots_per_environment` slots of the storage; environments that step together fill one set of
neighbouring slots, one for each of them, while the learner has the others. When no set is free they
wait: nothing is dropped, and no unroll can be older than the sets it queued behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from impala.actor import Actor
from impala.agents.agent import Agent
from impala.crew import Crew
from impala.inference_server import Batching
from impala.messages import Free
from impala.mix import Mix
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
    task_names: Sequence[str]
    move_slow: bool  # to processes of their own: environments that keep others waiting
    mix: Mix | None
    batching: Batching | None  # of the inference server, if there is to be one

    @property
    def layout(self) -> Trajectory:
        """Of impala.trajectory.Field."""
        ...

    @property
    def num_actions(self) -> int: ...

    @property
    def crews(self) -> Sequence[Crew]:
        """What each actor plays at first. It never has more environments than then."""
        ...

    def build(
        self, actor: int, storage: Trajectory, seed: int, *, weights: Weights, **options: Any
    ) -> Actor:
        """See `impala.actor_pool.ActorPool.build`."""
        ...


class Slots:
    """Which slots belong to which actor, and when a set of them is free again.

    Each actor owns as many runs of neighbouring slots as an environment has slots, each with a slot
    for every environment that it may have. A group of environments has a part of each run: a set.

        run 0                     run 1
        group 0, set 0 | group 1  group 0, set 1 | group 1
    """

    def __init__(self, actor_sizes: Sequence[int], slots_per_environment: int) -> None:
        self.total = sum(actor_sizes) * slots_per_environment
        self._runs = slots_per_environment
        self._sizes = list(actor_sizes)
        self._starts = np.cumsum([0, *actor_sizes]) * slots_per_environment
        self._groups: list[list[slice]] = [[] for _ in actor_sizes]  # within a run
        self._out = np.zeros(self.total, np.bool_)

    def partition(self, actor: int, group_sizes: Sequence[int]) -> None:
        """The actor's groups from now on; all of its sets are others then."""
        edges = np.cumsum([0, *group_sizes]).tolist()
        if edges[-1] > self._sizes[actor]:
            raise ValueError(f"groups of {group_sizes} in {self._sizes[actor]} columns")
        self._groups[actor] = [slice(a, b) for a, b in pairwise(edges)]

    def taken(self, slots: NDArray[np.int64]) -> None:
        """They went to the learner."""
        self._out[slots] = True

    def free(self, actor: int) -> list[Free]:
        """The sets of an actor of which the learner has nothing."""
        sets = [
            Free(group, self._set(actor, group, run))
            for run in range(self._runs)
            for group in range(len(self._groups[actor]))
        ]
        return [free for free in sets if not self._out[free.slots].any()]

    def released(self, slots: NDArray[np.int64]) -> list[tuple[int, Free]]:
        """The learner has read these slots; returns the actors and sets that are now wholly free.

        Slots of an actor whose groups have changed since are free, but no set of its own.
        """
        self._out[slots] = False
        touched = {}
        actors = np.searchsorted(self._starts, slots, side="right") - 1
        for slot, actor in zip(slots.tolist(), actors.tolist(), strict=True):
            run, column = divmod(slot - int(self._starts[actor]), self._sizes[actor])
            for group, columns in enumerate(self._groups[actor]):
                if columns.start <= column < columns.stop:
                    touched[actor, group, run] = Free(group, self._set(actor, group, run))
        return [
            (actor, free)
            for (actor, _, _), free in touched.items()
            if not self._out[free.slots].any()
        ]

    def _set(self, actor: int, group: int, run: int) -> slice:
        start = int(self._starts[actor]) + run * self._sizes[actor]
        columns = self._groups[actor][group]
        return slice(start + columns.start, start + columns.stop)


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

    def metrics(self) -> dict[str, float]:
        """What it measured since the last call."""
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
