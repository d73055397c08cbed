"""DMLab-30 with levels of their measured speeds: what the learner gets of each, and how old.

    python -m benchmarks.dmlab

Resets, steps and episodes take as long as was measured of the engine's 30 levels, times a scale;
what stands for the engine (tests/engine) sleeps so long. Every level has one environment, in a
process of its own. Writes outputs/benchmarks/dmlab.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.training_run import exit_on_sigterm, points_of
from suites.dmlab30 import DmLab30

ENGINE = report.ROOT / "tests" / "engine"
SLOWEST = ("skymaze_irreversible_path_hard", "skymaze_irreversible_path_varied")
MAX_LAG = 60  # updates


@dataclass(frozen=True)
class Played:
    """A run after its warm-up."""

    tasks: list[str]
    steps_per_s: float
    waiting: float  # share of the learner's time in which it had no batch
    steps: dict[str, float]  # that were learned from, by task
    points: list[dict[str, Any]]

    def lag(self, name: str) -> list[float]:
        """Of every point that has it."""
        return [point[name] for point in self.points if name in point]


def train(options: argparse.Namespace, tasks: Sequence[str], mix: str) -> Played:
    points = points_of(
        [
            "suite=dmlab30", f"suite.tasks=[{','.join(tasks)}]", "suite.dataset_path=dummy",
            "suite.level_cache=null", "network=shallow", "network/core=lstm",
            "network.feed_back=true", "algorithm.unroll_length=20", "algorithm.batch_size=8",
            f"algorithm.max_lag={MAX_LAG}", "num_actors=2", f"min_environments={len(tasks)}",
            f"actors.mix={mix}", "restarts.step_timeout_s=600", "total_frames=1_000_000_000",
        ],
        seconds=options.warm_up + options.seconds,
        environment={
            "PYTHONPATH": str(ENGINE), "DMLAB_DOUBLE_TIME_SCALE": str(options.time_scale),
        },
    )  # fmt: skip
    start_s = points[0]["time_s"] + options.warm_up
    kept = [point for point in points if point["time_s"] >= start_s]
    steps = dict.fromkeys(tasks, 0.0)
    for before, point in pairwise(kept):
        for task in tasks:
            learned = (point["frames"] - before["frames"]) / 4
            steps[task] += learned * point.get(f"share/{task}", 0.0)
    elapsed_s = kept[-1]["time_s"] - kept[0]["time_s"]
    waiting = statistics.fmean(point.get("time/learner_waiting", 0.0) for point in kept[1:])
    return Played(list(tasks), sum(steps.values()) / elapsed_s, waiting, steps, kept[1:])


def task_rows(played: Played) -> list[list[str]]:
    total = sum(played.steps.values())
    rows = []
    for task, steps in played.steps.items():
        lags, most = played.lag(f"lag/{task}"), played.lag(f"lag_max/{task}")
        seconds = played.lag(f"lag_s_max/{task}")
        dropped = sum(point.get(f"dropped/{task}", 0.0) for point in played.points)
        rows.append(
            [
                task, f"{steps / total * len(played.tasks):.3f}",
                f"{statistics.fmean(lags):.1f}" if lags else "-",
                f"{max(most):.0f}" if most else "-", f"{max(seconds):.1f}" if seconds else "-",
                f"{dropped:.0f}",
            ]
        )  # fmt: skip
    return rows


def main() -> None:
    parser = report.parser("benchmarks.dmlab", __doc__)
    parser.add_argument("--time-scale", type=float, default=0.25, help="of resets and steps")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--warm-up", type=float, default=40.0)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "dmlab.md")
    options = parser.parse_args()
    exit_on_sigterm()
    tasks = [task.name for task in DmLab30().tasks]
    runs = {}
    for name, its, mix in (
        ("without skymaze, equal_actors", [t for t in tasks if t not in SLOWEST], "equal_actors"),
        ("all 30, equal_actors", tasks, "equal_actors"),
        ("all 30, equal_frames", tasks, "equal_frames"),
    ):
        runs[name] = train(options, its, mix)
        report.say(f"{name}: {runs[name].steps_per_s:,.0f} steps/s")
    write(options, runs)


def write(options: argparse.Namespace, runs: dict[str, Played]) -> None:
    header = ["task", "share", "lag", "most", "most, s", "dropped"]
    sections = []
    for name, played in list(runs.items())[1:]:
        shares = np.array(list(played.steps.values())) / sum(played.steps.values())
        off = shares * len(played.tasks)
        sections += [
            f"## {name}",
            f"Shares are {off.min():.3f} to {off.max():.3f} of a thirtieth.",
            report.table(header, task_rows(played)),
        ]
    report.write(
        options.out,
        "# DMLab-30 with levels of their measured speeds",
        report.facts(report.made_here("benchmarks.dmlab")),
        f"""\
What stands for the engine sleeps {options.time_scale:g} times as long as resets and steps of each
level took on the engine, for episodes of the levels' own length; there is no level cache. Each of
the 30 levels has one environment in a process of its own, in two actors; the shallow network with
LSTM and instructions, unrolls of 20, batches of 8, `algorithm.max_lag={MAX_LAG}`: older unrolls
are dropped. Numbers are of {options.seconds:g} s after {options.warm_up:g} s of learning.""",
        report.table(
            ["run", "learned from, steps/s", "share of the learner's time without a batch"],
            [[n, f"{p.steps_per_s:,.0f}", f"{p.waiting:.2f}"] for n, p in runs.items()],
        ),
        "*share*: of the learner's frames, in thirtieths. *lag*, *most*: mean and greatest, in"
        " updates; in seconds. *dropped*: unrolls that were too old.",
        *sections,
    )


if __name__ == "__main__":
    main()
