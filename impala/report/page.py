"""The report as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import plotly.graph_objects as go

from impala.report import task_table
from impala.report.comparison import (
    TRAINING,
    Estimate,
    Group,
    Part,
    Scored,
    common_folder,
    differences,
    member_of,
    scored,
    shown,
    shown_first,
)
from impala.report.evaluations import repeated
from impala.report.figures import bars_name
from impala.report.population_section import section
from impala.report.populations import Population
from impala.report.runs import Run
from impala.report.sweeps import Sweep
from impala.words import UNKNOWN, counted, per_cent
from suites.published import Published
from suites.score import LIVE
from suites.statistics import (
    AGGREGATES,
    improvement_interval,
    probability_of_improvement,
)

VIDEO_BYTES = 3_000_000  # of videos that go into a page; further ones are linked
FEW_SEEDS = 5  # whose bootstrap says less than it seems to: of two it is about their range
COMPARED_GROUPS = 12  # pairs of more are not compared with each other


class Drawn(NamedTuple):
    """A part and its figures, what was published for its suite, and its populations with theirs."""

    part: Part
    published: list[Published]
    populations: list[tuple[Population, dict[str, go.Figure]]]
    figures: dict[str, go.Figure]

    @property
    def all_figures(self) -> dict[str, go.Figure]:
        """By name; those of a second population have its place before it."""
        own = {
            f"{i}_{name}" if i else name: figure
            for i, (_, of_it) in enumerate(self.populations)
            for name, figure in of_it.items()
        }
        return own | self.figures


def render(
    drawn: Sequence[Drawn], sweeps: Sequence[Sweep], left_out: Sequence[str], out: Path
) -> str:
    """The page's text; `out` is where it will be, for links to videos that are too large."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("impala.report", "."), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.globals["counted"] = counted
    files = resources.files("impala.report")
    runs = [run for each in drawn for run in each.part.runs]
    room = [VIDEO_BYTES]
    return environment.get_template("page.html.j2").render(
        style=files.joinpath("page.css").read_text(encoding="utf-8"),
        script=files.joinpath("page.js").read_text(encoding="utf-8"),
        plotly=files.joinpath("plotly/plotly-basic.min.js").read_text(encoding="utf-8"),
        folder="/".join(common_folder(runs).parts[-2:]),
        made=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        parts=[_part(f"part{i}", each, out, room) for i, each in enumerate(drawn)],
        places={str(run.directory): f"run{i}" for i, run in enumerate(runs)},
        sweeps=[_sweep(sweep) for sweep in sweeps],
        left_out=left_out,
    )


def _sweep(sweep: Sweep) -> dict[str, Any]:
    return {
        "name": sweep.name,
        "words": sweep.in_words,
        "open": bool(sweep.failures),
        "jobs": [
            (job.number, job.name, job.state,
             UNKNOWN if job.score is None else per_cent(job.score), job.error)
            for job in sweep.jobs
        ],
    }  # fmt: skip


def _part(name: str, drawn: Drawn, out: Path, room: list[int]) -> dict[str, Any]:
    part = drawn.part
    of_kinds = scored(part, [population for population, _ in drawn.populations])
    # Plotly escapes < and >, so that no name in it ends a script element.
    figure_json = {key: figure.to_json() for key, figure in drawn.all_figures.items()}
    cards = [(_card(part, group), member_of(group.runs[0])) for group in part.groups]
    percentiles = [name for name in AGGREGATES if name.startswith("percentile_")]
    return {
        "id": name,
        "suite": part.suite,
        "headline": part.headline,
        "tasks": part.tasks,
        "shown_task": next(
            (t for g in part.groups for t in g.training(part.tasks).tasks), part.tasks[0]
        ),
        "differs": part.differs,
        "provenance": part.provenance,
        "populations": [
            section(population, part.headline, part.tasks) for population, _ in drawn.populations
        ],
        "cards": [card for card, member in cards if not member],
        "member_cards": [card for card, member in cards if member],
        "aggregates": [name for name in AGGREGATES if name not in percentiles],
        "percentiles": percentiles,
        "live": LIVE,
        "rows": [_aggregate_row(each, part) for each in _by_label(of_kinds)],
        "published": [
            _published_row(each, part.tasks)
            for each in drawn.published
            if each.scores.keys() & set(part.tasks)
        ],
        "whole_suite": max((len(each.scores) for each in drawn.published), default=0),
        "bars": _bars(of_kinds),
        "figures": figure_json,
        "improvement": _improvement(part),
        "task_head": task_table.head(part),
        "task_rows": [row for group in part.groups for row in task_table.rows(part, group)],
        "runs": [_run_row(group, run) for group in part.groups for run in group.runs],
        "labels": [group.label for group in part.groups],
        "differences": [
            (key, [shown(group.runs[0].config.get(key)) for group in part.groups])
            for key in differences([group.runs[0] for group in part.groups])
        ],
        "configs": [
            (g.label, sorted((k, shown(v)) for k, v in g.runs[0].config.items()))
            for g in part.groups
        ],
        "videos": [video for run in part.runs for video in _videos(run, out, room)],
    }


