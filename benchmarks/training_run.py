"""A training program, ours or a peer's, run as its users run it and watched from outside.

Rates are taken between the points at which the program itself says how many frames it has learned
from, so that neither start-up nor a part of an update is counted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from impala.loggers.json_lines import read_points

LAUNCH = Path(__file__).resolve().parents[1] / "launch.py"
SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.25
START_LIMIT_S = 300.0  # to the first update
STALL_LIMIT_S = 120.0  # between two updates
FAREWELL_S = 15.0  # for a program to end by itself before it is killed
TIDY_S = 5.0  # for its tracker of shared memory to remove what killed processes left
OUTPUT_LINES = 30  # of the program's own output, shown when it fails


class Count(NamedTuple):
    """What a program says of itself: frames learned from so far, on a clock that grows."""

    time_s: float
    frames: int


class Progress(NamedTuple):
    time_s: float
    frames: int
    cpu_s: float  # processor time of all its processes so far


class Window(NamedTuple):
    """What happened between two updates."""

    steps_per_s: float  # agent steps learned from
    cores_busy: float


@dataclass(frozen=True)
class Program:
    """command: given an empty directory, where it may write and where it runs, the command line.
    read: given the same directory, what the program has said so far.
    environment: variables beside those of this process.
    """

    name: str
    command: Callable[[Path], Sequence[str]]
    read: Callable[[Path], list[Count]]
    environment: Mapping[str, str]


def our_training(overrides: Sequence[str], name: str = "this project") -> Program:
    """`launch.py` with its defaults and these overrides, but for what it reports and to whom.

    A point of its metrics each second, because rates are taken between them.
    """

    def command(folder: Path) -> list[str]:
        own = ["loggers=[console]", "log_every_s=1", f"hydra.run.dir={folder / 'run'}"]
        return [sys.executable, str(LAUNCH), *overrides, *own]

    def read(folder: Path) -> list[Count]:
        points = read_points(folder / "run" / "metrics.jsonl")
        return [Count(point["time_s"], point["frames"]) for point in points]

    return Program(name, command, read, {})


def split(
    progress: Sequence[Progress], *, warm_up_s: float, seconds: float, frames_per_step: int
) -> list[Window]:
    """The whole windows so far: each ends with the first point at least `seconds` after its start.

    The first starts with the first point at least `warm_up_s` after the first one of all, each
    further one where the last has ended.
    """
    windows: list[Window] = []
    start = None
    for point in progress:
        if start is None:
            if point.time_s - progress[0].time_s >= warm_up_s:
                start = point
        elif (elapsed_s := point.time_s - start.time_s) >= seconds:
            steps = (point.frames - start.frames) / frames_per_step
            cores = (point.cpu_s - start.cpu_s) / elapsed_s
            windows.append(Window(steps / elapsed_s, cores))
            start = point
    return windows


def median_window(windows: Sequence[Window]) -> Window:
    return Window(*(statistics.median(column) for column in zip(*windows, strict=True)))


def watch(
    program: Program,
    *,
    seconds: float,
    windows: int,
    warm_up_s: float = 10.0,
    frames_per_step: int = 4,
) -> list[Window]:
    """Runs a program until it has filled `windows` windows, then ends all its processes.

    Raises RuntimeError, with the end of the program's output, if it stops or stands still before.
    """
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {"PYTHONUNBUFFERED": "1", **program.environment}
    with tempfile.TemporaryDirectory(prefix="training-", ignore_cleanup_errors=True) as parent:
        output_file, folder = Path(parent, "output.txt"), Path(parent, "work")
        folder.mkdir()
        with output_file.open("wb") as output:
            process = subprocess.Popen(
                list(program.command(folder)),
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        farewell_s = 0.0
        try:
            progress: list[Progress] = []
            changed = time.monotonic()
            while True:
                code = process.poll()
                if points := program.read(folder)[len(progress) :]:
                    cpu_s = _cpu_s(process.pid)
                    progress += [Progress(*point, cpu_s) for point in points]
                    changed = time.monotonic()
                full = split(
                    progress, warm_up_s=warm_up_s, seconds=seconds, frames_per_step=frames_per_step
                )
                if len(full) >= windows:
                    farewell_s = FAREWELL_S
                    return full[:windows]
                if problem := _problem(code, bool(progress), time.monotonic() - changed):
                    words = output_file.read_text(errors="replace").splitlines()[-OUTPUT_LINES:]
                    raise RuntimeError(
                        f"{program.name} {problem} with {len(full)} of {windows} windows of"
                        f" {seconds:g} s full. Its last words:\n" + "\n".join(words)
                    )
                time.sleep(POLL_S)
        finally:
            end(process, farewell_s)


def points_of(
    overrides: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None,
    run: Path | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The points, one a second, that `launch.py` logs until `seconds` after the first of them.

    environment: variables beside those of this process.
    run: its directory, kept; None: it is removed.
    Raises RuntimeError, with the end of the program's output, if it stops before.
    """
    with tempfile.TemporaryDirectory(prefix="training-", ignore_cleanup_errors=True) as folder:
        run, output_file = run or Path(folder, "run"), Path(folder, "output.txt")
        own = ["loggers=[]", "log_every_s=1", f"hydra.run.dir={run}"]
        with output_file.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(LAUNCH), *overrides, *own],
                cwd=LAUNCH.parent, env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        try:
            points: list[dict[str, Any]] = []
            while not points or points[-1]["time_s"] < points[0]["time_s"] + seconds:
                if process.poll() is not None:
                    words = output_file.read_text(errors="replace").splitlines()[-OUTPUT_LINES:]
                    raise RuntimeError(
                        f"launch.py {' '.join(overrides)} ended with exit code"
                        f" {process.returncode}. Its last words:\n" + "\n".join(words)
                    )
                time.sleep(1.0)
                points = list(read_points(run / "metrics.jsonl"))
            return points
        finally:
            end(process, FAREWELL_S)


def _problem(code: int | None, started: bool, still_s: float) -> str | None:
    if code is not None:
        return f"ended with exit code {code}"
    if still_s > (STALL_LIMIT_S if started else START_LIMIT_S):
        return f"stood still for {still_s:.0f} s"
    return None


def exit_on_sigterm() -> None:
    """As on Ctrl-C, whatever is being watched is ended first: it is in a group of its own."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants; an empty list once it has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_actor(process: psutil.Process) -> bool:
    """Whether it is a child that plays, and not the tracker of multiprocessing or W&B's service."""
    return "--multiprocessing-fork" in process.cmdline()


def shared_memory() -> set[str]:
    """The entries of /dev/shm."""
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _cpu_s(pid: int) -> float:
    spent_s = 0.0
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            spent_s += times.user + times.system
    return spent_s


def end(process: subprocess.Popen[bytes], farewell_s: float) -> None:
    """Ends a program that leads a process group, and whatever it started in that group.

    It is asked first (SIGTERM), and killed if it has not ended `farewell_s` later.
    """
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(farewell_s)
        process.kill()
        process.wait()
        # Python's tracker of shared memory ignores this signal, and tidies up after the others.
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + TIDY_S
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)  # raises once the group is empty
            time.sleep(0.05)
    except ProcessLookupError:
        return
    finally:  # also when Ctrl-C comes again
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
