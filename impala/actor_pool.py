"""The actor pool: which task each environment of each actor plays, and how an actor is made."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from impala.actor import Actor
from impala.agents.agent import Agent
from impala.crew import Crew, crew_of
from impala.inference import Inference, LocalInference, WeightsSource
from impala.inference_server import Batching
from impala.mix import Ledger, Mix, TaskTurns, dealt
from impala.remote_inference import RemoteInference
from impala.trajectory import Trajectory, trajectory_layout
from impala.worker import WorkerEnv

if TYPE_CHECKING:
    from suites.suite import Suite, TaskVectorEnv

SLOW_NICENESS = 10  # added to that of the actor


def assign_tasks(
    num_tasks: int,
    num_actors: int,
    envs_per_actor: int | None,
    min_environments: int = 1,
    mix: Mix | None = None,
) -> list[list[int]]:
    """The task index of every environment of every actor.

    The rule: environments are spread over the tasks as evenly as possible (no task has two more
    than another), in the suite's order, and dealt to the actors in contiguous blocks, so that an
    actor holds few tasks with several environments each. With a mix they are spread by its weights
    and dealt one by one, so that every actor can play what is behind.

    envs_per_actor: None gives every task the same number of environments, the least that makes
        `min_environments` in total, and every actor the same number of them to within one.
    Raises ValueError if a task would have no environment.
    """
    if num_actors < 1 or (envs_per_actor is not None and envs_per_actor < 1):
        raise ValueError(
            f"num_actors={num_actors}, envs_per_actor={envs_per_actor}: both must be at least 1"
        )
    if envs_per_actor is None:
        per_task = -(-max(min_environments, num_actors, num_tasks) // num_tasks)
        total = per_task * num_tasks
    else:
        total = num_actors * envs_per_actor
    if total < num_tasks:
        raise ValueError(
            f"num_actors={num_actors} x envs_per_actor={envs_per_actor} makes {total} environments"
            f" for {num_tasks} tasks, and each task needs one: set"
            f" envs_per_actor={-(-num_tasks // num_actors)} or more, or choose fewer suite.tasks"
        )
    if mix is not None:
        return dealt(mix.weights, num_actors, total)
    tasks = [column * num_tasks // total for column in range(total)]
    edges = [actor * total // num_actors for actor in range(num_actors + 1)]
    return [tasks[start:end] for start, end in pairwise(edges)]


@dataclass(frozen=True)
class ActorPool:
    """Builds any actor of a run, in whatever process it lives; see `transport.ActorBuilder`.

    tasks: from `assign_tasks`.
    agent: on the CPU; its weights are those of the first snapshot it reads.
    outside: tasks of which each environment has a process of its own from the beginning.
    move_slow: whether others that prove too slow to be stepped with others get one. Only with
        processes; see `impala.pace`.
    mix: shares of the learner's frames; None: they fall where speed puts them.
    batching: of the server that answers the actors; None: each answers itself.
    log_dir: where environments outside print to; None: where this process does.
    """

    suite: Suite
    agent: Agent
    tasks: Sequence[Sequence[int]]
    unroll_length: int
    life_loss_ends_episode: bool
    outside: Collection[int] = ()
    move_slow: bool = False
    mix: Mix | None = None
    batching: Batching | None = None
    log_dir: Path | None = None

    @property
    def num_actions(self) -> int:
        return self.suite.spec.num_actions

    @property
    def task_names(self) -> list[str]:
        return [task.name for task in self.suite.tasks]

    @property
    def crews(self) -> list[Crew]:
        """What each actor plays at first."""
        return [crew_of(tasks, self.outside) for tasks in self.tasks]

    @property
    def layout(self) -> Trajectory:
        return trajectory_layout(self.agent, self.suite.spec, self.unroll_length)

    def build(
        self,
        actor: int,
        storage: Trajectory,
        seed: int,
        *,
        weights: WeightsSource,
        server: Connection | None = None,
        ledger: Ledger | None = None,
        crew: Crew | None = None,
        life: int = 0,
        **options: Any,
    ) -> Actor:
        """The actor of that number.

        server: who answers; None: the actor itself, with these weights.
        ledger: of all actors, where there is a mix.
        crew: None is its first.
        life: 1 and up for those that take the place of one that failed, with seeds of their own.
        options: others of `Actor`.
        """
        capacity = len(self.tasks[actor])
        if crew is None:
            crew = self.crews[actor]
        inference: Inference
        if server is not None:
            inference = RemoteInference(server)
        else:
            noise_seed, *_ = actor_seeds(seed, actor, 0, life)
            inference = LocalInference(
                self.agent,
                weights,
                num_environments=capacity,
                num_actions=self.num_actions,
                seed=noise_seed,
                storage=storage,
            )
        return Actor(
            crew=crew,
            make=_Making(self, seed, actor, life),
            inference=inference,
            storage=storage,
            unroll_length=self.unroll_length,
            frames_per_step=self.suite.spec.frames_per_step,
            life_loss_ends_episode=self.life_loss_ends_episode,
            capacity=capacity,
            turns=TaskTurns(ledger, actor, self.mix.weights) if ledger and self.mix else None,
            **options,
        )


class _Making:
    """Makes an actor's environments, each with a seed that no other has."""

    def __init__(self, pool: ActorPool, seed: int, actor: int, life: int) -> None:
        self._pool = pool
        self._identity = seed, actor, life
        self._made = 0

    def __call__(self, task: int, count: int, outside: bool) -> TaskVectorEnv:
        seed, actor, life = self._identity
        first = 1 + self._made  # after the policy's
        self._made += count
        seeds = actor_seeds(seed, actor, self._made, life)[first:]
        suite = self._pool.suite
        level = suite.tasks[task]
        if outside:
            # Those that were found slow take what the others leave, unless all are to keep up.
            polite = self._pool.mix is None and task not in self._pool.outside
            niceness = SLOW_NICENESS if polite else 0
            log_dir = self._pool.log_dir
            return WorkerEnv(suite, level, count, seeds, niceness=niceness, log_dir=log_dir)
        return suite.make(level, count, seeds)


def actor_seeds(seed: int, actor: int, num_environments: int, life: int = 0) -> list[int]:
    """Seeds below 2**31 of an actor's policy noise (first) and of each of its environments.

    Derived from the run's seed, the actor's number and how often it was started again; all differ,
    within and between actors.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(actor, life) if life else (actor,))
    return [int(s) for s in sequence.generate_state(1 + num_environments, np.uint64) >> 33]
