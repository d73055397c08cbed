"""From directories to the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from impala.report.comparison import parts
from impala.report.export import write_pictures
from impala.report.figures import figures
from impala.report.page import Drawn, render
from impala.report.population_figures import population_figures
from impala.report.populations import find_populations
from impala.report.runs import Run, find_runs
from impala.report.sweeps import find_sweeps
from impala.whole_file import write_whole
from suites.published import published


class Made(NamedTuple):
    """left_out: directories and files that could not be used, each with the reason."""

    runs: list[Run]
    left_out: list[str]
    drawn: list[Drawn]


def make(directories: Sequence[Path], out: Path) -> Made:
    """Writes the page. ValueError where there is nothing to show, OSError where it cannot write."""
    sweeps, unread = find_sweeps(p for p in directories if p.is_dir())
    try:
        runs, left_out = find_runs(directories)
    except ValueError as error:
        # Jobs that all failed leave no run, and it is they who know why.
        raise ValueError(
            "; ".join([str(error), *(f for s in sweeps for f in s.failures)])
        ) from error
    populations, damaged = find_populations(runs)
    left_out += [*(text for run in runs for text in run.damaged_files), *damaged, *unread]
    drawn = []
    for part in parts(runs):
        own = {run.directory.parent for run in part.runs}
        of_part = [population for population in populations if population.directory in own]
        results = published(part.suite)
        drawn.append(
            Drawn(
                part,
                results,
                [(population, population_figures(population)) for population in of_part],
                figures(part, results, of_part),
            )
        )
    text = render(drawn, sweeps, left_out, out)
    text = text.encode("utf-8", "backslashreplace").decode()  # names of files may be any bytes
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, text)
    return Made(runs, left_out, drawn)


def make_of_population(directory: Path) -> Path:
    """Writes `population.html`, and `population_*.png` beside it; returns the page's path.

    NoBrowserError, saying what to do, if there is a page now, and nothing that draws pictures.
    """
    page = directory / "population.html"
    for each in make([directory], page).drawn:
        for _, figures_of_it in each.populations:
            write_pictures({directory / name: fig for name, fig in figures_of_it.items()}, ["png"])
    return page