def _card(part: Part, group: Group) -> dict[str, Any]:
    training, aggregate = group.training(part.tasks), AGGREGATES[part.headline]
    estimate, done = training.estimate(aggregate), len(training.tasks)
    return {
        "label": group.label,
        "score": None if estimate is None else per_cent(estimate.value),
        "interval": _interval(estimate, len(group.runs)),
        "coverage": f"{done} of {counted(len(part.tasks), 'task')}"
        f" ({100 * done / len(part.tasks):.0f} %)",
        "incomplete": done < len(part.tasks),
        "frames": training.span,
        "uneven": training.frames[1] > 1.05 * training.frames[0],
        "evaluations": [
            (result.kind, result.span, _estimate(of_it))
            for result in group.evaluations(part.tasks)
            if (of_it := result.estimate(aggregate))
        ],
        "of_some": [
            f"{kind}: of {number} of {counted(len(group.runs), 'seed')} only, in no number here"
            for kind, number in group.evaluated_in_part.items()
        ],
    }


def _by_label(of_kinds: Mapping[str, Sequence[Scored]]) -> list[Scored]:
    """What is of the same runs one below the other."""
    labels = dict.fromkeys(each.label for of_kind in of_kinds.values() for each in of_kind)
    everything = [each for of_kind in of_kinds.values() for each in of_kind]
    return [each for label in labels for each in everything if each.label == label]


def _bars(of_kinds: Mapping[str, Sequence[Scored]]) -> list[tuple[str, str]]:
    """Name of the figure and what it shows, first what is shown at first."""
    first, everybody = shown_first(of_kinds), len(of_kinds[TRAINING])
    return [
        (
            bars_name(kind),
            kind if len(of_kinds[kind]) >= everybody else f"{kind} (not of every run)",
        )
        for kind in sorted(of_kinds, key=lambda kind: kind != first)
    ]


def _aggregate_row(scored: Scored, part: Part) -> dict[str, Any]:
    result = scored.result
    return {
        "label": scored.label,
        "kind": result.kind,
        "frames": result.span,
        "seeds": len(result.scores),
        "tasks": f"{len(result.tasks)} of {counted(len(part.tasks), 'task')}",
        "cells": {
            name: _estimate(result.estimate(each), name) for name, each in AGGREGATES.items()
        },
    }


def _published_row(published: Published, tasks: Sequence[str]) -> dict[str, Any]:
    """Over the tasks of the part."""
    return {
        "label": published.label,
        "protocol": published.protocol,
        "source": published.source,
        "random": published.random,
        "note": published.note,
        "tasks": f"{sum(task in published.scores for task in tasks)} of"
        f" {counted(len(tasks), 'task')}",
        "cells": {name: _number(published.aggregate(name, tasks), name) for name in AGGREGATES},
    }


