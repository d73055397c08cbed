"""Which runs are seeds of one another, which can be compared, and their scores as arrays."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from impala.report.evaluations import SCORED_BY, Evaluation
from impala.report.populations import Population
from impala.report.runs import Run
from suites.statistics import Aggregate, Scores, bootstrap, interval, middle

# What does not change what is learned. Runs that differ in nothing else are one run's seeds.
BESIDE = (
    "seed", "mode", "resume", "loggers", "log_every_s", "log_every_frames", "checkpoint",
    "evaluation", "videos", "restarts", "sweep", "choices.loggers",
)  # fmt: skip
TRAINING = "training, up to the last 100 games a task"
CURVE_POINTS = 80
CURVE_RESAMPLES = 200


class Estimate(NamedTuple):
    """A number, and the middle 95 % of its bootstraps over seeds; None for one seed."""

    value: float
    interval: tuple[float, float] | None


class Curve(NamedTuple):
    """x [n], value [n]; low and high [n] or None for one seed."""

    x: Scores
    value: Scores
    low: Scores | None
    high: Scores | None


@dataclass(frozen=True)
class Result:
    """Scores of one kind, `TRAINING` or an evaluation's.

    tasks: those that all runs have finished.
    """

    kind: str
    frames: tuple[int, int]  # least and most of the runs
    tasks: tuple[str, ...]
    scores: Scores  # [runs, tasks], human-normalised, per cent
    returns: Scores  # [runs, tasks], raw

    @property
    def span(self) -> str:
        """The frames, in words."""
        low, high = self.frames
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"

    def estimate(self, aggregate: Aggregate) -> Estimate | None:
        """None where no task has been finished by all runs."""
        if not self.tasks:
            return None
        return Estimate(float(aggregate(self.scores)), interval(aggregate, self.scores))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    label: str
    runs: list[Run]

    def training(self, tasks: Sequence[str]) -> Result:
        points = [run.last for run in self.runs]
        return result_of(TRAINING, [int(p["frames"]) for p in points], points, tasks)

    def evaluations(self, tasks: Sequence[str]) -> list[Result]:
        """Of each kind that all runs have, with each run's newest."""
        newest: list[dict[str, Evaluation]] = [
            {evaluation.kind: evaluation for evaluation in run.evaluations} for run in self.runs
        ]
        kinds = [kind for kind in newest[0] if all(kind in of_run for of_run in newest)]
        return [
            result_of(
                kind,
                [of_run[kind].frames for of_run in newest],
                [of_run[kind].metrics for of_run in newest],
                tasks,
            )
            for kind in kinds
        ]

    @property
    def evaluated_in_part(self) -> dict[str, int]:
        """Kinds that some runs have and others have not, and how many have it."""
        kinds = Counter(kind for run in self.runs for kind in {e.kind for e in run.evaluations})
        return {kind: count for kind, count in sorted(kinds.items()) if count < len(self.runs)}

    def mean_of(self, key: str) -> float:
        """Of a metric over all points of all runs; NaN where there is none."""
        values = [point[key] for run in self.runs for point in run.points if key in point]
        return float(np.mean(values)) if values else math.nan

    def curve(self, keys: Sequence[str], aggregate: Aggregate, x: str) -> Curve | None:
        """Of `aggregate` over metrics [runs, keys], against `x`, `frames` or `time_s`.

        Up to where the run that has gone least far is. At each point over the keys that all runs
        have by then. None where there are none.
        """
        end = min(run.last[x] for run in self.runs)
        grid = np.unique([point[x] for run in self.runs for point in run.points])
        grid = grid[grid <= end]
        if len(grid) > CURVE_POINTS:
            grid = np.linspace(grid[0], end, CURVE_POINTS)
        at = np.stack([_at(run, keys, x, grid) for run in self.runs], 1)  # [grid, runs, keys]
        known = np.asarray(np.isfinite(at).all(axis=-2))
        some = np.asarray(known.any(axis=-1))
        if not some.any():
            return None
        rows = [scores[:, there] for scores, there in zip(at[some], known[some], strict=True)]
        value = np.array([float(aggregate(scores)) for scores in rows])
        if len(self.runs) < 2:
            return Curve(grid[some], value, None, None)
        bounds = np.array(
            [middle(aggregate(bootstrap(scores, resamples=CURVE_RESAMPLES))) for scores in rows]
        )
        return Curve(grid[some], value, bounds[:, 0], bounds[:, 1])


