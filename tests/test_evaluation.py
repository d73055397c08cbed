"""Whole games with the state carried and fixed seeds; what is kept of them; workers that fail."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from impala.actor_pool import actor_seeds
from impala.agents.actor_critic import ActorCritic
from impala.evaluation import beside_training, workers
from impala.evaluation.beside_training import BesideTraining
from impala.evaluation.evaluation import Chunk, Evaluation, EvaluationError, Game
from impala.evaluation.evaluator import Evaluator, evaluate
from impala.evaluation.player import Player
from impala.evaluation.progress import Progress
from impala.evaluation.workers import Workers
from impala.loggers.json_lines import JsonLines
from impala.networks.core import LSTM
from impala.networks.torso import MLP
from suites.atari57 import Atari57
from suites.catch import Catch
from tests.counting import CountingAgent, CountingEnv, CountingSuite
from tests.playing_here import PlayingHere

ROOT = Path(__file__).parents[1]
THREE, FIVE = Game(6.0, 12), Game(15.0, 20)


def evaluation(suite, agent, *, games=4, greedy=False, seed=5, num_workers=1, **options):
    return Evaluation(
        suite=suite, agent=agent, games=games, greedy=greedy, seed=seed, num_workers=num_workers,
        **options,
    )  # fmt: skip


def played(given, run_dir=Path()):
    """All games, here: task -> games."""
    player, games = Player(given, run_dir, 700), {}
    for chunk in given.chunks():
        games.setdefault(chunk.task, []).extend(player.play(chunk))
    player.close()
    return games


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr("impala.evaluation.evaluator.Workers", PlayingHere)
    monkeypatch.setattr(PlayingHere, "fails", None)
    return PlayingHere


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


class NamedEnv(CountingEnv):
    """Its frames count from ten times its own number on."""

    def __init__(self, number, *arguments):
        super().__init__(*arguments)
        self._number = number

    def _frames(self, count):
        return super()._frames(count + 10 * self._number)


class RememberingAgent(CountingAgent):
    """Its state is the number of the environment that it began with. Keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def act(self, step, state, noise):
        outputs, _ = super().act(step, state, noise)
        number = step.frame[:, 0, 0, :1].float() // 10
        number = torch.where(step.first[:, None], number, state[0])
        self.seen.append((step.frame[:, 0, 0, 0].tolist(), number[:, 0].int().tolist()))
        return outputs, (number,)


class UnevenSuite(CountingSuite):
    """The games of its environments last 3, 4, 5 .. steps. Keeps the seeds that they get."""

    def __init__(self, tasks=("three",)):
        super().__init__(tasks)
        self.seeds = []

    def make(self, task, num_envs, seeds, split="train"):
        assert (split, num_envs) == ("test", 1)
        number = len(self.seeds)
        environment = NamedEnv(number, self, 3 + number, False, num_envs, seeds)
        self.seeds += seeds
        return environment


# Games


@pytest.mark.parametrize("lives", [False, True])
def test_the_state_is_carried_through_whole_games(lives):
    agent = WatchedAgent()
    given = evaluation(CountingSuite(["three", "five"], lives=lives), agent, at_once=3)
    assert played(given) == {0: [THREE] * 4, 1: [FIVE] * 4}
    for frames, counts in agent.seen:
        assert counts == [frame + 1 for frame in frames]  # frames count the steps of a game
    assert len(agent.seen) == 2 * 3 + 2 * 5  # two portions of two games of each


def test_a_game_that_has_ended_leaves_and_the_others_go_on():
    agent = RememberingAgent()
    games = played(evaluation(UnevenSuite(), agent))[0]
    assert games == [(6.0, 12), (10.0, 16), (15.0, 20), (21.0, 24)]
    for step, (frames, numbers) in enumerate(agent.seen):
        left = list(range(max(step - 2, 0), 4))
        assert frames == [10 * number + step for number in left] and numbers == left
    assert len(agent.seen) == 6


def test_instructions_are_read_and_frames_are_those_that_were_played():
    class Reader(WatchedAgent):
        def act(self, step, state, noise):
            words.append((step.instruction - step.frame[:, 0, 0, :1]).tolist())
            return super().act(step, state, noise)

    words = []
    suite = CountingSuite(["three", "five"], instructions=True)
    games = played(evaluation(suite, Reader(), games=2))
    assert games == {0: [(6.0, 9)] * 2, 1: [(15.0, 17)] * 2}  # the last step plays one frame
    assert words == [[[1, 2]] * 2] * 8


