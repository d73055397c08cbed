"""A suite that counts: every off-by-one shows. Without torch, for processes that only play."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from suites.suite import Spec, Task, TaskVectorEnv

LENGTHS = {"three": 3, "five": 5}  # steps of an episode of each task


class CountingSuite:
    """Frames count the steps of an episode: 0, 1, .. length-1, then the next episode's 0.

    The true last observation, that `final_obs` has, counts `length`. The reward of a step is the
    count it arrives at. Task "five" ends by a time limit, task "three" terminates.
    lives: if set, a life is lost on arriving at every even count.
    instructions: if set, each observation has two words, one and two more than its count, and the
        last step of an episode plays one frame.
    fault: of the task `faulty`, or of all; see `CountingEnv`. Only until the file `once` exists.
    """

    name = "counting"
    headline = "mean"
    provenance: ClassVar = {"scores": "made up"}

    def __init__(
        self,
        tasks: Sequence[str] = ("three",),
        *,
        lives: bool = False,
        instructions: bool = False,
        fault: str | None = None,
        faulty: str | None = None,
        once: Path | None = None,
    ) -> None:
        self.tasks = tuple(Task(name, name, name, 0.0, 100.0) for name in tasks)
        words = {"instruction_length": 2, "vocabulary_size": 10} if instructions else {}
        self.spec = Spec(frame_shape=(1, 2, 2), num_actions=2, frames_per_step=4, **words)
        self.lives = lives
        self.fault = fault
        self.faulty = faulty
        self.once = once

    def make(
        self, task: Task, num_envs: int, seeds: Sequence[int], split: str = "train"
    ) -> CountingEnv:
        fault = self.fault if self.faulty in (None, task.name) else None
        if fault == "unbuildable" and self.first_time():
            raise RuntimeError("this environment cannot be built")
        return CountingEnv(self, LENGTHS[task.name], task.name == "five", num_envs, seeds, fault)

    def first_time(self) -> bool:
        """Whether a fault is to happen; if it is to happen once, it is remembered that it did."""
        if self.once is None:
            return True
        try:
            self.once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def check(self) -> None:
        pass

    def tidy(self) -> None:
        pass


class CountingEnv(TaskVectorEnv):
    """fault: "slow" takes a second for each step, "sluggish" a 20th; the others happen at the 50th:
    "raise", "hang", "exit" and "kill" of the process, "shape" and "nan" of what is returned,
    "pipe": an error that looks like the end of a pipe.
    """

    def __init__(
        self,
        suite: CountingSuite,
        length: int,
        truncates: bool,
        num_envs: int,
        seeds: Sequence[int],
        fault: str | None = None,
    ) -> None:
        spec = suite.spec
        super().__init__(num_envs=num_envs, seeds=seeds, spec=spec)
        self._suite, self._length, self._truncates = suite, length, truncates
        self._count = np.zeros(num_envs, np.int64)
        self._steps = 0
        self._words = bool(spec.instruction_length)
        self._fault = fault

    def _frames(self, count: np.ndarray) -> np.ndarray:
        return np.broadcast_to(
            count.astype(np.uint8)[:, None, None, None],
            (self.num_envs, *self._suite.spec.frame_shape),
        ).copy()

    def _info(self) -> dict[str, Any]:
        info = {"lives": 10 - self._count // 2} if self._suite.lives else {}
        return info | ({"instruction": _words(self._count)} if self._words else {})

    def _reset(self, seeds: np.ndarray | None) -> tuple[np.ndarray, dict[str, Any]]:
        self._count[:] = 0
        return self._frames(self._count), self._info()

    def _send(self, actions: np.ndarray) -> None:
        self._steps += 1
        time.sleep({"slow": 1.0, "sluggish": 0.05}.get(self._fault or "", 0.0))
        now = self._fault is not None and self._steps == 50 and self._suite.first_time()
        self._broken = self._fault if now else None
        if self._broken == "raise":
            raise RuntimeError("this environment broke at its 50th step")
        if self._broken == "pipe":
            raise BrokenPipeError("a pipe of this environment broke")
        if self._broken == "hang":
            time.sleep(600)
        if self._broken == "exit":
            os._exit(3)
        if self._broken == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def _recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        self._count += 1
        reward = self._count.astype(np.float64)
        ended = self._count == self._length
        final, last_words = self._frames(self._count), _words(self._count)
        self._count[ended] = 0
        info = self._info()
        if ended.any():
            info["final_obs"] = final
        if self._words:
            info["frames"] = np.where(ended, 1, 4)
            info["final_instruction"] = last_words
        if self._broken == "nan":
            reward[0] = np.nan
        if self._broken == "shape":
            reward = reward[:, None]
        never = np.zeros_like(ended)
        terminated, truncated = (never, ended) if self._truncates else (ended, never)
        return self._frames(self._count), reward, terminated, truncated, info


def _words(count: np.ndarray) -> np.ndarray:
    return (count[:, None] + [1, 2]).astype(np.int32)
