"""Runs as their directories tell of them, also while they run or after they were killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from impala.report.checked_json import (
    named,
    names,
    number,
    numbers,
    read_or_name,
    text,
    texts,
    whole,
)
from impala.report.evaluations import Evaluation, read_evaluations
from suites.statistics import AGGREGATES

MAX_POINTS = 500  # kept of a run's metrics, evenly spaced, and the last
GROUPS = ("score", "hns", "return", "length", "share", "lag", "lag_p95", "time", "rate", "step_s")


def _an_aggregate(value: Any) -> bool:
    """the name of an aggregate"""
    return isinstance(value, str) and value in AGGREGATES


ABOUT = {"suite": text, "headline": _an_aggregate, "tasks": names, "provenance": texts}


class Metrics(NamedTuple):
    """points: of `metrics.jsonl`, thinned out; damaged_lines were skipped, the first of them for
    the reason `damage`."""

    points: list[dict[str, float]]
    damaged_lines: int
    damage: str


@dataclass(frozen=True)
class Run:
    """points: those of `metrics.jsonl`, thinned out; in order, with `frames` and `time_s`.
    damaged_lines: of `metrics.jsonl`, half written by a run that goes on or was killed.
    damaged_files: that could not be used, with the reason.
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
    runs, left_out = [], []

    def unreadable(error: OSError) -> None:
        left_out.append(f"{error.filename}: {error.strerror}")

    directories = {
        folder: None
        for path in paths
        for folder in sorted(
            (Path(folder) for folder, *names in os.walk(path.resolve(), onerror=unreadable)
             if any("config.yaml" in each for each in names)),
            key=_in_order,
        )
        if folder.name != ".hydra" and not _is_best_of_population(folder)
    }  # fmt: skip
    for directory in directories:
        try:
            runs.append(read_run(directory))
        except (ValueError, OSError, RecursionError) as error:
            left_out.append(f"{directory}: {error}")
    if not runs:
        found = "; ".join(left_out) or "no directory in it has a config.yaml"
        raise ValueError(f"no run to report on in {', '.join(map(str, paths))}: {found}")
    return runs, left_out


def _in_order(path: Path) -> list[tuple[bool, int, str]]:
    """2 before 10, and both before words."""
    return [(False, int(part), "") if part.isdecimal() else (True, 0, part) for part in path.parts]


def _is_best_of_population(directory: Path) -> bool:
    """A member's checkpoint, once more."""
    return directory.name == "best" and (directory.parent / "population.json").exists()


def read_run(directory: Path) -> Run:
    """ValueError, saying why, if there is nothing to show."""
    config = _config(directory / "config.yaml")
    metrics = read_metrics(directory / "metrics.jsonl")
    if not metrics.points:
        lines = "its only line" if metrics.damaged_lines == 1 else f"{metrics.damaged_lines} lines"
        raise ValueError(
            f"metrics.jsonl: nothing of {lines} can be read ({metrics.damage})"
            if metrics.damaged_lines
            else "metrics.jsonl has no point"
        )
    damaged: list[str] = []
    if metrics.damaged_lines:
        lines = "line is" if metrics.damaged_lines == 1 else "lines are"
        damaged.append(
            f"{directory / 'metrics.jsonl'}: {metrics.damaged_lines} {lines} damaged"
            f" ({metrics.damage})"
        )
    summary = read_or_name(
        directory / "summary.json",
        damaged,
        {"status": text, "frames": whole},
        {"games": numbers, "restarts": numbers, "aborted": numbers, "updates_skipped": number,
         "commit": text, "machine": text} | ABOUT,
    ) or {}  # fmt: skip
    about = read_or_name(directory / "suite.json", damaged, {}, ABOUT) or summary
    points = metrics.points
    keys = {key for point in points for key in point}
    played = sorted(key.partition("/")[2] for key in keys if key.startswith("share/"))
    tasks = tuple(about.get("tasks") or played)
    suite = about.get("suite") or flat(config).get("choices.suite")
    if not tasks or not isinstance(suite, str):
        raise ValueError("neither suite.json nor anything else says what it plays")
    headline = about.get("headline") or "median"
    provenance = about.get("provenance") or _from_config(config)
    return Run(
        directory=directory,
        suite=suite,
        headline=headline,
        tasks=tasks,
        provenance=provenance,
        config=flat(config),
        points=points,
        summary=summary,
        evaluations=read_evaluations(directory, suite, headline, provenance, damaged),
        videos=[p for p in sorted(directory.glob("evaluation/*.videos/*.mp4")) if _readable(p)],
        damaged_lines=metrics.damaged_lines,
        damaged_files=damaged,
    )


def read_metrics(path: Path) -> Metrics:
    """At most twice `MAX_POINTS` points, and the last. OSError if it is there and no file."""
    points: list[dict[str, float]] = []
    stride, kept, damaged, damage = 1, 0, 0, ""
    last: dict[str, float] | None = None
    for line_number, line in enumerate(_lines(path), start=1):
        try:
            point = _point(line)
            if last is not None and point["frames"] < last["frames"]:
                raise ValueError("frames went back")
        except ValueError as error:
            damaged += 1
            damage = damage or f"line {line_number}: {error}"
            continue
        last = point
        if kept % stride == 0:
            points.append(point)
            if len(points) == 2 * MAX_POINTS:
                points, stride = points[::2], stride * 2
        kept += 1
    if last is not None and points[-1] is not last:
        points.append(last)
    return Metrics(points, damaged, damage)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots; lists stay whole."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from file


def _point(line: bytes) -> dict[str, float]:
    """A line's point with the keys of `GROUPS`. ValueError where it is damaged."""
    try:
        point = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("half written or no JSON") from error
    if not isinstance(point, dict):
        raise ValueError(f"{named(point)}, expected an object")
    numbers = {
        key: value
        for key, value in point.items()
        if key.partition("/")[0] in GROUPS and value is not None
    }
    for key in ("frames", "time_s"):
        if key not in point:
            raise ValueError(f"has no {key}")
        numbers[key] = point[key]
    if not whole(point["frames"]):
        raise ValueError(f"frames is {named(point['frames'])}, expected {whole.__doc__}")
    for key, value in numbers.items():
        if not number(value):
            raise ValueError(f"{key} is {named(value)}, expected {number.__doc__}")
    return numbers


def _config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        json.dumps(config, default=str)  # ValueError where it holds itself
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"config.yaml cannot be read: {said}") from error
    if not isinstance(config, dict):
        raise ValueError(f"config.yaml holds {named(config)}, expected keys and values")
    return config


def _readable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK)


def _from_config(config: Mapping[str, Any]) -> dict[str, str]:
    """What stands for the protocol of a run that has not said it: an older one, still running."""
    settings = sorted(flat({"suite": config.get("suite")}).items())
    return {
        "protocol": ", ".join(f"{key.removeprefix('suite.')}={value}" for key, value in settings)
    }
