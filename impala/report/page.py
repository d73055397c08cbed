"""The report as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import datetime
import math
from collections.abc import Sequence
from importlib import resources
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from impala.report.comparison import (
    Estimate,
    Group,
    Part,
    Result,
    common_folder,
    differences,
    shown,
)
from impala.report.runs import Run
from suites.published import Published
from suites.score import LIVE
from suites.statistics import (
    AGGREGATES,
    improvement_interval,
    interval,
    mean,
    probability_of_improvement,
)

UNKNOWN = "\N{EN DASH}"
VIDEO_BYTES = 3_000_000  # of videos that go into a page; further ones are linked
COMPARED_GROUPS = 12  # pairs of more are not compared with each other


class Drawn(NamedTuple):
    """A part with what was published for its suite and its figures."""

    part: Part
    published: list[Published]
    figures: dict[str, go.Figure]


def render(drawn: Sequence[Drawn], left_out: Sequence[str], out: Path) -> str:
    """The page's text; `out` is where it will be, for links to videos that are too large."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("impala.report", "."), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    files = resources.files("impala.report")
    runs = [run for each in drawn for run in each.part.runs]
    room = [VIDEO_BYTES]
    return environment.get_template("page.html.j2").render(
        style=files.joinpath("page.css").read_text(encoding="utf-8"),
        script=files.joinpath("page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        folder="/".join(common_folder(runs).parts[-2:]),
        made=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        parts=[_part(f"part{i}", each, out, room) for i, each in enumerate(drawn)],
        left_out=[*left_out, *(text for run in runs for text in run.damaged_files)],
        damaged_lines=sum(run.damaged_lines for run in runs),
        human=any(each.published for each in drawn),
    )


def _part(name: str, drawn: Drawn, out: Path, room: list[int]) -> dict[str, Any]:
    part, published, figures = drawn
    results = [(g, [g.training(part.tasks), *g.evaluations(part.tasks)]) for g in part.groups]
    # Plotly escapes < and >, so that no name in it ends a script element.
    figure_json = {key: figure.to_json() for key, figure in figures.items()}
    return {
        "id": name,
        "suite": part.suite,
        "headline": part.headline,
        "tasks": part.tasks,
        "differs": part.differs,
        "provenance": part.provenance,
        "cards": [_card(part, group, of_group) for group, of_group in results],
        "aggregates": list(AGGREGATES),
        "live": LIVE,
        "rows": [_aggregate_row(group, r) for group, of_group in results for r in of_group],
        "published": [_published_row(each) for each in published],
        "figures": figure_json,
        "improvement": _improvement(part),
        "task_rows": [row for group in part.groups for row in _task_rows(part, group)],
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
        "videos": [_video(run, path, out, room) for run in part.runs for path in run.videos],
    }


def _card(part: Part, group: Group, results: Sequence[Result]) -> dict[str, Any]:
    training = results[0]
    done = len(training.tasks)
    return {
        "label": group.label,
        "score": _estimate(training.estimate(AGGREGATES[part.headline]), with_interval=False),
        "interval": _interval(training.estimate(AGGREGATES[part.headline]), len(group.runs)),
        "coverage": f"{done} of {len(part.tasks)} tasks",
        "incomplete": done < len(part.tasks),
        "frames": _span(training.frames),
        "uneven": training.frames[1] > 1.05 * training.frames[0],
        "evaluations": [
            (r.kind, _span(r.frames), _estimate(r.estimate(AGGREGATES[part.headline])))
            for r in results[1:]
        ],
    }


def _aggregate_row(group: Group, result: Result) -> dict[str, Any]:
    return {
        "label": group.label,
        "kind": result.kind,
        "frames": _span(result.frames),
        "seeds": len(group.runs),
        "tasks": len(result.tasks),
        "cells": [_estimate(result.estimate(each), name) for name, each in AGGREGATES.items()],
    }


def _published_row(published: Published) -> dict[str, Any]:
    return {
        "label": published.label,
        "protocol": published.protocol,
        "source": published.source,
        "random": published.random,
        "note": published.note,
        "cells": [_number(published.aggregate(name), name) for name in AGGREGATES],
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


def _task_rows(part: Part, group: Group) -> list[list[Any]]:
    """Of the table of tasks: task, group, then numbers or None."""
    training = group.training(part.tasks)
    evaluated = group.evaluations(part.tasks)
    rows = []
    for task in part.tasks:
        row: list[Any] = [task, group.label]
        if task in training.tasks:
            scores = training.scores[:, [training.tasks.index(task)]]
            returns = training.returns[:, training.tasks.index(task)]
            low, high = interval(mean, scores) or (None, None)
            row += [float(returns.mean()), float(scores.mean()), low, high]
        else:
            row += [None] * 4
        newest = evaluated[-1] if evaluated else None
        if newest is not None and task in newest.tasks:
            row.append(float(newest.scores[:, newest.tasks.index(task)].mean()))
        else:
            row.append(None)
        games = [run.summary.get("games", {}).get(task) for run in group.runs]
        row.append(None if None in games else sum(filter(None, games)))
        row += [
            _finite(group.mean_of(f"{key}/{task}") * scale)
            for key, scale in (("length", 1), ("share", 100), ("lag", 1), ("lag_p95", 1))
        ]
        rows.append(row)
    return rows


def _run_row(group: Group, run: Run) -> dict[str, Any]:
    rates = [point["rate/frames_per_s"] for point in run.points if "rate/frames_per_s" in point]
    return {
        "label": group.label,
        "name": run.name,
        "directory": str(run.directory),
        "status": run.status,
        "seed": run.config.get("seed"),
        "frames": f"{int(run.last['frames']):,}",
        "hours": f"{run.last['time_s'] / 3600:.2f}",
        "rate": f"{sum(rates) / len(rates):,.0f}" if rates else UNKNOWN,
        "restarts": sum(run.summary.get("restarts", {}).values()),
        "aborted": sum(run.summary.get("aborted", {}).values()),
        "skipped": run.summary.get("updates_skipped", 0),
        "damaged": run.damaged_lines,
        "commit": (run.summary.get("commit") or UNKNOWN)[:12],
        "machine": run.summary.get("machine", UNKNOWN),
        "engine": run.provenance.get("engine", UNKNOWN),
        "evaluations": [
            (e.kind, f"{e.frames:,}", e.seed, _number(e.metrics[f"score/{run.headline}"], ""),
             sorted(e.provenance.items()))
            for e in run.evaluations
        ],
    }  # fmt: skip


def _video(run: Run, path: Path, out: Path, room: list[int]) -> dict[str, Any]:
    title = f"{path.stem} of {run.name}, {path.parent.name}"
    size = path.stat().st_size
    embedded = size <= room[0]
    if embedded:
        room[0] -= size
        source = "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
    else:
        source = path.resolve().as_uri()
        title += " (a link: too large to be in the page)"
    return {"title": title, "source": source, "embedded": embedded}


def _estimate(estimate: Estimate | None, name: str = "", *, with_interval: bool = True) -> str:
    if estimate is None:
        return UNKNOWN
    text = _number(estimate.value, name)
    if with_interval and estimate.interval:
        low, high = (_number(bound, name) for bound in estimate.interval)
        text += f" ({low} to {high})"
    return text


def _interval(estimate: Estimate | None, seeds: int) -> str:
    if estimate is None:
        return "no task has a finished game in every run yet"
    if estimate.interval is None:
        return "one seed: no interval"
    low, high = (_number(bound, "") for bound in estimate.interval)
    return f"95 % interval over {seeds} seeds: {low} to {high}"


def _number(value: float, name: str) -> str:
    """Per cent with one digit; `above_human` counts tasks."""
    digits = 0 if name == "above_human" else 1
    return f"{round(value, digits) + 0.0:,.{digits}f}"  # + 0.0: no -0.0


def _span(frames: tuple[int, int]) -> str:
    low, high = frames
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
