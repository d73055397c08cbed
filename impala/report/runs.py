"""Runs as their directories tell of them, also while they run or after they were killed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MAX_POINTS = 500  # kept of a run's metrics, evenly spaced, and the last
GROUPS = ("score", "hns", "return", "length", "share", "lag", "lag_p95", "time", "rate")


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint's games on the test levels: `evaluation/<frames>.json`."""

    path: Path
    frames: int
    games_per_task: int
    greedy: bool
    seed: int
    metrics: dict[str, float]  # as `Scoreboard.metrics`
    provenance: dict[str, str]

    @property
    def kind(self) -> str:
        """Evaluations of different kinds are never in one number."""
        actions = "likeliest actions" if self.greedy else "drawn actions"
        return f"evaluation, {self.games_per_task} games, {actions}"


@dataclass(frozen=True)
class Run:
    """points: those of `metrics.jsonl`, thinned out; in order, with `frames` and `time_s`.
    damaged_lines: of `metrics.jsonl`, half written by a run that goes on or was killed.
    damaged_files: that could not be read, with the reason.
    """

    directory: Path
    suite: str
    headline: str
    tasks: tuple[str, ...]
    provenance: dict[str, str]
    config: dict[str, Any]  # keys with dots
    points: list[dict[str, float]]
    summary: dict[str, Any]  # empty until the run has ended once
    evaluations: list[Evaluation]
    videos: list[Path]
    damaged_lines: int
    damaged_files: list[str]

    @property
    def name(self) -> str:
        return "/".join(self.directory.parts[-2:])

    @property
    def last(self) -> dict[str, float]:
        return self.points[-1]

    @property
    def status(self) -> str:
        if self.summary.get("frames", -1) < self.last["frames"]:
            return "running or killed"
        return str(self.summary["status"])


def find_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """All runs in and below `paths`, each once, and what is to be said of those left out.

    ValueError where a path is no directory or none of them has a run with a point.
    """
    paths = list(paths)
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path}: expected the directory of a run or of a sweep")
    directories = {
        config.parent.resolve(): None
        for path in paths
        for config in sorted(path.resolve().rglob("config.yaml"))
        if config.parent.name != ".hydra" and not _is_best_of_population(config.parent)
    }
    runs, left_out = [], []
    for directory in directories:
        try:
            runs.append(read_run(directory))
        except ValueError as error:
            left_out.append(f"{directory}: {error}")
    if not runs:
        found = "; ".join(left_out) or "no directory in it has a config.yaml"
        raise ValueError(f"no run to report on in {', '.join(map(str, paths))}: {found}")
    return runs, left_out


def _is_best_of_population(directory: Path) -> bool:
    """A member's checkpoint, once more."""
    return directory.name == "best" and (directory.parent / "population.json").exists()


def read_run(directory: Path) -> Run:
    """ValueError, saying why, if there is nothing to show."""
    points, damaged_lines = read_metrics(directory / "metrics.jsonl")
    if not points:
        raise ValueError(
            f"none of {damaged_lines} lines of metrics.jsonl can be read"
            if damaged_lines
            else "metrics.jsonl has no point yet"
        )
    damaged: list[str] = []
    summary = _json(directory / "summary.json", damaged) or {}
    about = _json(directory / "suite.json", damaged) or summary
    try:
        config = yaml.safe_load((directory / "config.yaml").read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"config.yaml cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError("config.yaml holds no configuration")
    evaluations = [
        Evaluation(
            path=path,
            frames=report["frames"],
            games_per_task=report["games_per_task"],
            greedy=report["greedy"],
            seed=report["seed"],
            metrics=report["metrics"],
            provenance=report["provenance"],
        )
        for path in sorted((directory / "evaluation").glob("*.json"))
        if (report := _json(path, damaged))
    ]
    keys = {key for point in points for key in point}
    played = sorted(key.partition("/")[2] for key in keys if key.startswith("share/"))
    return Run(
        directory=directory,
        suite=about.get("suite") or config["choices"]["suite"],
        headline=about.get("headline", "median"),
        tasks=tuple(about.get("tasks", played)),
        provenance=about.get("provenance") or _from_config(config),
        config=flat(config),
        points=points,
        summary=summary,
        evaluations=sorted(evaluations, key=lambda evaluation: evaluation.frames),
        videos=sorted((directory / "evaluation").glob("**/*.mp4")),
        damaged_lines=damaged_lines,
        damaged_files=damaged,
    )


def read_metrics(path: Path) -> tuple[list[dict[str, float]], int]:
    """At most twice `MAX_POINTS` points, and how many lines were skipped as damaged."""
    points: list[dict[str, float]] = []
    stride, number, damaged = 1, 0, 0
    last: dict[str, float] | None = None
    for point in _lines(path):
        if point is None:
            damaged += 1
            continue
        last = point
        if number % stride == 0:
            points.append(point)
            if len(points) == 2 * MAX_POINTS:
                points, stride = points[::2], stride * 2
        number += 1
    if last is not None and points[-1] is not last:
        points.append(last)
    return points, damaged


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots; lists stay whole."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _lines(path: Path) -> Iterator[dict[str, float] | None]:
    """Each line's point with the keys of `GROUPS`; None where it is damaged."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                point = json.loads(line)
                frames, time_s = point["frames"], point["time_s"]
            except (ValueError, KeyError, TypeError):
                yield None
                continue
            numbers = {
                key: value
                for key, value in point.items()
                if key.partition("/")[0] in GROUPS and value is not None
            }
            yield {"frames": frames, "time_s": time_s, **numbers}


def _json(path: Path, damaged: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        damaged.append(f"{path}: {error}")
        return None


def _from_config(config: Mapping[str, Any]) -> dict[str, str]:
    """What stands for the protocol of a run that has not said it: an older one, still running."""
    settings = sorted(flat(config["suite"]).items())
    return {"protocol": ", ".join(f"{key}={value}" for key, value in settings)}
