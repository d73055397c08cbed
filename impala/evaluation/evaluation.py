"""What an evaluation is: which games are played, with which seeds, and in which portions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from impala.agents.agent import Agent
from suites.suite import Suite


class EvaluationError(RuntimeError):
    """A game could not be played; the message carries the worker's own traceback."""


class EvaluationBusy(ValueError):
    """Another program plays the same games."""


class Game(NamedTuple):
    raw_return: float
    length: int  # environment frames


@dataclass(frozen=True)
class Chunk:
    """Games `first` to `first + games - 1` of a task, played together."""

    task: int  # index into suite.tasks
    first: int
    games: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """`games` whole games of each task of `suite`, on its test levels.

    Game g of a task has seeds of its own. What it depends on besides is which games are played
    together, since sums over a batch of another size are rounded otherwise: so that is fixed, too,
    and the number of workers changes nothing.

    agent:       on the CPU.
    greedy:      take the likeliest action instead of drawing from the policy.
    num_workers: processes that play.
    at_once:     games that a process plays at once, at most.
    outside:     each environment in a process of its own, which the worker starts.
    timeout_s:   a worker that shows no sign of life for longer has failed; None: wait for ever.
    videos:      of each task's first games.
    niceness:    of the workers.
    """

    suite: Suite
    agent: Agent
    games: int
    greedy: bool
    seed: int
    num_workers: int
    at_once: int = 8
    outside: bool = False
    timeout_s: float | None = 120.0
    videos: int = 0
    niceness: int = 0

    def chunks(self) -> Iterator[Chunk]:
        """All games, in as few and as even portions as `at_once` allows."""
        portions = -(-self.games // self.at_once)
        for task in range(len(self.suite.tasks)):
            for numbers in np.array_split(np.arange(self.games), portions):
                yield Chunk(task, int(numbers[0]), len(numbers))

    def seeds(self, task: int, game: int) -> tuple[int, int]:
        """Of the environment, and of the noise that actions are drawn with."""
        # A key of two numbers: no actor's games, whose keys have one, are played again here.
        sequence = np.random.SeedSequence(self.seed, spawn_key=(task, game))
        environment, noise = (sequence.generate_state(2, np.uint64) >> 33).tolist()
        return environment, noise

    def identity(self, frames: int) -> dict[str, Any]:
        """All that the numbers depend on. frames: the agent was trained for."""
        return {
            "frames": frames,
            "weights": digest(self.agent),
            "suite": self.suite.name,
            "tasks": [task.name for task in self.suite.tasks],
            "protocol": dict(self.suite.provenance),
            "seed": self.seed,
            "greedy": self.greedy,
            "games": self.games,
            "at_once": self.at_once,
            "videos": self.videos,
        }


def digest(agent: Agent) -> str:
    """Of the weights: the same for the same numbers."""
    sha = hashlib.sha256()
    for name, weight in sorted(agent.state_dict().items()):
        sha.update(name.encode())
        sha.update(weight.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]
