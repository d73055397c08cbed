"""What the page says of a population: the best member, the rule, the search space, its members."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from impala.population import Member
from impala.population_directory import Record
from impala.report.comparison import best_results, shown
from impala.report.population_figures import fitness_title
from impala.report.populations import Population
from impala.words import UNKNOWN, by_magnitude, counted, per_cent
from suites.statistics import AGGREGATES


def section(population: Population, headline: str, tasks: tuple[str, ...]) -> dict[str, Any]:
    """headline: the aggregate that counts in the suite that is played."""
    fittest = population.fittest()
    estimates = [(r, r.estimate(AGGREGATES[headline])) for r in best_results(population, tasks)]
    events = [_event(population, r) for r in population.records if r.copied or r.failed]
    return {
        "name": population.name,
        "best": None if fittest is None else _best(population, fittest),
        "best_directory": str(population.directory / "best"),
        "evaluations": [
            (result.kind, result.span, per_cent(estimate.value))
            for result, estimate in estimates
            if estimate is not None
        ],
        "headline": headline,
        "facts": list(_facts(population)),
        "space": [
            (
                row["key"],
                _bounds(row),
                _prior(row),
                shown(fittest.values[row["key"]]) if fittest else UNKNOWN,
            )
            for row in population.settings["space"]
        ],
        "head": ["rank", "member", f"fitness: {fitness_title(population)}", "frames", "generation",
                 "copied last", *population.short.values(), "seed"],
        "rows": list(_rows(population)),
        "rounds_title": "Rounds" if population.settings.get("round_frames") else "Generations",
        "rounds": list(_rounds(population)),
        "events": events,
    }  # fmt: skip


def _best(population: Population, fittest: Member) -> dict[str, Any]:
    copies = sum(record.copied for record in population.ancestors())
    run = population.runs[fittest.index]
    return {
        "member": fittest.index,
        "fitness": _fitness(population, fittest.fitness),
        "unit": " %" if _is_score(population) else "",
        "what": fitness_title(population).removesuffix(", %"),
        "frames": f"{run.last['frames']:,.0f}",
        "directory": str(run.directory),
        "copies": f"another {counted(copies, 'time')}" if copies else "nobody",
        "members": counted(len(population.latest), "member"),
    }


def _facts(population: Population) -> Iterator[tuple[str, str]]:
    settings, rule = population.settings, population.settings["rule"]
    yield "members", f"{settings['size']}, {settings['total_frames']:,} frames each"
    if settings.get("round_frames") is not None:
        yield (
            "schedule",
            f"rounds: all are compared after every {settings['round_frames']:,} frames",
        )
    else:
        games = settings.get("games") or 0
        yield "schedule", f"asynchronous: each is compared after every {games:,} of its games"
    unit = " %" if _is_score(population) else ""
    if rule["selection"] == "tournament":
        yield (
            "rule",
            "tournament: against one other, drawn at random, whose weights and hyperparameters are"
            f" copied if its fitness is better by more than {rule['threshold']:g}{unit}",
        )
    else:
        share = f"{100 * rule['quantile']:g} %"
        yield (
            "rule",
            f"{rule['selection']}: each of the worst {share} copies one of the best {share}",
        )
    yield (
        "change",
        f"then each hyperparameter with a probability of {100 * rule['perturb_probability']:g} %,"
        f" by a factor of {rule['perturb_factor']:g} up or down",
    )
    yield "burn-in", f"{rule['burn_in_frames']:,} frames, in which nothing is copied or changed"
    yield "fitness", f"{settings['fitness']}, once every task has finished a game"
    yield "seed", f"{rule['seed']}; members' own follow from it"
    yield "the same for all", " ".join(settings.get("overrides") or []) or "nothing was set"


def _bounds(row: dict[str, Any]) -> str:
    if row.get("values"):
        return ", ".join(map(shown, row["values"]))
    return f"{row['low']:g} to {row['high']:g}" + (", whole numbers" if row.get("integer") else "")


def _prior(row: dict[str, Any]) -> str:
    """What the first value is drawn from."""
    if row.get("values"):
        return "any of them; later the one before or after it"
    if row.get("starts"):
        return " or ".join(map(shown, row["starts"]))
    return "evenly on a logarithmic scale" if row.get("log") else "evenly"


def _rows(population: Population) -> Iterator[dict[str, Any]]:
    latest, fittest = population.latest, population.fittest()
    for rank, member in enumerate(population.members(), start=1):
        record, run = latest[member.index], population.runs.get(member.index)
        copied = [r for r in population.records if r.member == member.index and r.copied]
        yield {
            "rank": UNKNOWN if member.fitness is None else str(rank),
            "member": member.index,
            "best": fittest is not None and member.index == fittest.index,
            "directory": None if run is None else str(run.directory),
            "cells": [
                _fitness(population, member.fitness),
                f"{run.last['frames']:,.0f}" if run else UNKNOWN,
                str(record.generation),
                f"{copied[-1].parent}, at {copied[-1].frames:,}" if copied else "nobody",
                *(shown(member.values[key]) for key in population.keys),
                str(run.config.get("seed")) if run else UNKNOWN,
            ],
        }


def _rounds(population: Population) -> Iterator[list[str]]:
    """Of each generation that has been compared: when, how fit, who copied whom, who failed."""
    by_generation: dict[int, list[Record]] = {}
    for record in population.records:
        by_generation.setdefault(record.generation, []).append(record)
    by_generation.pop(0, None)  # it began with nothing to compare
    for generation, records in by_generation.items():
        frames = sorted(record.frames for record in records)
        known = [(r.fitness, r.member) for r in records if r.fitness is not None and not r.failed]
        best, member = max(known, default=(None, UNKNOWN))
        median = float(np.median([fitness for fitness, _ in known])) if known else None
        copies = [f"{r.member} copies {r.parent}" for r in records if r.copied]
        failed = [str(record.member) for record in records if record.failed]
        yield [
            str(generation),
            f"{frames[0]:,}" + (f" to {frames[-1]:,}" if frames[0] < frames[-1] else ""),
            str(member),
            _fitness(population, best),
            _fitness(population, median),
            ", ".join(copies) or "nobody",
            ", ".join(failed) or "none",
        ]


def _event(population: Population, record: Record) -> str:
    """A copy or a failure, in words."""
    before = f"with a fitness of {_fitness(population, record.fitness)}"
    copies = f"copies member {record.parent} and " if record.copied else ""
    values = [
        f"{population.short[key]} {shown(value)}"
        + (f" (before: {shown(record.old[key])})" if record.old.get(key, value) != value else "")
        for key, value in record.new.items()
    ]
    return (
        f"after {record.frames:,} frames member {record.member},"
        f" {'whose run failed' if record.failed else before}, {copies}goes on with"
        f" {', '.join(values)}"
    )


def _fitness(population: Population, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return per_cent(value) if _is_score(population) else by_magnitude(value)


def _is_score(population: Population) -> bool:
    return population.settings["fitness"].partition("/")[0] in ("score", "hns")
