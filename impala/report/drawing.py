"""What all figures share: colours, axes, sizes."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

COLOURS = (
    "#4285d6", "#e08a2e", "#3fa66b", "#b06fc9", "#d65a52", "#1fa3a3", "#c0a020", "#8c8c8c",
    "#9a6a4f", "#d674a8",
)  # fmt: skip
GRID = {"gridcolor": "rgba(128,128,128,0.25)", "zerolinecolor": "rgba(128,128,128,0.6)"}


def blank(*, height: int) -> go.Figure:
    return go.Figure(
        layout={
            "template": "none",
            "height": height,
            "margin": {"l": 60, "r": 20, "t": 60, "b": 50},
            "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "hovermode": "closest",
            "font": {"family": "system-ui, sans-serif", "size": 13},
            "xaxis": GRID,
            "yaxis": GRID,
        }
    )


def grid(figure: go.Figure) -> None:
    """On all axes; `blank` has one pair."""
    figure.update_xaxes(GRID)
    figure.update_yaxes(GRID)


def tasks_down(figure: go.Figure, upwards: Sequence[str]) -> None:
    figure.update_yaxes(
        categoryorder="array", categoryarray=upwards, range=[-0.8, len(upwards) - 0.2], dtick=1,
        automargin=True,
    )  # fmt: skip
