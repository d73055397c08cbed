"""Figures as files: PNG, SVG, and CSV of what is drawn."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import plotly.graph_objects as go
import plotly.io
from numpy.typing import NDArray

from impala.report.comparison import Part
from impala.report.figures import SYMLOG, band_ends, from_symlog

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


COLUMNS = ("panel", "trace", "x", "y", "x_low", "x_high", "y_low", "y_high")


def write_csv(figure: go.Figure, path: Path) -> None:
    """One row for each point: what the axes say there, and where whiskers and bands end.

    panel: what is on the x axis, where there are several.
    """
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in _rows(figure):
            writer.writerow([f"{v:.6g}" if isinstance(v, float | np.floating) else v for v in row])


def _rows(figure: go.Figure) -> Iterator[list[object]]:
    panels = {axis.plotly_name.replace("axis", ""): axis for axis in figure.select_xaxes()}
    value = from_symlog if figure.layout.meta == SYMLOG else np.asarray
    bands: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    for trace in cast(tuple[Any, ...], figure.data):
        if getattr(trace, "fill", None) == "toself":
            bands[trace.legendgroup] = band_ends(trace)
            continue
        if trace.x is None or not len(trace.x):  # only in the legend
            continue
        x: Any = trace.x
        count = len(x)
        title = panels[trace.xaxis or "x"].title.text or ""
        panel = title.replace("<br>", " ") if len(panels) > 1 else ""
        ends: list[Any] = [[""] * count] * 4  # low and high, of x and of y
        if not isinstance(x[0], str):
            error, x = trace.error_x, value(x)
            if error.array is not None and error.visible is not False:
                ends[0] = value(trace.x - np.asarray(error.arrayminus))
                ends[1] = value(trace.x + np.asarray(error.array))
        if trace.legendgroup in bands and len(bands[trace.legendgroup][0]) == count:
            ends[2:] = bands[trace.legendgroup]
        for point in zip(x, trace.y, *ends, strict=True):
            yield [panel, trace.name, *point]