def test_greedy_adds_no_noise():
    for greedy in (True, False):
        agent = WatchedAgent()
        played(evaluation(CountingSuite(), agent, greedy=greedy))
        assert any(noise.any() for noise in agent.noise) != greedy


def catch_agent():
    torch.manual_seed(1)
    return ActorCritic(
        frame_shape=(1, 10, 5), num_actions=3, torso=MLP, core=LSTM, feed_back=True,
        discount=0.99, baseline_cost=0.5, entropy_cost=0.01, reward_transform="clamp",
    )  # fmt: skip


def test_the_seed_decides_and_no_actor_has_it():
    first, again, other = (
        played(evaluation(Catch(), catch_agent(), games=30, seed=seed)) for seed in (5, 5, 6)
    )
    assert first == again != other
    assert len(set(first[0])) == 2  # some were caught and some not
    suite = UnevenSuite(["three", "five"])
    played(evaluation(suite, CountingAgent(), games=20, at_once=20))
    assert len(set(suite.seeds)) == 40
    assert not set(suite.seeds) & {
        seed for actor in range(50) for seed in actor_seeds(5, actor, 50)
    }


def test_used_environments_play_the_games_of_new_ones_inside_and_outside(tmp_path):
    suite = Atari57(tasks=["video_pinball"], sticky_actions=0.25, max_frames=800)
    given = evaluation(suite, SeedAgent(), games=2, at_once=1)
    both = played(given)[0]
    assert both[0] != both[1]
    for outside in (False, True):
        player = Player(replace(given, outside=outside), tmp_path, 700)
        assert player.play(Chunk(0, 1, 1)) == both[1:]
        assert player.play(Chunk(0, 0, 1)) == both[:1]
        player.close()


class SeedAgent(CountingAgent):
    """Plays at random, as its noise says."""

    def act(self, step, state, noise):
        outputs, state = super().act(step, state, noise)
        return outputs._replace(action=noise.argmax(-1)), state


def test_long_games_end_at_the_suites_limit():
    suite = Atari57(tasks=["pong"], max_frames=120)
    assert [game.length for game in played(evaluation(suite, CountingAgent(), games=2))[0]] == [
        120, 120,
    ]  # fmt: skip


def test_portions_are_even_and_hold_every_game_once():
    given = evaluation(CountingSuite(["three", "five"]), CountingAgent(), games=10, at_once=4)
    sizes = [(0, 0, 4), (0, 4, 3), (0, 7, 3), (1, 0, 4), (1, 4, 3), (1, 7, 3)]
    assert [(c.task, c.first, c.games) for c in given.chunks()] == sizes


# What is kept


def test_the_report(tmp_path, capsys, here):
    suite = CountingSuite(["three", "five"])
    given = evaluation(suite, CountingAgent(), at_once=3)
    assert evaluate(given, frames=700, run_dir=tmp_path) == pytest.approx(10.5)
    report = json.loads((tmp_path / "evaluation" / "700.json").read_text())
    assert [path.name for path in tmp_path.rglob("*")] == ["evaluation", "700.json"]
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


def test_videos_stay_with_the_evaluation_that_they_are_of(tmp_path, here):
    folder = tmp_path / "evaluation"

    def videos_are_left():
        (folder / "700.videos").mkdir(parents=True)
        (folder / "700.videos" / "catch_0.mp4").write_bytes(b"film")
        with Evaluator(evaluation(Catch(), CountingAgent()), frames=700, run_dir=tmp_path):
            assert not (folder / "700.videos").exists()

    videos_are_left()  # of games that were not finished
    assert [path.name for path in folder.iterdir()] == ["700.games.jsonl"]
    (folder / "700_1.games.jsonl").touch()  # whose number is not taken again
    report = {"frames": 700, "videos": ["evaluation/700.videos/catch_0.mp4"]}
    (folder / "700.json").write_text(json.dumps(report))
    videos_are_left()
    kept = json.loads((folder / "700_2.json").read_text())
    assert kept == {**report, "videos": ["evaluation/700_2.videos/catch_0.mp4"]}
    assert (tmp_path / kept["videos"][0]).read_bytes() == b"film"
    (folder / "700.json").write_text("{")
    videos_are_left()
    assert (folder / "700_3.json").exists() and (folder / "700_3.videos").exists()


