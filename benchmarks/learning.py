"""What finished runs learned: their returns against frames, as a report, a plot and a table.

    python -m benchmarks.learning pong outputs/atari57/impala/<run> ... --thresholds pong=18

Reads what runs leave in their directories (`metrics.jsonl`, `episodes.jsonl`, `config.yaml`,
`summary.json`) and writes outputs/benchmarks/NAME.md, NAME.png and NAME.csv. Several runs must
be of the same tasks, such as several seeds of one recipe.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import OmegaConf

from benchmarks import report
from benchmarks.random_play import random_returns
from impala.loggers.json_lines import read_points
from suites.score import human_normalised
from suites.suite import SCORE_WINDOW, Suite

CSV_ROWS = 200
AGGREGATES = ("median", "mean", "mean_capped", "iqm")


@dataclass(frozen=True)
class Run:
    """A finished run, as its directory has it."""

    path: Path
    config: Any
    commands: list[str]  # that started and resumed it
    summary: dict[str, Any]
    points: list[dict[str, Any]]  # of metrics.jsonl
    episodes: list[dict[str, Any]]  # of episodes.jsonl

    @property
    def seed(self) -> int:
        return self.summary["seed"]

    @property
    def tasks(self) -> list[str]:
        return list(self.summary["games"])


def read_run(path: Path) -> Run:
    """Raises ValueError unless it is the directory of a run that has ended."""
    summary_file = path / "summary.json"
    if not summary_file.is_file():
        raise ValueError(f"{path} has no summary.json: expected the directory of a run that ended")
    points = list(read_points(path / "metrics.jsonl"))
    if not points:
        raise ValueError(f"{path} has no points in metrics.jsonl: nothing was learned in that run")
    given = re.findall(r"command line: (.*)", (path / "train.log").read_text())
    return Run(
        path=path,
        config=OmegaConf.load(path / "config.yaml"),
        commands=[f"python launch.py {line}".removesuffix(" (all defaults)") for line in given],
        summary=json.loads(summary_file.read_text()),
        points=points,
        episodes=list(read_points(path / "episodes.jsonl")),
    )


def frames_at(episodes: Iterable[Mapping[str, Any]], task: str, threshold: float) -> int | None:
    """Frames at which the mean of the last `SCORE_WINDOW` whole games first was `threshold`.

    None if it never was; fewer games than a full window do not count.
    """
    last: deque[float] = deque(maxlen=SCORE_WINDOW)
    for episode in episodes:
        if episode["task"] == task:
            last.append(episode["return"])
            if len(last) == SCORE_WINDOW and math.fsum(last) >= threshold * SCORE_WINDOW:
                return episode["frames"]
    return None


def seconds_at(points: Iterable[Mapping[str, Any]], frames: int) -> float | None:
    """Seconds of training, to the next point of the metrics."""
    return next((point["time_s"] for point in points if point["frames"] >= frames), None)


def thin(rows: Sequence[Any], most: int) -> list[Any]:
    """At most `most` rows, evenly spread, with the first and the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def curve(run: Run, key: str) -> tuple[list[int], list[float]]:
    """Frames and values of the points that have `key`."""
    points = [(point["frames"], point[key]) for point in run.points if point.get(key) is not None]
    return [frames for frames, _ in points], [value for _, value in points]


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """The mean, and the range where there is one to speak of."""
    mean, lowest, highest = (text(f(values)) for f in (statistics.fmean, min, max))
    return mean if lowest == highest else f"{mean} ({lowest} to {highest})"


