"""What is drawn of how runs ran: shares of frames, policy lag, time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from impala.report.comparison import Group, Part
from impala.report.drawing import COLOURS, blank, grid, tasks_down
from suites.statistics import Scores

# Metric, another that whiskers reach to, scale, title.
PER_TASK = (
    ("share", None, 100.0, "share of the learner's frames, %"),
    ("lag", "lag_p95", 1.0, "policy lag, updates,<br>and its 95th percentile"),
    ("step_s", None, 1000.0, "an environment's step,<br>milliseconds"),
)


def shares_lag_time(part: Part) -> go.Figure:
    """Means over the points of all runs, a row for each task in the suite's order."""
    columns = [column for column in PER_TASK if column[0] in part.measured]
    figure = make_subplots(1, max(1, len(columns)), shared_yaxes=True, horizontal_spacing=0.03)
    rows = len(part.tasks) * (1 if len(part.groups) < 4 else 1.4)
    figure.update_layout(blank(height=round(130 + 19 * max(rows, 4))).layout)
    figure.update_layout(scattermode="group")  # side by side where values are the same
    for column, (key, reaching, scale, title) in enumerate(columns, start=1):
        for index, group in enumerate(part.groups):
            values, error = _mean_of(group, key, part.tasks) * scale, None
            if reaching:
                ends = _mean_of(group, reaching, part.tasks) * scale
                error = {"type": "data", "symmetric": False, "array": ends - values,
                         "arrayminus": np.zeros(len(ends)), "thickness": 1}  # fmt: skip
            figure.add_scatter(
                x=values, y=list(part.tasks), name=group.label, legendgroup=group.label,
                showlegend=column == 1, mode="markers", error_x=error, orientation="h",
                marker={"color": COLOURS[index % len(COLOURS)], "size": 6}, row=1, col=column,
            )  # fmt: skip
        figure.update_xaxes(title=title, rangemode="tozero", row=1, col=column)
    grid(figure)
    tasks_down(figure, part.tasks[::-1])
    return figure


def _mean_of(group: Group, key: str, tasks: Sequence[str]) -> Scores:
    return np.array([group.mean_of(f"{key}/{task}") for task in tasks])


def time_split(part: Part) -> go.Figure:
    """Where the time of learner (left) and actors (right) goes, means over the run."""
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04)
    keys = sorted({key for run in part.runs for p in run.points for key in p if "time/" in key})
    labels = [group.label for group in part.groups]
    for index, key in enumerate(keys):
        actor = key.startswith("time/actor_")
        figure.add_bar(
            x=[100 * group.mean_of(key) for group in part.groups],
            y=labels,
            orientation="h",
            name=key.removeprefix("time/").replace("_", " "),
            marker={"color": COLOURS[index % len(COLOURS)]},
            row=1,
            col=2 if actor else 1,
        )
    figure.update_layout(blank(height=150 + 28 * len(labels)).layout)
    figure.update_layout(barmode="stack")
    for column, whose in enumerate(("the learner's time, %", "the actors' time, %"), start=1):
        figure.update_xaxes(title=whose, range=[0, 101], row=1, col=column)
    figure.update_yaxes(automargin=True)
    return figure
