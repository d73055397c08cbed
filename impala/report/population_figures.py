"""What is drawn of a population: Plotly figures by name."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from impala.population import Value
from impala.population_directory import Record
from impala.report.comparison import shown
from impala.report.drawing import COLOURS, blank, grid
from impala.report.populations import Life, Population, followed

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
HALO = {"color": "rgba(232,178,0,0.5)", "width": 10}  # a highlighter, under the members' lines
HALO_NAME = "ancestry of the best"
ROUND = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), tuple(n / 10 for n in range(10, 100, 5)))
X_TITLE = "environment frames of a member"


def population_figures(population: Population) -> dict[str, go.Figure]:
    return {
        "population_fitness": fitness_figure(population),
        "population_schedules": schedules_figure(population),
        "population_tree": tree_figure(population),
    }


def fitness_title(population: Population) -> str:
    """With its unit, where it is known."""
    group, _, name = population.settings["fitness"].partition("/")
    unit = {"score": ", %", "hns": ", %", "length": ", frames"}.get(group, "")
    return f"{name.replace('_', ' ')}{unit}" if group in ("score", "hns") else f"{group} {name}"


def fitness_figure(population: Population) -> go.Figure:
    """All members over frames; under them, as one line, the best one's ancestors."""
    figure = blank(height=420)
    _add_halo(figure, *_columns(followed(population.ancestors(), population.curves)))
    for member, curve in sorted(population.curves.items()):
        x, y = _columns(curve)
        figure.add_scatter(x=x, y=y, **_member_style(member), mode="lines+markers",
                           marker={"size": 4})  # fmt: skip
    figure.update_xaxes(title=X_TITLE, rangemode="tozero")
    figure.update_yaxes(title=f"fitness: {fitness_title(population)}")
    return figure


def schedules_figure(population: Population) -> go.Figure:
    """A panel for each hyperparameter. Lines of the same value are drawn a little apart."""
    space = population.settings["space"]
    figure = make_subplots(
        len(space), 1, shared_xaxes=True, vertical_spacing=min(0.05, 0.5 / len(space))
    )
    figure.update_layout(blank(height=110 + 200 * len(space)).layout)
    lives = list(population.lives())
    ancestors = population.ancestors()
    ends = {life.place: life.end for life in lives}
    for row, hyperparameter in enumerate(space, start=1):
        key = hyperparameter["key"]
        axis = _Axis(hyperparameter, [life.record.new[key] for life in lives])
        placed = axis.placed(lives, key)
        of_member: dict[int, list[tuple[Any, Any, str]]] = defaultdict(list)
        for life, y in zip(lives, placed, strict=True):
            record = life.record
            said = f"member {record.member}, generation {record.generation}: {key}="
            said += shown(record.new[key])
            of_member[record.member] += [(record.frames, y, said), (life.end, y, said)]
        heights = {life.place: y for life, y in zip(lives, placed, strict=True)}
        _add_halo(figure, *_columns(_steps(ancestors, heights, ends)), row=row)
        for member, points in sorted(of_member.items()):
            figure.add_scatter(
                x=[p[0] for p in points], y=[p[1] for p in points],
                hovertext=[p[2] for p in points],
                hoverinfo="text", mode="lines", showlegend=row == 1, **_member_style(member),
                row=row, col=1,
            )  # fmt: skip
        figure.update_yaxes(
            title=population.short[key].replace("_", " "), row=row, col=1, automargin=True,
            **axis.ticks,
        )  # fmt: skip
    grid(figure)
    figure.update_xaxes(title=X_TITLE, rangemode="tozero", row=len(space), col=1)
    return figure


def tree_figure(population: Population) -> go.Figure:
    """Members from top to bottom, frames to the right; a slanted line is a copy."""
    nodes, lives = population.nodes(), list(population.lives())
    figure = blank(height=190 + 34 * max(3, len(population.latest)))
    span = max((life.end for life in lives), default=0)
    of_best = {(record.member, record.generation) for record in population.ancestors()}
    trained, copies, halo, said = [], [], [], []
    for life in lives:
        record = life.record
        lines = [[(record.frames, record.member), (life.end, record.member)]]
        trained += lines
        if record.copied:
            copied = nodes.get((record.parent or 0, (record.parent_generation or 0) + 1))
            start = min(copied.frames if copied else record.frames, record.frames - 0.02 * span)
            lines.append([(max(0.0, start), record.parent), (record.frames, record.member)])
            copies.append(lines[-1])
            said += [f"member {record.member} copies member {record.parent}"] * 2 + [""]
        if life.place in of_best:
            halo += lines
    _add_halo(figure, *_broken(halo))
    x, y = _broken(trained)
    figure.add_scatter(x=x, y=y, mode="lines", name="a member trains", hoverinfo="skip",
                       line={"color": COLOURS[0], "width": 2})  # fmt: skip
    x, y = _broken(copies)
    arrow = {"symbol": "arrow", "size": [0, 13, 0] * len(copies), "angleref": "previous",
             "standoff": 4, "color": COLOURS[1], "line": {"width": 0}}  # fmt: skip
    figure.add_scatter(x=x, y=y, mode="lines+markers", name="a copy, from whom to whom",
                       hovertext=said, hoverinfo="text", marker=arrow,
                       line={"color": COLOURS[1], "width": 2})  # fmt: skip
    for failed, name, marker in (
        (False, "a generation begins", {"symbol": "circle", "size": 7, "color": COLOURS[0]}),
        (True, "its run had failed", {"symbol": "x", "size": 10, "color": COLOURS[4]}),
    ):
        own = [life for life in lives if life.record.failed is failed]
        if own:
            figure.add_scatter(
                x=[life.record.frames for life in own], y=[life.record.member for life in own],
                name=name, mode="markers", marker=marker, hoverinfo="text",
                hovertext=[_told(life) for life in own],
            )  # fmt: skip
    figure.update_xaxes(title=X_TITLE, rangemode="tozero")
    figure.update_yaxes(title="member", autorange="reversed", tickvals=sorted(population.latest))
    return figure


