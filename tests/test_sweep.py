"""`python launch.py -m ...`: many jobs, each as good as a command of its own."""

import csv
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from omegaconf import OmegaConf

import launch
from sweep import JobState, accelerator_for, accelerators, named_jobs, read_state, write_state
from tests.test_launch import LAUNCH, TINY, UPDATE, contents, folder, points, run

__all__ = ["folder"]  # a fixture, for every test
SMALL = (*TINY, f"total_frames={2 * UPDATE}", f"log_every_frames={UPDATE}")
PARALLEL = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")


def the_sweep(folder):
    return max((folder / "multirun").iterdir())


def summary(sweep):
    with (sweep / "summary.csv").open() as file:
        return list(csv.DictReader(file))


def states(sweep):
    return [row["state"] for row in summary(sweep)]


def steady(run_dir):
    """What a run measured that does not depend on the machine's speed."""
    varying = ("time", "rate/", "memory/", "lag_s", "step_s/")
    return [
        {key: value for key, value in point.items() if not key.startswith(varying)}
        for point in points(run_dir)
    ]


def process_state():
    """What one job could leave to the next."""
    return {
        "children": {child.pid for child in psutil.Process().children() if child.is_running()},
        "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in open_files()),
        "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
        "handlers": [type(handler) for handler in logging.root.handlers],
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.initial_seed()),
        "torch": (torch.get_rng_state().tolist(), torch.get_num_threads()),
        "environment": dict(os.environ),
        "exit": (sys.exit, sys.excepthook),
    }


def open_files():
    """Without those of the log, of which each job has its own, and of this very listing."""
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if os.path.exists(path) and not os.readlink(path).endswith(("/fd", "train.log")):
            yield fd


@pytest.mark.slow
def test_jobs_leave_nothing_to_each_other(folder, monkeypatch):
    found = []
    alone = launch.run_alone

    def recorded(cfg):
        found.append(process_state())
        return alone(cfg)

    monkeypatch.setattr(launch, "run_alone", recorded)
    given = [*SMALL, "transport=shared_memory,in_process", "loggers=[weights_and_biases]"]
    ran = run("-m", *given, "seed=1,2")
    assert (ran.code, ran.err) == (0, "")
    sweep = the_sweep(folder)
    assert states(sweep) == ["finished"] * 4
    assert ran.out.index("sweep of 4 jobs") < ran.out.index("job 0 of 4: transport=shared_memory")
    # The first may start what stays: the resource tracker of multiprocessing, W&B's settings.
    for state in found[2:]:
        for key, value in state.items():
            assert value == found[1][key], key
    for key in ("signals", "random", "torch", "environment", "exit"):
        assert found[1][key] == found[0][key], key

    names = [f"transport={t} seed={s}" for t in ("shared_memory", "in_process") for s in (1, 2)]
    ids = set()
    for job, name in enumerate(names):
        config = OmegaConf.load(sweep / str(job) / "config.yaml")
        assert config.loggers.weights_and_biases.group == sweep.name
        (file,) = (sweep / str(job)).glob("wandb/offline-run-*/*.wandb")
        assert name.encode() in file.read_bytes() and sweep.name.encode() in file.read_bytes()
        ids.add(json.loads((sweep / str(job) / "wandb_run.json").read_text())["id"])
        assert f"job {job} of 4: {name}" in (sweep / str(job) / "train.log").read_text()
    assert len(ids) == 4


def test_three_jobs_are_three_commands_bit_for_bit(folder):
    assert run("-m", *SMALL, "seed=1,2,3").code == 0
    sweep = the_sweep(folder)
    for job, seed in enumerate((1, 2, 3)):
        assert run(*SMALL, f"seed={seed}").code == 0
        alone = (folder / "outputs/catch/impala/latest").resolve()
        assert steady(alone) == steady(sweep / str(job))
        assert len(steady(alone)) == 2
        episodes = (alone / "episodes.jsonl").read_bytes()
        assert episodes == (sweep / str(job) / "episodes.jsonl").read_bytes()
        score = json.loads((alone / "summary.json").read_text())["score"]
        assert float(summary(sweep)[job]["score"]) == pytest.approx(score)
    # Their checkpoints can be played by a sweep as well.
    ran = run(
        "-m", f"resume={sweep / '0'},{sweep / '1'}", "mode=evaluate", "evaluation.games=1",
        "evaluation.num_workers=1",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    rows = summary(the_sweep(folder))
    assert [row["state"] for row in rows] == ["finished"] * 2
    assert [row["directory"] for row in rows] == [
        str((sweep / job).relative_to(folder)) for job in "01"
    ]
    assert len(list((sweep / "1/evaluation").glob("*.json"))) == 1


def failing(monkeypatch, failure):
    """The run with seed=2 fails so, when it is to train."""
    build = launch.build_training

    def build_failing(cfg, run_dir):
        built = build(cfg, run_dir)
        return built if cfg.seed != 2 else failure

    monkeypatch.setattr(launch, "build_training", build_failing)


def test_a_job_that_fails_is_reported_and_can_be_run_again(folder):
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, lambda: 1 / 0)
        ran = run("-m", *SMALL, "seed=1,2,3", "sweep.on_error=stop")
    sweep = the_sweep(folder)
    assert ran.code == 1
    assert states(sweep) == ["finished", "failed", "not run"]
    assert "not run: job 2" in ran.out and not (sweep / "2").exists()
    assert "of 3 jobs did not finish" in ran.err.splitlines()[-1]
    error = "job 1 (seed=2) failed: ZeroDivisionError: division by zero; its log is"
    assert error in ran.out
    log = (sweep / "1/train.log").read_text()
    assert "Traceback" in log and "return built if" not in log and error in log
    assert "ZeroDivisionError" not in (sweep / "0/train.log").read_text()
    assert summary(sweep)[1]["error"] == "ZeroDivisionError: division by zero"
    before = contents(sweep / "0")
    assert f"go on with: python launch.py -m sweep.resume={sweep.relative_to(folder)}" in ran.out

    ran = run("-m", f"sweep.resume={sweep}")
    assert (ran.code, ran.err) == (0, "")
    assert states(sweep) == ["finished"] * 3
    assert contents(sweep / "0") == before
    assert len(points(sweep / "1")) == 2


