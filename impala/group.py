"""Environments of an actor: those that step together, and what is known of each one's game."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala.messages import GAME
from impala.trajectory import Trajectory, leaves, map_structure
from impala.worker import WorkerEnv
from suites.suite import TaskVectorEnv


@dataclass
class Member:
    """A vector environment of a group."""

    environment: TaskVectorEnv
    task: int
    numbers: NDArray[np.int64]  # of its environments, among the actor's


@dataclass
class Group:
    members: list[Member]
    started: bool = True  # whether the first observation is there
    broken: bool = False
    asking: bool = False  # its row is to be asked about,
    awaiting: bool = False  # was, and has no answer
    actions: NDArray[np.int64] | None = None  # the answer: sent to environments that are at it
    sent_s: float = 0.0  # when
    clock: list[float] = field(default_factory=list)  # before and after each was sent to
    steps: int = 0  # since the group was made
    free: list[slice] = field(default_factory=list)  # those outside share one list
    slots: slice | None = None  # that the unroll is written to; None between two
    t: int = 0  # the newest row
    began_s: float = 0.0
    playing: list[tuple[Member, slice]] = field(default_factory=list)  # and its columns
    order: list[int] = field(default_factory=list)  # in which they are received from
    numbers: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def worker(self) -> WorkerEnv | None:
        """Its only environment, if that has a process of its own."""
        environment = self.members[0].environment
        return environment if isinstance(environment, WorkerEnv) else None

    @property
    def busy(self) -> bool:
        """Its environments owe an answer."""
        return not self.broken and (not self.started or self.actions is not None)

    @property
    def rests(self) -> bool:
        """It could begin an unroll."""
        return not (self.broken or self.busy or self.slots is not None) and bool(self.free)


class Games:
    """By number of the environment: the row that its next unroll begins with, and its game.

    storage: slots, whose rows these become.
    frames_per_step: that a step plays unless the environment says how many it did.
    life_loss_ends_episode: a lost life ends the episode *for learning*; games and scores go on.
    """

    def __init__(
        self,
        storage: Trajectory,
        size: int,
        *,
        frames_per_step: int,
        life_loss_ends_episode: bool,
    ) -> None:
        self._storage: Any = map_structure(lambda leaf: leaf.numpy(), storage)
        self._frames_per_step = frames_per_step
        self._life_loss_ends_episode = life_loss_ends_episode
        self._carry: Any = map_structure(
            lambda leaf: np.zeros((size, *leaf.shape[2:]), leaf.dtype), self._storage.steps
        )
        self._task = np.zeros(size, np.int64)
        self._return = np.zeros(size)
        self._frames = np.zeros(size, np.int32)
        self._lives = np.zeros(size, np.int32)
        self._unused = set(range(size))
        self._finished: list[tuple[int, float, int]] = []

    def numbers(self, task: int, count: int) -> NDArray[np.int64]:
        """The lowest numbers that no environment has, for those of a task."""
        numbers = sorted(self._unused)[:count]
        self._unused -= set(numbers)
        self._task[numbers] = task
        return np.array(numbers, np.int64)

    def give_back(self, numbers: NDArray[np.int64]) -> None:
        self._unused |= set(numbers.tolist())

    def started(
        self, numbers: NDArray[np.int64], frame: NDArray[Any], info: dict[str, Any]
    ) -> None:
        """The first observations of these environments."""
        for leaf in leaves(self._carry):
            leaf[numbers] = 0
        self._carry.frame[numbers] = frame
        if "instruction" in info:
            self._carry.instruction[numbers] = info["instruction"]
        # The row before an unroll's first reads as the end of an episode: the core state is zero.
        self._carry.terminated[numbers] = True
        self._return[numbers] = 0.0
        self._frames[numbers] = 0
        self._lives[numbers] = info.get("lives", 0)

    def begin(self, slots: slice, numbers: NDArray[np.int64]) -> None:
        """Writes row 0 of an unroll: row T of the one before."""
        for stored, carried in zip(leaves(self._storage.steps), leaves(self._carry), strict=True):
            np.take(carried, numbers, axis=0, out=stored[0, slots], mode="clip")
        self._storage.task[slots] = self._task[numbers]

    def keep(self, t: int, slots: slice, numbers: NDArray[np.int64]) -> None:
        """Row `t` will be row 0 of the next unroll."""
        for stored, carried in zip(leaves(self._storage.steps), leaves(self._carry), strict=True):
            carried[numbers] = stored[t, slots]

    def row(self, t: int, slots: slice) -> Any:
        return map_structure(lambda leaf: leaf[t, slots], self._storage.steps)

    def kept_row(self, number: int) -> Any:
        return map_structure(lambda leaf: leaf[number : number + 1], self._carry)

    def actions(self, t: int, slots: slice) -> NDArray[np.int64]:
        return self._storage.outputs.action[t, slots].copy()

    def frames_per_step(self, numbers: NDArray[np.int64]) -> NDArray[np.int32]:
        return np.full(len(numbers), self._frames_per_step, np.int32)

    def lives(self, numbers: NDArray[np.int64]) -> NDArray[np.int32]:
        return self._lives[numbers]

    def stepped(
        self,
        rows: Any,
        numbers: NDArray[np.int64],
        lives: NDArray[np.int32],
        frames: NDArray[np.int32],
    ) -> None:
        """Sums whole games, raw rewards and frames; only then is a lost life an end in `rows`."""
        rows.truncated[:] &= ~rows.terminated
        self._return[numbers] += rows.reward
        self._frames[numbers] += frames
        ended = numbers[rows.terminated | rows.truncated]
        for i in ended:
            game = int(self._task[i]), float(self._return[i]), int(self._frames[i])
            self._finished.append(game)
        self._return[ended] = 0.0
        self._frames[ended] = 0
        if self._life_loss_ends_episode:
            rows.terminated[:] |= (lives < self._lives[numbers]) & ~rows.truncated
        self._lives[numbers] = lives

    def take_finished(self) -> NDArray[np.void]:
        """Of dtype GAME: those that ended since the last call."""
        finished, self._finished = self._finished, []
        return np.array(finished, GAME)
