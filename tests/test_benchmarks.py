"""Benchmarks: what they compute, watch and write, on made-up runs; nothing here is measured."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from benchmarks import learning, parts, report, soak, throughput, training_run
from benchmarks.learning import frames_at, read_run, thin
from benchmarks.parts import Costs, compose, ideal
from benchmarks.peers import sample_factory_peer
from benchmarks.random_play import random_returns
from benchmarks.soak import Ending, Sample, floor_growth, floors, judge, slope
from benchmarks.throughput import OURS, OURS_FLOAT32, Case, Measured
from benchmarks.training_run import Count, Program, Progress, Window, median_window, split, watch
from suites.suite import SCORE_WINDOW
from tests.counting import CountingEnv, CountingSuite

# Training runs watched from outside


def test_windows_begin_after_the_warm_up_and_end_with_an_update() -> None:
    # 400 frames a second but for the warm-up, points every 3 s, half a core busy.
    progress = [Progress(float(t), 400 * t, 0.5 * t) for t in range(3, 40, 3)]
    progress[:2] = [Progress(3.0, 0, 0.0), Progress(6.0, 4, 0.1)]
    windows = split(progress, warm_up_s=4.0, seconds=10.0, frames_per_step=4)
    # First at t=9 (the first point 4 s after t=3), then every 12 s: the first point past 10 s.
    assert windows == [Window(100.0, 0.5), Window(100.0, 0.5)]


def test_an_unfinished_window_is_none() -> None:
    progress = [Progress(0.0, 0, 0.0), Progress(1.0, 4, 1.0), Progress(10.9, 44, 9.0)]
    assert split(progress, warm_up_s=1.0, seconds=10.0, frames_per_step=4) == []


def test_the_median_window_is_of_each_column() -> None:
    windows = [Window(1.0, 0.9), Window(3.0, 0.1), Window(2.0, 0.2)]
    assert median_window(windows) == Window(2.0, 0.2)


FAKE_TRAINING = """
import json, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("points.jsonl", "w") as file:
    for second in range(0, 31, 5):
        print(json.dumps({"time_s": second, "frames": 4000 * second}), file=file, flush=True)
