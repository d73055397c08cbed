"""The live screen of a terminal: an overview panel above a table of the tasks."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from impala.loggers.latest import (
    ACTOR_TIME,
    LEARNER_TIME,
    Latest,
    duration,
    memory,
    number,
    percent,
    small,
)

PART_COLOURS = {
    "waiting": "red",
    "loading": "yellow",
    "computing": "green",
    "publishing": "cyan",
    "environments": "green",
    "inference": "cyan",
}
NAME_WIDTH = 17
GAP = 3  # between two blocks of tasks


class Field(NamedTuple):
    """A column of figures: "group/<task>", times a scale."""

    header: str
    group: str
    width: int
    scale: float = 1.0


# The ones that matter most come first; those that do not fit are left out from the end.
FIELDS = (
    Field("hns %", "hns", 8),
    Field("return", "return", 8),
    Field("lag", "lag", 5),
    Field("length", "length", 7),
    Field("share %", "share", 7, 100.0),
)
HUMAN_BAR = 24  # columns of a bar from random to human, where there is room


class Screen:
    """Drawn anew at each `refresh`. Log records and prints scroll above it while it stands."""

    def __init__(self, latest: Latest, title: str, stream: TextIO) -> None:
        self._latest = latest
        self._title = title
        self._console = Console(file=stream, force_terminal=True)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            auto_refresh=False,  # a thread that draws would take time from the learner
            vertical_overflow="crop",
        )
        self._live.start()
        self._redirected = redirected_log_handlers(self._console)

    def refresh(self) -> None:
        self._live.refresh()

    def stop(self) -> None:
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected = []
        self._live.stop()

    def _render(self) -> RenderableType:
        width, height = self._console.size
        lines = overview(self._latest, width)
        panel = Panel(
            Group(*lines), title=self._title or None, title_align="left", border_style="dim"
        )
        rows = height - len(lines) - 4  # the panel's border, the header, and the cursor's line
        return Group(panel, task_table(self._latest, width, max(rows, 1)))


def redirected_log_handlers(
    console: Console,
) -> list[tuple[logging.StreamHandler[Any], TextIO]]:
    """Makes those that write to a terminal print above what is live; and the streams they had."""
    # Handlers hold the streams of before; rich has replaced sys.stdout and sys.stderr only.
    redirected = []
    for handler in logging.getLogger().handlers:
        stream = getattr(handler, "stream", None)  # None: a file that opens when needed
        if isinstance(handler, logging.StreamHandler) and stream and stream.isatty():
            redirected.append((handler, stream))
            handler.setStream(cast(TextIO, FileProxy(console, stream)))
    return redirected


def overview(latest: Latest, width: int) -> list[Text]:
    """The lines of the overview panel of a terminal of that width."""
    get = latest.get
    bar_width = min(max(width - 68, 8), 40)  # all of it on one line also where 80 is all there is
    score = Text.assemble((latest.score, "bold green"), f"   coverage {latest.coverage}   ")
    for name in ("median", "mean", "mean_capped", "iqm"):
        if name != latest.headline and get(f"score/{name}") is not None:
            score.append(f"{name} ", style="dim")
            score.append(f"{number(get(f'score/{name}'))} %   ")

    done = round(bar_width * latest.progress)
    progress = Text.assemble(
        ("━" * done, "green"), ("─" * (bar_width - done), "bright_black"), "  "
    )
    progress.append(f"{100 * latest.progress:.1f} %  ", style="bold")
    progress.append(f"{number(latest.frames)} of {number(latest.total_frames)} frames  ")
    progress.append(f"left {duration(latest.time_left_s)}  spent {duration(get('time_s'))}")

    speed = _pairs(
        ("frames/s", number(get("rate/frames_per_s"))),
        ("updates/s", number(get("rate/updates_per_s"))),
        ("updates", f"{get('updates') or 0:,.0f}"),
        ("lag", f"{number(latest.mean_lag)} max {number(get('lag/max'))}"),
        ("queue", percent(get("queue/fill"))),
        ("memory", memory(get("memory/rss_mb"))),
    )
    learning = _pairs(
        ("loss", small(get("loss/total"))),
        ("policy", small(get("loss/policy"))),
        ("baseline", small(get("loss/baseline"))),
        ("entropy", small(get("loss/entropy"))),
        ("lr", small(get("lr"))),
        ("grad norm", small(get("grad/norm"))),
        ("rho clipped", percent(get("vtrace/rho_clipped"))),
    )
    learner = _time_bar("learner", latest.times(LEARNER_TIME, "learner"), bar_width)
    actors = _time_bar("actors", latest.times(ACTOR_TIME, "actor"), bar_width)
    lines = [score, progress, speed, learning, learner, actors]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _pairs(*figures: tuple[str, str]) -> Text:
    line = Text()
    for name, figure in figures:
        line.append(f"{name} ", style="dim")
        line.append(f"{figure}   ")
    return line


def _time_bar(who: str, shares: Sequence[tuple[str, float]], width: int) -> Text:
    """Where the time goes: one bar, its parts in colour, and their shares beside it."""
    line = Text.assemble((f"{who:8}", "dim"))
    drawn, upto = 0, 0.0
    for part, share in shares:
        upto += share
        cells = max(min(round(width * upto), width) - drawn, 0)
        line.append("█" * cells, style=PART_COLOURS[part])
        drawn += cells
    line.append("░" * (width - drawn), style="bright_black")
    for part, share in shares:
        line.append(f"  {part} ", style=PART_COLOURS[part])
        line.append(percent(share))
    if not shares:
        line.append("  -")
    return line


def task_table(latest: Latest, width: int, rows: int) -> Table:
    """As many blocks of tasks side by side as it takes, with as many figures as then fit."""
    names = latest.task_names
    blocks = max(math.ceil(len(names) / rows), 1)
    fields = _fields_that_fit(width, blocks)
    blocks = min(blocks, max((width + GAP) // (_block_width(fields) + GAP), 1))
    shown = names if len(names) <= blocks * rows else names[: blocks * rows - 1]
    rows = math.ceil(len(names) / blocks) if len(shown) == len(names) else rows
    bar = blocks == 1 and width >= _block_width(fields) + HUMAN_BAR + 12

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for block in range(blocks):
        if block:
            table.add_column("", width=GAP - 1)
        table.add_column("task", width=NAME_WIDTH, no_wrap=True, overflow="ellipsis")
        for field in fields:
            table.add_column(field.header, width=field.width, justify="right", no_wrap=True)
    if bar:
        table.add_column("  random ⟶ human", width=HUMAN_BAR + 2)
    for row in range(rows):
        cells: list[RenderableType] = []
        for block in range(blocks):
            cells += [""] if block else []
            index = block * rows + row
            if index < len(shown):
                cells += _task_cells(latest, shown[index], fields)
            elif index == len(shown) < len(names):
                cells += [Text(f"and {len(names) - index} more", style="dim"), *[""] * len(fields)]
            else:
                cells += [""] * (len(fields) + 1)
        if bar:
            cells.append(_human_bar(latest.get(f"hns/{shown[row]}")) if row < len(shown) else "")
        table.add_row(*cells)
    return table


def _block_width(fields: Sequence[Field]) -> int:
    return NAME_WIDTH + sum(field.width + 1 for field in fields)


def _fields_that_fit(width: int, blocks: int) -> tuple[Field, ...]:
    room = (width + GAP) // blocks - GAP
    count = len(FIELDS)
    while count > 1 and _block_width(FIELDS[:count]) > room:
        count -= 1
    return FIELDS[:count]


def _task_cells(latest: Latest, name: str, fields: Sequence[Field]) -> list[RenderableType]:
    cells: list[RenderableType] = [Text(name)]
    for field in fields:
        value = latest.get(f"{field.group}/{name}")
        text = number(None if value is None else field.scale * value)
        style = "dim" if value is None else _score_style(value) if field.group == "hns" else ""
        cells.append(Text(text, style=style))
    return cells


def _score_style(score: float) -> str:
    """Better than a human, better than random, or neither."""
    return "bold green" if score >= 100 else "yellow" if score > 0 else "red"


def _human_bar(score: float | None) -> Text:
    cells = round(HUMAN_BAR * min(max(score or 0.0, 0.0), 100.0) / 100)
    bar = Text("  ")
    bar.append("━" * cells, style=_score_style(score or 0.0))
    bar.append("─" * (HUMAN_BAR - cells), style="bright_black")
    return bar
