"""What a suite of tasks is: its tasks, what they have in common, and how they are played.

How finished games become scores is in `suites.score`. This file knows nothing of agents: no torch,
no Hydra, no `impala`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

SCORE_WINDOW = 100  # whole games of each task behind every reported score
MAX_SEED = 2**31 - 1  # engines keep seeds in a signed 32-bit integer


class EngineMissing(ValueError):
    """The engine of a suite is not installed; the message says how to install it."""


@dataclass(frozen=True)
class Task:
    """One game. `random_return` and `human_return` are raw whole-game returns."""

    name: str
    train_level: str
    test_level: str
    random_return: float
    human_return: float

    def __post_init__(self) -> None:
        scores = (self.random_return, self.human_return)
        if not all(map(math.isfinite, scores)) or self.human_return <= self.random_return:
            raise ValueError(
                f"task {self.name!r} has random_return={self.random_return} and human_return="
                f"{self.human_return}: a human-normalised score needs two finite reference "
                "returns, the human one above the random one"
            )


@dataclass(frozen=True)
class Spec:
    """What every task of a suite has in common, so that one network plays them all."""

    frame_shape: tuple[int, ...]  # of one uint8 observation
    num_actions: int  # of the head shared by all tasks: index i means the same in each
    frames_per_step: int  # environment frames for each agent step (action repeat)
    instruction_length: int = 0  # word ids of an instruction at most; 0: there are none
    vocabulary_size: int = 0  # word ids are 0 (padding) to vocabulary_size - 1
    outside: bool = False  # its engine wants a process for each environment

    def __post_init__(self) -> None:
        length, size = self.instruction_length, self.vocabulary_size
        if (length, size) != (0, 0) and (length < 1 or size < 2):
            raise ValueError(
                f"instruction_length={length}, vocabulary_size={size}: expected both 0, or at"
                " least 1 and 2"
            )


class TaskVectorEnv(gymnasium.vector.VectorEnv):
    """N environments of one task in the SAME_STEP autoreset mode; a step comes in two halves.

    `send` starts a step and `recv` waits for it, so that one process can send to many vector
    environments and then receive from each while the others still work. `step` is both.

    `recv` returns frames uint8 [N, *frame_shape], raw rewards [N], terminated and truncated
    bool [N] (never both), and `info`. On a step at which a game ended, row i of
    `info["final_obs"]` is the true last observation of each game i that did; its other rows mean
    nothing. Without an end the key is absent. What else `info` may have, of `reset` too:

    - `instruction`, where `instruction_length` is not 0: int32 [N, instruction_length], word ids of
      the instruction shown with the observation that is returned. `final_instruction`, likewise, is
      that of `final_obs`, and has to be there where an episode was truncated.
    - `lives`: int32 [N].
    - `frames`, of steps only: int64 [N], environment frames that were played, where an episode may
      end within a step. Without it each step played all of them.
    - `level_cache`: int32 [N, 3], hits, misses and failures of a cache of levels since the last
      `info`.

    Engines implement `_reset`, `_send` and `_recv`. Misuse that would hang or confuse an engine
    raises here: ValueError for a wrong action or seed, RuntimeError for calls out of turn, and for
    an engine that returns what it should not.
    """

    def __init__(self, *, num_envs: int, seeds: Sequence[int], spec: Spec) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs}: expected at least 1")
        self.num_envs = num_envs
        self._first_seeds: np.ndarray | None = self._check_seeds(seeds)
        self._started = False
        self._sent = False
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gymnasium.spaces.Box(0, 255, spec.frame_shape, np.uint8)
        self.single_action_space = gymnasium.spaces.Discrete(spec.num_actions)
        self._num_actions = spec.num_actions
        self._instruction_length = spec.instruction_length
        batch_space = gymnasium.vector.utils.batch_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self,
        *,
        seed: int | Sequence[int] | np.ndarray | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts a game in every environment: frames [N, *frame_shape] and `info`.

        The first reset uses the seeds given to the constructor, later ones go on with the random
        states. `seed` replaces both: one number for each environment, or one whose successors
        serve the others.
        """
        if options:
            raise ValueError(f"options={options}: this environment has none, pass None")
        if self._sent:
            self.recv()
        if isinstance(seed, (int, np.integer)):
            seed = [int(seed) + i for i in range(self.num_envs)]
        seeds = self._first_seeds if seed is None else self._check_seeds(seed)
        self._first_seeds = None
        self._started = True
        frames, info = self._reset(seeds)
        self._check_frames(frames)
        self._check_info(info)
        return frames, info

    def send(self, actions: np.ndarray) -> None:
        """Starts a step: integer actions [N] in [0, num_actions)."""
        if not self._started or self._sent:
            missing = "recv() of the step before" if self._started else "reset()"
            raise RuntimeError(f"send() called without {missing}")
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu":
            raise ValueError(
                f"actions have shape {actions.shape} and type {actions.dtype}: expected "
                f"({self.num_envs},) integers, one for each environment"
            )
        if actions.min() < 0 or actions.max() >= self._num_actions:
            raise ValueError(
                f"actions {actions.tolist()}: each must be in 0..{self._num_actions - 1}"
            )
        self._send(actions.astype(np.int64, copy=False))
        self._sent = True

    def recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Waits for the step that `send` started."""
        if not self._sent:
            raise RuntimeError("recv() called without send(): there is no step to wait for")
        self._sent = False
        frames, rewards, terminated, truncated, info = self._recv()
        self._check_frames(frames)
        self._check_info(info)
        for name, value, kind in (
            ("rewards", rewards, "fiu"), ("terminated", terminated, "b"),
            ("truncated", truncated, "b"),
        ):  # fmt: skip
            if value.shape != (self.num_envs,) or value.dtype.kind not in kind:
                raise RuntimeError(
                    f"the environment returned {name} of shape {value.shape} and type"
                    f" {value.dtype}, expected one for each of {self.num_envs} environments"
                )
        if not np.isfinite(rewards).all():
            raise RuntimeError(f"the environment returned rewards {rewards.tolist()}")
        if truncated.any():
            self._check_final(np.flatnonzero(truncated & ~terminated), info)
        return frames, rewards, terminated, truncated, info

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        self.send(actions)
        return self.recv()

    def _check_frames(self, frames: np.ndarray) -> None:
        shape = self.observation_space.shape
        if frames.shape != shape or frames.dtype != np.uint8:
            raise RuntimeError(
                f"the environment returned frames of shape {frames.shape} and type {frames.dtype},"
                f" expected {shape} of uint8"
            )

    def _check_final(self, cut: np.ndarray, info: dict[str, Any]) -> None:
        """Last observations of episodes that a time limit cut: their value is needed."""
        assert self.observation_space.shape is not None
        shape = self.observation_space.shape[1:]
        final = info.get("final_obs")
        for index in cut:
            frame = None if final is None else np.asarray(final[index])
            if frame is None or frame.shape != shape or frame.dtype != np.uint8:
                given = "none" if frame is None else f"{frame.shape} of {frame.dtype}"
                raise RuntimeError(
                    f"the environment cut an episode with {given} in info['final_obs'] for its"
                    f" last frame, expected {shape} of uint8"
                )
        if self._instruction_length and len(cut):
            self._check_entry(info, "final_instruction", np.int32, self._instruction_length)

    def _check_info(self, info: dict[str, Any]) -> None:
        if self._instruction_length:
            self._check_entry(info, "instruction", np.int32, self._instruction_length)
        if "frames" in info:
            self._check_entry(info, "frames", np.int64)

    def _check_entry(self, info: dict[str, Any], name: str, kind: type, *shape: int) -> None:
        """It has to be there, with a row for each environment."""
        value = info.get(name)
        shape = (self.num_envs, *shape)
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != kind:
            given = f"{value.shape} of {value.dtype}" if isinstance(value, np.ndarray) else value
            raise RuntimeError(
                f"the environment returned info[{name!r}]={given}, expected an array {shape} of"
                f" {np.dtype(kind)}"
            )

    def _check_seeds(self, seeds: Sequence[int] | np.ndarray) -> np.ndarray:
        values = np.asarray(seeds)
        if values.shape != (self.num_envs,) or values.dtype.kind not in "iu":
            raise ValueError(
                f"seeds={seeds}: expected {self.num_envs} integers, one for each environment"
            )
        if values.min() < 0 or values.max() > MAX_SEED:
            raise ValueError(f"seeds={values.tolist()}: each must be in 0..{MAX_SEED}")
        return values.astype(np.int64)

    def _reset(self, seeds: np.ndarray | None) -> tuple[np.ndarray, dict[str, Any]]:
        raise NotImplementedError

    def _send(self, actions: np.ndarray) -> None:
        raise NotImplementedError

    def _recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        raise NotImplementedError


class Suite(Protocol):
    """The contract. Implementations are `suites.atari57.Atari57`, `suites.dmlab30.DmLab30`,
    `suites.catch.Catch`.

    A suite must be picklable: it is sent to the processes that play it.
    """

    name: str
    tasks: tuple[Task, ...]
    spec: Spec
    headline: str  # the key of `suites.score.aggregates` that names *the* score, such as "median"
    provenance: dict[str, str]  # where reference scores come from and the protocol played

    def make(
        self, task: Task, num_envs: int, seeds: Sequence[int], split: str = "train"
    ) -> TaskVectorEnv:
        """A vector environment of one task in the SAME_STEP autoreset mode.

        Where a game ends, the observation is the next game's first and the true last one is
        row i of `info["final_obs"]`. Rewards are raw. Where the task has lives, `info["lives"]`
        counts them. `seeds` has one seed for each sub-environment.
        """
        ...

    def check(self) -> None:
        """Raises ValueError, saying what to do, unless every task can be played on this machine;
        `EngineMissing` if none can."""
        ...

    def tidy(self) -> None:
        """Removes what engines that were killed left behind. Others may be playing."""
        ...


def check_task(task: Task, tasks: Sequence[Task], split: str) -> None:
    """Raises ValueError unless `task` is one of `tasks` and `split` is train or test."""
    if task not in tasks:
        raise ValueError(f"{task} is not a task of this suite: pass one of suite.tasks")
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r}: expected 'train' or 'test'")


def select_names(wanted: Sequence[str], known: Sequence[str], *, kind: str) -> tuple[str, ...]:
    """`wanted` as a tuple; ValueError, with the nearest names, unless each is known and given once.

    kind: what the names are of, for the message, such as "game of atari57".
    """
    if isinstance(wanted, str) or not isinstance(wanted, Sequence) or not wanted:
        raise ValueError(
            f"got {wanted!r} where a list with at least one {kind} is expected, "
            f"such as [{known[0]}]"
        )
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"{name!r} is no {kind}; {hint}")
    if twice := sorted({name for name in wanted if list(wanted).count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} given more than once: name each {kind} once")
    return tuple(wanted)
