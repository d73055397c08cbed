"""Whether training stays up: memory, open files, threads and shared memory of a long run.

    python -m benchmarks.soak --minutes 10

Runs `python launch.py suite=atari57` in a directory of its own, looks at all its processes every
few seconds, presses Ctrl-C, and looks at what is left. The rules of the verdict are in `judge`.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks import report
from benchmarks.training_run import (
    LAUNCH,
    end,
    exit_on_sigterm,
    family,
    is_actor,
    shared_memory,
)
from impala.loggers.json_lines import read_points

SETTLED = 0.3  # of the run: what is before is start-up and first uses
BLOCK_S = 20.0
MEMORY_LIMIT = 1.0  # MB per minute
EXIT_LIMIT_S = 5.0
SAY_EVERY_S = 30.0
KINDS = ("learner", "actors", "others")  # others: W&B's service, Python's tracker of resources


class Sample(NamedTuple):
    """All processes at one moment, by `KINDS`."""

    time_s: float
    memory_mb: tuple[float, ...]  # resident in each process, so that shared pages count in each
    open_files: tuple[int, ...]
    threads: tuple[int, ...]
    processes: tuple[int, ...]
    shared_memory: int  # entries of /dev/shm that were not there before


@dataclass(frozen=True)
class Ending:
    """What followed Ctrl-C."""

    seconds: float
    exit_code: int | None  # None: it had to be killed
    processes_left: tuple[str, ...]
    shared_memory_left: tuple[str, ...]


class Check(NamedTuple):
    name: str
    measured: str
    rule: str
    passed: bool


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Theil and Sen's: the median slope of all pairs, which a few outliers do not move.

    0 if there are fewer than two points.
    """
    points = list(zip(times, values, strict=True))
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2)]
    return statistics.median(slopes) if slopes else 0.0


