"""A whole run in one process: counts, bit-for-bit repetition, interruption, resumption."""

import json
import signal
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from impala import experiment as experiments
from impala.actor_pool import ActorPool
from impala.agents.actor_critic import ActorCritic
from impala.checkpoint import Checkpoints
from impala.experience.experience import Batch
from impala.experience.fifo import Fifo
from impala.experiment import Experiment, Schedule, Staleness
from impala.learner import Learner, NonFiniteError, linear_decay
from impala.loggers.json_lines import EpisodeLog, JsonLines
from impala.measures import Measures
from impala.messages import GAME
from impala.networks.core import LSTM
from impala.networks.torso import MLP
from impala.transport.in_process import InProcess
from impala.transport.transport import ActorError, Delivery
from suites.catch import Catch
from suites.score import Scoreboard
from tests.counting import CountingAgent, CountingSuite

UNROLL = 6


@dataclass
class Recorder:
    """A logger that can do something at a point of the run."""

    at_frames: int = -1
    action: object = None
    exit_code: int | None = None

    def write(self, frames, metrics):
        if frames >= self.at_frames >= 0 and self.action:
            self.action()

    def commit(self, frames):
        pass

    def finish(self, exit_code):
        self.exit_code = exit_code


def experiment(
    run_dir, suite, agent, *, total_frames, resume=False, recorder=None, tasks=None, staleness=None
):
    run_dir.mkdir(exist_ok=True)
    tasks = tasks or [[0, 0], [0, 0, 0]]
    pool = ActorPool(suite, agent, tasks, UNROLL, False)
    transport = InProcess(builder=pool)
    checkpoints = Checkpoints(run_dir / "checkpoints")
    state = checkpoints.load() if resume else None
    frames = state["frames"] if state else None
    torch.manual_seed(0)
    learner = Learner(
        agent,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        lr_schedule=linear_decay,
        max_grad_norm=40.0,
        device=torch.device("cpu"),
        max_skipped=2,
    )
    return Experiment(
        suite=suite,
        learner=learner,
        transport=transport,
        experience=Fifo(transport.storage, batch_size=4, micro_batch=3),
        checkpoints=checkpoints,
        metrics_file=JsonLines(run_dir / "metrics.jsonl", frames),
        episodes_file=EpisodeLog(run_dir / "episodes.jsonl", frames),
        loggers=[recorder or Recorder()],
        scoreboard=Scoreboard(suite.tasks),
        schedule=Schedule(total_frames, 1e9, 4 * UNROLL * suite.spec.frames_per_step * 5, 1e9),
        run_dir=run_dir,
        seed=1,
        about={"commit": "abc"},
        staleness=staleness,
        resume=state,
    )