def portions(run_dir):
    return (run_dir / "evaluation" / "700.games.jsonl").read_text().splitlines()[1:]


def test_what_was_finished_is_not_played_again(tmp_path, here, caplog):
    caplog.set_level(logging.INFO)
    agent = SeedAgent()
    given = evaluation(Catch(), agent, games=6, at_once=1)
    whole = played(given)[0]
    here.fails = 4
    with pytest.raises(RuntimeError, match="a fake"):
        evaluate(given, frames=700, run_dir=tmp_path)
    assert "stopped: 4 of 6 games are finished and kept" in caplog.text
    path = tmp_path / "evaluation" / "700.games.jsonl"
    path.write_bytes(path.read_bytes()[:-5])  # as of a program that was killed while it wrote
    here.fails = None
    with Evaluator(given, frames=700, run_dir=tmp_path) as evaluator:
        assert evaluator.finished_games == len(portions(tmp_path)) == 3
        with pytest.raises(ValueError, match="another program is at the evaluation"):
            Evaluator(given, frames=700, run_dir=tmp_path)
        while evaluator.finished_games < 6:
            evaluator.turn(0.0)
        assert evaluator.frames_played == 3 * 9  # only the others
        report = evaluator.finish()
    assert report["games"]["catch"]["returns"] == [game.raw_return for game in whole]
    assert not path.exists()


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "{}", "[" * 9999,
        '{"task": 0, "first": 1, "returns": [1.0], "lengths": []}',
        '{"task": 7, "first": 1, "returns": [1.0], "lengths": [9]}',
        '{"task": [0], "first": 1, "returns": [1.0], "lengths": [9]}',
        '{"task": 0, "first": 1, "returns": [1.0, 1.0], "lengths": [9, 9]}',
        '{"task": 0, "first": 1, "returns": [NaN], "lengths": [9]}',
        '{"task": 0, "first": 1, "returns": [1.0], "lengths": [Infinity]}',
    ],
)  # fmt: skip
def test_a_damaged_line_ends_what_is_known_of_the_games(tmp_path, here, caplog, line):
    given = evaluation(Catch(), CountingAgent(), games=3, at_once=1)
    with Evaluator(given, frames=700, run_dir=tmp_path) as evaluator:
        while evaluator.finished_games < 2:
            evaluator.turn(0.0)
    path = tmp_path / "evaluation" / "700.games.jsonl"
    about, first, second = path.read_text().splitlines()
    path.write_text(f"{about}\n{first}\n{line}\n{second}\n")
    with Evaluator(given, frames=700, run_dir=tmp_path) as evaluator:
        assert evaluator.finished_games == 1
    assert "700.games.jsonl is damaged at line 3, the rest is lost" in caplog.text
    assert path.read_text().splitlines() == [about, first]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"seed": 6}, "seed"), ({"greedy": True}, "greedy"), ({"games": 5}, "games"),
        ({"agent": CountingAgent(num_weights=2)}, "weights"),
        ({"suite": Catch(rows=8)}, "protocol"), ({"at_once": 2}, "at_once"),
    ],
)  # fmt: skip
def test_another_evaluation_starts_anew_and_keeps_the_unfinished_one(
    tmp_path, here, caplog, change, what
):
    caplog.set_level(logging.INFO)
    given = evaluation(Catch(), CountingAgent(), at_once=1)
    with Evaluator(given, frames=700, run_dir=tmp_path) as evaluator:
        evaluator.turn(0.0)
    before = (tmp_path / "evaluation" / "700.games.jsonl").read_bytes()
    with Evaluator(replace(given, **change), frames=700, run_dir=tmp_path) as evaluator:
        assert evaluator.finished_games == 0
    assert f"700.games.jsonl differs in {what} and is kept as 700_1.games.jsonl" in caplog.text
    assert (tmp_path / "evaluation" / "700_1.games.jsonl").read_bytes() == before