class Scored(NamedTuple):
    """Of whom a result is: a group's label, or the best of a population."""

    label: str
    result: Result


@dataclass(frozen=True)
class Part:
    """Runs of one suite, under one protocol and one set of reference scores."""

    suite: str
    headline: str
    tasks: tuple[str, ...]
    provenance: dict[str, str]
    groups: list[Group]
    differs: list[str]  # from the first part, in words

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]

    @cached_property
    def measured(self) -> set[str]:
        """Groups of metrics that a run has."""
        points = (point for run in self.runs for point in run.points)
        return {key.partition("/")[0] for point in points for key in point}


def scored(part: Part, populations: Sequence[Population]) -> dict[str, list[Scored]]:
    """All results by their kind, training first: only what is of one kind can be compared."""
    found: dict[str, list[Scored]] = {}
    for group in part.groups:
        for result in (group.training(part.tasks), *group.evaluations(part.tasks)):
            found.setdefault(result.kind, []).append(Scored(group.label, result))
    for population in populations:
        for result in best_results(population, part.tasks):
            found.setdefault(result.kind, []).append(Scored(f"{population.name}, best", result))
    return found


def shown_first(of_kinds: Mapping[str, Sequence[Scored]]) -> str:
    """The kind that says most of all: the newest evaluation that every run has, else training."""
    everybody = len(of_kinds[TRAINING])
    evaluations = [
        (min(each.result.frames[0] for each in of_kind), kind)
        for kind, of_kind in of_kinds.items()
        if kind != TRAINING and len(of_kind) >= everybody
    ]
    newest = max((frames for frames, _ in evaluations), default=0)
    return next((kind for frames, kind in evaluations if frames == newest), TRAINING)


def best_results(population: Population, tasks: Sequence[str]) -> list[Result]:
    """Of the evaluations of `best/`, the newest of each kind."""
    newest = {evaluation.kind: evaluation for evaluation in population.evaluations}
    return [result_of(kind, [e.frames], [e.metrics], tasks) for kind, e in newest.items()]


def parts(runs: Sequence[Run]) -> list[Part]:
    """Runs of different suites, tasks, protocols or reference scores are in different parts."""
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(_identity(run), []).append(run)
    first = next(iter(found))
    names = ("suite", "headline", "tasks", *SCORED_BY)

    def differs(identity: tuple[Any, ...]) -> list[str]:
        pairs = zip(names, identity, first, strict=True)
        found = [f"{name}: {_only(a, b)}, there {_only(b, a)}" for name, a, b in pairs if a != b]
        return found if identity[0] == first[0] else found[:1]  # all else differs with the suite

    return [
        Part(
            suite=same[0].suite,
            headline=same[0].headline,
            tasks=same[0].tasks,
            provenance=same[0].provenance,
            groups=groups(same),
            differs=differs(identity),
        )
        for identity, same in found.items()
    ]


