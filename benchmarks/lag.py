"""What policy lag does to learning, with V-trace and without correction.

    python -m benchmarks.lag --lags 0 10 50 200 --seeds 1 2 3

Trains `suite=catch` once for each lag, correction and seed, in one process, so that nothing but
the lag differs: actors get every snapshot of the weights a fixed number of updates late. Writes
outputs/benchmarks/lag.md, lag.png and lag.csv.
"""

from __future__ import annotations

import copy
import csv
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.training_run import LAUNCH
from impala.agents.agent import Agent
from impala.loggers.json_lines import read_points
from impala.transport.in_process import InProcess

CORRECTIONS = {True: "V-trace", False: "no correction"}


class Delayed(InProcess):
    """Gives the actors each snapshot `updates` updates after it was made, and its version."""

    def __init__(self, *, updates: int, **options: Any) -> None:
        super().__init__(**options)
        self._delay = updates
        self._late: deque[tuple[int, dict[str, Any]]] = deque()

    def publish(self, agent: Agent, version: int) -> None:
        self._late.append((version, copy.deepcopy(agent.state_dict())))
        if len(self._late) > self._delay:
            then, weights = self._late.popleft()
        elif len(self._late) == 1:  # the first, which actors need to begin with
            then, weights = self._late[0]
        else:
            return
        late = copy.deepcopy(agent)
        late.load_state_dict(weights)
        super().publish(late, then)


@dataclass(frozen=True)
class Trained:
    lag: int  # forced, in updates
    corrected: bool
    seed: int
    points: list[dict[str, Any]]  # of metrics.jsonl

    @property
    def mean_lag(self) -> float:
        """As the run measured it, in its second half."""
        lags = [point["lag/catch"] for point in self.points]
        return statistics.fmean(lags[len(lags) // 2 :])

    @property
    def final_return(self) -> float:
        return self.points[-1]["return/catch"]


def train(lag: int, corrected: bool, seed: int, frames: int) -> Trained:
    with tempfile.TemporaryDirectory(prefix="lag-") as folder:
        subprocess.run(
            [
                sys.executable, str(LAUNCH), "suite=catch", "transport=in_process",
                "transport._target_=benchmarks.lag.Delayed", f"+transport.updates={lag}",
                f"algorithm.agent.correct_lag={str(corrected).lower()}", f"seed={seed}",
                f"total_frames={frames}", f"log_every_frames={frames // 40}", "loggers=[]",
                f"hydra.run.dir={folder}/run",
            ],
            cwd=report.ROOT,
            check=True,
            capture_output=True,
            text=True,
        )  # fmt: skip
        return Trained(lag, corrected, seed, list(read_points(Path(folder, "run/metrics.jsonl"))))


def summary_table(runs: Sequence[Trained]) -> str:
    rows = []
    for lag in sorted({run.lag for run in runs}):
        row = [f"{lag}"]
        for corrected in CORRECTIONS:
            these = [run for run in runs if (run.lag, run.corrected) == (lag, corrected)]
            final = [run.final_return for run in these]
            row.append(f"{statistics.fmean(run.mean_lag for run in these):.1f}")
            row.append(f"{statistics.fmean(final):.2f} ({min(final):.2f} to {max(final):.2f})")
        rows.append(row)
    header = ["forced lag, updates"]
    for name in CORRECTIONS.values():
        header += [f"measured, {name}", f"return at the end, {name}"]
    return report.table(header, rows)


def write_csv(runs: Sequence[Trained], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["forced_lag", "corrected", "seed", "frames", "lag", "return"])
        for run in runs:
            for point in run.points:
                values = [f"{point[key]:.4g}" for key in ("lag/catch", "return/catch")]
                writer.writerow([run.lag, run.corrected, run.seed, point["frames"], *values])
    print(f"wrote {path}", flush=True)


def plot(runs: Sequence[Trained], path: Path) -> None:
    """A panel for each lag: mean over seeds, and their range."""
    from benchmarks import plots

    lags = sorted({run.lag for run in runs})
    figure, grid = plots.panels(1, len(lags), width=3.0, height=2.8)
    for lag, axes in zip(lags, grid, strict=True):
        for colour, (corrected, name) in zip(plots.COLOURS, CORRECTIONS.items(), strict=False):
            these = [run for run in runs if (run.lag, run.corrected) == (lag, corrected)]
            frames = np.array([point["frames"] for point in these[0].points]) / 1e3
            returns = np.array([[point["return/catch"] for point in run.points] for run in these])
            axes.plot(frames, returns.mean(0), color=colour, label=name)
            axes.fill_between(frames, returns.min(0), returns.max(0), color=colour, alpha=0.18)
        axes.set_title(f"{lag} updates")
        axes.set_ylim(-1.05, 1.05)
    grid[0].legend(loc="lower right", fontsize=8.5)
    figure.supxlabel("thousand frames", fontsize=9.5)
    figure.supylabel("return", fontsize=9.5)
    plots.save(figure, path)


def main() -> None:
    parser = report.parser("benchmarks.lag", __doc__)
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 10, 50, 200])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--frames", type=int, default=250_000)
    parser.add_argument("--folder", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    runs = []
    for lag in options.lags:
        for corrected, name in CORRECTIONS.items():
            for seed in options.seeds:
                run = train(lag, corrected, seed, options.frames)
                report.say(f"lag {lag}, {name}, seed {seed}: return {run.final_return:.2f}")
                runs.append(run)
    plot(runs, options.folder / "lag.png")
    write_csv(runs, options.folder / "lag.csv")
    report.write(
        options.folder / "lag.md",
        "# Policy lag",
        report.facts(report.made_here("benchmarks.lag")),
        f"`suite=catch`, {options.frames:,} frames, {len(options.seeds)} seeds: mean over seeds and"
        " the range. Returns are means of the last 100 games; a perfect agent has 1, a random one"
        " -0.6. All else is the same: *no correction* is `algorithm.agent.correct_lag=false`.",
        summary_table(runs),
        "![return against frames](lag.png)",
        "The curves: [lag.csv](lag.csv)",
    )


if __name__ == "__main__":
    main()
