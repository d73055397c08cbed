"""How finished games become scores: human-normalised, aggregated over tasks, in per cent."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from suites.statistics import AGGREGATES
from suites.suite import SCORE_WINDOW, Suite, Task

LIVE = ("median", "mean", "mean_capped", "mean_capped_floored", "iqm")


def human_normalised(raw_return: float, task: Task) -> float:
    """100 (return - random) / (human - random): in per cent, 0 plays at random, 100 like a human.

    `raw_return` is of a whole game, unclipped (or the mean of such).
    """
    return 100.0 * (raw_return - task.random_return) / (task.human_return - task.random_return)


def aggregates(scores: Mapping[str, float]) -> dict[str, float]:
    """What a run shows of itself, `LIVE` of `suites.statistics.AGGREGATES`, in per cent.

    scores: task name -> human-normalised score in per cent; at least one task.
    """
    if not scores:
        raise ValueError("aggregates over no task: at least one must have a finished game")
    values = np.fromiter(scores.values(), np.float64, len(scores))[None]
    return {name: float(AGGREGATES[name](values)) for name in LIVE}


def provenance(
    suite: Suite, *, frames: int, games: str, levels: str, actions: str, weights: str
) -> dict[str, str]:
    """All that a score of `suite` depends on: what the suite says of itself, and how it came about.

    frames:  environment frames learned from until then.
    games:   which games the mean return is of; levels: of which split of the suite.
    actions: how they were chosen from the policy.
    weights: whose they were.
    """
    return {
        **suite.provenance,
        "order": "mean over games, normalised, capped, aggregated over tasks",
        "frames": f"{frames:,}",
        "games": games,
        "levels": levels,
        "actions": actions,
        "weights": weights,
    }


class Scoreboard:
    """The last whole games of each task, and the scores they make.

    A game is named by its task's index in `tasks`, its raw return, and its length in environment
    frames. Returns are means over each task's last `window` games.
    """

    def __init__(self, tasks: Sequence[Task], window: int = SCORE_WINDOW) -> None:
        if not tasks or window < 1:
            raise ValueError(f"{len(tasks)} tasks and window={window}: expected at least 1 of each")
        self.tasks = tuple(tasks)
        self.window = window
        self._returns = [deque[float](maxlen=window) for _ in tasks]
        self._lengths = [deque[int](maxlen=window) for _ in tasks]
        self._games = [0 for _ in tasks]

    def add(self, task_index: int, raw_return: float, length_frames: int) -> None:
        """Records a finished game. ValueError for a non-finite return or a length below 1."""
        task = self.tasks[self._checked(task_index)]
        if not math.isfinite(raw_return):
            raise ValueError(f"return {raw_return} of a game of {task.name}: expected a number")
        if length_frames < 1:
            raise ValueError(f"a game of {task.name} lasted {length_frames} frames: expected > 0")
        self._returns[task_index].append(float(raw_return))
        self._lengths[task_index].append(int(length_frames))
        self._games[task_index] += 1

    def add_many(
        self,
        task_indices: Iterable[int],
        raw_returns: Iterable[float],
        lengths_frames: Iterable[int],
    ) -> None:
        """Records finished games in order; three sequences of the same length."""
        for game in zip(task_indices, raw_returns, lengths_frames, strict=True):
            self.add(*game)

    def games(self, task_index: int) -> int:
        """How many games of this task have ever been recorded, also those beyond the window."""
        return self._games[self._checked(task_index)]

    def scores(self) -> dict[str, float]:
        """Human-normalised score in per cent of each task that has a finished game."""
        return {
            task.name: human_normalised(float(np.mean(returns)), task)
            for task, returns in zip(self.tasks, self._returns, strict=True)
            if returns
        }

    def metrics(self) -> dict[str, float]:
        """Flat numbers to log, of the tasks that have a finished game.

        `score/<aggregate>` and `hns/<task>` in per cent, `return/<task>` raw, `length/<task>` in
        environment frames; `score/coverage`, the share of tasks with a finished game, always.
        """
        scores = self.scores()
        metrics = {"score/coverage": len(scores) / len(self.tasks)}
        if scores:
            metrics |= {f"score/{name}": value for name, value in aggregates(scores).items()}
        for task, returns, lengths in zip(self.tasks, self._returns, self._lengths, strict=True):
            if returns:
                metrics[f"hns/{task.name}"] = scores[task.name]
                metrics[f"return/{task.name}"] = float(np.mean(returns))
                metrics[f"length/{task.name}"] = float(np.mean(lengths))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything recorded, in lists, strings and numbers."""
        return {
            "tasks": [task.name for task in self.tasks],
            "window": self.window,
            "returns": [list(returns) for returns in self._returns],
            "lengths": [list(lengths) for lengths in self._lengths],
            "games": list(self._games),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces what is recorded. ValueError, changing nothing, for other tasks or window."""
        wanted = set(self.state_dict())
        if set(state) != wanted:
            raise ValueError(
                f"scoreboard state has {sorted(state)}: expected exactly {sorted(wanted)}"
            )
        own, saved = [task.name for task in self.tasks], list(state["tasks"])
        if saved != own:
            missing = ", ".join(sorted(set(own) - set(saved))) or "none"
            surplus = ", ".join(sorted(set(saved) - set(own))) or "none"
            raise ValueError(
                "scoreboard state is of other tasks, or of another order of tasks: of these tasks "
                f"it lacks {missing}; it has besides {surplus}. Resume with the tasks of the run"
            )
        if state["window"] != self.window:
            raise ValueError(
                f"scoreboard state has window {state['window']}: expected {self.window}"
            )
        columns = [state["returns"], state["lengths"], state["games"]]
        if any(len(column) != len(own) for column in columns):
            raise ValueError(f"scoreboard state is damaged: expected {len(own)} rows in each list")
        self._returns = [deque(map(float, row), maxlen=self.window) for row in state["returns"]]
        self._lengths = [deque(map(int, row), maxlen=self.window) for row in state["lengths"]]
        self._games = [int(games) for games in state["games"]]

    def _checked(self, task_index: int) -> int:
        if not 0 <= task_index < len(self.tasks):
            raise ValueError(f"task index {task_index}: expected 0..{len(self.tasks) - 1}")
        return task_index