def _improvement(part: Part) -> list[tuple[str, str, str]]:
    """(first, second, probability that the first scores more), each pair both ways."""
    if len(part.groups) > COMPARED_GROUPS:
        return []
    rows = []
    for first, second in permutations(part.groups, 2):
        both = [first.training(part.tasks), second.training(part.tasks)]
        shared = [task for task in both[0].tasks if task in both[1].tasks]
        if shared:
            a, b = (r.scores[:, [r.tasks.index(task) for task in shared]] for r in both)
            value = f"{100 * probability_of_improvement(a, b):.0f} %"
            if bounds := improvement_interval(a, b, resamples=500):
                value += f" ({100 * bounds[0]:.0f} to {100 * bounds[1]:.0f})"
            rows.append((first.label, second.label, value))
    return rows


def _run_row(group: Group, run: Run) -> dict[str, Any]:
    again = repeated(run.evaluations)
    first, seconds = run.points[0], run.last["time_s"] - run.points[0]["time_s"]
    rate = (run.last["frames"] - first["frames"]) / seconds if seconds > 0 else None
    return {
        "label": group.label,
        "name": run.name,
        "directory": str(run.directory),
        "status": run.status,
        "seed": run.config.get("seed"),
        "frames": f"{int(run.last['frames']):,}",
        "hours": f"{run.last['time_s'] / 3600:.3g}",
        "rate": UNKNOWN if rate is None else f"{rate:,.0f}",
        "restarts": _total(run.summary.get("restarts")),
        "aborted": _total(run.summary.get("aborted")),
        "skipped": run.summary.get("updates_skipped") or 0,
        "damaged": run.damaged_lines,
        "commit": (run.summary.get("commit") or UNKNOWN)[:12],
        "machine": run.summary.get("machine") or UNKNOWN,
        "engine": run.provenance.get("engine", UNKNOWN),
        "evaluations": [
            (e.kind, f"{e.frames:,}", e.seed, per_cent(e.metrics[f"score/{run.headline}"]),
             sorted(e.provenance.items()))
            for e in run.evaluations if e.path.stem not in again
        ],
    }  # fmt: skip


def _videos(run: Run, out: Path, room: list[int]) -> Iterator[dict[str, Any]]:
    again = repeated(run.evaluations)
    for path in run.videos:
        if path.parent.name.removesuffix(".videos") not in again and (
            video := _video(run, path, out, room)
        ):
            yield video


def _video(run: Run, path: Path, out: Path, room: list[int]) -> dict[str, Any] | None:
    """None where it is not there any more: a newer evaluation of the same frames renames it."""
    name = path.parent.name.removesuffix(".videos")
    kind = next((e.kind for e in run.evaluations if e.path.stem == name), "unfinished evaluation")
    title = f"{path.stem} of {run.name}, {name}: {kind}"
    try:
        size = path.stat().st_size
        embedded = size <= room[0]
        content = path.read_bytes() if embedded else b""
    except OSError:
        return None
    if embedded:
        room[0] -= size
        source = "data:video/mp4;base64," + base64.b64encode(content).decode()
    else:
        source = path.resolve().as_uri()
        title += " (a link: too large to be in the page)"
    return {"title": title, "source": source, "embedded": embedded}


def _total(counts: dict[str, int] | None) -> int:
    return sum((counts or {}).values())


def _estimate(estimate: Estimate | None, name: str = "") -> str:
    if estimate is None:
        return UNKNOWN
    text = _number(estimate.value, name)
    if estimate.interval:
        low, high = (_number(bound, name) for bound in estimate.interval)
        text += f" ({low} to {high})"
    return text


def _interval(estimate: Estimate | None, seeds: int) -> str:
    if estimate is None:
        return "no task has a finished game in every run yet"
    if estimate.interval is None:
        return "one seed: no interval"
    low, high = map(per_cent, estimate.interval)
    few = "; of so few seeds it is too narrow" if seeds < FEW_SEEDS else ""
    return f"95 % interval over {counted(seeds, 'seed')}: {low} to {high}{few}"


def _number(value: float, name: str) -> str:
    """Per cent; `above_human` counts tasks."""
    return f"{value:,.0f}" if name == "above_human" else per_cent(value)