def floors(
    times: Sequence[float], values: Sequence[float], block_s: float
) -> tuple[list[float], list[float]]:
    """The lowest value of each `block_s`, and when it was."""
    blocks: dict[int, tuple[float, float]] = {}
    for time_s, value in zip(times, values, strict=True):
        block = int(time_s // block_s)
        blocks[block] = min(blocks.get(block, (value, time_s)), (value, time_s))
    return [time_s for _, time_s in blocks.values()], [value for value, _ in blocks.values()]


def floor_growth(values: Sequence[int]) -> int:
    """The lowest of the last quarter less the lowest of the first: a leak raises the floor."""
    quarter = max(1, len(values) // 4)
    return min(values[-quarter:]) - min(values[:quarter])


def judge(samples: Sequence[Sample], ending: Ending) -> list[Check]:
    """The verdict, from the samples after the first `SETTLED` part of the run."""
    settled_s = SETTLED * samples[-1].time_s
    settled = [sample for sample in samples if sample.time_s >= settled_s]
    times = [sample.time_s for sample in settled]
    memory = [sum(sample.memory_mb) for sample in settled]
    growth = 60.0 * slope(*floors(times, memory, BLOCK_S))
    checks = [
        Check(
            "memory of all processes",
            f"{growth:+.2f} MB/min",
            f"grows less than {MEMORY_LIMIT:g} MB/min",
            growth < MEMORY_LIMIT,
        )
    ]
    counts: dict[str, Callable[[Sample], int]] = {
        "open files": lambda sample: sum(sample.open_files),
        # W&B's service is a Go program, whose runtime starts and keeps threads as it likes.
        "threads of learner and actors": lambda sample: sum(sample.threads[:2]),
        "processes": lambda sample: sum(sample.processes),
        "entries in /dev/shm": lambda sample: sample.shared_memory,
    }
    for name, count in counts.items():
        values = [count(sample) for sample in settled]
        change = floor_growth(values)
        text = f"{change:+d} ({min(values)} to {max(values)})"
        checks.append(Check(name, text, "lowest count does not grow", change <= 0))
    left = len(ending.processes_left), len(ending.shared_memory_left)
    return [
        *checks,
        Check(
            "exit after Ctrl-C",
            f"{ending.seconds:.1f} s",
            f"within {EXIT_LIMIT_S:g} s",
            ending.seconds <= EXIT_LIMIT_S,
        ),
        Check("exit code", str(ending.exit_code), "130", ending.exit_code == 130),
        Check("processes left", str(left[0]), "none", left[0] == 0),
        Check("entries in /dev/shm left", str(left[1]), "none", left[1] == 0),
    ]


def soak(
    overrides: Sequence[str], *, seconds: float, every_s: float, folder: Path
) -> tuple[list[Sample], Ending]:
    """Runs training in `folder` and watches it. RuntimeError if it ends by itself."""
    shared_before = shared_memory()
    output_file = folder / "output.txt"
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(LAUNCH), *overrides, f"hydra.run.dir={folder / 'run'}"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        samples: list[Sample] = []
        said_s = 0.0
        seen: set[psutil.Process] = set()
        started = time.monotonic()
        while (elapsed_s := time.monotonic() - started) < seconds:
            time.sleep(min(every_s, seconds - elapsed_s))
            if process.poll() is not None:
                words = "\n".join(output_file.read_text(errors="replace").splitlines()[-30:])
                raise RuntimeError(
                    f"training ended after {elapsed_s:.0f} s with exit code"
                    f" {process.returncode}. Its last words:\n{words}"
                )
            processes = family(process.pid)
            seen.update(processes)
            samples.append(sample(processes, time.monotonic() - started, shared_before))
            if elapsed_s - said_s >= SAY_EVERY_S:
                said_s = elapsed_s
                report.say(sample_text(samples[-1]))
        return samples, press_ctrl_c(process, seen, shared_before)
    finally:
        end(process, 0.0)


def press_ctrl_c(
    process: subprocess.Popen[bytes], seen: set[psutil.Process], shared_before: set[str]
) -> Ending:
    """As a terminal does, to the whole group; waits up to four times as long as it may take."""
    pressed = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    exit_code, left = None, seen
    while time.monotonic() - pressed < 4 * EXIT_LIMIT_S and (exit_code is None or left):
        exit_code = process.poll()
        left = {one for one in seen if one.is_running()}
        time.sleep(0.02)
    seconds = time.monotonic() - pressed
    names = tuple(sorted(f"{one.pid}" for one in left))
    return Ending(seconds, exit_code, names, tuple(sorted(shared_memory() - shared_before)))


def sample(processes: Sequence[psutil.Process], time_s: float, shared_before: set[str]) -> Sample:
    by_kind = np.zeros((4, len(KINDS)))
    for process in processes:
        try:
            with process.oneshot():
                memory_mb = process.memory_info().rss / 2**20
                counts = (memory_mb, process.num_fds(), process.num_threads(), 1)
                by_kind[:, _kind(process, processes[0])] += counts
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # it ended between being listed and being asked
    counts = (tuple(map(int, row)) for row in by_kind[1:])
    shared = len(shared_memory() - shared_before)
    return Sample(time_s, tuple(by_kind[0].tolist()), *counts, shared_memory=shared)


def sample_text(sample: Sample) -> str:
    return (
        f"{sample.time_s / 60:.1f} min: {sum(sample.memory_mb):,.0f} MB,"
        f" {sum(sample.open_files)} open files, {sum(sample.threads)} threads,"
        f" {sum(sample.processes)} processes"
    )


def _kind(process: psutil.Process, learner: psutil.Process) -> int:
    """Index into `KINDS`."""
    if process == learner:
        return 0
    return 1 if is_actor(process) else 2


def plot(samples: Sequence[Sample], path: Path) -> None:
    from benchmarks import plots

    figure, (memory, counts) = plots.panels(1, 2, width=4.6, height=3.1)
    minutes = [sample.time_s / 60 for sample in samples]
    by_kind = list(zip(*(sample.memory_mb for sample in samples), strict=True))
    memory.stackplot(minutes, by_kind, labels=KINDS, colors=plots.COLOURS, alpha=0.85, linewidth=0)
    memory.set(title="Resident memory", ylabel="MB", xlabel="minutes")
    memory.legend(loc="lower right", facecolor="white", frameon=True, framealpha=0.85)
    for name, colour in zip(("open_files", "threads", "processes"), plots.COLOURS, strict=False):
        values = [sum(getattr(sample, name)) for sample in samples]
        counts.plot(minutes, values, color=colour, label=name.replace("_", " "))
    counts.legend(loc="center right")
    counts.set(title="All processes together", xlabel="minutes")
    for axes in (memory, counts):
        axes.set_xlim(0, minutes[-1])
        axes.set_ylim(0)
        axes.margins(y=0.15)
        axes.axvline(SETTLED * minutes[-1], color=plots.FAINT, linewidth=0.9, linestyle=":")
    plots.save(figure, path)


def write(samples: Sequence[Sample], ending: Ending, frames: int, command: str, out: Path) -> bool:
    """Returns whether all checks passed."""
    checks = judge(samples, ending)
    passed = all(check.passed for check in checks)
    rows = [[c.name, c.measured, c.rule, "yes" if c.passed else "**no**"] for c in checks]
    left = ", ".join((*ending.processes_left, *ending.shared_memory_left))
    plot(samples, out.with_suffix(".png"))
    report.write(
        out,
        "# Staying up",
        report.facts(
            {
                **report.made_here("benchmarks.soak"),
                "training": f"`{command}`",
                "length": f"{samples[-1].time_s / 60:.1f} min, {frames:,} frames,"
                f" {len(samples)} samples",
                "verdict": "passed" if passed else "**failed**",
            }
        ),
        f"""\
From the samples after the first {SETTLED:.0%} of the run (the dotted line). Memory is what is
resident in all processes together, shared pages counted in each: the lowest of every
{BLOCK_S:g} s, because an update holds more for a moment, and of those the median slope of all
pairs (Theil and Sen). Counts compare the lowest in the last quarter with the lowest in the first,
because a checkpoint has files open while it is written.""",
        report.table(["check", "measured", "rule", "passed"], rows),
        f"![memory, threads and open files over time]({out.with_suffix('.png').name})",
        f"Left behind: {left}" if left else "",
    )
    return passed


def main() -> None:
    parser = report.parser("benchmarks.soak", __doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between samples")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "soak.md")
    parser.add_argument("overrides", nargs="*", default=["suite=atari57"], help="of launch.py")
    options = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        samples, ending = soak(
            options.overrides,
            seconds=60 * options.minutes,
            every_s=options.every,
            folder=folder,
        )
        points = list(read_points(folder / "run" / "metrics.jsonl"))
    if not points:
        sys.exit("benchmarks.soak: error: nothing was learned in that time: give more --minutes")
    command = " ".join(["python launch.py", *options.overrides])
    sys.exit(0 if write(samples, ending, points[-1]["frames"], command, options.out) else 1)


if __name__ == "__main__":
    main()
