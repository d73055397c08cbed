"""What evaluation beside training costs the training: its rate, and its longest pause.

    python -m benchmarks.beside

Trains with and without an evaluation under way, in turns. Writes outputs/benchmarks/beside.md.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.training_run import exit_on_sigterm, points_of
from building import NICENESS

EVERY_FRAMES = 200_000  # a checkpoint and a copy of the weights; the next evaluation waits
GAMES = 1_000  # of each task: the first evaluation is still under way at the end
CASES = {
    "pong, shallow": ["suite.tasks=[pong]"],
    "all 57 games, shallow": [],
}


class Window(NamedTuple):
    """Of a part of a run."""

    steps_per_s: float  # agent steps learned from
    longest_s: float  # between two updates


class Ran(NamedTuple):
    """A run and the games, and agent steps, that were evaluated beside it."""

    windows: list[Window]
    games: int
    steps: float
    seconds: float

    @property
    def steps_per_s(self) -> float:
        return statistics.median(window.steps_per_s for window in self.windows)

    @property
    def longest_s(self) -> float:
        return max(window.longest_s for window in self.windows)


def train(
    overrides: Sequence[str], *, evaluated: bool, warm_up_s: float, seconds: float, windows: int
) -> Ran:
    own = ["suite=atari57", "total_frames=1_000_000_000", "log_every_frames=1"]  # each update
    if evaluated:
        own += [f"evaluation.every_frames={EVERY_FRAMES}", f"evaluation.games={GAMES}"]
    with tempfile.TemporaryDirectory(prefix="beside-") as folder:
        run = Path(folder, "run")
        points = points_of([*own, *overrides], seconds=warm_up_s + windows * seconds, run=run)
        lengths = evaluated_lengths(run)
    return Ran(
        split(points, warm_up_s, seconds, windows), len(lengths), sum(lengths) / 4,
        points[-1]["time_s"] - points[0]["time_s"],
    )  # fmt: skip


def split(
    points: Sequence[dict[str, Any]], warm_up_s: float, seconds: float, windows: int
) -> list[Window]:
    start_s = points[0]["time_s"] + warm_up_s
    found = []
    for window in range(windows):
        low, high = start_s + window * seconds, start_s + (window + 1) * seconds
        pairs = [(a, b) for a, b in pairwise(points) if low <= a["time_s"] < high]
        if not pairs:
            raise RuntimeError(f"nothing was learned in window {window}, {low} to {high} s")
        first, last = pairs[0][0], pairs[-1][1]
        rate = (last["frames"] - first["frames"]) / 4 / (last["time_s"] - first["time_s"])
        found.append(Window(rate, max(b["time_s"] - a["time_s"] for a, b in pairs)))
    return found


def evaluated_lengths(run: Path) -> list[int]:
    """Frames of each game that was evaluated, of an evaluation that is not finished."""
    lengths: list[int] = []
    for path in run.glob("evaluation/*.games.jsonl"):
        for line in path.read_text().splitlines()[1:]:
            lengths += json.loads(line)["lengths"]
    return lengths


def main() -> None:
    parser = report.parser("benchmarks.beside", __doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--warm-up", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=2, help="of each case, in turns")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=report.RESULTS / "beside.md")
    options = parser.parse_args()
    exit_on_sigterm()
    times = {"warm_up_s": options.warm_up, "seconds": options.seconds, "windows": options.windows}
    rows = []
    for case in options.cases:
        ran: dict[bool, list[Ran]] = {False: [], True: []}
        for _ in range(options.rounds):  # in turns: the machine's own speed changes by the minute
            for evaluated, runs in ran.items():
                runs.append(train(CASES[case], evaluated=evaluated, **times))
                report.say(
                    f"{case}, {'with' if evaluated else 'without'}: {runs[-1].steps_per_s:,.0f}"
                    f" steps/s, longest pause {runs[-1].longest_s:.2f} s, {runs[-1].games} games"
                )
        without, beside = (max(run.steps_per_s for run in ran[key]) for key in (False, True))
        pauses = (max(run.longest_s for run in ran[key]) for key in (False, True))
        seconds = sum(run.seconds for run in ran[True])
        rows.append(
            [
                case, f"{without:,.0f}", f"{beside:,.0f}", f"{beside / without:.2f}",
                *(f"{pause:.2f}" for pause in pauses),
                f"{sum(run.steps for run in ran[True]) / seconds:,.0f}",
                f"{60 * sum(run.games for run in ran[True]) / seconds:.1f}",
            ]
        )  # fmt: skip
    report.write(
        options.out,
        "# Evaluation beside training",
        report.facts(report.made_here("benchmarks.beside")),
        f"Training with its defaults, without and with an evaluation that is under way all the time"
        f" (one process that gives way to training, niceness {NICENESS}); every"
        f" {EVERY_FRAMES:,} frames a checkpoint is written and the weights are copied for the next"
        f" one. Rates are agent steps/s, the best of {options.rounds} medians over"
        f" {options.windows} windows of"
        f" {options.seconds:g} s; *pause*: the longest time between two updates in all windows;"
        " *evaluated*: of games that are finished.",
        report.table(
            ["case", "without, steps/s", "with, steps/s", "ratio", "pause without, s",
             "pause with, s", "evaluated, steps/s", "games/min"],
            rows,
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
