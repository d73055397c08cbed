"""TensorBoard's files as TensorBoard reads them, after kills and resumes."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from impala.loggers.json_lines import JsonLines
from impala.loggers.logger import RunInfo
from impala.loggers.tensorboard import TensorBoard

RUN = RunInfo(
    run_dir=Path(), name="a-name", title="", config={}, total_frames=1000, task_names=(),
    headline="median", resume_frames=None,
)  # fmt: skip

CRASH = """
import os, sys
from pathlib import Path
from impala.loggers.logger import RunInfo
from impala.loggers.tensorboard import TensorBoard
logger = TensorBoard(RunInfo(Path(sys.argv[1]), "", "", {}, 1000, (), "median", None))
for frames in (10, 20, 30, 40):
    logger.write(frames, {"updates": frames / 10, "loss/total": 0.5})
logger.commit(30)  # and 40 happens to be written out, too
logger.write(50, {"updates": 5, "loss/total": 0.5})  # which is not
os.kill(os.getpid(), 9)
"""


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return {
        name: [(event.step, event.value) for event in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }


@pytest.mark.slow
def test_a_killed_and_resumed_run_has_every_point_once(tmp_path):
    crashed = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], capture_output=True)
    assert crashed.returncode == -9, crashed.stderr
    time.sleep(1.0)  # files are read in the order of their names, which have seconds
    logger = TensorBoard(replace(RUN, run_dir=tmp_path, resume_frames=30))
    for frames in (45, 50):
        logger.write(frames, {"updates": 5.0, "loss/total": 0.25, "evaluation/median": 12.0})
    logger.finish(0)
    read = scalars(tmp_path)
    assert read["loss/total"] == [(10, 0.5), (20, 0.5), (30, 0.5), (45, 0.25), (50, 0.25)]
    assert read["evaluation/median"] == [(45, 12.0), (50, 12.0)]


def test_chosen_at_a_resume_it_begins_with_what_was_logged_before(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for frames in (10, 20):
        lines.write(frames, {"updates": 1.0, "loss/total": float("nan") if frames == 10 else 0.5})
    lines.finish(0)
    logger = TensorBoard(replace(RUN, run_dir=tmp_path, resume_frames=20))
    logger.write(30, {"updates": 3.0})
    logger.finish(0)
    assert scalars(tmp_path) == {
        "updates": [(10, 1.0), (20, 1.0), (30, 3.0)],
        "loss/total": [(20, 0.5)],
    }


def test_without_a_point_there_is_no_file_and_without_the_package_an_error(tmp_path, monkeypatch):
    TensorBoard(replace(RUN, run_dir=tmp_path)).finish(1)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'impala\[tensorboard\]'"):
        TensorBoard(replace(RUN, run_dir=tmp_path))
