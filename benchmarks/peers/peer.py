"""What a measured peer is, and how a training run of one is watched from outside.

A peer's program appends one JSON line after each of its updates to a file,
`{"time_s": ..., "frames": ..., "cpu_s": ...}`: a clock that grows, its own counter of environment
frames that it has trained on, and the processor time of all its processes so far. Rates are taken
between such lines, so that neither start-up nor a part of an update is counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

POLL_S = 1.0
START_LIMIT_S = 180.0  # to the first update
STALL_LIMIT_S = 120.0  # between two updates
FAREWELL_S = 15.0  # for a peer to end by itself before it is killed
TIDY_S = 5.0  # for its tracker of shared memory to remove what killed processes left
OUTPUT_LINES = 30  # of the peer's own output, shown when it fails


class Progress(NamedTuple):
    """A peer's counters just after an update."""

    time_s: float
    frames: int
    cpu_s: float


class Window(NamedTuple):
    """What happened between two updates."""

    steps_per_s: float
    cores_busy: float


@dataclass(frozen=True)
class PeerResult:
    """The throughput of one training run of a peer."""

    name: str
    version: str
    game: str
    network: str
    recurrent: bool
    steps_per_s: tuple[float, ...]  # agent steps trained on per second, of each window
    cores_busy: tuple[float, ...]  # processor seconds per second, of each window

    @property
    def median(self) -> float:
        """Agent steps per second; of several runs the best is `max(..., key=median)`."""
        return statistics.median(self.steps_per_s)


def split(
    progress: Sequence[Progress], *, warm_up_s: float, seconds: float, frames_per_step: int
) -> list[Window]:
    """The whole windows so far: each ends with the first update at least `seconds` after its start.

    The first starts with the first update at least `warm_up_s` after the first one of all, each
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


def watch(
    command: Sequence[str],
    *,
    seconds: float,
    windows: int,
    warm_up_s: float = 10.0,
    frames_per_step: int = 4,
) -> list[Window]:
    """Runs a peer's program until it has filled `windows` windows, then ends all its processes.

    command: gets two more arguments, the file for its progress and an empty directory for anything
             else it writes, which is also where it runs. Both are gone afterwards.
    Raises RuntimeError, with the end of the peer's output, if it stops or stands still before.
    """
    # One thread in each process: the peer has as many processes as the machine has cores.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as folder:
        progress_file, output_file = Path(folder, "progress.jsonl"), Path(folder, "output.txt")
        scratch = Path(folder, "scratch")
        scratch.mkdir()
        with output_file.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(progress_file), str(scratch)],
                cwd=scratch,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        farewell_s = 0.0
        try:
            full = _wait_for_windows(
                process,
                progress_file,
                output_file,
                seconds=seconds,
                windows=windows,
                warm_up_s=warm_up_s,
                frames_per_step=frames_per_step,
            )
            farewell_s = FAREWELL_S
            return full
        finally:
            end(process, farewell_s)


def _wait_for_windows(
    process: subprocess.Popen[bytes],
    progress_file: Path,
    output_file: Path,
    *,
    seconds: float,
    windows: int,
    warm_up_s: float,
    frames_per_step: int,
) -> list[Window]:
    updates, changed = 0, time.monotonic()
    while True:
        ended = process.poll() is not None
        progress = read(progress_file)
        full = split(
            progress, warm_up_s=warm_up_s, seconds=seconds, frames_per_step=frames_per_step
        )
        if len(full) >= windows:
            return full[:windows]
        if len(progress) > updates:
            updates, changed = len(progress), time.monotonic()
        still_s = time.monotonic() - changed
        if ended:
            reason = f"ended with exit code {process.returncode}"
        elif still_s > (STALL_LIMIT_S if updates else START_LIMIT_S):
            reason = f"stood still for {still_s:.0f} s"
        else:
            time.sleep(POLL_S)
            continue
        last_words = output_file.read_text(errors="replace").splitlines()[-OUTPUT_LINES:]
        raise RuntimeError(
            f"the peer {reason} after {updates} updates, before {windows} windows of {seconds:g} s"
            " were full. Its last words:\n" + "\n".join(last_words)
        )


def read(progress_file: Path) -> list[Progress]:
    """All whole lines of a progress file, none if there is no file yet."""
    if not progress_file.exists():
        return []
    lines = progress_file.read_text().split("\n")[:-1]  # the last may still be being written
    return [Progress(**json.loads(line)) for line in lines]


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
