"""A job of a parallel launcher: whatever ends it, the launcher's process lives and says how."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import supervisor
from impala.population_directory import PopulationDirectory, Record
from sweep import Job, JobState, Sweep, read_state, write_state


def that_finishes(outcome, cfg, hydra_cfg, again):
    outcome.send((cfg.score + again, None))


def that_fails(outcome, cfg, hydra_cfg, again):
    outcome.send((None, "job 1 failed: boom"))
    os._exit(1)


def that_is_killed(outcome, cfg, hydra_cfg, again):
    os.kill(os.getpid(), signal.SIGKILL)


def that_crashes(outcome, cfg, hydra_cfg, again):
    os._exit(3)


def that_is_told(outcome, cfg, hydra_cfg, again):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    outcome.send((float(signal.sigwait([signal.SIGTERM])), None))


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Makes the watch over job 1 of a sweep, which does as one of the functions above."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": {}}))

    def made(job, on_error="continue", population=None):
        monkeypatch.setattr(supervisor, "_job", job)
        jobs = (Job(0, "seed=1", ()), Job(1, "seed=2", ()))
        sweep = Sweep(tmp_path, jobs, on_error, socket.gethostname(), os.getpid())
        sweep.job_dir(1).mkdir(exist_ok=True)
        return supervisor._Watch(sweep, sweep.job_dir(1), population)

    return made


def test_the_outcome_is_what_the_job_says(watch):
    with watch(that_finishes) as watched:
        assert watched.run(OmegaConf.create({"score": 4.5})) == (4.5, None)
    with watch(that_fails) as watched:
        assert watched.run(OmegaConf.create()) == (None, "job 1 failed: boom")
        assert not watched.may_go_on()


@pytest.mark.parametrize(
    ("job", "state", "error"),
    [
        (that_is_killed, "killed", "its process was killed by SIGKILL"),
        (that_crashes, "failed", "its process ended with exit code 3 and left no traceback"),
    ],
)
def test_a_job_that_can_say_nothing_is_reported(job, state, error, watch, tmp_path):
    with watch(job, on_error="stop") as watched:
        write_state(tmp_path / "1", JobState("running", name="seed=2", pid=os.getpid()))
        assert watched.run(OmegaConf.create()) == (None, f"job 1 {state}: {error}")
    now = read_state(tmp_path / "1")
    assert (now.state, now.error, now.name) == (state, error, "seed=2")
    assert error in (tmp_path / "summary.csv").read_text()
    assert (tmp_path / ".stop").read_text() == f"job 1 was {state} and sweep.on_error=stop"


def test_a_signal_is_passed_on_and_ends_it(watch):
    with watch(that_is_told, population={"max_failures": 9}) as watched:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert watched.run(OmegaConf.create()) == (float(signal.SIGTERM), None)
        assert not watched.may_go_on()  # it was asked to end


def test_all_members_end_where_too_many_have_failed(watch, tmp_path):
    threading.Timer(0.3, (tmp_path / ".failed").write_text, ("enough",)).start()
    with watch(that_is_told, population={"max_failures": 9}) as watched:
        assert watched.run(OmegaConf.create()) == (float(signal.SIGTERM), None)
        assert not watched.may_go_on()


def test_failures_of_all_members_count(watch, tmp_path):
    def lineage(member, failures):
        first = Record(member, 0, 0, None, None, None, False, {}, {"lr": 0.1}, None)
        rest = [first._replace(generation=g + 1, failed=True, parent=0) for g in range(failures)]
        return [first, *rest]

    directory = PopulationDirectory(tmp_path)
    directory.write_lineage([*lineage(0, 0), *lineage(1, 0)])
    watched = watch(that_is_killed, population={"max_failures": 3})
    assert watched.may_go_on()  # the first
    directory.write_lineage(lineage(1, 1), member=1)  # by which it is not counted twice
    assert watched.may_go_on()
    directory.member(0).mkdir()
    directory.write_lineage(lineage(0, 1), member=0)
    assert not watched.may_go_on()
    reason = "members have failed 4 times, and hydra.sweeper.max_failures=3"
    assert (tmp_path / ".failed").read_text() == reason


def test_it_stays_small():
    """What runs beside each job has no PyTorch in it: Hydra loads the sweepers there as well."""
    code = "import sys, supervisor, hydra_plugins.grid_sweeper, hydra_plugins.population_sweeper"
    code += "; assert 'torch' not in sys.modules and 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_job_is_run_by_joblib_and_one_that_is_killed_takes_nobody_along(tmp_path, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    from tests.test_launch import TINY, run

    monkeypatch.chdir(tmp_path)

    def kill():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for file in tmp_path.glob("multirun/*/1/job.json"):
                state = json.loads(file.read_text())
                if state["state"] == "running":
                    os.kill(state["pid"], signal.SIGKILL)
                    return
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    ran = run(
        "-m", *TINY, "total_frames=100,1_000_000_000", "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
    )  # fmt: skip
    killer.join()
    assert ran.code == 1
    (sweep,) = (tmp_path / "multirun").iterdir()
    states = [read_state(sweep / job) for job in "01"]
    assert [state.state for state in states] == ["finished", "killed"], ran.out
    assert states[0].score is not None and states[0].pid != states[1].pid
    log = (sweep / "0/train.log").read_text()
    assert "job 0 of 2: total_frames=100" in log and "command line: suite=catch" in log
    told = "job 1 (total_frames=1000000000) killed: its process was killed by SIGKILL"
    assert told in (sweep / "1/train.log").read_text()
    assert "its process was killed by SIGKILL" in ran.out  # the table