def test_progress_is_lines_where_there_is_no_terminal(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("impala.evaluation.progress.LINE_EVERY_S", 0.0)
    with Progress(10, 2) as progress:
        time.sleep(0.01)
        progress.show(3, 4000)
    assert "3 of 10 games, " in caplog.text and "frames/s" in caplog.text


# Workers


def test_workers_play_every_portion_whatever_their_number_and_end(tmp_path):
    suite = SignalledSuite(["three", "five"])
    given = evaluation(suite, CountingAgent(), num_workers=2, at_once=2)
    evaluate(given, frames=700, run_dir=tmp_path)
    report = json.loads((tmp_path / "evaluation" / "700.json").read_text())
    assert report["games"] == {
        "three": {"returns": [6.0] * 4, "lengths": [12] * 4},
        "five": {"returns": [15.0] * 4, "lengths": [20] * 4},
    }
    assert not workers_of(psutil.Process())


class SignalledSuite(CountingSuite):
    """Its workers are sent what ends a program, as a terminal does to all processes of one."""

    def make(self, task, num_envs, seeds, split="train"):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        return super().make(task, num_envs, seeds, split)


def workers_of(process):
    return [p for p in process.children() if "spawn_main" in " ".join(p.cmdline())]


class FailingOnceSuite(CountingSuite):
    """A process that plays "three" is killed, one that plays "five" hangs, once each."""

    def make(self, task, num_envs, seeds, split="train"):
        fault = {"three": "kill", "five": "hang"}[task.name]
        suite = CountingSuite(
            [t.name for t in self.tasks], fault=fault, faulty=task.name, once=self.once / fault
        )
        return suite.make(task, num_envs, seeds, split)


def test_a_worker_that_is_killed_or_hangs_is_named_and_replaced(tmp_path, caplog):
    suite = FailingOnceSuite(["three", "five"], once=tmp_path)
    given = evaluation(
        suite, CountingAgent(), games=30, num_workers=2, at_once=1, timeout_s=3.0
    )  # the faults are at the 50th step, in used environments  # fmt: skip
    evaluate(given, frames=700, run_dir=tmp_path)
    report = json.loads((tmp_path / "evaluation" / "700.json").read_text())
    assert report["games"]["three"]["returns"] == [6.0] * 30
    assert report["games"]["five"]["returns"] == [15.0] * 30
    assert {"kill", "hang"} <= {path.name for path in tmp_path.iterdir()}
    assert "played three (games 16 to 16) failed: its process was killed by SIGKILL" in caplog.text
    assert "played five (games 9 to 9) failed: no sign of life for 3 s" in caplog.text


def test_one_that_fails_for_ever_is_an_error_with_its_own_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "REPLACEMENTS", 0)
    suite = CountingSuite(["three"], fault="unbuildable")
    given = evaluation(suite, CountingAgent())
    playing = Workers(given, given.chunks(), run_dir=tmp_path, frames=700)
    expected = r"played three (.|\n)*cannot be built(.|\n)*0 processes before it"
    with pytest.raises(EvaluationError, match=expected):
        list(iter(lambda: playing.receive(10.0), None))
    playing.close()
    assert not workers_of(psutil.Process())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_by_a_signal_it_goes_on_later_and_leaves_no_process(number, tmp_path, caplog):
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, lambda number, frame: sys.exit(128 + number))\n"
        "from tests.test_evaluation import *\n"
        "suite = CountingSuite(['three', 'five'], fault='slow', faulty='five')\n"
        "evaluate(evaluation(suite, CountingAgent()), frames=700, run_dir=Path(sys.argv[1]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, start_new_session=True,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    path, children = tmp_path / "evaluation" / "700.games.jsonl", []
    while not (children and path.exists() and portions(tmp_path)):
        assert process.poll() is None, process.stderr.read()
        children = workers_of(psutil.Process(process.pid))
        time.sleep(0.02)
    if number == signal.SIGINT:  # as a terminal sends it
        os.killpg(process.pid, number)
    else:
        process.kill()
    _, error = process.communicate()
    assert (process.returncode, error) == (130 if number == signal.SIGINT else -9, b"")
    assert not psutil.wait_procs(children, timeout=60)[1]
    if number == signal.SIGKILL:
        caplog.set_level(logging.INFO)
        given = evaluation(CountingSuite(["three", "five"]), CountingAgent())
        evaluate(given, frames=700, run_dir=tmp_path)
        assert "going on with" in caplog.text and "2/2 five" in caplog.text
        assert "three" not in caplog.text  # was finished


# Beside training


def beside(run_dir, *, every_frames=100, resume_frames=None, same_seed=False):
    given = evaluation(CountingSuite(), CountingAgent(), games=2, at_once=1)
    return BesideTraining(
        given, every_frames=every_frames, same_seed=same_seed, run_dir=run_dir,
        resume_frames=resume_frames,
    )  # fmt: skip


