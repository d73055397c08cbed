"""From a checkpoint to whole games on the test levels to a score."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from impala.agents.agent import Agent
from impala.children import die_with_parent, signals_held
from impala.inference import LocalInference
from impala.trajectory import empty_step
from suites.score import Scoreboard, provenance
from suites.suite import Suite

log = logging.getLogger(__name__)


class EvaluationError(RuntimeError):
    """A game could not be played; the message carries the worker's own traceback."""


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
        """(task index, [(raw return, length in frames) of each game]) as tasks are done.

        Raises EvaluationError, naming the task, if a worker fails or dies.
        """
        waiting = deque(range(len(self.suite.tasks)))
        playing: dict[Connection, int] = {}
        workers: dict[Connection, BaseProcess] = {}
        try:
            with signals_held():
                for _ in range(min(self.num_workers, len(waiting))):
                    connection, process = self._start_worker()
                    workers[connection] = process
            for connection in workers:
                playing[connection] = waiting.popleft()
                connection.send(playing[connection])
            while playing:
                for connection in cast(list[Connection], wait(list(playing))):
                    task = playing.pop(connection)
                    result = self._received(task, connection, workers[connection])
                    if waiting:
                        playing[connection] = waiting.popleft()
                        connection.send(playing[connection])
                    yield task, result
        finally:
            for connection, process in workers.items():
                connection.close()
                process.kill()
            for process in workers.values():
                process.join()

    def _start_worker(self) -> tuple[Connection, BaseProcess]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(self, theirs), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def _received(
        self, task: int, connection: Connection, process: BaseProcess
    ) -> list[tuple[float, int]]:
        name = self.suite.tasks[task].name
        try:
            result = connection.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            raise EvaluationError(
                f"the process that played {name} died (exit code {process.exitcode}; -9: killed,"
                " as when memory runs out)"
            ) from None
        if isinstance(result, str):
            raise EvaluationError(f"the process that played {name} failed:\n{result}")
        return result

    def play(self, task: int) -> list[tuple[float, int]]:
        """One task in this process: (raw return, length in frames) of each game."""
        # A key of two numbers: no actor's games, whose keys have one, are played again here.
        sequence = np.random.SeedSequence(self.seed, spawn_key=(task, 0))
        noise_seed, *seeds = (sequence.generate_state(1 + self.games, np.uint64) >> 33).tolist()
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


def _work(evaluation: Evaluation, connection: Connection) -> None:
    """The life of a worker: plays the tasks that it is sent until nobody is there to send any."""
    die_with_parent()
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            task = connection.recv()
            try:
                result: list[tuple[float, int]] | str = evaluation.play(task)
            except Exception:
                result = traceback.format_exc()
            connection.send(result)


def evaluate(evaluation: Evaluation, *, frames: int, run_dir: Path) -> float:
    """Plays, prints a table, writes `evaluation/<frames>.json`; returns the headline score.

    An earlier evaluation of the same name is kept, as `evaluation/<frames>_<number>.json`.

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
    how = "greedy" if evaluation.greedy else "sampled"
    title = f"{suite.name} after {frames:,} frames, {how} actions"
    Console().print(_table(suite, title, metrics, games))
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
        "provenance": provenance(
            suite,
            frames=frames,
            games=f"{evaluation.games} whole games of each task, seed {evaluation.seed}",
            levels="test",
            actions="the likeliest" if evaluation.greedy else "drawn from the policy",
            weights=f"checkpoint of {frames:,} frames",
        ),
    }
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    if path.exists():
        names = (path.with_stem(f"{frames}_{number}") for number in count(1))
        earlier = next(name for name in names if not name.exists())
        path.rename(earlier)
        log.info("the evaluation before this one is kept as %s", earlier)
    os.replace(temporary, path)
    log.info("wrote %s", path)
    return report["score"]


def _table(suite: Suite, title: str, metrics: dict[str, float], games: dict[str, Any]) -> Table:
    table = Table(title=title)
    table.add_column("game", no_wrap=True)
    for name in ("return", "human-normalised", "games"):
        table.add_column(name, justify="right", no_wrap=True)
    for task in suite.tasks:
        table.add_row(
            task.name,
            f"{metrics[f'return/{task.name}']:,.1f}",
            f"{metrics[f'hns/{task.name}']:,.1f} %",
            str(len(games[task.name]["returns"])),
        )
    table.add_section()
    for name, value in metrics.items():
        if name.startswith("score/") and name != "score/coverage":
            aggregate = name.removeprefix("score/")
            style = "bold" if aggregate == suite.headline else ""
            table.add_row(aggregate, "", f"{value:,.1f} %", "", style=style)
    return table