def test_a_job_that_cannot_be_built_does_not_stop_the_others(folder, monkeypatch):
    def refuse(self):
        if self.spec.frame_shape[1] == 7:
            raise ValueError("7 rows cannot be played here")

    monkeypatch.setattr("suites.catch.Catch.check", refuse)
    ran = run("-m", *SMALL, "suite.rows=7,9")  # sweep.on_error=continue
    assert (ran.code, states(the_sweep(folder))) == (1, ["failed", "finished"])
    assert ran.out.index("job 0 (suite.rows=7) failed: 7 rows") < ran.out.index("job 1 of 2")
    assert "7 rows cannot be played here" in summary(the_sweep(folder))[0]["error"]


def test_a_signal_says_which_jobs_were_not_run(monkeypatch, folder):
    failing(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    ran = run("-m", *SMALL, "seed=1,2,3,4")
    assert ran.code == 128 + signal.SIGTERM
    assert states(the_sweep(folder)) == ["finished", "interrupted", "not run", "not run"]
    assert "not run: jobs 2, 3" in ran.out
    assert summary(the_sweep(folder))[1]["error"] == "stopped by SIGTERM"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["seed=1,x"], "job 1 (seed=x): seed=x: expected a whole number, at least 0"),
        (["sed=1,2"], "unknown key 'sed': did you mean seed?"),
        (["suite=catch,catchh"], "suite=catchh: there is no such choice, did you mean catch?"),
        (["algorithm.optimizer.lr=interval(1,2)"], "lr=interval(1,2): has no list of values"),
        (["sweep.on_error=no", "seed=1,2"], "sweep.on_error=no: expected continue or stop"),
        (["sweep.on_error=stop,continue"], "expected one value, for the whole sweep"),
        (
            ["suite=atari57", "suite.tasks=[pong],[brekout]"],
            "job 1 (suite.tasks=[brekout]): 'brekout' is no game of atari57; did you mean breakout",
        ),
        (
            ["seed=1", "suite.rows=9,1"],
            "job 1 (suite.rows=1): rows=1, columns=5: expected",
        ),
        (["seed=range(1,1)"], "seed=range(1,1): there are no values, and so there is no job"),
        (["seed=1,2", "hydra.sweep.dir=/dev/null"], "expected a directory, and it is a file"),
        (["seed=1,2", "hydra.sweep.subdir=x"], "the directory of a job is its number"),
        (["sweep.resume=nowhere"], "sweep.resume=nowhere: expected the directory of a sweep"),
        (["resume=a,b"], "job 0 (resume=a): resume=a: expected the directory of a run"),
        (["mode=evaluate", "seed=1,2"], "mode=evaluate needs resume=<run directory>"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(arguments, expected, folder):
    ran = run("-m", *(() if "suite" in arguments[0] else TINY), *arguments)
    assert ran.code == 2
    assert expected in ran.error
    assert list(folder.iterdir()) == []


def test_one_program_runs_a_sweep_and_one_run_has_none(folder):
    assert run("-m", *SMALL, "seed=1").code == 0
    sweep = the_sweep(folder)
    assert "add -m" in run(*SMALL, f"sweep.resume={sweep}").error
    write_state(sweep / "0", replace(read_state(sweep / "0"), state="running"))
    assert f"job 0 of multirun/{sweep.name} is running" in run("-m", f"sweep.resume={sweep}").error
    write_state(sweep / "0", replace(read_state(sweep / "0"), state="interrupted"))
    with launch.claimed(sweep):
        assert "stop that first" in run("-m", f"sweep.resume={sweep}").error


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on(folder):
    process = subprocess.Popen(
        [sys.executable, LAUNCH, "-m", *TINY, "checkpoint.every_s=0.05", "log_every_frames=200",
         "total_frames=40,3000,60"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    job = "multirun/*/1/"
    wait_for(
        lambda: any(points(path.parent) for path in folder.glob(f"{job}/metrics.jsonl")), process
    )
    process.kill()
    process.wait()
    sweep = the_sweep(folder)
    assert states(sweep) == ["finished", "running", "not run"]  # as it was left
    assert read_state(sweep / "1").state == "killed"
    before = contents(sweep / "0")
    ran = run("-m", f"sweep.resume={sweep}", "checkpoint.every_s=60")
    assert (ran.code, ran.err) == (0, "")
    assert states(sweep) == ["finished"] * 3
    assert contents(sweep / "0") == before
    frames = [point["frames"] for point in points(sweep / "1")]
    assert sorted(set(frames)) == frames and frames[-1] == 3_000
    assert "loaded" in (sweep / "1/train.log").read_text()
    assert "loaded" not in (sweep / "2/train.log").read_text()


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["none", "SIGINT", "SIGKILL", "a job's SIGKILL"])
def test_parallel_jobs(end, folder):
    frames = 40_000 if end == "none" else 150_000
    command = [sys.executable, str(LAUNCH), "-m", "suite=catch", "loggers=[console]"]
    command += ["num_actors=1", "log_every_s=0.5", f"total_frames={frames}", "seed=1,2,3"]
    output = (folder / "output").open("w+")
    process = subprocess.Popen(
        [*command, *PARALLEL], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    children = []
    if end != "none":
        wait_for(
            lambda: all([*folder.glob(f"multirun/*/{n}/episodes.jsonl")] for n in "01"), process
        )
        wait_for(lambda: states(the_sweep(folder))[:2] == ["running"] * 2, process)
        children = psutil.Process(process.pid).children(recursive=True)
        victim = read_state(the_sweep(folder) / "1").pid
        if end == "a job's SIGKILL":
            os.kill(victim, signal.SIGKILL)
        else:  # of a terminal to all, a kill to one
            send = os.killpg if end == "SIGINT" else os.kill
            send(process.pid, signal.Signals[end])
    code = process.wait(timeout=200)
    assert not psutil.wait_procs(children, timeout=60)[1]
    sweep = the_sweep(folder)
    output.seek(0)
    text = output.read()
    now = [read_state(sweep / job).state for job in "012"]
    if end == "none":
        assert (code, now) == (0, ["finished"] * 3), text
        assert "job 0: " in text and "job 2: finished at" in text
        return
    expected = {
        "SIGINT": (130, ["interrupted", "interrupted", "not run"]),
        "SIGKILL": (-9, ["killed", "killed", "not run"]),
        "a job's SIGKILL": (1, ["finished", "killed", "finished"]),
    }[end]
    assert (code, now) == expected, text
    assert run("-m", f"sweep.resume={sweep}", "total_frames=2_000").code == 0
    assert states(sweep) == ["finished"] * 3


# Pure functions


def test_jobs_are_named_by_what_sets_them_apart():
    jobs = named_jobs([("suite=catch", "seed=1", "a=x"), ("suite=catch", "seed=2", "a=x")])
    assert [job.name for job in jobs] == ["seed=1", "seed=2"]
    assert [job.number for job in jobs] == [0, 1]
    assert named_jobs([("suite=catch", "seed=1")])[0].name == "suite=catch seed=1"
    assert named_jobs([()])[0].name == "0"


def test_a_process_has_an_accelerator_of_its_own():
    assert accelerators(None, 3) == ["0", "1", "2"]
    assert accelerators("2,GPU-5a", 2) == ["2", "GPU-5a"]
    assert accelerators("", 0) == []
    here = JobState("running", host=socket.gethostname(), pid=os.getpid(), accelerator="1")
    names = ["0", "1"]
    other = os.getppid()
    assert accelerator_for(5, names, []) == "0"
    assert accelerator_for(os.getpid(), names, [here]) == "1"  # its own, also for its next job
    assert accelerator_for(5, names, [replace(here, accelerator="0")]) == "1"
    full = [here, replace(here, pid=other, accelerator="0", state="finished")]
    assert accelerator_for(5, names, full) == "0"  # both are taken
    assert accelerator_for(5, names, [replace(here, accelerator="0", host="other")]) == "0"


def test_a_job_whose_process_has_ended_was_killed(folder):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    state = JobState("running", host=socket.gethostname(), pid=ended.pid)
    write_state(folder, state)
    assert read_state(folder).state == "killed"
    write_state(folder, replace(state, host="another"))  # nobody here can know
    assert read_state(folder).state == "running"
    (folder / "job.json").write_text("{")
    with pytest.raises(ValueError, match=r"job\.json is damaged"):
        read_state(folder)
