"""Reports of what runs learned, from directories of made-up runs."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from benchmarks import learning
from benchmarks.learning import frames_at, read_run, thin
from benchmarks.parts import compose
from benchmarks.random_play import random_returns
from suites.suite import SCORE_WINDOW
from tests.counting import CountingEnv, CountingSuite


def episodes(returns: Sequence[float], task: str = "pong") -> list[dict[str, Any]]:
    return [{"frames": 10 * i, "task": task, "return": r} for i, r in enumerate(returns, start=1)]


def test_a_threshold_needs_a_full_window_of_games() -> None:
    assert SCORE_WINDOW == 100
    assert frames_at(episodes([20.0] * 99), "pong", 18.0) is None
    assert frames_at(episodes([20.0] * 100), "pong", 18.0) == 1000
    # 100 lost games, then won ones: 21n - 21(100-n) >= 1800 from the 93rd on.
    mixed = episodes([-21.0] * 100 + [21.0] * 100)
    assert frames_at(mixed, "pong", 18.0) == 10 * (100 + 93)
    assert frames_at(mixed, "breakout", 18.0) is None


def test_thinned_rows_keep_both_ends() -> None:
    assert thin(list(range(5)), 10) == [0, 1, 2, 3, 4]
    rows = thin(list(range(1001)), 5)
    assert rows == [0, 250, 500, 750, 1000]


def run_directory(path: Path, seed: int, tasks: Sequence[str], final: float) -> Path:
    path.mkdir(parents=True)
    overrides = ["suite=atari57", f"suite.tasks=[{','.join(tasks)}]", f"seed={seed}"]
    OmegaConf.save(compose(overrides), path / "config.yaml")
    for line in (" ".join(overrides), f"resume={path.name}"):
        with (path / "train.log").open("a") as file:
            print(f"[2026-01-01 00:00:00,000][launch][INFO] - command line: {line}", file=file)
    metrics = {f"return/{task}": final for task in tasks}
    metrics |= {"score/median": 50.0, "score/coverage": 1.0}
    with (path / "metrics.jsonl").open("w") as file:
        for i in range(1, 501):
            point = {"frames": 1000 * i, "updates": float(i), "time_s": 6.0 * i}
            print(json.dumps(point | metrics | {f"return/{tasks[0]}": final * i / 500}), file=file)
    with (path / "episodes.jsonl").open("w") as file:
        for episode in episodes([final] * 120, tasks[0]):
            print(json.dumps(episode), file=file)
    summary = {
        "status": "finished",
        "seed": seed,
        "frames": 500_000,
        "time_s": 3000.0,
        "games": dict.fromkeys(tasks, 120),
        "metrics": metrics,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_a_learning_report_of_two_seeds(tmp_path: Path) -> None:
    tasks = ["pong", "breakout"]
    runs = [
        read_run(run_directory(tmp_path / f"run{seed}", seed, tasks, final))
        for seed, final in ((1, 14.6), (2, -20.7))
    ]
    folder = tmp_path / "results"
    thresholds = {"pong": 10.0}
    learning.write(
        "two_games", runs, folder=folder, thresholds=thresholds, random_games=0, commit="abc"
    )
    text = (folder / "two_games.md").read_text()
    for expected in (
        "`python launch.py suite=atari57 suite.tasks=[pong,breakout] seed=1`",
        "**commit:** abc",
        "**seeds:** 1, 2",
        "**frames:** 500,000, 500,000",
        "**wall time:** 50 min, 50 min",
        "| pong at least 10, seed 1 | 1,000 | 6 s |",
        "| pong at least 10, seed 2 | not reached |  |",
        # pong: random -20.7 is 0 %, human 14.6 is 100 %
        "| pong | -20.7 | 14.6 | -3.05 (-20.7 to 14.6) | 50.0 % (0.0 % to 100.0 %) | 240 |",
        "| tasks with a score | 100 % |",
    ):
        assert expected in text, expected
    assert (folder / "two_games.png").stat().st_size > 5000
    with (folder / "two_games.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 200 and {row["seed"] for row in rows} == {"1", "2"}
    assert rows[99]["frames"] == "500000" and float(rows[99]["return/pong"]) == 14.6


def test_runs_that_cannot_be_reported_are_refused(tmp_path: Path) -> None:
    one = read_run(run_directory(tmp_path / "one", 1, ["pong"], 1.0))
    other = read_run(run_directory(tmp_path / "other", 1, ["breakout"], 1.0))
    options: dict[str, Any] = {"folder": tmp_path, "random_games": 0, "commit": None}
    with pytest.raises(ValueError, match="other tasks"):
        learning.write("x", [one, other], thresholds={}, **options)
    with pytest.raises(ValueError, match=r"breakout.*the tasks are pong"):
        learning.write("x", [one], thresholds={"breakout": 1.0}, **options)
    with pytest.raises(ValueError, match="has no summary"):
        read_run(tmp_path)


class UnevenSuite(CountingSuite):
    """Games of environment i last i + 2 steps."""

    def make(self, *arguments: Any, **options: Any) -> CountingEnv:
        environment = super().make(*arguments, **options)
        environment._length = np.arange(2, 2 + environment.num_envs)  # type: ignore[assignment]
        return environment


def test_random_play_gives_each_environment_the_same_number_of_games() -> None:
    played = random_returns(UnevenSuite(["three", "five"]), games=12, seed=0)
    two_of_each = [sum(range(1, length + 1)) for length in range(2, 10) for _ in range(2)]
    assert played == {"three": two_of_each, "five": two_of_each}
