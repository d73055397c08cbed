"""The fault program in a reduced form: real kills, a disk that is full, runs that break."""

import os
import resource
import signal
import subprocess
import sys

import pytest

from benchmarks import faults
from benchmarks.training_run import LAUNCH


@pytest.mark.slow
def test_training_survives_killed_actors():
    row = faults.kill_actors(seconds=1.0, every_s=0.2)
    assert row.passed and row.injected >= 1, row


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_leaves_a_checkpoint():
    row = faults.fill_the_disk()
    if not row.injected:
        pytest.skip(row.remark)
    assert row.passed, row


@pytest.mark.parametrize(
    "phase", [pytest.param("start-up", marks=pytest.mark.slow), "mid-checkpoint"]
)
def test_a_learner_that_is_killed_leaves_nothing(phase):
    row = faults.send(signal.SIGKILL, phase)
    assert row.passed, row


@pytest.mark.slow
@pytest.mark.parametrize("phase", faults.PHASES)
@pytest.mark.parametrize("number", faults.SIGNALS)
def test_signals_end_a_run_as_they_should(number, phase):
    row = faults.send(number, phase)
    assert row.passed, row


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.ENVIRONMENT_FAULTS)
def test_training_survives_environments_that_break(fault):
    row = faults.break_environments(fault, times=1)
    assert row.passed and row.injected >= 1, row


@pytest.mark.slow
def test_small_limits_are_enough(tmp_path):
    """256 open files, one core, a home that cannot be written to."""
    command = [sys.executable, str(LAUNCH), "suite=catch", "total_frames=3_000"]
    core = min(os.sched_getaffinity(0))
    ran = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path}/run", "loggers.weights_and_biases.mode=offline"],
        env={**os.environ, "HOME": str(LAUNCH)},  # a file: nothing can be in it
        preexec_fn=lambda: (
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
            os.sched_setaffinity(0, {core}),
        ),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "finished at" in ran.stdout
    assert "INFO connection" not in ran.stdout + ran.stderr  # of W&B's service
    assert len(list((tmp_path / "run/wandb").glob("offline-run-*"))) == 1
