"""What is drawn of a part: Plotly figures by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from impala.report.comparison import (
    CURVE_RESAMPLES,
    TRAINING,
    Curve,
    Group,
    Part,
    Scored,
    scored,
)
from impala.report.drawing import COLOURS, blank, tasks_down
from impala.report.populations import Population
from impala.report.running_figures import shares_lag_time, time_split
from suites.published import Published
from suites.score import LIVE
from suites.statistics import (
    AGGREGATES,
    Scores,
    bootstrap,
    interval,
    mean,
    performance_profile,
)

SYMBOLS = ("diamond-open", "square-open", "triangle-up-open", "cross-open", "x-open",
           "star-open", "hexagon-open", "pentagon-open")  # fmt: skip
LINEAR_BELOW = 10.0  # per cent: the symmetric-log axis is about linear up to here
TICKS = (-1000, -300, -100, -30, -10, 0, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
X_AXES = {
    "frames": ("frames", 1.0, "environment frames"),
    "time_s": ("hours", 3600.0, "hours since the start of the run"),
}
HNS = "human-normalised score, %"
SYMLOG = {"x": "symlog"}  # of a figure whose x axis has what `symlog` gives


def figures(
    part: Part, published: Sequence[Published], populations: Sequence[Population]
) -> dict[str, go.Figure]:
    """By name, which is also a file's: scores, curves of aggregates and tasks, and the rest."""
    found = {}
    if len(part.tasks) > 1:
        for kind, of_kind in scored(part, populations).items():
            found[bars_name(kind)] = scores_of_tasks(part, kind, of_kind, published)
        found |= aggregate_curves(part)
    for x, (unit, _, _) in X_AXES.items():
        for task in part.tasks:
            found[f"task_{task}_over_{unit}"] = curves(
                part.groups, [f"hns/{task}"], mean, x, f"score in {task}, %"
            )
    found["performance_profile"] = profiles(part)
    found["shares_lag_time"] = shares_lag_time(part)
    found["time_split"] = time_split(part)
    return found


def bars_name(kind: str) -> str:
    """Of the figure of the scores of all tasks, of this kind."""
    return "scores_of_tasks" + (
        "" if kind == TRAINING else f"_in_{re.sub('[^a-z0-9]+', '_', kind)}"
    )


def aggregate_curves(part: Part) -> dict[str, go.Figure]:
    found = {}
    keys = [f"hns/{task}" for task in part.tasks]
    for x, (unit, _, _) in X_AXES.items():
        for name in LIVE:
            title = f"{name.replace('_', ' ')}, %"
            found[f"curve_{name}_over_{unit}"] = curves(
                part.groups, keys, AGGREGATES[name], x, title
            )
        found[f"curve_coverage_over_{unit}"] = curves(
            part.groups, ["score/coverage"], _share_to_per_cent, x, "tasks with a finished game, %"
        )
    return found


def symlog(values: Scores) -> Scores:
    """Signed logarithm of 1 + |value| / `LINEAR_BELOW`: 0 stays 0, sums of games stay visible."""
    return np.sign(values) * np.log10(1.0 + np.abs(values) / LINEAR_BELOW)


def from_symlog(values: Scores) -> Scores:
    """The inverse of `symlog`."""
    values = np.asarray(values, np.float64)
    return np.sign(values) * LINEAR_BELOW * (10.0 ** np.abs(values) - 1.0)


def scores_of_tasks(
    part: Part, kind: str, of_kind: Sequence[Scored], published: Sequence[Published]
) -> go.Figure:
    """Bars of the first, marks of the others and of published results; sorted.

    All but the published are of one kind, which the axis names.
    """
    result = of_kind[0].result
    first = dict(zip(result.tasks, result.scores.mean(0), strict=True))
    order = sorted(part.tasks, key=lambda task: first.get(task, -math.inf))
    figure = blank(height=130 + 19 * max(len(order), 4)).update_layout(meta=SYMLOG)
    labels = [group.label for group in part.groups]
    for index, (label, result) in enumerate(of_kind):
        place = labels.index(label) if label in labels else len(labels) + index
        style = {"color": COLOURS[place % len(COLOURS)]}
        y, values = list(result.tasks), result.scores.mean(0)
        bounds = [interval(mean, result.scores[:, [i]]) or (v, v) for i, v in enumerate(values)]
        low, high = np.array(bounds).reshape(-1, 2).T
        error = {
            "type": "data",
            "symmetric": False,
            "array": symlog(high) - symlog(values),
            "arrayminus": symlog(values) - symlog(low),
            "thickness": 1,
            "visible": len(result.scores) > 1,
        }
        text = [
            f"{task}: {v:,.1f} %" + (f" ({a:,.1f} to {b:,.1f})" if a < b else "")
            for task, v, a, b in zip(y, values, low, high, strict=True)
        ]
        name = label if result.kind == TRAINING else f"{label}, after {result.span} frames"
        common = {"x": symlog(values), "y": y, "name": name, "hovertext": text,
                  "hoverinfo": "text+name", "error_x": error}  # fmt: skip
        if index == 0:
            figure.add_bar(**common, orientation="h", marker=style, opacity=0.6)
        else:
            figure.add_scatter(**common, mode="markers", marker={**style, "size": 7})
    for index, each in enumerate(published):
        tasks = [task for task in order if task in each.scores]
        figure.add_scatter(
            x=symlog(np.array([each.scores[task] for task in tasks])),
            y=tasks,
            name=each.label,
            mode="markers",
            marker={
                "symbol": SYMBOLS[index % len(SYMBOLS)],
                "size": 8,
                "color": COLOURS[-1 - index % len(COLOURS)],
            },
            hovertext=[f"{task}: {each.scores[task]:,.1f} %" for task in tasks],
            hoverinfo="text+name",
            visible=True if "IMPALA" in each.source else "legendonly",
        )
    _add_human(figure)
    ticks = np.array(TICKS, np.float64)
    figure.update_xaxes(
        title=f"{HNS}, symmetric-log axis<br>{kind}",
        automargin=True,
        tickvals=symlog(ticks),
        ticktext=[f"{t:,}" for t in TICKS],
    )
    tasks_down(figure, order)
    return figure