def test_it_says_so_while_there_is_nothing_to_learn_from(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(experiments, "QUIET_S", 0.0)
    with caplog.at_level("INFO"):
        experiment(tmp_path, CountingSuite(), CountingAgent(), total_frames=100).run()
    assert "nothing to learn from for 0 s: 2 unrolls wait for a batch to be full" in caplog.text


def test_a_batch_that_can_never_be_full_ends_the_run(tmp_path):
    trained = experiment(
        tmp_path, CountingSuite(), CountingAgent(), total_frames=100, tasks=[[0], [0]]
    )
    trained._experience = Fifo(trained._transport.storage, batch_size=5, micro_batch=5)
    with pytest.raises(ActorError, match="4 unrolls are waiting, which is less than a batch"):
        trained.run()


def catch_agent():
    torch.manual_seed(3)
    suite = Catch()
    return ActorCritic(
        frame_shape=suite.spec.frame_shape, num_actions=suite.spec.num_actions, torso=MLP,
        core=LSTM, feed_back=True, discount=0.99, baseline_cost=0.5, entropy_cost=0.01,
        reward_transform="clamp",
    )  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_frames_games_and_shares_are_counted_exactly(tmp_path):
    suite = CountingSuite(["three", "five"])
    run = experiment(tmp_path, suite, CountingAgent(), total_frames=4800, tasks=[[0, 0, 1], [1]])
    result = run.run()
    assert (result.status, result.exit_code) == ("finished", 0)
    metrics, episodes = lines(tmp_path / "metrics.jsonl"), lines(tmp_path / "episodes.jsonl")
    per_update = 4 * UNROLL * 4  # columns x steps x frames of a step
    assert [m["frames"] for m in metrics] == [per_update * 5 * (i + 1) for i in range(10)]
    assert all(m["frames"] == m["updates"] * per_update for m in metrics)
    assert {(e["task"], e["length"], e["return"]) for e in episodes} == {
        ("three", 12, 6.0),
        ("five", 20, 15.0),
    }
    assert {e["actor"] for e in episodes if e["task"] == "three"} == {0}
    last = metrics[-1]
    assert last["share/three"] + last["share/five"] == pytest.approx(1.0)
    assert last["return/three"] == 6.0
    assert last["score/coverage"] == 1.0
    assert {"lag/three", "lag/max", "queue/fill", "time/learner_waiting", "lr"} <= last.keys()


class LastEvaluation:
    """Is under way when training is done, and looks at what somebody who is killed now leaves."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.left = None

    def due(self, frames):
        return False

    def poll(self):
        pass

    def results(self):
        return {"evaluation/mean": 5.0} if self.left else {}

    def finish(self, given_up):
        summary = json.loads((self.run_dir / "summary.json").read_text())
        frames = Checkpoints(self.run_dir / "checkpoints").load()["frames"]
        self.left = summary["status"], lines(self.run_dir / "metrics.jsonl")[-1], frames
        time.sleep(1.0)

    def close(self):
        pass


def test_all_of_the_training_is_kept_before_the_last_evaluation_is_waited_for(tmp_path):
    run = experiment(tmp_path, CountingSuite(), CountingAgent(), total_frames=1000)
    run._evaluations = evaluations = LastEvaluation(tmp_path)
    run.run()
    assert evaluations.left
    status, point, frames = evaluations.left
    assert (status, point["frames"]) == ("finished", frames)
    last = lines(tmp_path / "metrics.jsonl")[-1]
    assert last == {**point, "evaluation/mean": 5.0}
    assert json.loads((tmp_path / "summary.json").read_text())["time_s"] < last["time_s"] + 0.9


def test_one_process_repeats_itself_bit_for_bit(tmp_path):
    weights = []
    for name in ("a", "b"):
        agent = catch_agent()
        experiment(tmp_path / name, Catch(), agent, total_frames=1500).run()
        weights.append(agent.state_dict())
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    timed = ("time", "rate", "memory", "lag_s", "step_s")
    points = [
        [{k: v for k, v in m.items() if not k.startswith(timed)} for m in lines(path)]
        for path in (tmp_path / "a" / "metrics.jsonl", tmp_path / "b" / "metrics.jsonl")
    ]
    assert points[0] == points[1]
    assert (tmp_path / "a/episodes.jsonl").read_bytes() == (
        tmp_path / "b/episodes.jsonl"
    ).read_bytes()


def test_stale_unrolls_are_dropped_counted_and_their_slots_freed(tmp_path):
    """Twelve unrolls arrive at once and updates take four, so that the last wait for updates."""
    agent = CountingAgent()
    lags = {}
    for name, staleness in (("all", Staleness()), ("limited", Staleness(max_lag=1))):
        run = experiment(
            tmp_path / name, CountingSuite(["three", "five"]), agent, total_frames=4800,
            tasks=[[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]], staleness=staleness,
        )  # fmt: skip
        assert run.run().status == "finished"
        points = lines(tmp_path / name / "metrics.jsonl")
        lags[name] = max(point["lag/max"] for point in points)
        dropped = sum(v for m in points for k, v in m.items() if k.startswith("dropped/"))
        assert (dropped > 0) == (name == "limited")
    assert lags["all"] > 1 == lags["limited"]


def test_stale_unrolls_weigh_less_by_their_age():
    staleness = Staleness(max_lag=10, drop=False)
    assert staleness.weights(np.array([0, 10])) is None
    assert staleness.weights(np.array([0, 10, 20, 40])).tolist() == [1.0, 1.0, 0.5, 0.25]
    assert Staleness().weights(np.array([1000])) is None


def batch_of(task, version):
    return Batch([], np.array(task), np.array(version), np.array([], np.int64))


def test_lag_of_each_task_is_measured_in_updates_and_in_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("impala.measures.time.monotonic", lambda: now[0])
    measures = Measures(["slow", "fast", "idle"])
    for version in range(5):
        measures.published(version)
        now[0] += 10.0
    measures.batch(batch_of([0, 1, 1], [0, 4, 4]), version=4)
    now[0] += 1.0
    measures.published(5)
    measures.batch(batch_of([0, 1, 1], [1, 5, 4]), version=5)
    measures.dropped(np.array([0, 0]))
    measures.down_weighted(np.array([1]))
    taken = measures.take(1)
    assert [taken[f"lag{kind}/slow"] for kind in ("", "_max")] == [4.0, 4.0]
    assert [taken[f"lag{kind}/fast"] for kind in ("", "_max")] == [0.25, 1.0]
    assert taken["lag_p95/fast"] == pytest.approx(0.85)
    assert [taken[f"lag_s{kind}/slow"] for kind in ("", "_max")] == [45.5, 50.0]
    assert [taken[f"lag_s{kind}/fast"] for kind in ("", "_max")] == [7.75, 11.0]
    assert (taken["lag/max"], taken["lag_s/max"]) == (4.0, 50.0)
    assert (taken["dropped/slow"], taken["down_weighted/fast"]) == (2.0, 1.0)
    assert taken["share/idle"] == 0.0
    assert not {"lag/idle", "dropped/fast", "dropped/idle"} & taken.keys()
    again = measures.take(1)
    assert not [key for key in again if key.startswith(("lag", "dropped", "down"))]


def test_a_step_of_an_environment_takes_the_mean_over_actors_and_samples():
    measures = Measures(["slow", "fast", "idle"])

    def delivered(*times):
        measures.delivery(
            Delivery(0, np.arange(1), np.zeros(0, GAME), 1.0, 1.0, 0.0, (0,) * 3, times)
        )

    delivered((0, 3.0, 2), (1, 0.5, 4))
    delivered((1, 0.3, 4))
    taken = measures.take(1)
    assert {key: value for key, value in taken.items() if key.startswith("step_s")} == {
        "step_s/slow": 1.5, "step_s/fast": pytest.approx(0.1),
    }  # fmt: skip
    assert type(taken["step_s/slow"]) is float
    assert not [key for key in measures.take(1) if key.startswith("step_s")]


def test_start_up_is_in_no_rate(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("impala.measures.time.monotonic", lambda: now[0])
    monkeypatch.setattr("impala.measures.time.perf_counter", lambda: now[0])
    measures = Measures(["three"])
    measures.published(0)
    with measures.time("learner_waiting"):
        now[0] += 40.0
    delivery = Delivery(0, np.arange(1), np.zeros(0, GAME), 1.0, 1.0, 0.0)
    measures.delivery(delivery)
    with measures.time("learner_computing"):
        now[0] += 2.0
    measures.batch(batch_of([0], [0]), version=0)
    measures.delivery(delivery)
    taken = measures.take(100)
    assert (taken["rate/frames_per_s"], taken["time/learner_computing"]) == (50.0, 1.0)
    assert taken["lag_s/three"] == 2.0
    assert "time/learner_waiting" not in taken


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_saves_and_a_resumed_run_goes_on_without_gap(tmp_path, number):
    recorder = Recorder(1000, lambda: signal.raise_signal(number))
    result = experiment(
        tmp_path, Catch(), catch_agent(), total_frames=4000, recorder=recorder
    ).run()
    assert (result.status, result.exit_code) == ("interrupted", 128 + number)
    assert recorder.exit_code == 128 + number
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["commit"] == "abc"
    stopped = Checkpoints(tmp_path / "checkpoints").load()
    assert stopped["frames"] == summary["frames"] < 2000
    games = len(lines(tmp_path / "episodes.jsonl"))

    agent = catch_agent()
    resumed = experiment(tmp_path, Catch(), agent, total_frames=4000, resume=True)
    for name, value in stopped["learner"]["agent"].items():
        assert torch.equal(agent.state_dict()[name], value)
    assert resumed.run().status == "finished"
    frames = [m["frames"] for m in lines(tmp_path / "metrics.jsonl")]
    assert frames == sorted(set(frames))
    assert stopped["frames"] in frames and frames[-1] >= 4000
    metrics = lines(tmp_path / "metrics.jsonl")
    assert all(a["updates"] < b["updates"] for a, b in pairwise(metrics))
    assert all(a["time_s"] < b["time_s"] for a, b in pairwise(metrics))
    assert len(lines(tmp_path / "episodes.jsonl")) > games
    assert json.loads((tmp_path / "summary.json").read_text())["games"]["catch"] > games - 10


def test_an_error_in_the_loop_is_raised_and_everything_closed(tmp_path):
    def fail():
        raise RuntimeError("a part broke")

    recorder = Recorder(1000, fail)
    with pytest.raises(RuntimeError, match="a part broke"):
        experiment(tmp_path, Catch(), catch_agent(), total_frames=4000, recorder=recorder).run()
    assert recorder.exit_code == 1
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert Checkpoints(tmp_path / "checkpoints").load()["frames"] >= 1000


def test_many_updates_that_are_not_finite_stop_the_run_and_name_the_task(tmp_path, caplog):
    suite = CountingSuite(["three", "five"])
    agent = CountingAgent(bad_task=1)
    run = experiment(tmp_path, suite, agent, total_frames=10**6, tasks=[[0, 0, 1], [1]])
    with pytest.raises(NonFiniteError):
        run.run()
    assert "non-finite loss or gradient in five" in caplog.text
    assert json.loads((tmp_path / "summary.json").read_text())["updates_skipped"] == 3
