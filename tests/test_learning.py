"""Whole runs of `launch.py` that have to learn: scores that no random agent reaches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def summary_of(run_dir, *overrides):
    subprocess.run(
        [sys.executable, "launch.py", "loggers=[]", f"hydra.run.dir={run_dir}", *overrides],
        cwd=ROOT,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_catch_is_nearly_perfect_within_a_minute(tmp_path, seed):
    summary = summary_of(tmp_path, "suite=catch", f"seed={seed}")
    assert summary["metrics"]["return/catch"] >= 0.95
    assert summary["time_s"] < 60


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_catch_is_learned_with_a_recurrent_core(tmp_path):
    summary = summary_of(tmp_path, "suite=catch", "network/core=lstm", "network.feed_back=true")
    assert summary["metrics"]["return/catch"] >= 0.8


@pytest.mark.timeout(300)
def test_catch_is_learned_in_one_process(tmp_path):
    """A third of the frames that it takes to be perfect; a random agent's return is -0.6."""
    summary = summary_of(tmp_path, "suite=catch", "transport=in_process", "total_frames=120_000")
    assert summary["metrics"]["return/catch"] > 0.3
