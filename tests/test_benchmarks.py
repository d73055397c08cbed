"""Benchmarks: what they compute, watch and write, on made-up runs; nothing here is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from hydra.utils import instantiate

from benchmarks import beside, lag, parts, report, throughput, training_run
from benchmarks.parts import Costs, compose, ideal
from benchmarks.peers import sample_factory_peer
from benchmarks.throughput import OURS, OURS_FLOAT32, Case, Measured
from benchmarks.training_run import Count, Program, Progress, Window, median_window, split, watch

# Training runs watched from outside


def test_windows_begin_after_the_warm_up_and_end_with_an_update() -> None:
    # 400 frames a second but for the warm-up, points every 3 s, half a core busy.
    progress = [Progress(float(t), 400 * t, 0.5 * t) for t in range(3, 40, 3)]
    progress[:2] = [Progress(3.0, 0, 0.0), Progress(6.0, 4, 0.1)]
    windows = split(progress, warm_up_s=4.0, seconds=10.0, frames_per_step=4)
    # First at t=9 (the first point 4 s after t=3), then every 12 s: the first point past 10 s.
    assert windows == [Window(100.0, 0.5), Window(100.0, 0.5)]


def test_a_pause_is_between_two_updates_of_a_window() -> None:
    times = [0.0, 9.0, 10.0, 11.0, 14.0, 20.0, 21.0, 30.0, 31.0]
    points = [{"time_s": t, "frames": 400 * t} for t in times]
    assert beside.split(points, 10.0, 10.0, 2) == [(100.0, 6.0), (100.0, 9.0)]
    with pytest.raises(RuntimeError, match="nothing was learned in window 1"):
        beside.split(points, 21.0, 10.0, 2)


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


TERMINATED = """
import sys
from benchmarks.training_run import exit_on_sigterm, watch
from tests.test_benchmarks import fake_training
exit_on_sigterm()
program = fake_training(600)
def read(folder):
    found = program.read(folder)
    if found:
        print(folder, flush=True)
    return found
watch(type(program)("x", program.command, read, {}), seconds=10, windows=9)
"""


@pytest.mark.slow
def test_a_terminated_benchmark_ends_what_it_watches() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINATED], cwd=report.ROOT, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        folder = process.stdout.readline().strip()
        watched = training_run.family(process.pid)[1:]
        process.terminate()
        process.stdout.read()
    left = [one for one in watched if one.is_running()]
    for one in left:
        one.kill()
    assert process.returncode == 143
    assert len(watched) == 2 and not left
    assert not Path(folder).exists()


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


def test_one_core_is_given_back() -> None:
    if not hasattr(parts.os, "sched_getaffinity"):
        pytest.skip("this system cannot tie a thread to a core")
    before = parts.os.sched_getaffinity(0)
    with parts.one_core():
        assert len(parts.os.sched_getaffinity(0)) == 1
    assert parts.os.sched_getaffinity(0) == before


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


# Reports


def test_numbers_have_three_digits_that_count() -> None:
    values = (-20.7, 0.123456, 14.6, 999.6, 12850.4, -17098.1, 0.0)
    texts = ["-20.7", "0.123", "14.6", "1,000", "12,850", "-17,098", "0"]
    assert [report.number(value) for value in values] == texts


def test_a_table_refuses_a_short_row() -> None:
    assert report.table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"
    with pytest.raises(ValueError, match="the 2 cells"):
        report.table(["a", "b"], [["x"]])


# Forced lag


@pytest.mark.slow
@pytest.mark.parametrize("updates", [0, 3])
def test_forced_lag_is_exact(updates: int) -> None:
    """From the update on that has as many before it; the first ones cannot be as late."""
    run = lag.train(updates, corrected=False, seed=1, frames=20_000)
    assert run.points[-1]["updates"] > 20
    assert {point["lag_max/catch"] for point in run.points[10:]} == {float(updates)}
    assert run.mean_lag == updates
    assert run.points[-1]["vtrace/rho_clipped"] == 0.0