def curves(
    groups: Sequence[Group],
    keys: Sequence[str],
    aggregate: Callable[[Scores], Scores],
    x: str,
    title: str,
) -> go.Figure:
    _, scale, x_title = X_AXES[x]
    figure = blank(height=380)
    for index, group in enumerate(groups):
        curve = group.curve(keys, aggregate, x)
        if curve is None:
            continue
        colour = COLOURS[index % len(COLOURS)]
        if curve.low is not None and curve.high is not None:
            _add_band(figure, curve, scale, colour, group.label)
        figure.add_scatter(
            x=_small(curve.x / scale),
            y=_small(curve.value),
            name=group.label,
            legendgroup=group.label,
            mode="lines+markers" if len(curve.x) < 12 else "lines",
            line={"color": colour, "width": 2},
        )
    if not figure.data:
        figure.add_annotation(
            text="no finished game at a place that every seed has come to",
            xref="paper", yref="paper", x=0.5, y=0.5, showarrow=False,
        )  # fmt: skip
    figure.update_xaxes(title=x_title, rangemode="tozero")
    figure.update_yaxes(title=title)
    return figure


def profiles(part: Part) -> go.Figure:
    """Share of runs and tasks above each score, with bands over seeds."""
    grid = np.concatenate([-np.geomspace(100, 1, 15), [0], np.geomspace(1, 10_000, 60)])
    figure = blank(height=380).update_layout(meta=SYMLOG)
    for index, group in enumerate(part.groups):
        scores = group.training(part.tasks).scores
        if not scores.size:
            continue
        colour = COLOURS[index % len(COLOURS)]
        thresholds = np.union1d(grid, scores)  # so that it falls at the scores
        value = 100 * performance_profile(scores, thresholds)
        if len(scores) > 1:
            drawn = bootstrap(scores, resamples=CURVE_RESAMPLES)
            shares = 100 * np.stack([performance_profile(each, thresholds) for each in drawn])
            low, high = np.percentile(shares, [2.5, 97.5], axis=0)
            band = Curve(symlog(thresholds), value, low, high)
            _add_band(figure, band, 1.0, colour, group.label, steps=True)
        figure.add_scatter(
            x=_small(symlog(thresholds)),
            y=_small(value),
            name=group.label,
            legendgroup=group.label,
            mode="lines",
            line={"color": colour, "width": 2, "shape": "hv"},
        )
    ticks = np.array(TICKS, np.float64)
    _add_human(figure)
    figure.update_xaxes(title=f"{HNS}, symmetric-log axis", tickvals=symlog(ticks),
                        ticktext=[f"{t:,}" for t in TICKS])  # fmt: skip
    figure.update_yaxes(title="runs and tasks above it, %", range=[0, 101])
    return figure


def _add_human(figure: go.Figure) -> None:
    """Its name is below the plot's upper edge, above which there is the legend."""
    x = float(symlog(np.array(100.0)))
    figure.add_vline(x=x, line={"dash": "dash", "width": 1.2})
    figure.add_annotation(
        x=x, y=1.0, yref="paper", yanchor="top", xanchor="left", text="human", showarrow=False
    )


def _add_band(
    figure: go.Figure, curve: Curve, scale: float, colour: str, label: str, *, steps: bool = False
) -> None:
    """steps: each value holds until the next, as in a line of shape hv."""
    x, low, high = curve.x, curve.low, curve.high
    assert low is not None
    assert high is not None
    if steps:
        x = np.repeat(x, 2)[1:]
        low, high = np.repeat(low, 2)[:-1], np.repeat(high, 2)[:-1]
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    figure.add_scatter(
        x=_small(np.concatenate([x, x[::-1]]) / scale),
        y=_small(np.concatenate([high, low[::-1]])),
        meta=2 if steps else 1,
        mode="lines",
        fill="toself",
        fillcolor=f"rgba({red},{green},{blue},0.2)",
        line={"width": 0},
        legendgroup=label,
        name=f"{label}, 95 % over seeds",
        showlegend=False,
        hoverinfo="skip",
    )


def band_ends(band: Any) -> tuple[Scores, Scores]:
    """Low and high of the trace of a band, at the places of its line."""
    y = np.asarray(band.y, np.float64)
    high, low = y[: len(y) // 2], y[len(y) // 2 :][::-1]
    return low[:: band.meta], high[:: band.meta]


def _small(values: Scores) -> NDArray[np.float32]:
    """Four bytes a number are enough for the eye, and halve the page."""
    most = np.finfo(np.float32).max
    return np.clip(values, -most, most).astype(np.float32)


def _share_to_per_cent(values: Scores) -> Scores:
    return 100.0 * mean(values)
