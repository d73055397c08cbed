"""The soak: its arithmetic, its verdict, and what it sees of real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import soak, training_run
from benchmarks.soak import Ending, Sample, floor_growth, floors, judge, slope


def test_slope_is_not_moved_by_an_outlier() -> None:
    times = [float(t) for t in range(10)]
    values = [5.0 + 2.0 * t for t in times]
    values[7] = 1000.0
    assert slope(times, values) == pytest.approx(2.0)
    assert slope([1.0], [1.0]) == 0.0


def test_floors_are_the_lowest_of_each_block() -> None:
    times, values = floors([0, 4, 8, 12, 16, 25], [3, 1, 2, 9, 8, 7], block_s=10)
    assert (times, values) == ([4, 16, 25], [1, 8, 7])


def test_a_floor_grows_only_by_what_stays() -> None:
    assert floor_growth([5, 9, 5, 5, 6, 5, 9, 5]) == 0
    assert floor_growth([5, 5, 5, 6, 6, 7, 7, 7]) == 2


def samples(**growth: float) -> list[Sample]:
    """Ten minutes, a sample every two seconds; the first three minutes are start-up.

    growth: for each minute, of one of the fields.
    """
    made = []
    for time_s in np.arange(2.0, 601.0, 2.0):
        minutes, started = time_s / 60, min(1.0, time_s / 170)

        def grown(name: str, level: float, minutes: float = minutes) -> Any:
            return level + growth.get(name, 0.0) * minutes

        made.append(
            Sample(
                time_s=float(time_s),
                # An update holds 30 MB for a moment, W&B's service starts threads as it likes.
                memory_mb=(
                    grown("memory_mb", 500 * started) + 30 * (time_s % 3 < 1),
                    900 * started,
                    50.0,
                ),
                open_files=(int(grown("open_files", 30)) + (time_s % 60 < 2), 40, 10),
                threads=(int(grown("threads", 20)), 40, int(minutes)),
                processes=(1, int(grown("processes", 2)), 1),
                shared_memory=int(grown("shared_memory", 0)),
            )
        )
    return made


GOOD = Ending(seconds=1.2, exit_code=130, processes_left=(), shared_memory_left=())


def failed(checks: Sequence[soak.Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def test_a_steady_run_passes() -> None:
    assert failed(judge(samples(memory_mb=0.5), GOOD)) == []


@pytest.mark.parametrize(
    ("growth", "name"),
    [
        ({"memory_mb": 1.5}, "memory of all processes"),
        ({"open_files": 0.5}, "open files"),
        ({"threads": 0.5}, "threads of learner and actors"),
        ({"processes": 0.5}, "processes"),
        ({"shared_memory": 0.5}, "entries in /dev/shm"),
    ],
)
def test_each_leak_fails_its_own_check(growth: dict[str, float], name: str) -> None:
    assert failed(judge(samples(**growth), GOOD)) == [name]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seconds": 5.1}, "exit after Ctrl-C"),
        ({"exit_code": None}, "exit code"),
        ({"processes_left": ("12",)}, "processes left"),
        ({"shared_memory_left": ("sem.x",)}, "entries in /dev/shm left"),
    ],
)
def test_each_bad_ending_fails_its_own_check(change: dict[str, Any], name: str) -> None:
    ending = Ending(**{**GOOD.__dict__, **change})
    assert failed(judge(samples(), ending)) == [name]


INTERRUPTIBLE = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
child = (
    f"import signal, time; signal.signal(signal.SIGINT, signal.{sys.argv[1]});"
    " print('ready', flush=True); time.sleep(600)"
)
subprocess.Popen([sys.executable, "-c", child])
time.sleep(600)
"""


@pytest.mark.parametrize("stays", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_ctrl_c_leaves_behind_is_seen(monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    monkeypatch.setattr(soak, "EXIT_LIMIT_S", 0.3 if stays else 15.0)
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "SIG_IGN" if stays else "SIG_DFL"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        seen = set(training_run.family(process.pid))
        assert len(seen) == 2
        ending = soak.press_ctrl_c(process, seen, soak.shared_memory())
        child = next(str(one.pid) for one in seen if one.pid != process.pid)
        assert ending.processes_left == ((child,) if stays else ())
        assert stays or ending.exit_code == 130
    finally:
        training_run.end(process, 0.0)
        assert process.stdout is not None
        process.stdout.close()


def test_a_sample_knows_learner_and_others() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        processes = [psutil.Process(), psutil.Process(process.pid)]
        sample = soak.sample(processes, 3.0, soak.shared_memory())
        assert sample.processes == (1, 0, 1) and sample.time_s == 3.0
        assert sample.memory_mb[0] > 50 and sample.memory_mb[1] == 0.0
        assert sample.threads[0] >= 1 and sample.open_files[0] > 0
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert soak.sample(processes, 3.0, soak.shared_memory()).processes == (1, 0, 0)


def test_the_soak_report_says_what_failed(tmp_path: Path) -> None:
    out = tmp_path / "soak.md"
    assert soak.write(samples(), GOOD, 12345, "python launch.py suite=atari57", out)
    assert "**verdict:** passed" in out.read_text() and "12,345 frames" in out.read_text()
    assert out.with_suffix(".png").stat().st_size > 5000
    left = Ending(1.0, 130, ("4711",), ())
    assert not soak.write(samples(), left, 12345, "python launch.py suite=atari57", out)
    text = out.read_text()
    assert "**verdict:** **failed**" in text and "Left behind: 4711" in text
    assert "| processes left | 1 | none | **no** |" in text