def _steps(
    ancestors: Sequence[Record],
    heights: Mapping[tuple[int, int], float],
    ends: Mapping[tuple[int, int], float],
) -> Iterator[tuple[float, float]]:
    """What the ancestors had, each until the next one began."""
    for record, after in zip(ancestors, [*ancestors[1:], None], strict=True):
        place = record.member, record.generation
        yield record.frames, heights[place]
        yield (after.frames if after else ends[place]), heights[place]


class _Axis:
    """Where values of a hyperparameter are: numbers where they are, words in their order."""

    def __init__(self, row: dict[str, Any], values: Sequence[Value]) -> None:
        self._words: list[str] = []
        self.ticks: dict[str, Any] = {}
        if any(isinstance(value, str | bool) for value in values):
            self._words = list(dict.fromkeys(map(shown, [*(row.get("values") or []), *values])))
            self.ticks = {"tickvals": list(range(len(self._words))), "ticktext": self._words}
        elif min(map(float, values)) > 0 and (row.get("log") or row.get("starts")):
            self.ticks = {"type": "log", **_log_ticks(min(values), max(values))}
        self._log = self.ticks.get("type") == "log"
        heights = [self._height(value) for value in values]
        self._apart = 0.02 * ((max(heights) - min(heights)) or abs(heights[0]) or 1.0)

    def placed(self, lives: Sequence[Life], key: str) -> list[float]:
        """Of each life its height; those of one generation that share a value lie side by side."""
        same: dict[tuple[int, str], list[int]] = defaultdict(list)
        for life in lives:
            same[life.record.generation, shown(life.record.new[key])].append(life.record.member)
        found = []
        for life in lives:
            record = life.record
            others = same[record.generation, shown(record.new[key])]
            shift = others.index(record.member) - (len(others) - 1) / 2
            height = self._height(record.new[key]) + self._apart * shift
            found.append(10**height if self._log else height)
        return found

    def _height(self, value: Value) -> float:
        if self._words:
            return float(self._words.index(shown(value)))
        return math.log10(float(value)) if self._log else float(value)


def _log_ticks(low: Value, high: Value) -> dict[str, Any]:
    """The roundest numbers of which there are three between the ends."""
    low, high = float(low), float(high)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for factors in ROUND:
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        if sum(low <= tick <= high for tick in ticks) >= 3:
            break
    return {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _told(life: Life) -> str:
    record = life.record
    fitness = "failed" if record.failed else "not known" if record.fitness is None else (
        f"{record.fitness:.1f}"
    )  # fmt: skip
    values = [
        f"{key.rpartition('.')[2]} {shown(value)}"
        + (f" (before: {shown(record.old[key])})" if record.old.get(key, value) != value else "")
        for key, value in record.new.items()
    ]
    copied = f"<br>copies member {record.parent}" if record.copied else ""
    before = "" if record.generation == 0 else f"<br>fitness before: {fitness}"
    title = f"member {record.member}, generation {record.generation}"
    return "<br>".join([f"{title}{before}{copied}", *values])


def member_colour(member: int) -> str:
    return COLOURS[member % len(COLOURS)]


def _member_style(member: int) -> dict[str, Any]:
    dash = DASHES[member // len(COLOURS) % len(DASHES)]
    return {
        "name": f"member {member}",
        "legendgroup": f"member {member}",
        "line": {"color": member_colour(member), "width": 1.7, "dash": dash},
    }


def _add_halo(figure: go.Figure, x: Sequence[Any], y: Sequence[Any], row: int = 1) -> None:
    place = {} if row == 1 and not figure._has_subplots() else {"row": row, "col": 1}
    figure.add_scatter(x=x, y=y, name=HALO_NAME, legendgroup=HALO_NAME, mode="lines", line=HALO,
                       hoverinfo="skip", showlegend=row == 1, **place)  # fmt: skip


def _broken(lines: Sequence[Sequence[tuple[Any, Any]]]) -> tuple[list[Any], list[Any]]:
    """Lines one after the other, with gaps between them."""
    points = [point for line in lines for point in (*line, (None, None))]
    return _columns(points)


def _columns(points: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    both = list(points)
    return [p[0] for p in both], [p[1] for p in both]
