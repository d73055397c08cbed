"""Runs on DMLab-30: an engine for each environment, counts in the metrics, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from impala.actor_pool import ActorPool
from impala.evaluation.evaluation import Chunk, Evaluation
from impala.evaluation.player import Player
from impala.messages import GAME, Unroll, packed, unpacked
from impala.transport.restarts import Restarts
from impala.transport.shared_memory import SharedMemoryTransport
from suites.dmlab30 import DmLab30
from tests.counting import CountingAgent
from tests.test_launch import LAUNCH, points, run

TASKS = ("language_answer_quantitative_question", "rooms_select_nonmatching_object")
OPTIONS = (
    "suite=dmlab30", f"suite.tasks=[{','.join(TASKS)}]", "loggers=[]", "num_actors=1",
    "envs_per_actor=2", "algorithm.batch_size=2", "learner.threads=1",
)  # fmt: skip


@pytest.fixture
def folder(lab, tmp_path, monkeypatch):
    """Where it is run, with an engine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    return tmp_path


def engines() -> list[psutil.Process]:
    """Processes below this one that play."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie is none, too
            found += [child] if "impala.worker import work" in str(child.cmdline()) else []
    return found


def engine_folders(folder: Path) -> list[Path]:
    return list(folder.glob("impala_dmlab_*/*"))


def until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_without_the_engine_a_run_is_refused_in_a_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setitem(sys.modules, "deepmind_lab", None)
    ran = run("suite=dmlab30")
    assert ran.code == 2 and "dmlab-gym build" in ran.error
    assert not any(tmp_path.iterdir())


def test_actors_give_every_environment_an_engine_and_survive_it(folder):
    suite = DmLab30(tasks=TASKS)
    pool = ActorPool(
        suite, CountingAgent(), [[0, 1, 1]], 10, False, outside=(0, 1), log_dir=folder / "engine"
    )
    transport = SharedMemoryTransport(builder=pool, restarts=Restarts(per_task=1, backoff_s=0.01))
    deliveries = []

    def receive_until(enough):
        end = time.monotonic() + 120
        while not enough():
            assert time.monotonic() < end
            for delivery in transport.receive(0.1):
                transport.release(delivery.slots)
                deliveries.append(delivery)

    try:
        transport.start(CountingAgent(), 0, 1)
        receive_until(lambda: len(deliveries) >= 100)
        assert len(engines()) == 3 == len(engine_folders(folder))
        victim = engines()[0]
        victim.kill()
        receive_until(lambda: len(engines()) == 3 and victim not in engines())
        before = len(deliveries)
        receive_until(lambda: len(deliveries) >= before + 100)
    finally:
        transport.close()
    assert not engines(), "closing has waited for them"
    suite.tidy()
    assert not engine_folders(folder)
    (fault,) = transport.faults()
    assert fault.restarted
    hits, misses, failures = np.sum([d.level_cache for d in deliveries], axis=0)
    assert misses >= 1 and not hits and not failures
    assert len(list((folder / "engine").glob("*.log"))) == 4


@pytest.mark.slow
def test_counts_of_the_level_cache_reach_the_metrics(folder):
    ran = run(*OPTIONS, "transport=in_process", "total_frames=12_000", "log_every_frames=1_000")
    assert ran.code == 0, ran.err
    (run_dir,) = (folder / "outputs/dmlab30/impala").glob("2*")
    found = points(run_dir)
    assert sum(point.get("level_cache/misses", 0) for point in found) >= 2
    assert all(not point.get("level_cache/hits") for point in found)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["games"][TASKS[1]] >= 2
    assert not engine_folders(folder)


def test_an_unroll_carries_them_through_a_pipe():
    for times in ((), ((7, 0.5, 8),), ((0, 0.25, 1), (3, 9.0, 2))):
        sent = Unroll(slice(3, 5), np.zeros(1, GAME), 1.0, 2.0, 3.0, (4, 5, 6), times)
        assert unpacked(packed(sent)) == sent


@pytest.mark.slow
def test_a_run_is_stopped_and_goes_on_and_nothing_is_left(folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])}
    command = [sys.executable, LAUNCH, *OPTIONS, "log_every_s=1", "total_frames=100_000_000"]

    def run_dirs():
        return list((folder / "outputs/dmlab30/impala").glob("2*"))

    def scored(run_dir, games):
        file = run_dir / "episodes.jsonl"
        return file.exists() and len(file.read_text().splitlines()) >= games

    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
        until(lambda: run_dirs() and scored(run_dirs()[0], 3))
        engines()[0].kill()
        (run_dir,) = run_dirs()
        until(lambda: scored(run_dir, 6))
        program.send_signal(signal.SIGINT)
        printed, _ = program.communicate(timeout=60)
    assert program.returncode == 130
    assert "killed by SIGKILL" in printed and len(list((run_dir / "engine").iterdir())) == 3
    assert not engines() and not engine_folders(folder)
    frames = points(run_dir)[-1]["frames"]
    assert sum(json.loads((run_dir / "summary.json").read_text())["restarts"].values()) == 1
    resume = [sys.executable, LAUNCH, f"resume={run_dir}", f"total_frames={frames + 10_000}"]
    subprocess.run(resume, env=environment, check=True, timeout=120)
    assert points(run_dir)[-1]["frames"] >= frames + 10_000
    assert not engine_folders(folder)


class Watching(CountingAgent):
    """Keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def act(self, step, state, noise):
        self.seen.append(int(step.frame.sum()))
        return super().act(step, state, noise)


def test_a_game_of_an_evaluation_does_not_depend_on_those_before_it(folder):
    agent = Watching()
    evaluation = Evaluation(
        suite=DmLab30(tasks=TASKS[1:]), agent=agent, games=2, greedy=True, seed=3, num_workers=1,
        at_once=1, outside=True,
    )  # fmt: skip
    seen = []
    for numbers in ([0, 1], [1]):
        player = Player(evaluation, folder, 700)
        for number in numbers:
            agent.seen.clear()
            player.play(Chunk(0, number, 1))
        player.close()
        seen.append(agent.seen.copy())
    assert seen[0] == seen[1] and len(set(seen[0])) > 100