def returns_table(runs: Sequence[Run], suite: Suite, random: Mapping[str, list[float]]) -> str:
    header = ["task", "random", "human", "return", "human-normalised", "games"]
    if random:
        header.insert(2, "random, measured")
    rows = []
    for task in suite.tasks:
        metrics = [run.summary["metrics"] for run in runs]
        returns = [m[f"return/{task.name}"] for m in metrics if f"return/{task.name}" in m]
        scores = [human_normalised(value, task) for value in returns]
        row = [
            task.name,
            report.number(task.random_return),
            report.number(task.human_return),
            spread(returns, report.number) if returns else "no finished game",
            spread(scores, lambda score: f"{score:.1f} %") if scores else "",
            f"{sum(run.summary['games'][task.name] for run in runs):,}",
        ]
        if random:
            played = random[task.name]
            row.insert(2, f"{statistics.fmean(played):.4g} ({len(played)} games)")
        rows.append(row)
    return report.table(header, rows)


def aggregates_table(runs: Sequence[Run]) -> str:
    metrics = [run.summary["metrics"] for run in runs]
    rows = []
    for name in AGGREGATES:
        values = [m[f"score/{name}"] for m in metrics if f"score/{name}" in m]
        if values:
            text = spread(values, lambda value: f"{value:.1f} %")
            rows.append([name.replace("_", " "), text])
    coverage = spread([m["score/coverage"] for m in metrics], lambda value: f"{100 * value:.0f} %")
    return report.table(["human-normalised", "score"], [*rows, ["tasks with a score", coverage]])


