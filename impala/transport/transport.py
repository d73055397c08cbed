"""The contract of a transport: it owns processes and memory.

It starts the actors, brings full slots to the learner and takes weights back. An actor owns
`slots_per_environment` slots of the storage for each of its environments; those that step together
fill one set of neighbouring slots, one for each of them, while the learner has other sets. When no
set is free they wait: nothing is dropped, and no unroll can be older than those it queued behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    level_cache: tuple[int, int, int] = (0, 0, 0)
    step_times: tuple[tuple[int, float, int], ...] = ()


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


OUTSIDE_PER_SPARE = 4


class Slots:
    """Which slots belong to which actor, and when a set of them is free again.

    Environments that step together, inside the actor, fill sets of slots. Those outside fill single
    slots, which they share: whoever begins an unroll takes one.

        inside: set 0 | set 1 | outside: 1 | 1 | 1 | 1 | ...

    Those outside have one each, and one more for every `OUTSIDE_PER_SPARE`, at least; what is left
    are as many sets as fit, so that where few fast environments play beside many slow ones, the
    fast ones go on while the learner waits for a batch.
    """

    def __init__(self, actor_sizes: Sequence[int], slots_per_environment: int) -> None:
        self.total = sum(actor_sizes) * slots_per_environment
        self._per_environment = slots_per_environment
        self._edges = (np.cumsum([0, *actor_sizes]) * slots_per_environment).tolist()
        self._sets: list[list[Free]] = [[] for _ in actor_sizes]
        self._set_of_slot = np.full(self.total, -1)  # among the sets of its actor
        self._out = np.zeros(self.total, np.bool_)

    def partition(self, actor: int, inside: int, outside: int) -> None:
        """So many environments play from now on; all of the actor's sets are others then."""
        start, end = self._edges[actor : actor + 2]
        if (inside + outside) * self._per_environment > end - start:
            raise ValueError(f"{inside} and {outside} environments in {end - start} slots")
        sets = []
        if inside:
            least = outside + -(-outside // OUTSIDE_PER_SPARE)
            count = max((end - start - least) // inside, self._per_environment)
            sets = [
                Free(0, slice(a, a + inside)) for a in range(start, start + count * inside, inside)
            ]
            start += count * inside
        if outside:
            sets += [Free(1 if inside else 0, slice(slot, slot + 1)) for slot in range(start, end)]
        self._sets[actor] = sets
        self._set_of_slot[self._edges[actor] : end] = -1
        for index, free in enumerate(sets):
            self._set_of_slot[free.slots] = index

    def taken(self, slots: NDArray[np.int64]) -> None:
        """They went to the learner."""
        self._out[slots] = True

    def free(self, actor: int) -> list[Free]:
        """The sets of an actor of which the learner has nothing."""
        return [free for free in self._sets[actor] if not self._out[free.slots].any()]

    def released(self, slots: NDArray[np.int64]) -> list[tuple[int, Free]]:
        """The learner has read these slots; returns the actors and sets that are now wholly free.

        Slots of an actor whose sets have changed since may be free and in no set.
        """
        self._out[slots] = False
        actors = np.searchsorted(self._edges, slots, side="right") - 1
        touched = dict.fromkeys(
            zip(actors.tolist(), self._set_of_slot[slots].tolist(), strict=True)
        )
        freed = [(actor, self._sets[actor][index]) for actor, index in touched if index >= 0]
        return [(actor, free) for actor, free in freed if not self._out[free.slots].any()]


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

    def exhausted(self) -> bool:
        """Whether all that actors can fill is with the learner, so that nothing more can come."""
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
