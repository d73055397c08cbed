"""The page's table of tasks: a row for each task of each group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from impala.report.comparison import Group, Part
from impala.words import UNKNOWN, by_magnitude, per_cent
from suites.statistics import interval, mean

Cell = tuple[float | None, str]
"""A number, if it is known and one, and what is written."""

# Of what is measured of each task: metric, scale, name of the column, what it means.
MEASURED = (
    ("length", 1.0, "length, frames", "mean length of games"),
    ("share", 100.0, "share, %", "of the learner's frames"),
    ("step_s", 1000.0, "step, ms", "time that a step of an environment takes, in milliseconds"),
    ("lag", 1.0, "lag, updates", "mean policy lag"),
    ("lag_p95", 1.0, "lag p95, updates", "95th percentile of policy lag"),
)


def head(part: Part) -> list[tuple[str, str]]:
    """Names of the columns, and what they mean. What no run has measured has none."""
    return [
        ("task", "task"),
        ("run", "run"),
        ("return", "mean raw return of up to the last 100 games in training, mean over seeds"),
        ("score, %", "human-normalised, of up to the last 100 games in training"),
        ("low, %", "of the 95 % interval over seeds"),
        ("high, %", "of the 95 % interval over seeds"),
        *((f"{kind}, %", "human-normalised, of the newest of this kind") for kind in _kinds(part)),
        ("games", "finished in the whole run, of all seeds; known once each run has ended"),
        *((name, title) for key, _, name, title in MEASURED if key in part.measured),
    ]


def rows(part: Part, group: Group) -> Iterator[list[Cell]]:
    training = group.training(part.tasks)
    evaluated = {result.kind: result for result in group.evaluations(part.tasks)}
    for task in part.tasks:
        cells: list[Cell] = [(None, task), (None, group.label)]
        if task in training.tasks:
            index = training.tasks.index(task)
            scores = training.scores[:, [index]]
            low, high = interval(mean, scores) or (None, None)
            cells.append(_cell(float(training.returns[:, index].mean()), by_magnitude))
            cells += [_cell(value, per_cent) for value in (float(scores.mean()), low, high)]
        else:
            cells += [_cell(None, per_cent)] * 4
        for kind in _kinds(part):
            result = evaluated.get(kind)
            value = None
            if result is not None and task in result.tasks:
                value = float(result.scores[:, result.tasks.index(task)].mean())
            cells.append(_cell(value, per_cent))
        games = [(run.summary.get("games") or {}).get(task) for run in group.runs]
        total = None if None in games else sum(filter(None, games))
        cells.append(_cell(total, lambda number: f"{number:,.0f}"))
        for key, scale, _, _ in MEASURED:
            if key in part.measured:
                cells.append(_cell(group.mean_of(f"{key}/{task}") * scale, by_magnitude))
        yield cells


def _kinds(part: Part) -> list[str]:
    """Of the evaluations that a group has."""
    results = (result for group in part.groups for result in group.evaluations(part.tasks))
    return list(dict.fromkeys(result.kind for result in results))


def _cell(value: float | None, write: Callable[[float], str]) -> Cell:
    if value is None or not math.isfinite(value):
        return None, UNKNOWN
    return float(value), write(value)
