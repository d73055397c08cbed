"""Catch: a ball falls, a paddle moves, a game is a second of work. For tests and first runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from suites.camera import ObservationCamera
from suites.suite import Spec, Task, TaskVectorEnv, check_task

LEFT, STAY, RIGHT = 0, 1, 2


class Catch:
    """The suite of one task, "catch" (Mnih et al. 2014; rows and columns as in bsuite).

    rows, columns: size of the board. A game lasts rows - 1 steps.
    """

    name = "catch"
    headline = "mean"

    def __init__(self, *, rows: int = 10, columns: int = 5) -> None:
        if columns < 2 or rows < columns // 2 + 1 or rows < 2:
            raise ValueError(
                f"rows={rows}, columns={columns}: expected at least 2 of each, and "
                "rows > columns // 2 so that the paddle can reach every ball"
            )
        # A ball in a column drawn evenly, independent of the paddle, meets it 1 time in `columns`.
        random_return = 2.0 / columns - 1.0
        self.tasks = (Task("catch", "catch", "catch", random_return, 1.0),)
        self.spec = Spec(frame_shape=(1, rows, columns), num_actions=3, frames_per_step=1)
        self.provenance = {
            "random": "exact expected return of a uniformly random policy, 2 / columns - 1",
            "human": "1.0, every ball caught",
            "cap": "mean_capped caps at 100 %",
            "protocol": f"{rows} rows, {columns} columns, +1 caught, -1 missed, {rows - 1} steps",
            "engine": f"numpy {np.__version__}",
        }

    def make(
        self, task: Task, num_envs: int, seeds: Sequence[int], split: str = "train"
    ) -> TaskVectorEnv:
        """See `Suite.make`; both splits play the same game."""
        check_task(task, self.tasks, split)
        return CatchVectorEnv(num_envs=num_envs, seeds=seeds, spec=self.spec)

    def camera(
        self, task: Task, seed: int, frame: np.ndarray, info: dict[str, Any]
    ) -> ObservationCamera:
        """See `suites.camera.Filmed`. The game has no speed of its own: people can follow this."""
        return ObservationCamera(frame, pictures_per_s=5.0)

    def check(self) -> None:
        """Nothing can be missing: numpy is all that it takes."""

    def tidy(self) -> None:
        """Nothing is left behind."""


class CatchVectorEnv(TaskVectorEnv):
    """N boards as arrays. Frames uint8 [N, 1, rows, columns]: 255 for ball and paddle, else 0.

    The ball starts at the top in a random column, the paddle at the bottom in the middle. Each
    step moves the paddle left, not, or right, then the ball down. At the bottom the game ends with
    reward +1 if the paddle is there, else -1; all other rewards are 0.
    """

    def __init__(self, *, num_envs: int, seeds: Sequence[int], spec: Spec) -> None:
        super().__init__(num_envs=num_envs, seeds=seeds, spec=spec)
        _, self._rows, self._columns = spec.frame_shape
        self._boards = np.arange(num_envs)
        self._seeds = np.zeros(num_envs, np.uint64)
        self._game = np.zeros(num_envs, np.uint64)
        self._ball_row = np.zeros(num_envs, np.int64)
        self._ball_column = np.zeros(num_envs, np.int64)
        self._paddle = np.zeros(num_envs, np.int64)
        self._actions = np.zeros(num_envs, np.int64)

    def _reset(self, seeds: np.ndarray | None) -> tuple[np.ndarray, dict[str, Any]]:
        if seeds is not None:
            self._seeds = seeds.astype(np.uint64)
            self._game[:] = 0
        self._start(np.ones(self.num_envs, bool))
        return self._frames(), {}

    def _send(self, actions: np.ndarray) -> None:
        self._actions = actions.copy()

    def _recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        self._paddle = np.clip(self._paddle + self._actions - STAY, 0, self._columns - 1)
        self._ball_row += 1
        terminated = self._ball_row == self._rows - 1
        caught = np.where(self._paddle == self._ball_column, 1.0, -1.0)
        rewards = np.where(terminated, caught, 0.0).astype(np.float32)
        frames, info = self._frames(), {}
        if terminated.any():
            info["final_obs"] = frames
            self._start(terminated)
            frames = self._frames()
        return frames, rewards, terminated, np.zeros(self.num_envs, bool), info

    def _start(self, which: np.ndarray) -> None:
        """Begins the next game of the boards in the mask `which`."""
        column = _random_below(self._columns, self._seeds, self._game)
        self._ball_column = np.where(which, column, self._ball_column)
        self._ball_row[which] = 0
        self._paddle[which] = self._columns // 2
        self._game += which

    def _frames(self) -> np.ndarray:
        frames = np.zeros((self.num_envs, 1, self._rows, self._columns), np.uint8)
        frames[self._boards, 0, self._ball_row, self._ball_column] = 255
        frames[self._boards, 0, self._rows - 1, self._paddle] = 255
        return frames


def _random_below(limit: int, seeds: np.ndarray, game: np.ndarray) -> np.ndarray:
    """int64 [N] in [0, limit): a fixed, evenly spread function of each seed and game number.

    SplitMix64 (Steele et al. 2014), applied to the game number and then to the seed: a random
    state for each board that needs no loop over boards.
    """

    def scramble(x: np.ndarray) -> np.ndarray:
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    high = scramble(scramble(game) ^ seeds) >> np.uint64(32)
    return ((high * np.uint64(limit)) >> np.uint64(32)).astype(np.int64)