print("these are the last words", flush=True)
time.sleep(float(sys.argv[1]))
"""


def fake_training(seconds: float) -> Program:
    def read(folder: Path) -> list[Count]:
        file = folder / "points.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [Count(**json.loads(line)) for line in lines]

    command = [sys.executable, "-c", FAKE_TRAINING, str(seconds)]
    return Program("the fake", lambda folder: command, read, {})


def test_watching_ends_the_program_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[psutil.Process] = []
    cpu_s = training_run._cpu_s

    def remember(pid: int) -> float:
        seen.extend(training_run.family(pid))
        return cpu_s(pid)

    monkeypatch.setattr(training_run, "_cpu_s", remember)
    windows = watch(fake_training(600), seconds=10, windows=2, warm_up_s=5)
    assert [window.steps_per_s for window in windows] == [1000.0, 1000.0]
    assert len(set(seen)) == 2
    assert not [process for process in seen if process.is_running()]


def test_a_program_that_ends_too_soon_is_reported_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)the fake ended with exit code 0.*the last words"):
        watch(fake_training(0), seconds=10, windows=3, warm_up_s=5)


def test_our_training_is_launch_with_its_defaults(tmp_path: Path) -> None:
    command = training_run.our_training(["suite=catch"]).command(tmp_path)
    assert Path(command[1]).name == "launch.py" and Path(command[1]).is_file()
    cfg = compose([part for part in command[2:] if not part.startswith("hydra.")])
    assert list(cfg.loggers) == ["console"]
    default = compose(["suite=catch"])
    for key in default:
        if key not in ("loggers", "log_every_s"):
            assert cfg[key] == default[key], key


# What the parts cost


def test_the_ideal_keeps_all_cores_busy_with_the_parts() -> None:
    costs = Costs(0.5e-3, 0.1e-3, 0.4e-3)
    assert ideal(2, costs) == pytest.approx(2000.0)
    assert costs.rates == pytest.approx((2000.0, 10000.0, 2500.0))


def test_a_cost_is_processor_time_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"processor": 7.0, "wall": 0.0}

    def work() -> int:
        clock["processor"] += 0.2
        clock["wall"] += 5.0  # mostly waiting for others
        return 100

    monkeypatch.setattr(parts.time, "process_time", lambda: clock["processor"])
    monkeypatch.setattr(parts.time, "perf_counter", lambda: clock["wall"])
    assert parts.cost(work, seconds=12.0) == pytest.approx(0.2 / 100)
    assert clock["wall"] == 15.0


def test_parts_are_those_of_the_configured_run() -> None:
    cfg = compose(["suite=catch", "network/core=lstm", "num_actors=2", "device=cpu"])
    environments = parts.Environments(cfg, instantiate(cfg.suite))
    assert [len(tasks) for tasks in environments.tasks] == [16, 16]
    assert environments.step() == 32
    built = parts.Parts(cfg, environments)
    before = [p.clone() for p in built._learner.agent.parameters()]
    costs = built.measure(seconds=0.01, windows=1)
    assert all(0.0 < cost < 1.0 for cost in costs)
    assert built._act() == 16 * cfg.algorithm.unroll_length
    assert built._update() == cfg.algorithm.batch_size * cfg.algorithm.unroll_length
    assert built._batch.parts[0].steps.frame.any(), "the batch was not played"
    for parameter, value in zip(built._learner.agent.parameters(), before, strict=True):
        assert parameter.equal(value)
    environments.close()


# Throughput


def measured(games: str = "pong", *, peer: float | None = None) -> Measured:
    result = Measured(Case(games, "shallow", False), cores=2)
    result.costs = [Costs(4e-4, 2e-4, 3e-4), Costs(5e-4, 1e-4, 4e-4)]
    result.runs[OURS] = [[Window(1000.0, 1.9)] * 3, [Window(w, 1.8) for w in (5.0, 2000.0, 2e3)]]
    if peer:
        result.runs["Peer 1.0"] = [[Window(peer, 1.7)] * 3]
        result.runs[OURS_FLOAT32] = [[Window(1500.0, 2.0)] * 3]
    return result


def test_the_best_of_medians_stands_for_parts_and_loop() -> None:
    result = measured()
    assert result.best_costs == Costs(4e-4, 1e-4, 3e-4)
    assert result.ideal == pytest.approx(2500.0)
    assert result.best(OURS).steps_per_s == 2000.0
    assert result.ratio == pytest.approx(0.8)


def test_tables_say_ratios() -> None:
    row = throughput.loop_table([measured()]).splitlines()[-1]
    assert row == "| pong, shallow | 2,500 | 10,000 | 3,333 | 2,500 | 2,000 | 0.80 | 1.80 |"
    assert throughput.peer_table([measured()]) == ""
    lines = throughput.peer_table([measured("all"), measured(peer=800.0)]).splitlines()
    assert lines[0].endswith("times Peer 1.0 |")
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["2.50", "1.00", "1.88"]


def test_the_report_has_how_it_was_made_and_all_windows(tmp_path: Path) -> None:
    out = tmp_path / "throughput.md"
    options = throughput.parse(["--out", str(out), "--seconds", "7"])
    throughput.write([measured(peer=800.0)], options)
    text = out.read_text()
    for expected in ("**commit:**", "last 7 s", "1,000 1,000 1,000; 5 2,000 2,000", "Peer 1.0"):
        assert expected in text, expected


@pytest.mark.parametrize(
    ("case", "torso", "core", "tasks"),
    [
        (Case("pong", "deep", True), "Deep", "LSTM", ["pong"]),
        (Case("all", "shallow", False), "Shallow", "FeedForward", None),
    ],
)
def test_a_case_is_a_command_line(case: Case, torso: str, core: str, tasks: Any) -> None:
    cfg = compose(case.overrides)
    assert cfg.network.torso._target_.endswith("." + torso)
    assert cfg.network.core._target_.endswith("." + core)
    assert cfg.suite.tasks == tasks


def test_a_peer_plays_single_games_on_the_same_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_factory_peer, "install", lambda venv: Path("python"))
    case = Case("pong", "shallow", True)
    autocast = ["learner.autocast=true"]
    found = throughput.programs(case, autocast, cores=3, against=True)
    assert [program.name for program in found] == [OURS, "Sample Factory 2.1.1", OURS_FLOAT32]
    line = found[1].command(Path("work"))
    assert line[2:4] == ["pong", "shallow"] and "--recurrent" in line and "--workers=3" in line
    assert "learner.autocast=false" in found[2].command(Path("work"))
    off = throughput.programs(case, ["learner.autocast=false"], cores=3, against=True)
    assert len(off) == 2  # we are in float32 already
    everything = throughput.programs(Case("all", "shallow", True), autocast, cores=3, against=True)
    assert len(everything) == 1


def test_what_is_wrong_with_the_options_shows_before_anything_is_measured() -> None:
    with pytest.raises(Exception, match="did you mean pong"):
        throughput.plan(throughput.parse(["--games", "breakout,pongg"]))
    with pytest.raises(Exception, match="shalow"):
        throughput.plan(throughput.parse(["--games", "pong", "--networks", "shalow"]))


# Staying up


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


@pytest.mark.parametrize("stays", [False, True])
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
        ending = soak.press_ctrl_c(process, seen, soak._shared_memory())
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
        sample = soak.sample(processes, 3.0, soak._shared_memory())
        assert sample.processes == (1, 0, 1) and sample.time_s == 3.0
        assert sample.memory_mb[0] > 50 and sample.memory_mb[1] == 0.0
        assert sample.threads[0] >= 1 and sample.open_files[0] > 0
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert soak.sample(processes, 3.0, soak._shared_memory()).processes == (1, 0, 0)


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


# Learning


def episodes(returns: Sequence[float], task: str = "pong") -> list[dict[str, Any]]:
    return [{"frames": 10 * i, "task": task, "return": r} for i, r in enumerate(returns, start=1)]


def test_a_threshold_needs_a_full_window_of_games() -> None:
    assert SCORE_WINDOW == 100
    assert frames_at(episodes([20.0] * 99), "pong", 18.0) is None
    assert frames_at(episodes([20.0] * 100), "pong", 18.0) == 1000
    # 100 lost games, then won ones: 21n - 21(100-n) >= 1800 from the 93rd on.
    mixed = episodes([-21.0] * 100 + [21.0] * 100)
    assert frames_at(mixed, "pong", 18.0) == 10 * (100 + 93)
    assert frames_at(mixed, "breakout", 18.0) is None


def test_thinned_rows_keep_both_ends() -> None:
    assert thin(list(range(5)), 10) == [0, 1, 2, 3, 4]
    rows = thin(list(range(1001)), 5)
    assert rows == [0, 250, 500, 750, 1000]


def run_directory(path: Path, seed: int, tasks: Sequence[str], final: float) -> Path:
    (path / ".hydra").mkdir(parents=True)
    overrides = ["suite=atari57", f"suite.tasks=[{','.join(tasks)}]", f"seed={seed}"]
    OmegaConf.save(compose(overrides), path / "config.yaml")
    OmegaConf.save(OmegaConf.create(overrides), path / ".hydra" / "overrides.yaml")
    metrics = {f"return/{task}": final for task in tasks}
    metrics |= {"score/median": 50.0, "score/coverage": 1.0}
    with (path / "metrics.jsonl").open("w") as file:
        for i in range(1, 501):
            point = {"frames": 1000 * i, "updates": float(i), "time_s": 6.0 * i}
            print(json.dumps(point | metrics | {f"return/{tasks[0]}": final * i / 500}), file=file)
    with (path / "episodes.jsonl").open("w") as file:
        for episode in episodes([final] * 120, tasks[0]):
            print(json.dumps(episode), file=file)
    summary = {
        "status": "finished",
        "seed": seed,
        "frames": 500_000,
        "time_s": 3000.0,
        "games": dict.fromkeys(tasks, 120),
        "metrics": metrics,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_a_learning_report_of_two_seeds(tmp_path: Path) -> None:
    tasks = ["pong", "breakout"]
    runs = [
        read_run(run_directory(tmp_path / f"run{seed}", seed, tasks, final))
        for seed, final in ((1, 14.6), (2, -20.7))
    ]
    folder = tmp_path / "results"
    thresholds = {"pong": 10.0}
    learning.write(
        "two_games", runs, folder=folder, thresholds=thresholds, random_games=0, commit="abc"
    )
    text = (folder / "two_games.md").read_text()
    for expected in (
        "`python launch.py suite=atari57 suite.tasks=[pong,breakout] seed=1`",
        "**commit:** abc",
        "**seeds:** 1, 2",
        "**frames:** 500,000, 500,000",
        "**wall time:** 50 min, 50 min",
        "| pong at least 10, seed 1 | 1,000 | 0 min |",
        "| pong at least 10, seed 2 | not reached |  |",
        # pong: random -20.7 is 0 %, human 14.6 is 100 %
        "| pong | -20.7 | 14.6 | -3.05 (-20.7 to 14.6) | 50.0 % (0.0 % to 100.0 %) | 240 |",
        "| tasks with a score | 100 % |",
    ):
        assert expected in text, expected
    assert (folder / "two_games.png").stat().st_size > 5000
    with (folder / "two_games.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 200 and {row["seed"] for row in rows} == {"1", "2"}
    assert rows[99]["frames"] == "500000" and float(rows[99]["return/pong"]) == 14.6


def test_runs_that_cannot_be_reported_are_refused(tmp_path: Path) -> None:
    one = read_run(run_directory(tmp_path / "one", 1, ["pong"], 1.0))
    other = read_run(run_directory(tmp_path / "other", 1, ["breakout"], 1.0))
    options: dict[str, Any] = {"folder": tmp_path, "random_games": 0, "commit": None}
    with pytest.raises(ValueError, match="other tasks"):
        learning.write("x", [one, other], thresholds={}, **options)
    with pytest.raises(ValueError, match=r"breakout.*the tasks are pong"):
        learning.write("x", [one], thresholds={"breakout": 1.0}, **options)
    with pytest.raises(ValueError, match="has no summary"):
        read_run(tmp_path)


class UnevenSuite(CountingSuite):
    """Games of environment i last i + 2 steps."""

    def make(self, *arguments: Any, **options: Any) -> CountingEnv:
        environment = super().make(*arguments, **options)
        environment._length = np.arange(2, 2 + environment.num_envs)  # type: ignore[assignment]
        return environment


def test_random_play_gives_each_environment_the_same_number_of_games() -> None:
    played = random_returns(UnevenSuite(["three", "five"]), games=12, seed=0)
    two_of_each = [sum(range(1, length + 1)) for length in range(2, 10) for _ in range(2)]
    assert played == {"three": two_of_each, "five": two_of_each}


# Reports


def test_numbers_have_three_digits_that_count() -> None:
    values = (-20.7, 0.123456, 14.6, 999.6, 12850.4, -17098.1, 0.0)
    texts = ["-20.7", "0.123", "14.6", "1,000", "12,850", "-17,098", "0"]
    assert [report.number(value) for value in values] == texts


def test_a_table_refuses_a_short_row() -> None:
    assert report.table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"
    with pytest.raises(ValueError, match="the 2 cells"):
        report.table(["a", "b"], [["x"]])


def test_one_core_is_given_back() -> None:
    if not hasattr(parts.os, "sched_getaffinity"):
        pytest.skip("this system cannot tie a thread to a core")
    before = parts.os.sched_getaffinity(0)
    with parts.one_core():
        assert len(parts.os.sched_getaffinity(0)) == 1
    assert parts.os.sched_getaffinity(0) == before
