"""The fault program in a reduced form: real kills, a disk that is full, runs that break."""

import signal

import pytest

from benchmarks import faults


def test_training_survives_killed_actors():
    row = faults.kill_actors(seconds=1.0, every_s=0.2)
    assert row.passed and row.injected >= 1, row


def test_a_full_disk_ends_the_run_and_leaves_a_checkpoint():
    row = faults.fill_the_disk()
    if not row.injected:
        pytest.skip(row.remark)
    assert row.passed, row


@pytest.mark.parametrize("phase", ["start-up", "mid-checkpoint"])
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
