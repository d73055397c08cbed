"""What the page says of a population: the best member, the rule, the search space, its members."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from impala.population import Member
from impala.population_member import told
from impala.report.comparison import best_results, shown
from impala.report.population_figures import fitness_title
from impala.report.populations import Population
from impala.report.words import UNKNOWN, by_magnitude, counted, per_cent
from suites.statistics import AGGREGATES


def section(population: Population, headline: str, tasks: tuple[str, ...]) -> dict[str, Any]:
    """headline: the aggregate that counts in the suite that is played."""
    fittest = population.fittest()
    estimates = [(r, r.estimate(AGGREGATES[headline])) for r in best_results(population, tasks)]
    events = [told(record) for record in population.records if record.copied or record.failed]
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
                _range(row),
                shown(fittest.values[row["key"]]) if fittest else UNKNOWN,
            )
            for row in population.settings["space"]
        ],
        "head": ["rank", "member", f"fitness: {fitness_title(population)}", "frames", "generation",
                 "copied last", *population.short.values(), "seed"],
        "rows": list(_rows(population)),
        "events": events,
    }  # fmt: skip


def _best(population: Population, fittest: Member) -> dict[str, Any]:
    group = population.settings["fitness"].partition("/")[0]
    fitness = fittest.fitness or 0.0
    copies = sum(record.copied for record in population.ancestors())
    is_score = group in ("score", "hns")
    run = population.runs[fittest.index]
    return {
        "member": fittest.index,
        "fitness": per_cent(fitness) if is_score else by_magnitude(fitness),
        "unit": " %" if is_score else "",
        "what": fitness_title(population).removesuffix(", %"),
        "frames": f"{run.last['frames']:,}",
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
    unit = " %" if settings["fitness"].partition("/")[0] in ("score", "hns") else ""
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


def _range(row: dict[str, Any]) -> str:
    if row.get("values"):
        return f"{', '.join(map(shown, row['values']))}: in this order, one step at a time"
    text = f"{row['low']:g} to {row['high']:g}"
    if row.get("starts"):
        text += f", starting from {' or '.join(map(shown, row['starts']))}"
    if row.get("log"):
        text += ", drawn on a logarithmic scale"
    return text + (", whole numbers" if row.get("integer") else "")


def _rows(population: Population) -> Iterator[list[str]]:
    latest = population.latest
    for rank, member in enumerate(population.members(), start=1):
        record, run = latest[member.index], population.runs.get(member.index)
        copied = [r for r in population.records if r.member == member.index and r.copied]
        yield [
            str(rank) if member.fitness is not None else UNKNOWN,
            str(member.index),
            UNKNOWN if member.fitness is None else by_magnitude(member.fitness),
            f"{run.last['frames']:,}" if run else UNKNOWN,
            str(record.generation),
            f"{copied[-1].parent}, at {copied[-1].frames:,}" if copied else "nobody",
            *(shown(member.values[key]) for key in population.keys),
            str(run.config.get("seed")) if run else UNKNOWN,
        ]