def thresholds_table(runs: Sequence[Run], thresholds: Mapping[str, float]) -> str:
    rows = []
    for task, threshold in thresholds.items():
        for run in runs:
            frames = frames_at(run.episodes, task, threshold)
            seconds = None if frames is None else seconds_at(run.points, frames)
            rows.append(
                [
                    f"{task} at least {threshold:g}, seed {run.seed}",
                    "not reached" if frames is None else f"{frames:,}",
                    "" if seconds is None else duration(seconds),
                ]
            )
    header = [f"mean return of the last {SCORE_WINDOW} whole games", "frames", "after"]
    return report.table(header, rows)


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def write_csv(runs: Sequence[Run], path: Path) -> None:
    """Thinned points of all runs, so that the plot can be drawn again without their directories."""
    keys = [f"return/{task}" for task in runs[0].tasks]
    keys += [f"score/{name}" for name in AGGREGATES] if len(runs[0].tasks) > 1 else []
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["seed", "frames", "time_s", *keys])
        for run in runs:
            for point in thin(run.points, CSV_ROWS // len(runs)):
                values = [point.get(key) for key in keys]
                texts = ["" if value is None else f"{value:.6g}" for value in values]
                writer.writerow([run.seed, point["frames"], f"{point['time_s']:.1f}", *texts])
    print(f"wrote {path}", flush=True)


def plot(runs: Sequence[Run], suite: Suite, thresholds: Mapping[str, float], path: Path) -> None:
    """Return against frames, a panel for each task and a line for each run."""
    from benchmarks import plots

    columns = math.ceil(math.sqrt(len(suite.tasks)))
    rows = math.ceil(len(suite.tasks) / columns)
    size = (6.4, 3.8) if len(suite.tasks) == 1 else (4.2, 2.8) if columns <= 3 else (2.6, 1.9)
    figure, grid = plots.panels(rows, columns, width=size[0], height=size[1])
    for task, axes in zip(suite.tasks, grid, strict=False):
        for index, run in enumerate(runs):
            frames, values = curve(run, f"return/{task.name}")
            colour = plots.COLOURS[index % len(plots.COLOURS)]
            axes.plot(np.asarray(frames) / 1e6, values, color=colour, label=f"seed {run.seed}")
        # Curves begin at random and, if all is well, end at human: names where they are not.
        plots.level(axes, task.random_return, "random")
        plots.level(axes, task.human_return, "human", at=0.0)
        if task.name in thresholds:
            value = thresholds[task.name]
            plots.level(axes, value, f"{value:g}", at=0.2, colour=plots.COLOURS[4])
        axes.set_title(task.name)
        axes.set_xlim(0, max(run.summary["frames"] for run in runs) / 1e6)
        axes.margins(y=0.12)
    for axes in grid[len(suite.tasks) :]:
        axes.set_visible(False)
    if len(runs) > 1:
        grid[0].legend(loc="best", fontsize=8.5)
    figure.supxlabel("million frames", fontsize=9.5)
    figure.supylabel(f"return, mean of the last {SCORE_WINDOW} whole games", fontsize=9.5)
    plots.save(figure, path)


def facts(runs: Sequence[Run], commit: str | None) -> dict[str, str]:
    """Where and how the runs were made."""
    made = report.made_here("benchmarks.learning")
    commits = {run.summary.get("commit", commit) for run in runs}
    lines = dict.fromkeys(line for run in runs for line in run.commands)
    return {
        "command": "; ".join(f"`{line}`" for line in lines),
        "commit": ", ".join(sorted(str(one or "not recorded by the run") for one in commits)),
        "seeds": ", ".join(str(run.seed) for run in runs),
        "machine": made["machine"],
        "versions": made["versions"],
        "frames": ", ".join(f"{run.summary['frames']:,}" for run in runs),
        "wall time": ", ".join(duration(run.summary["time_s"]) for run in runs),
        "runs": ", ".join(f"{run.path.name} ({run.summary['status']})" for run in runs),
        "report": made["command"],
    }


def write(
    name: str,
    runs: Sequence[Run],
    *,
    folder: Path,
    thresholds: Mapping[str, float],
    random_games: int,
    commit: str | None,
) -> None:
    """Raises ValueError where runs are of different tasks, or a threshold of an unknown one."""
    for run in runs:
        if run.tasks != runs[0].tasks:
            raise ValueError(f"{run.path} is of other tasks than {runs[0].path}: report them apart")
    if unknown := set(thresholds) - set(runs[0].tasks):
        raise ValueError(
            f"thresholds of {', '.join(sorted(unknown))}: the tasks are {', '.join(runs[0].tasks)}"
        )
    suite: Suite = instantiate(runs[0].config.suite)
    random = random_returns(suite, random_games, seed=0) if random_games else {}
    folder.mkdir(parents=True, exist_ok=True)
    plot(runs, suite, thresholds, folder / f"{name}.png")
    write_csv(runs, folder / f"{name}.csv")
    paragraphs = [f"# {name.replace('_', ' ').replace('-', ' ').capitalize()}"]
    paragraphs.append(report.facts(facts(runs, commit)))
    if thresholds:
        paragraphs.append(thresholds_table(runs, thresholds))
    paragraphs += [
        f"Returns are raw, of whole games, the mean of the last {SCORE_WINDOW}"
        + (" of each run; of several runs the mean and the range." if len(runs) > 1 else "."),
        returns_table(runs, suite, random),
    ]
    if len(suite.tasks) > 1:
        paragraphs.append(aggregates_table(runs))
    paragraphs.append(report.facts(suite.provenance))
    paragraphs += [f"![return against frames]({name}.png)", f"The curves: [{name}.csv]({name}.csv)"]
    report.write(folder / f"{name}.md", *paragraphs)


def threshold(text: str) -> tuple[str, float]:
    """TASK=RETURN as a pair."""
    task, value = text.split("=")
    return task, float(value)


def main() -> None:
    parser = report.parser("benchmarks.learning", __doc__)
    parser.add_argument("name", help="of the files that are written")
    parser.add_argument("runs", nargs="+", type=Path, help="directories of finished runs")
    parser.add_argument(
        "--thresholds", nargs="*", default=[], type=threshold, metavar="TASK=RETURN"
    )
    parser.add_argument("--random", type=int, default=0, metavar="GAMES", help="play at random too")
    parser.add_argument("--commit", help="of the runs, where they have not recorded it")
    parser.add_argument("--folder", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    try:
        write(
            options.name,
            [read_run(path) for path in options.runs],
            folder=options.folder,
            thresholds=dict(options.thresholds),
            random_games=options.random,
            commit=options.commit,
        )
    except ValueError as error:
        sys.exit(f"benchmarks.learning: error: {error}")


if __name__ == "__main__":
    main()
