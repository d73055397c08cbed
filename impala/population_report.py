"""Pictures of a population, and a page that shows them: `python -m impala.population_report DIR`.

Draws whatever there is so far: a population that is still training can be looked at, too.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from impala.loggers.json_lines import read_points
from impala.population import Member, Value, best, best_first, fitness
from impala.population_directory import PopulationDirectory, Record

BEST, OTHER, COPY = "#b8483f", "#8fb0d3", "#d9822b"
Curve = list[tuple[int, float]]  # frames, value
Nodes = dict[tuple[int, int], Record]  # by member and generation


def write(directory: Path) -> Path:
    """Writes `population.html` and three pictures beside it; returns the page's path."""
    population = PopulationDirectory(directory)
    settings = population.settings()
    records = population.lineage()
    curves = {i: _curve(population, i, settings["fitness"]) for i in range(settings["size"])}
    nodes = {(record.member, record.generation): record for record in records}
    latest = population.latest()
    members = [Member(i, _last(curve), latest[i].new) for i, curve in curves.items()]
    fittest = best(members)
    ancestors = ancestry(nodes, latest[fittest.index]) if fittest else []
    pictures = {
        "fitness": (
            "Fitness of all members, and of the best one's ancestors",
            _fitness_figure(curves, ancestors, settings["fitness"]),
        ),
        "schedules": (
            "Hyperparameters along the ancestry of the best member",
            _schedule_figure(settings["space"], nodes, curves, ancestors),
        ),
        "tree": ("Who copied whom", _tree_figure(nodes, curves, ancestors)),
    }
    parts = []
    for name, (title, figure) in pictures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        plt.close(figure)
        (directory / f"population_{name}.png").write_bytes(buffer.getvalue())
        image = base64.b64encode(buffer.getvalue()).decode()
        parts.append(f"<h2>{title}</h2><img alt='{title}' src='data:image/png;base64,{image}'>")
    page = directory / "population.html"
    page.write_text(_page(settings, members, latest, curves, parts))
    return page


def ancestry(nodes: Nodes, record: Record) -> list[Record]:
    """The generations that led to this one, from the first to itself."""
    line = [record]
    while line[-1].parent is not None and line[-1].parent_generation is not None:
        line.append(nodes[line[-1].parent, line[-1].parent_generation])
    return line[::-1]


def followed(ancestors: Sequence[Record], curves: dict[int, Curve]) -> Curve:
    """The fitness curve of a line of ancestors, as the paper draws it: each one's own while it was
    the ancestor."""
    points: Curve = []
    for record, after in zip(ancestors, [*ancestors[1:], None], strict=True):
        end = after.frames if after else math.inf
        points += [p for p in curves[record.member] if record.frames < p[0] <= end]
    return points


def _curve(population: PopulationDirectory, member: int, key: str) -> Curve:
    points = read_points(population.member(member) / "metrics.jsonl")
    known = ((point["frames"], fitness(point, key)) for point in points)
    return [(frames, value) for frames, value in known if value is not None]


def _last(curve: Curve) -> float | None:
    return curve[-1][1] if curve else None


