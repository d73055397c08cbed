"""From a checkpoint to whole games on the test levels to a score."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from impala.actor_pool import actor_seeds
from impala.agents.agent import Agent
from impala.inference import LocalInference
from impala.trajectory import empty_step
from suites.score import Scoreboard
from suites.suite import Suite

log = logging.getLogger(__name__)


class FixedWeights:
    """A source that leaves the agent's weights as they are."""

    def load(self, agent: Agent, version: int) -> int:
        return 0


@dataclass(frozen=True)
class Evaluation:
    """Plays `games` whole games of each task of `suite`, in `num_workers` processes.

    Every game is the first of its own environment, so that short games are not preferred; the
    recurrent state is carried through a whole game, lost lives included.
    greedy: take the likeliest action instead of drawing from the policy.
    """

    suite: Suite
    agent: Agent
    games: int
    greedy: bool
    seed: int
    num_workers: int

    def results(self) -> Iterator[tuple[int, list[tuple[float, int]]]]:
        """(task index, [(raw return, length in frames) of each game]) as tasks are done."""
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(
            min(self.num_workers, len(self.suite.tasks)),
            mp_context=context,
            initializer=_start_worker,
            initargs=(self,),
        )
        try:
            futures = {
                executor.submit(_play_in_worker, task): task
                for task in range(len(self.suite.tasks))
            }
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()

    def play(self, task: int) -> list[tuple[float, int]]:
        """One task in this process: (raw return, length in frames) of each game."""
        noise_seed, *seeds = actor_seeds(self.seed, task, self.games)
        environment = self.suite.make(self.suite.tasks[task], self.games, seeds, split="test")
        inference = LocalInference(
            self.agent,
            FixedWeights(),
            num_environments=self.games,
            num_actions=self.suite.spec.num_actions,
            seed=noise_seed,
            greedy=self.greedy,
        )
        step = empty_step(self.suite.spec.frame_shape, self.games)
        frame, _ = environment.reset()
        step = step._replace(frame=torch.from_numpy(frame), terminated=~step.terminated)
        returns, lengths = np.zeros(self.games), np.zeros(self.games, np.int64)
        playing = np.ones(self.games, bool)
        while playing.any():
            action = inference.act(step).action
            frame, reward, terminated, truncated, _ = environment.step(action.numpy())
            returns += reward * playing
            lengths += playing
            playing &= ~(terminated | truncated)
            step = step._replace(
                frame=torch.from_numpy(frame),
                reward=torch.from_numpy(np.asarray(reward, np.float32)),
                terminated=torch.from_numpy(terminated),
                truncated=torch.from_numpy(truncated),
                last_action=action,
            )
        environment.close()
        frames = lengths * self.suite.spec.frames_per_step
        return list(zip(returns.tolist(), frames.tolist(), strict=True))


_worker: Evaluation


def _start_worker(evaluation: Evaluation) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    torch.set_num_threads(1)
    _worker = evaluation


def _play_in_worker(task: int) -> list[tuple[float, int]]:
    return _worker.play(task)


def evaluate(evaluation: Evaluation, *, frames: int, run_dir: Path) -> float:
    """Plays, prints a table, writes `evaluation/<frames>.json`; returns the headline score.

    frames: environment frames the agent was trained for, the file's name.
    """
    suite = evaluation.suite
    scoreboard = Scoreboard(suite.tasks, window=evaluation.games)
    games: dict[str, Any] = {}
    for task, results in evaluation.results():
        name = suite.tasks[task].name
        for raw_return, length in results:
            scoreboard.add(task, raw_return, length)
        games[name] = {
            "returns": [raw_return for raw_return, _ in results],
            "lengths": [length for _, length in results],
        }
        metrics = scoreboard.metrics()
        log.info(
            "%d/%d %s: return %.1f, human-normalised %.1f %%",
            len(games), len(suite.tasks), name, metrics[f"return/{name}"], metrics[f"hns/{name}"],
        )  # fmt: skip
    metrics = scoreboard.metrics()
    Console().print(_table(suite, metrics, games, frames))
    path = run_dir / "evaluation" / f"{frames}.json"
    path.parent.mkdir(exist_ok=True)
    report = {
        "frames": frames,
        "suite": suite.name,
        "headline": suite.headline,
        "score": metrics[f"score/{suite.headline}"],
        "games_per_task": evaluation.games,
        "greedy": evaluation.greedy,
        "seed": evaluation.seed,
        "metrics": metrics,
        "games": {task.name: games[task.name] for task in suite.tasks},
        "provenance": suite.provenance,
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(temporary, path)
    log.info("wrote %s", path)
    return report["score"]


def _table(suite: Suite, metrics: dict[str, float], games: dict[str, Any], frames: int) -> Table:
    table = Table(title=f"{suite.name} after {frames:,} frames", show_footer=True)
    table.add_column("game", footer="suite")
    footer = "  ".join(
        f"{name[6:]} {value:.1f} %"
        for name, value in metrics.items()
        if name.startswith("score/") and name != "score/coverage"
    )
    table.add_column("return", justify="right")
    table.add_column("human-normalised %", justify="right", footer=footer)
    table.add_column(
        "games", justify="right", footer=str(sum(len(g["returns"]) for g in games.values()))
    )
    for task in suite.tasks:
        table.add_row(
            task.name,
            f"{metrics[f'return/{task.name}']:,.1f}",
            f"{metrics[f'hns/{task.name}']:.1f}",
            str(len(games[task.name]["returns"])),
        )
    return table
