"""The evaluations of a run's checkpoints, as their files tell of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from impala.report.checked_json import flag, numbers, read_object, text, texts, whole

SCORED_BY = ("random", "human", "protocol")  # of a provenance: numbers that differ stand apart


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint's games on the test levels: `evaluation/<frames>.json`.

    kind: evaluations of different kinds are never in one number.
    """

    path: Path
    frames: int
    kind: str
    seed: int
    metrics: dict[str, float]  # as `Scoreboard.metrics`
    provenance: dict[str, str]


def read_evaluations(
    run_dir: Path, suite: str, headline: str, scored_by: Mapping[str, str], damaged: list[str]
) -> list[Evaluation]:
    """By frames, of the same frames the newest last; what cannot be used is added to `damaged`.

    scored_by: provenance of the run. An evaluation under another protocol is of another kind.
    """
    found = []
    for path in sorted((run_dir / "evaluation").glob("*.json")):
        try:
            found.append(_read(path, suite, headline, scored_by))
        except ValueError as error:
            damaged.append(f"{path}: {error}")
    return sorted(found, key=_age)


def _age(evaluation: Evaluation) -> tuple[int, float, str]:
    """Those that were put aside for a newer one of the same frames are numbered: 700_1, 700_2."""
    number = evaluation.path.stem.rpartition("_")[2]
    newest = evaluation.path.stem == str(evaluation.frames)
    order = math.inf if newest else int(number) if number.isdecimal() else 0
    return evaluation.frames, order, evaluation.path.stem


def repeated(evaluations: Iterable[Evaluation]) -> set[str]:
    """Names, without suffixes, of those of which a later one played the very same games."""
    latest: dict[tuple[Any, ...], str] = {}
    found = set()
    for each in evaluations:
        key = (each.frames, each.kind, each.seed, repr(each.metrics), repr(each.provenance))
        if key in latest:
            found.add(latest[key])
        latest[key] = each.path.stem
    return found


def _read(path: Path, suite: str, headline: str, scored_by: Mapping[str, str]) -> Evaluation:
    report = read_object(
        path,
        {"frames": whole, "games_per_task": whole, "greedy": flag, "seed": whole,
         "metrics": numbers, "provenance": texts},
        {"suite": text},
    )  # fmt: skip
    if report.get("suite", suite) != suite:
        raise ValueError(f"is of {report['suite']}, and the run of {suite}")
    if f"score/{headline}" not in report["metrics"]:
        raise ValueError(f"has no score/{headline} in metrics")
    actions = "greedy" if report["greedy"] else "sampled"
    games = report["games_per_task"]
    kind = f"evaluation, {games} {'game' if games == 1 else 'games'} a task, {actions} actions"
    own = report["provenance"]
    for name in SCORED_BY:
        if name in own and own[name] != scored_by.get(name, own[name]):
            kind += f", {name}: {own[name]}"
    return Evaluation(path, report["frames"], kind, report["seed"], report["metrics"], own)