def _figure(rows: int, height: float) -> tuple[Figure, list[Axes]]:
    figure, grid = plt.subplots(
        rows, 1, figsize=(9, height * rows), squeeze=False, sharex=True, layout="constrained"
    )
    for axes in grid.flat:
        axes.grid(color="#e4e4e4", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    grid.flat[-1].set_xlabel("frames of a member")
    return figure, list(grid.flat)


def _fitness_figure(curves: dict[int, Curve], ancestors: Sequence[Record], key: str) -> Figure:
    figure, (axes,) = _figure(1, 4.2)
    for curve in curves.values():
        axes.plot(*_columns(curve), color=OTHER, linewidth=1.0)
    axes.plot(*_columns(followed(ancestors, curves)), color=BEST, linewidth=2.0)
    axes.set_ylabel(key)
    return figure


def _schedule_figure(
    space: list[dict[str, Any]], nodes: Nodes, curves: dict[int, Curve], ancestors: Sequence[Record]
) -> Figure:
    """A panel for each hyperparameter: all members', and the line that led to the best."""
    figure, panels = _figure(len(space), 2.3)
    ends = {member: curve[-1][0] if curve else 0 for member, curve in curves.items()}
    for axes, row in zip(panels, space, strict=True):
        key = row["key"]
        for (member, generation), record in nodes.items():
            after = nodes.get((member, generation + 1))
            end = after.frames if after else max(ends[member], record.frames)
            axes.plot([record.frames, end], [record.new[key]] * 2, color=OTHER, linewidth=1.0)
        line = [(record.frames, record.new[key]) for record in ancestors]
        if ancestors:
            line.append((max(ends[ancestors[-1].member], line[-1][0]), line[-1][1]))
        axes.plot(*_columns(line), color=BEST, linewidth=2.0, drawstyle="steps-post")
        if row.get("log") or row.get("starts"):
            axes.set_yscale("log")
        axes.set_ylabel(key.rpartition(".")[2])
    return figure


def _tree_figure(nodes: Nodes, curves: dict[int, Curve], ancestors: Sequence[Record]) -> Figure:
    """Members from top to bottom, time to the right; a slanted line is a copy."""
    figure, (axes,) = _figure(1, max(2.5, 0.35 * len(curves)))
    of_best = {(record.member, record.generation) for record in ancestors}
    for (member, generation), record in nodes.items():
        colour, width = (BEST, 2.0) if (member, generation) in of_best else (OTHER, 1.0)
        after = nodes.get((member, generation + 1))
        end = after.frames if after else max((p[0] for p in curves[member][-1:]), default=0)
        axes.plot([record.frames, max(end, record.frames)], [member] * 2, color=colour, lw=width)
        if record.copied:
            assert record.parent is not None
            copied = nodes.get((record.parent, record.parent_generation or 0))
            start = copied.frames if copied else record.frames
            axes.plot(
                [max(start, record.frames - 0.02 * _span(curves)), record.frames],
                [record.parent, member],
                color=BEST if (member, generation) in of_best else COPY, lw=width,
            )  # fmt: skip
        marker = "x" if record.failed else "o"
        axes.plot(record.frames, member, marker, color=colour, markersize=4)
    axes.set_yticks(sorted(curves))
    axes.invert_yaxis()
    axes.set_ylabel("member")
    return figure


def _span(curves: dict[int, Curve]) -> int:
    return max((curve[-1][0] for curve in curves.values() if curve), default=1)


def _columns(points: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [p[0] for p in points], [p[1] for p in points]


def _page(
    settings: dict[str, Any],
    members: Sequence[Member],
    latest: dict[int, Record],
    curves: dict[int, Curve],
    parts: Sequence[str],
) -> str:
    keys = [row["key"] for row in settings["space"]]
    header = ["member", settings["fitness"], "frames", "generation", *keys]
    rows = [
        [
            str(member.index),
            "unknown" if member.fitness is None else f"{member.fitness:.1f}",
            f"{curves[member.index][-1][0]:,}" if curves[member.index] else "",
            str(latest[member.index].generation),
            *(_shown(member.values[key]) for key in keys),
        ]
        for member in best_first(members)
    ]
    body = "".join([
        f"<p>{html.escape(' '.join(settings['overrides']))}</p>",
        *parts,
        "<h2>Members</h2><table>",
        *_row(header, "th"),
        *(cell for row in rows for cell in _row(row, "td")),
        "</table>",
    ])  # fmt: skip
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Population</title><style>"
        "body{font:15px/1.5 sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#333}"
        "img{max-width:100%}td,th{padding:.2em .8em;text-align:right}</style>"
        f"<h1>Population of {settings['size']}</h1>{body}</html>\n"
    )


def _row(cells: Sequence[str], tag: str) -> Iterator[str]:
    yield "<tr>"
    yield from (f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    yield "</tr>"


def _shown(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m impala.population_report", description=__doc__)
    parser.add_argument("directory", type=Path, help="of a sweep by hydra/sweeper=population")
    directory = parser.parse_args().directory
    if not PopulationDirectory(directory).exists():
        parser.error(f"{directory} has no population.json: expected the directory of a population")
    print(f"wrote {write(directory)}")


if __name__ == "__main__":
    main()
