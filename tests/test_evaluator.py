"""Whole games, each environment's first, with the state carried; workers that fail or stop."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from impala.actor_pool import actor_seeds
from impala.agents.actor_critic import ActorCritic
from impala.evaluator import Evaluation, EvaluationError, evaluate
from impala.networks.core import LSTM
from impala.networks.torso import MLP
from suites.atari57 import Atari57
from suites.catch import Catch
from tests.counting import CountingAgent, CountingEnv, CountingSuite

ROOT = Path(__file__).parents[1]


class InOneProcess(Evaluation):
    def results(self):
        return ((task, self.play(task)) for task in range(len(self.suite.tasks)))


def evaluation(suite, agent, *, games=4, greedy=False, seed=5, num_workers=2, kind=InOneProcess):
    return kind(suite, agent, games, greedy, seed, num_workers)


class WatchedAgent(CountingAgent):
    """Keeps what it was given and how far it has counted."""

    def __init__(self):
        super().__init__()
        self.seen, self.noise = [], []

    def act(self, step, state, noise):
        outputs, state = super().act(step, state, noise)
        self.seen.append((step.frame[:, 0, 0, 0].tolist(), outputs.seen.tolist()))
        self.noise.append(noise.clone())
        return outputs, state


class UnevenSuite(CountingSuite):
    """Its environments' games last 3, 4, 5 .. steps."""

    def make(self, task, num_envs, seeds, split="train"):
        assert split == "test"
        environment = CountingEnv(self, 3, False, num_envs, seeds)
        environment._length = 3 + np.arange(num_envs)
        return environment


class SignalledSuite(CountingSuite):
    """Its workers are sent what ends a program, as a terminal does to all processes of one."""

    def make(self, task, num_envs, seeds, split="train"):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        return super().make(task, num_envs, seeds, split)


class DyingSuite(CountingSuite):
    def make(self, task, num_envs, seeds, split="train"):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("lives", [False, True])
def test_the_state_is_carried_through_whole_games(lives):
    agent = WatchedAgent()
    results = evaluation(CountingSuite(["three", "five"], lives=lives), agent).play(1)
    assert results == [(15.0, 20)] * 4
    for frames, counts in agent.seen:
        assert counts == [frame + 1 for frame in frames]  # frames count the steps of a game
    assert len(agent.seen) == 5


def test_each_environment_plays_one_game_that_counts():
    agent = WatchedAgent()
    results = evaluation(UnevenSuite(), agent).play(0)
    assert results == [(6.0, 12), (10.0, 16), (15.0, 20), (21.0, 24)]
    for frames, counts in agent.seen:  # those that have ended play on, from a state of zero
        assert counts == [frame + 1 for frame in frames]


def test_greedy_adds_no_noise():
    for greedy in (True, False):
        agent = WatchedAgent()
        evaluation(CountingSuite(), agent, greedy=greedy).play(0)
        assert any(noise.any() for noise in agent.noise) != greedy


def catch_agent():
    torch.manual_seed(1)
    return ActorCritic(
        frame_shape=(1, 10, 5), num_actions=3, torso=MLP, core=LSTM, feed_back=True,
        discount=0.99, baseline_cost=0.5, entropy_cost=0.01, reward_transform="clamp",
    )  # fmt: skip


def test_the_seed_decides_and_no_actor_has_it():
    first, again, other = (
        evaluation(Catch(), catch_agent(), games=30, seed=seed).play(0) for seed in (5, 5, 6)
    )
    assert first == again != other

    class Seeds(CountingSuite):
        def make(self, task, num_envs, seeds, split="train"):
            made.extend(seeds)
            return super().make(task, num_envs, seeds, split)

    made = []
    suite = Seeds(["three", "five"])
    for task in (0, 1):
        evaluation(suite, CountingAgent(), games=20).play(task)
    assert len(set(made)) == 40
    assert not set(made) & {seed for actor in range(50) for seed in actor_seeds(5, actor, 50)}


def test_long_games_end_at_the_suites_limit():
    suite = Atari57(tasks=["pong"], max_frames=120)
    agent = CountingAgent()
    results = evaluation(suite, agent, games=2).play(0)
    assert [length for _, length in results] == [120, 120]


def test_the_report(tmp_path, capsys):
    suite = CountingSuite(["three", "five"])
    played = evaluation(suite, CountingAgent())
    assert evaluate(played, frames=700, run_dir=tmp_path) == pytest.approx(10.5)
    report = json.loads((tmp_path / "evaluation" / "700.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation"]
    assert report["score"] == report["metrics"]["score/mean"] == 10.5  # of 100 for a human
    assert report["games"]["five"] == {"returns": [15.0] * 4, "lengths": [20] * 4}
    assert suite.provenance.items() <= report["provenance"].items()
    assert report["provenance"]["levels"] == "test"
    assert {
        "frames": 700,
        "games_per_task": 4,
        "greedy": False,
        "seed": 5,
    }.items() <= report.items()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["│", "five", "│", "15.0", "│", "15.0", "%", "│", "4", "│"] in lines
    assert any(line[1:2] == ["median"] and "10.5" in line for line in lines)
    evaluate(evaluation(suite, CountingAgent(), greedy=True), frames=700, run_dir=tmp_path)
    assert "700 frames, greedy actions" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "evaluation").iterdir())
    assert names == ["700.json", "700_1.json"]
    assert json.loads((tmp_path / "evaluation" / "700_1.json").read_text()) == report


def test_workers_play_every_task_whatever_signals_come_and_end():
    suite = SignalledSuite(["three", "five"])
    played = dict(evaluation(suite, CountingAgent(), num_workers=1, kind=Evaluation).results())
    assert played == {0: [(6.0, 12)] * 4, 1: [(15.0, 20)] * 4}
    assert not [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


@pytest.mark.parametrize(
    ("suite", "expected"),
    [
        (CountingSuite(fault="unbuildable"), r"three failed:\n(.|\n)*cannot be built"),
        (DyingSuite(), r"three died \(exit code -9"),
    ],
)
def test_a_worker_that_fails_or_dies_names_its_game(suite, expected):
    with pytest.raises(EvaluationError, match=expected):
        list(evaluation(suite, CountingAgent(), kind=Evaluation).results())


def test_a_signal_to_all_ends_it_at_once_and_leaves_no_process():
    number = signal.SIGINT  # as a terminal sends it
    code = (
        "import signal, sys\n"
        f"signal.signal({number:d}, lambda number, frame: sys.exit(128 + number))\n"
        "from tests.test_evaluator import *\n"
        "suite = CountingSuite(fault='slow')\n"
        "list(evaluation(suite, CountingAgent(), kind=Evaluation).results())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE
    )
    workers = []
    while not workers:  # from the first moment of the first worker on
        assert process.poll() is None, process.stderr.read()
        children = psutil.Process(process.pid).children()
        workers = [c for c in children if "spawn_main" in " ".join(c.cmdline())]
    os.killpg(process.pid, number)
    _, error = process.communicate()
    assert (process.returncode, error) == (128 + number, b"")
    assert not psutil.wait_procs(children, timeout=60)[1]
