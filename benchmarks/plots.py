"""The look of the plots in docs/results."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, or asked for

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#2f6db3", "#d9822b", "#4f9d69", "#8a5fa8", "#b8483f", "#7a7a7a")
INK, FAINT = "#333333", "#8c8c8c"

plt.rcParams.update(
    {
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e4e4e4",
        "grid.linewidth": 0.7,
        "axes.axisbelow": True,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.color": INK,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "figure.dpi": 110,
    }
)


def panels(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of rows x columns panels of `width` x `height` inches each, row by row."""
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows),
        squeeze=False,
        layout="constrained",
    )
    return figure, list(grid.flat)


def level(axes: Axes, value: float, name: str, *, at: float = 1.0, colour: str = FAINT) -> None:
    """A dashed horizontal line, and its name at this share of the width."""
    axes.axhline(value, color=colour, linestyle=(0, (4, 3)), linewidth=1.0, zorder=1)
    axes.annotate(
        name,
        (at, value),
        xycoords=("axes fraction", "data"),
        xytext=(-2 if at > 0.5 else 4, 2),
        textcoords="offset points",
        ha="right" if at > 0.5 else "left",
        va="bottom",
        color=colour,
        fontsize=8.5,
    )


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    print(f"wrote {path}", flush=True)
