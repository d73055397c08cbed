"""The acting loop: environments x inference, a generator of unrolls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from impala.inference import LocalInference
from impala.trajectory import Step, Trajectory, empty_step, leaves, map_structure
from suites.suite import TaskVectorEnv

GAME = np.dtype([("task", "<i4"), ("raw_return", "<f8"), ("steps", "<i4")])
"""A finished whole game: index of its task, sum of raw rewards, length in agent steps."""


@dataclass(frozen=True)
class Unroll:
    """What an actor hands over: columns of the storage that it has filled."""

    slots: slice
    games: NDArray[np.void]  # of dtype GAME: those that ended during this unroll
    environments_s: float  # seconds spent in the environments,
    inference_s: float  # in the network,
    waiting_s: float  # and waiting for free slots before this unroll

    @property
    def seconds(self) -> tuple[float, float, float]:
        return self.environments_s, self.inference_s, self.waiting_s


class Actor:
    """Plays N environments, several of each of its tasks, and writes rows straight into slots.

    All environments are sent their actions before the first is waited for; one batched forward
    pass answers all N.

    environments: vector environments in the SAME_STEP autoreset mode, in the order of columns.
    tasks: the task index of each environment of `environments` (of all their sub-environments).
    storage: slots; those given by `acquire` belong to this actor until it yields them.
    life_loss_ends_episode: a lost life ends the episode *for learning*; games and scores go on.
    watch: told the task of an environment that is about to be called, and -1 afterwards.
    """

    def __init__(
        self,
        *,
        environments: Sequence[TaskVectorEnv],
        tasks: Sequence[int],
        inference: LocalInference,
        storage: Trajectory,
        unroll_length: int,
        life_loss_ends_episode: bool,
        watch: Callable[[int], None],
    ) -> None:
        self._environments = list(environments)
        edges = np.cumsum([0] + [environment.num_envs for environment in environments])
        self._blocks = [slice(int(a), int(b)) for a, b in pairwise(edges)]
        self._size = int(edges[-1])
        self._task = np.repeat(
            np.asarray(tasks, np.int64), [environment.num_envs for environment in environments]
        )
        self._inference = inference
        self._storage = storage
        self._unroll_length = unroll_length
        self._life_loss_ends_episode = life_loss_ends_episode
        self._watch = watch
        self._tasks = list(tasks)
        self._rows: Any = map_structure(lambda leaf: leaf.numpy(), storage.steps)
        self._return = np.zeros(self._size)
        self._steps = np.zeros(self._size, np.int32)
        self._lives = np.zeros(self._size, np.int32)
        self._games: list[tuple[int, float, int]] = []

    def unrolls(self, acquire: Callable[[], slice]) -> Iterator[Unroll]:
        """Plays for ever. `acquire` waits for N free slots, neighbours in the storage."""
        carry = self._reset()
        while True:
            started = time.perf_counter()
            slots = acquire()
            waiting_s = time.perf_counter() - started
            # Step T of the unroll before is step 0 of this one.
            self._write(self._storage.steps, 0, slots, carry)
            self._begin(slots)
            environments_s = inference_s = 0.0
            for t in range(self._unroll_length):
                start = time.perf_counter()
                outputs = self._inference.act(_row(self._storage.steps, t, slots))
                self._write(self._storage.outputs, t, slots, outputs)
                middle = time.perf_counter()
                self._step(outputs.action, t + 1, slots)
                inference_s += middle - start
                environments_s += time.perf_counter() - middle
            last = _row(self._storage.steps, self._unroll_length, slots)
            carry = map_structure(torch.clone, last)
            games = np.array(self._games, GAME)
            self._games.clear()
            yield Unroll(slots, games, environments_s, inference_s, waiting_s)

    def close(self) -> None:
        for environment in self._environments:
            environment.close()

    def _reset(self) -> Step:
        frames = []
        for environment, block, task in self._each():
            self._watch(task)
            frame, info = environment.reset()
            frames.append(torch.from_numpy(np.ascontiguousarray(frame)))
            if "lives" in info:
                self._lives[block] = info["lives"]
        self._watch(-1)
        step = empty_step(tuple(frames[0].shape[1:]), self._size)
        # The row before an unroll's first reads as the end of an episode: the core state is zero.
        return step._replace(frame=torch.cat(frames), terminated=~step.terminated)

    def _each(self) -> Iterator[tuple[TaskVectorEnv, slice, int]]:
        return zip(self._environments, self._blocks, self._tasks, strict=True)

    def _begin(self, slots: slice) -> None:
        version = self._inference.refresh()
        for stored, state in zip(
            leaves(self._storage.core_state), leaves(self._inference.core_state), strict=True
        ):
            stored[slots] = state
        self._storage.task[slots] = torch.from_numpy(self._task)
        self._storage.version[slots] = version

    @staticmethod
    def _write(storage: Any, t: int, slots: slice, row: Any) -> None:
        for stored, value in zip(leaves(storage), leaves(row), strict=True):
            stored[t, slots] = value

    def _step(self, action: torch.Tensor, t: int, slots: slice) -> None:
        """Sends the actions and writes what comes back into row `t`."""
        rows = self._rows
        actions = action.numpy()
        rows.last_action[t, slots] = actions
        for environment, block, task in self._each():
            self._watch(task)
            environment.send(actions[block])
        frame = rows.frame[t, slots]
        reward = rows.reward[t, slots]
        terminated = rows.terminated[t, slots]
        truncated = rows.truncated[t, slots]
        rows.truncation_value[t, slots] = 0.0
        lives = self._lives.copy()
        for environment, block, task in self._each():
            self._watch(task)
            frame[block], reward[block], terminated[block], truncated[block], info = (
                environment.recv()
            )
            if "lives" in info:
                lives[block] = info["lives"]
            if truncated[block].any():
                cut = np.flatnonzero(truncated[block] & ~terminated[block])
                value = self._value(info["final_obs"], cut, block.start, actions, reward)
                rows.truncation_value[t, slots][block.start + cut] = value
        self._watch(-1)
        truncated &= ~terminated
        self._count(reward, terminated | truncated)
        if self._life_loss_ends_episode:
            terminated |= (lives < self._lives) & ~truncated
        self._lives = lives

    def _count(self, reward: NDArray[np.float32], ended: NDArray[np.bool_]) -> None:
        """Sums whole games: raw rewards and steps, whatever an episode of learning is."""
        self._return += reward
        self._steps += 1
        for i in np.flatnonzero(ended):
            self._games.append((int(self._task[i]), float(self._return[i]), int(self._steps[i])))
        self._return[ended] = 0.0
        self._steps[ended] = 0

    def _value(
        self,
        final_frame: NDArray[Any],
        cut: NDArray[np.intp],
        start: int,
        actions: NDArray[np.int64],
        reward: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """Values of the true last observations where a time limit cut the episode."""
        if not len(cut):
            return np.zeros(0, np.float32)
        final = np.stack([np.asarray(final_frame[i]) for i in cut])
        columns = torch.from_numpy(start + cut)
        step = empty_step(tuple(final.shape[1:]), len(cut))._replace(
            frame=torch.from_numpy(final),
            reward=torch.from_numpy(reward)[columns],
            last_action=torch.from_numpy(actions)[columns],
        )
        return self._inference.value(step, columns).numpy()


def _row(steps: Step, t: int, slots: slice) -> Step:
    return map_structure(lambda leaf: leaf[t, slots], steps)