def trained(weight):
    agent = CountingAgent()
    agent.weight.data.fill_(weight)
    return agent


def reports(run_dir):
    return sorted(path.name for path in (run_dir / "evaluation").iterdir())


def test_the_newest_agent_is_next_and_those_left_out_are_named(tmp_path, here, caplog):
    evaluations = beside(tmp_path)
    assert [evaluations.due(frames) for frames in (0, 99, 100)] == [False, False, True]
    evaluations.start(105, trained(1.0))
    assert [evaluations.due(frames) for frames in (199, 205)] == [False, True]
    evaluations.start(205, trained(2.0))
    evaluations.start(300, trained(3.0))
    assert "no evaluation of 205 frames" in caplog.text
    evaluations.poll()
    assert evaluations.results() == {}
    evaluations.poll()
    results = evaluations.results()
    assert results["evaluation/frames"] == 105 and results["evaluation/hns/three"] == 6.0
    assert {"evaluation/median", "evaluation/return/three"} <= set(results)
    assert evaluations.results() == {}
    evaluations.finish(lambda: False)
    assert evaluations.results()["evaluation/frames"] == 300
    assert reports(tmp_path) == ["105.json", "300.json"]
    digests = {
        json.loads((tmp_path / "evaluation" / name).read_text())["weights"]
        for name in reports(tmp_path)
    }
    assert len(digests) == 2
    evaluations.close()


@pytest.mark.parametrize("same_seed", [False, True])
def test_seeds_of_evaluations_beside_training(tmp_path, here, same_seed):
    evaluations = beside(tmp_path, same_seed=same_seed)
    for frames in (105, 205):
        evaluations.start(frames, trained(1.0))
        evaluations.finish(lambda: False)
    seeds = [
        json.loads((tmp_path / "evaluation" / name).read_text())["seed"]
        for name in ("105.json", "205.json")
    ]
    own = evaluation(CountingSuite(), CountingAgent()).seed
    assert seeds == ([own, own] if same_seed else [own + 105, own + 205])
    evaluations.close()


def test_while_it_waits_it_says_for_what(tmp_path, here, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(beside_training, "LINE_EVERY_S", 0.0)
    evaluations = beside(tmp_path)
    evaluations.start(105, trained(1.0))
    evaluations.start(205, trained(2.0))
    evaluations.finish(lambda: False)
    evaluations.close()
    said = [r.message for r in caplog.records if r.message.startswith("training is done")]
    assert "105 frames, 0 of 2 games are finished, and for that of 205 frames." in said[0]
    assert "105 frames, 1 of 2" in said[1]
    assert any("205 frames, 1 of 2 games are finished. Ctrl-C" in text for text in said)


def test_given_up_it_keeps_what_was_finished(tmp_path, here, caplog):
    caplog.set_level(logging.INFO)
    evaluations = beside(tmp_path)
    evaluations.start(700, trained(1.0))
    evaluations.poll()
    evaluations.finish(lambda: True)
    evaluations.close()
    assert "the evaluation of 700 frames is given up with 1 of 2 games" in caplog.text
    assert len(portions(tmp_path)) == 1


def test_a_failure_is_reported_and_the_next_one_tries_again(tmp_path, here, caplog):
    evaluations = beside(tmp_path)
    here.fails = 0
    evaluations.start(100, trained(1.0))
    evaluations.poll()
    assert "evaluation of 100 frames failed, training goes on" in caplog.text
    assert "a fake that fails" in caplog.text
    here.fails = None
    evaluations.start(200, trained(1.0))
    evaluations.finish(lambda: False)
    assert evaluations.results()["evaluation/frames"] == 200


@pytest.mark.parametrize(
    ("logged", "resume_frames", "due_frames"),
    [(None, 90, 100), (None, 150, 100), (105.0, 150, 200), (105.0, 250, 200), (205.0, 250, 300)],
)
def test_a_resumed_run_makes_up_for_the_one_that_was_lost(
    tmp_path, logged, resume_frames, due_frames
):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write(50, {"evaluation/frames": logged} if logged else {})
    lines.finish(0)
    evaluations = beside(tmp_path, resume_frames=resume_frames)
    assert not evaluations.due(due_frames - 1)
    assert evaluations.due(due_frames)
