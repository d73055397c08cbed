"""The actor pool: which task each environment of each actor plays, and how an actor is made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from impala.actor import Actor
from impala.agents.agent import Agent
from impala.inference import LocalInference, WeightsSource
from impala.trajectory import Trajectory, trajectory_layout

if TYPE_CHECKING:
    from suites.suite import Suite


def assign_tasks(
    num_tasks: int, num_actors: int, envs_per_actor: int | None, min_environments: int = 1
) -> list[list[int]]:
    """The task index of every environment of every actor.

    The rule: environments are spread over the tasks as evenly as possible (no task has two more
    than another), in the suite's order, and dealt to the actors in contiguous blocks, so that an
    actor holds few tasks with several environments each.

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
    tasks = [column * num_tasks // total for column in range(total)]
    edges = [actor * total // num_actors for actor in range(num_actors + 1)]
    return [tasks[start:end] for start, end in pairwise(edges)]


@dataclass(frozen=True)
class ActorPool:
    """Builds any actor of a run, in whatever process it lives; see `transport.ActorBuilder`.

    tasks: from `assign_tasks`.
    agent: on the CPU; its weights are those of the first snapshot it reads.
    """

    suite: Suite
    agent: Agent
    tasks: Sequence[Sequence[int]]
    unroll_length: int
    life_loss_ends_episode: bool

    @property
    def task_names(self) -> list[str]:
        return [task.name for task in self.suite.tasks]

    @property
    def layout(self) -> Trajectory:
        spec = self.suite.spec
        return trajectory_layout(self.agent, spec.frame_shape, spec.num_actions, self.unroll_length)

    def build(
        self,
        actor: int,
        storage: Trajectory,
        weights: WeightsSource,
        seed: int,
        *,
        watch: Callable[[int], None] = lambda task: None,
        without: Collection[int] = (),
        life: int = 0,
    ) -> Actor:
        """The actor of that number.

        watch: see `Actor`; it is told of building, too.
        without: tasks that it is to leave out.
        life: 1 and up for those that take the place of one that failed, with seeds of their own.
        """
        tasks = [task for task in self.tasks[actor] if task not in without]
        seeds = actor_seeds(seed, actor, len(tasks), life)
        runs = [(task, len(list(run))) for task, run in groupby(tasks)]
        environments = []
        used = 1
        for task, size in runs:
            watch(task)
            environments.append(
                self.suite.make(self.suite.tasks[task], size, seeds[used : used + size])
            )
            used += size
        watch(-1)
        inference = LocalInference(
            self.agent,
            weights,
            num_environments=len(tasks),
            num_actions=self.suite.spec.num_actions,
            seed=seeds[0],
        )
        return Actor(
            environments=environments,
            tasks=[task for task, _ in runs],
            inference=inference,
            storage=storage,
            unroll_length=self.unroll_length,
            life_loss_ends_episode=self.life_loss_ends_episode,
            watch=watch,
        )


def actor_seeds(seed: int, actor: int, num_environments: int, life: int = 0) -> list[int]:
    """Seeds below 2**31 of an actor's policy noise (first) and of each of its environments.

    Derived from the run's seed, the actor's number and how often it was started again; all differ,
    within and between actors.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(actor, life) if life else (actor,))
    return [int(s) for s in sequence.generate_state(1 + num_environments, np.uint64) >> 33]
