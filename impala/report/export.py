"""Figures as files: PNG, SVG, and CSV of what is drawn."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import plotly.graph_objects as go
import plotly.io

from impala.report.comparison import Part

WIDTH = 1000


class NoBrowserError(RuntimeError):
    """PNG and SVG cannot be drawn here; whatever else was asked for has been written."""


def export(drawn: Sequence[tuple[Part, Mapping[str, go.Figure]]], folder: Path) -> int:
    """Writes every figure into `folder`, or with several parts into one of its folders for each.

    Returns how many there are. NoBrowserError, saying what to do, where there is no browser.
    """
    figures: dict[Path, go.Figure] = {}
    for number, (part, named) in enumerate(drawn, start=1):
        own = folder if len(drawn) == 1 else folder / f"{number}_{part.suite}"
        own.mkdir(parents=True, exist_ok=True)
        for name, figure in named.items():
            figures[own / name] = figure
            write_csv(figure, own / f"{name}.csv")
    write_pictures(figures, ("png", "svg"))
    return len(figures)


def write_pictures(figures: Mapping[Path, go.Figure], suffixes: Sequence[str]) -> None:
    """Each as a file of each suffix, by its path without one.

    NoBrowserError, saying what to do, where there is no browser.
    """
    if find_spec("kaleido") is None:
        raise NoBrowserError("PNG and SVG need kaleido: pip install -e '.[report]'")
    from choreographer.channels import ChannelClosedError
    from choreographer.errors import BrowserClosedError, BrowserFailedError

    for drawing in ("choreographer", "kaleido"):  # which tell of each folder that they remove
        logging.getLogger(drawing).setLevel(logging.WARNING)
    on_white = [
        go.Figure(figure).update_layout(paper_bgcolor="white", width=WIDTH)
        for figure in figures.values()
    ]
    try:
        for suffix in suffixes:
            files: list[str | Path] = [stem.with_name(f"{stem.name}.{suffix}") for stem in figures]
            plotly.io.write_images(on_white, files)
    except (ChannelClosedError, RuntimeError) as error:
        of_browser = ChannelClosedError | BrowserClosedError | BrowserFailedError
        # Where there is none, Plotly raises a RuntimeError of its own.
        if not isinstance(error, of_browser) and "Chrome" not in str(error):
            raise
        raise NoBrowserError(
            "PNG and SVG are drawn by Chrome or Chromium, which is not found or does not start:"
            " install one, or name it in $BROWSER_PATH"
        ) from error


def write_csv(figure: go.Figure, path: Path) -> None:
    """One row for each point: trace, x, y and, where there are error bars, their ends.

    On symmetric-log axes numbers are as drawn; the text of a point has the score itself.
    """
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["trace", "x", "y", "text", "error_minus", "error_plus"])
        for trace in cast(tuple[Any, ...], figure.data):
            text = trace.hovertext
            error = trace.error_x
            for i, (x, y) in enumerate(zip(_list(trace.x), _list(trace.y), strict=True)):
                row = [trace.name, x, y, text[i] if text is not None else ""]
                if error.array is not None:
                    row += [error.arrayminus[i], error.array[i]]
                writer.writerow(row)


def _list(values: object) -> list[object]:
    return [] if values is None else list(values)  # type: ignore[call-overload]
