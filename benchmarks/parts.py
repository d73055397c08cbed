"""What each part of the loop costs alone: core-seconds for each agent step, on one core.

The parts are built from the configuration that `launch.py` would run, and used as it uses them:
environments as an actor drives them, inference at an actor's batch, the learner on batches of
unrolls that actors really played.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, groupby
from typing import Any, NamedTuple, cast

import hydra
import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import building
import refusals
from impala.actor import Actor
from impala.actor_pool import actor_seeds, assign_tasks
from impala.cores import available_cores
from impala.crew import crew_of
from impala.inference import LocalInference
from impala.messages import Free
from impala.trajectory import allocate, map_structure, trajectory_layout
from impala.weights import Weights
from suites.suite import Suite, TaskVectorEnv

RANDOM_ROWS = 1024  # of random actions drawn beforehand


class Costs(NamedTuple):
    """Core-seconds for each agent step."""

    environment: float
    inference: float
    learner: float

    @property
    def rates(self) -> tuple[float, ...]:
        """Agent steps per second of one core that does nothing else."""
        return tuple(1.0 / cost for cost in self)


def ideal(cores: int, costs: Costs) -> float:
    """Agent steps per second if every core did nothing but these three, all the time."""
    return cores / sum(costs)


def compose(overrides: Sequence[str]) -> DictConfig:
    """The configuration of `python launch.py <overrides>`."""
    with hydra.initialize_config_dir(str(refusals.CONF), version_base="1.3"):
        return hydra.compose("config", list(overrides))


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """This thread, and those it starts, stay on one core where the system can do that."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def cost(work: Callable[[], int], seconds: float) -> float:
    """Processor seconds, of all threads of this process, for each step.

    work: does a little and returns how many agent steps it was. Repeated for `seconds`.
    """
    steps = 0
    deadline = time.perf_counter() + seconds
    started = time.process_time()
    while not steps or time.perf_counter() < deadline:
        steps += work()
    return (time.process_time() - started) / steps


class Environments:
    """Those of every actor of a run; they play on from one measurement to the next."""

    def __init__(self, cfg: DictConfig, suite: Suite) -> None:
        self.suite = suite
        self.tasks = assign_tasks(
            len(suite.tasks),
            cfg.num_actors or available_cores(),
            cfg.envs_per_actor,
            cfg.min_environments,
        )
        self.size = sum(map(len, self.tasks))
        self.of_actor = [self._make(cfg.seed, actor) for actor in range(len(self.tasks))]
        random = np.random.default_rng(cfg.seed)
        most = max(map(len, self.tasks))
        rows = random.integers(0, suite.spec.num_actions, (RANDOM_ROWS, most))
        self._random_rows = cycle(rows)

    def _make(self, seed: int, actor: int) -> list[TaskVectorEnv]:
        seeds = actor_seeds(seed, actor, len(self.tasks[actor]))[1:]
        made = []
        for task, run in groupby(self.tasks[actor]):
            size = len(list(run))
            made.append(self.suite.make(self.suite.tasks[task], size, seeds[:size]))
            made[-1].reset()
            seeds = seeds[size:]
        return made

    def step(self) -> int:
        """One step of all with random actions; an actor's are all sent to, then received from."""
        actions = next(self._random_rows)
        for environments in self.of_actor:
            start = 0
            for environment in environments:
                environment.send(actions[start : start + environment.num_envs])
                start += environment.num_envs
            for environment in environments:
                environment.recv()
        return self.size

    def close(self) -> None:
        for environment in chain.from_iterable(self.of_actor):
            environment.close()


class Parts:
    """The three parts of one run on the CPU. Building them plays one unroll of every actor."""

    def __init__(self, cfg: DictConfig, environments: Environments) -> None:
        device = building.pick_device(cfg.device)
        if device.type != "cpu":
            raise ValueError(
                f"the learner is on {device}, whose work is not of a core: measure with device=cpu"
            )
        torch.set_num_threads(1)  # as in the learner's process and in the actors'
        suite = environments.suite
        agent = building.build_agent(cfg, suite)
        self._environments = environments
        self._unroll_length = cfg.algorithm.unroll_length
        self._storage = allocate(
            trajectory_layout(agent, suite.spec, self._unroll_length),
            environments.size,
        )
        self._inference, self._columns = self._play(cfg, agent)
        of_one_core = OmegaConf.merge(cfg, {"learner": {"threads": 1}})  # a micro-batch at a time
        self._learner = building.build_learner(cast(DictConfig, of_one_core), agent, device)
        self._batch = self._learners_batch(cfg)

    def measure(self, seconds: float, windows: int) -> Costs:
        """The median of each part over windows of `seconds`; the parts take turns."""
        works = (self._environments.step, self._act, self._update)
        for work in works:
            cost(work, seconds / 4)  # first uses are slower: caches, and kernels made on demand
        measured = [[cost(work, seconds) for work in works] for _ in range(windows)]
        return Costs(*np.median(measured, axis=0).tolist())

    def _play(self, cfg: DictConfig, agent: Any) -> tuple[LocalInference, slice]:
        """Every actor plays one unroll; returns the first one's inference and columns."""
        weights = Weights(agent, torch.zeros(Weights.size(agent), dtype=torch.uint8))
        weights.publish(agent, 0)
        used, inferences = 0, []
        for index, tasks in enumerate(self._environments.tasks):
            columns = slice(used, used + len(tasks))
            used = columns.stop
            inference = LocalInference(
                copy.deepcopy(agent),
                weights,
                num_environments=len(tasks),
                num_actions=self._environments.suite.spec.num_actions,
                seed=actor_seeds(cfg.seed, index, len(tasks))[0],
                storage=self._storage,
            )
            environments = iter(self._environments.of_actor[index])
            actor = Actor(
                crew=crew_of(tasks),
                make=lambda task, count, outside, made=environments: next(made),
                inference=inference,
                storage=self._storage,
                unroll_length=self._unroll_length,
                frames_per_step=self._environments.suite.spec.frames_per_step,
                life_loss_ends_episode=cfg.algorithm.life_loss_ends_episode,
            )
            next(actor.play(lambda columns=columns: [Free(0, columns)]))
            inferences.append(inference)
        return inferences[0], slice(0, len(self._environments.tasks[0]))

    def _learners_batch(self, cfg: DictConfig) -> Any:
        experience = instantiate(cfg.algorithm.experience)(self._storage)
        batch = None
        for _ in range(cfg.algorithm.passes):  # only then is a batch as large as all later ones
            while not experience.ready():
                experience.insert(np.arange(len(self._storage.task)))
            batch = experience.sample()
        return batch

    def _act(self) -> int:
        """One unroll of one actor's forward passes."""
        steps = self._storage.steps
        for t in range(self._unroll_length):
            self._inference.act(map_structure(lambda leaf, t=t: leaf[t, self._columns], steps))
        return self._unroll_length * (self._columns.stop - self._columns.start)

    def _update(self) -> int:
        # At the end of the run, where a decaying rate is 0: so the weights stay those of a start.
        skipped = self._learner.update(self._batch, progress=1.0)
        if skipped != []:
            raise RuntimeError(f"the learner skipped an update: not finite in tasks {skipped}")
        return self._unroll_length * self._batch.fresh