def groups(runs: Sequence[Run]) -> list[Group]:
    """Runs by what they learn; labels say in which keys of the configuration they differ.

    A member of a population stands alone: its hyperparameters have changed while it ran.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        same = member_of(run) or repr(sorted(learned_by(run).items()))
        found.setdefault(same, []).append(run)
    differing = differences([same[0] for same in found.values() if not member_of(same[0])])
    made = []
    for same in found.values():
        config = same[0].config
        words = [f"{_short(key)}={shown(config[key])}" for key in differing if key in config]
        chosen = f"{config.get('choices.algorithm', '')} {config.get('choices.network', '')}"
        label = member_of(same[0]) or ", ".join(words[:4]) or chosen.strip() or same[0].suite
        for number, take in enumerate(_takes(same)):
            made.append(Group(f"{label}, again" if number else label, take))
    return made


def _takes(runs: Sequence[Run]) -> list[list[Run]]:
    """Each with every seed once at most: a seed twice is no second seed."""
    takes: list[list[Run]] = []
    count: Counter[Any] = Counter()
    for run in runs:
        seed = repr(run.config.get("seed", run.directory))
        if count[seed] == len(takes):
            takes.append([])
        takes[count[seed]].append(run)
        count[seed] += 1
    return takes


def member_of(run: Run) -> str | None:
    """Which one of which population, if it is of one."""
    number = run.config.get("population.member")
    return None if number is None else f"{run.directory.parent.name}, member {number}"


def learned_by(run: Run) -> dict[str, Any]:
    """The keys of a run's configuration that say what is learned, all but the seed."""
    return {
        key: value
        for key, value in run.config.items()
        if not any(key == beside or key.startswith(f"{beside}.") for beside in BESIDE)
    }


def differences(runs: Sequence[Run]) -> list[str]:
    """Keys in which the configurations differ, choices of files first."""
    configs = [learned_by(run) for run in runs]
    keys = {key for config in configs for key in config}
    differing = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    return sorted(differing, key=lambda key: (not key.startswith("choices."), key))


def common_folder(runs: Sequence[Run]) -> Path:
    """The nearest one that all runs are in; the run's own if there is one run."""
    parents = [(run.directory, *run.directory.parents) for run in runs]
    return next(folder for folder in parents[0] if all(folder in each for each in parents))


def _identity(run: Run) -> tuple[Any, ...]:
    own = tuple(run.provenance.get(name, "not said") for name in SCORED_BY)
    return (run.suite, run.headline, run.tasks, *own)


def _only(value: Any, other: Any) -> str:
    """What a value, of items or of phrases between commas, has and the other has not."""
    items, others = (v if isinstance(v, tuple) else v.split(", ") for v in (value, other))
    own = [item for item in items if item not in others]
    if not own:
        return "none of these" if set(others) - set(items) else "another order"
    return ", ".join(own[:8]) + (f" and {len(own) - 8} more" if len(own) > 8 else "")


def shown(value: object) -> str:
    """A value of a configuration as it would be written in one."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str).strip('"')


def _short(key: str) -> str:
    return key.removeprefix("choices.").removeprefix("algorithm.")


def result_of(
    kind: str, frames: list[int], metrics: Sequence[dict[str, float]], tasks: Sequence[str]
) -> Result:
    """metrics: of each run."""
    finished = [
        task
        for task in tasks
        if all({f"hns/{task}", f"return/{task}"} <= of_run.keys() for of_run in metrics)
    ]

    def array(name: str) -> NDArray[np.float64]:
        rows = [[of_run[f"{name}/{task}"] for task in finished] for of_run in metrics]
        return np.array(rows, np.float64).reshape(len(metrics), len(finished))

    return Result(kind, (min(frames), max(frames)), tuple(finished), array("hns"), array("return"))


def _at(run: Run, keys: Sequence[str], x: str, grid: Scores) -> Scores:
    """Each metric at each place of the grid, [grid, keys], on a straight line between two points
    that have it; NaN before the first.

    Points of several seeds are at different places: the newest value of each would make steps.
    """
    columns = []
    for key in keys:
        known = [(point[x], point[key]) for point in run.points if key in point]
        at, values = np.array(known or [(np.inf, np.nan)], np.float64).T
        columns.append(np.interp(grid, at, values, left=np.nan))
    return np.stack(columns, 1)
