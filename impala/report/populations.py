"""Populations whose members are among the runs: who descends from whom, and how fit they were."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from impala.population import Member, best, best_first, fitness
from impala.population_directory import PopulationDirectory, Record, short
from impala.report.checked_json import flag, number, read_object, text, whole
from impala.report.evaluations import Evaluation, read_evaluations
from impala.report.runs import Run

FitnessCurve = list[tuple[float, float]]  # frames of the member, fitness
Nodes = Mapping[tuple[int, int], Record]  # by member and generation


class Life(NamedTuple):
    """A generation of a member, from `record.frames` to `end`."""

    record: Record
    end: float

    @property
    def place(self) -> tuple[int, int]:
        return self.record.member, self.record.generation


@dataclass(frozen=True)
class Population:
    """settings: of `population.json`. records: by generation and member.
    runs, curves: by member; of those that have a point. evaluations: of `best/`.
    """

    directory: Path
    settings: dict[str, Any]
    records: list[Record]
    runs: dict[int, Run]
    curves: dict[int, FitnessCurve]
    evaluations: list[Evaluation]

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def keys(self) -> list[str]:
        """Of the hyperparameters."""
        return [row["key"] for row in self.settings["space"]]

    @property
    def short(self) -> dict[str, str]:
        """Their last parts, where these tell them apart."""
        return {key: short(key, self.keys) for key in self.keys}

    @property
    def latest(self) -> dict[int, Record]:
        return {record.member: record for record in self.records}

    def members(self) -> list[Member]:
        """The fittest first."""
        return best_first(
            [
                Member(i, self.curves[i][-1][1] if self.curves.get(i) else None, record.new)
                for i, record in self.latest.items()
            ]
        )

    def fittest(self) -> Member | None:
        return best(self.members())

    def lives(self) -> Iterator[Life]:
        nodes = self.nodes()
        for record in self.records:
            after = nodes.get((record.member, record.generation + 1))
            run = self.runs.get(record.member)
            end = after.frames if after else run.last["frames"] if run else 0
            yield Life(record, max(end, record.frames))

    def nodes(self) -> Nodes:
        return {(record.member, record.generation): record for record in self.records}

    def ancestors(self) -> list[Record]:
        """Of the fittest member, itself last; empty if no fitness is known."""
        fittest = self.fittest()
        return ancestry(self.nodes(), self.latest[fittest.index]) if fittest else []


def ancestry(nodes: Nodes, record: Record) -> list[Record]:
    """The generations that led to this one, from the first that is known to itself."""
    line = [record]
    while line[-1].parent is not None and line[-1].parent_generation is not None:
        before = nodes.get((line[-1].parent, line[-1].parent_generation))
        if before is None:  # its file was read before it was written
            break
        line.append(before)
    return line[::-1]


def followed(ancestors: Sequence[Record], curves: Mapping[int, FitnessCurve]) -> FitnessCurve:
    """The fitness curve of a line of ancestors, as the paper draws it: each one's own while it was
    the ancestor."""
    points: FitnessCurve = []
    for record, after in zip(ancestors, [*ancestors[1:], None], strict=True):
        end = after.frames if after else math.inf
        points += [p for p in curves.get(record.member, []) if record.frames < p[0] <= end]
    return points


def find_populations(runs: Iterable[Run]) -> tuple[list[Population], list[str]]:
    """Those that have a run among these, and what is to be said of those that cannot be shown."""
    members: dict[Path, dict[int, Run]] = {}
    for run in runs:
        member = run.config.get("population.member")
        here = run.directory.parent / "population.json"
        if member is not None and whole(member) and here.exists():
            members.setdefault(run.directory.parent, {})[member] = run
    found, left_out = [], []
    for directory, of_it in members.items():
        try:
            found.append(read_population(directory, of_it, left_out))
        except ValueError as error:
            left_out.append(f"{directory}: shown as single runs, for its {error}")
    return found, left_out


def read_population(directory: Path, runs: dict[int, Run], damaged: list[str]) -> Population:
    """runs: of its members, those that have a point. ValueError, saying why, if it is damaged."""
    try:
        settings = read_object(
            directory / "population.json",
            {"size": whole, "fitness": text, "total_frames": whole, "space": _space, "rule": _rule},
            {"round_frames": number, "games": number, "overrides": _overrides},
        )
    except ValueError as error:
        raise ValueError(f"population.json {error}") from error
    try:
        records = PopulationDirectory(directory).lineage()
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"lineage cannot be read: {error}") from error
    keys = {row["key"] for row in settings["space"]}
    if not all(_is_sound(record, keys) for record in records):
        raise ValueError("lineage.jsonl has a line that is no generation of a member")
    of_fitness = {
        i: [(p["frames"], fitness(p, settings["fitness"])) for p in run.points]
        for i, run in runs.items()
    }
    curves = {i: [(x, y) for x, y in curve if y is not None] for i, curve in of_fitness.items()}
    one = next(iter(runs.values()))
    evaluations = read_evaluations(
        directory / "best", one.suite, one.headline, one.provenance, damaged
    )
    return Population(directory, settings, records, runs, curves, evaluations)


def _is_sound(record: Record, keys: set[str]) -> bool:
    return (
        all(map(whole, (record.member, record.generation)))
        and whole(record.frames)
        and flag(record.failed)
        and (record.fitness is None or number(record.fitness))
        and _are_values(record.new, keys)
        and (_are_values(record.old, keys) or (record.old == {} and _began_anew(record)))
        and (record.parent is None or whole(record.parent))
        and (
            record.parent_generation is None
            or (whole(record.parent_generation) and record.parent_generation < record.generation)
        )
    )


def _are_values(value: Any, keys: set[str]) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == keys
        and all(number(each) or isinstance(each, str | bool) for each in value.values())
    )


def _began_anew(record: Record) -> bool:
    """Nothing was before it."""
    return record.generation == 0 and not record.copied and not record.failed


def _space(value: Any) -> bool:
    """a list of hyperparameters with key and ends or values"""
    return (
        _list(value)
        and bool(value)
        and all(
            isinstance(row, dict)
            and text(row.get("key"))
            and (_list(row.get("values")) or (number(row.get("low")) and number(row.get("high"))))
            for row in value
        )
    )


def _rule(value: Any) -> bool:
    """an object with selection, threshold and the rest of the rule"""
    numbers = ("threshold", "quantile", "perturb_probability", "perturb_factor", "burn_in_frames",
               "seed")  # fmt: skip
    return (
        isinstance(value, dict)
        and text(value.get("selection"))
        and all(number(value.get(name)) for name in numbers)
    )


def _overrides(value: Any) -> bool:
    """a list of texts"""
    return _list(value) and all(map(text, value))


def _list(value: Any) -> bool:
    return isinstance(value, list)
