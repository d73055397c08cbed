"""What a suite of tasks is, and how finished games become human-normalised scores.

This file knows nothing of agents: no torch, no Hydra, no `impala`.
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np

SCORE_WINDOW = 100  # whole games of each task behind every reported score


@dataclass(frozen=True)
class Task:
    """One game. `random_return` and `human_return` are raw whole-game returns."""

    name: str
    train_level: str
    test_level: str
    random_return: float
    human_return: float


@dataclass(frozen=True)
class Spec:
    """What every task of a suite has in common, so that one network plays them all."""

    frame_shape: tuple[int, ...]  # of one uint8 observation
    num_actions: int  # of the head shared by all tasks: index i means the same in each
    frames_per_step: int  # environment frames for each agent step (action repeat)


class Suite(Protocol):
    """The contract. Implementations are `suites.atari57.Atari57`, `suites.catch.Catch`.

    A suite must be picklable: it is sent to the processes that play it.
    """

    name: str
    tasks: tuple[Task, ...]
    spec: Spec
    headline: str  # the key of `score` that names *the* score, such as "median"
    provenance: dict[str, str]  # where reference scores come from and the protocol played

    def make(
        self, task: Task, num_envs: int, seeds: Sequence[int], split: str = "train"
    ) -> gymnasium.vector.VectorEnv:
        """A vector environment of one task in the SAME_STEP autoreset mode.

        Where a game ends, the observation is the next game's first and the true last one is
        row i of `info["final_obs"]`. Rewards are raw. Where the task has lives, `info["lives"]`
        counts them. `seeds` has one seed for each sub-environment.
        """
        ...

    def check(self) -> None:
        """Raises ValueError, saying what to do, unless every task can be played on this machine."""
        ...
