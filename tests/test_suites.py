"""Suites, the vector environments they make, and what works on this machine."""

from __future__ import annotations

import itertools
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from ale_py import roms

from suites import check
from suites.atari57 import Atari57
from suites.catch import LEFT, RIGHT, STAY, Catch
from suites.suite import Task, TaskVectorEnv

# A step that ALE never finishes is killed rather than waited for.
pytestmark = pytest.mark.timeout(120, method="thread")


def atari(game: str, num_envs: int = 1, seeds=None, **options) -> TaskVectorEnv:
    suite = Atari57(tasks=[game], **options)
    return suite.make(suite.tasks[0], num_envs, range(num_envs) if seeds is None else seeds)


def catch(num_envs: int, seeds=None, **options) -> TaskVectorEnv:
    suite = Catch(**options)
    return suite.make(suite.tasks[0], num_envs, range(num_envs) if seeds is None else seeds)


def num_actions(env: TaskVectorEnv) -> int:
    assert isinstance(env.single_action_space, gymnasium.spaces.Discrete)
    return int(env.single_action_space.n)


# Bad input


@pytest.mark.parametrize("final", [{}, {"final_obs": np.zeros((1, 10, 5), np.uint8)}])
def test_a_last_frame_that_a_time_limit_left_out_is_an_error(final):
    class Cut(type(catch(1))):
        def _recv(self):
            frames, rewards, terminated, truncated, _ = super()._recv()
            return frames, rewards, terminated & False, truncated | True, final

    env = Cut(num_envs=1, seeds=[1], spec=Catch().spec)
    env.reset()
    with pytest.raises(RuntimeError, match="for its last frame, expected"):
        env.step(np.array([1]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("instruction", None),
        ("instruction", np.zeros((1, 3), np.int64)),
        ("instruction", np.zeros((1, 4), np.int32)),
        ("instruction", [[0, 0, 0]]),
        ("frames", np.zeros((1, 1), np.int64)),
        ("frames", np.zeros(1, np.int32)),
        ("final_instruction", None),
        ("final_instruction", np.zeros(3, np.int32)),
    ],
)
def test_what_info_lacks_or_has_of_another_type_is_an_error(name, value):
    right = {
        "instruction": np.zeros((1, 3), np.int32),
        "final_instruction": np.ones((1, 3), np.int32),
        "final_obs": np.zeros((1, 1, 10, 5), np.uint8),
        "frames": np.ones(1, np.int64),
    }

    class Cut(type(catch(1))):
        def __init__(self, info):
            super().__init__(num_envs=1, seeds=[1], spec=Catch().spec)
            self._instruction_length, self.info = 3, info

        def _reset(self, seeds):
            return super()._reset(seeds)[0], {"instruction": right["instruction"]}

        def _recv(self):
            frames, rewards, terminated, truncated, _ = super()._recv()
            return frames, rewards, terminated & False, truncated | True, self.info

    env = Cut(right)
    env.reset()
    assert env.step(np.array([1]))[4] is right
    env = Cut({**right, name: value})
    env.reset()
    with pytest.raises(RuntimeError, match=f"{name}'"):
        env.step(np.array([1]))


def test_unknown_games_are_refused_with_the_nearest_names():
    for wrong, near in [("pongg", "pong"), ("SpaceInvaders", "space_invaders")]:
        with pytest.raises(ValueError, match=f"'{wrong}'.*did you mean {near}"):
            Atari57(tasks=[wrong])
    with pytest.raises(ValueError, match="pong given more than once"):
        Atari57(tasks=["pong", "boxing", "pong"])
    for empty in ([], "pong"):
        with pytest.raises(ValueError, match="a list with at least one game"):
            Atari57(tasks=empty)


@pytest.mark.parametrize(
    "options",
    [
        {"sticky_actions": 1.5},
        {"noop_max": -1},
        {"max_frames": 402},
        {"max_frames": 0},
        {"full_action_space": False},
        {"random_column": "human"},
    ],
)
def test_impossible_options_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Atari57(**options)


def test_catch_refuses_boards_that_cannot_be_won():
    for rows, columns in [(2, 5), (10, 1), (1, 1)]:
        with pytest.raises(ValueError, match=f"rows={rows}, columns={columns}"):
            Catch(rows=rows, columns=columns)


def test_make_refuses_strange_tasks_splits_and_seeds():
    suite = Catch()
    task = suite.tasks[0]
    with pytest.raises(ValueError, match="not a task of this suite"):
        suite.make(Task("pong", "pong", "pong", 0.0, 1.0), 1, [0])
    with pytest.raises(ValueError, match="split='valid'"):
        suite.make(task, 1, [0], "valid")
    wrong: list[Any] = [[0], [0, 1, 2], [-1, 0], [0, 2**31], [0.5, 1.0]]
    for seeds in wrong:
        with pytest.raises(ValueError, match="seeds="):
            suite.make(task, 2, seeds)
    with pytest.raises(ValueError, match="num_envs=0"):
        suite.make(task, 0, [])


@pytest.fixture(params=["catch", "pong", "skiing"])
def env(request) -> TaskVectorEnv:
    """Two environments each of Catch, of an Atari game, and of the one whose actions are mapped."""
    if request.param == "catch":
        return catch(2)
    return atari(request.param, 2, full_action_space=True)


def test_wrong_actions_raise_instead_of_hanging(env):
    env.reset()
    limit = num_actions(env)
    for actions in ([0, limit], [-1, 0], [2**40, 0], [0], [[0, 0]], [0.0, 1.0], [True, False]):
        with pytest.raises(ValueError, match="actions"):
            env.step(np.array(actions))
    assert env.step(np.array([limit - 1, 0]))[0].shape == (2, *env.single_observation_space.shape)


def test_calls_out_of_turn_raise_instead_of_hanging(env):
    nothing = np.zeros(2, np.int64)
    with pytest.raises(RuntimeError, match="without reset"):
        env.send(nothing)
    env.reset()
    with pytest.raises(RuntimeError, match="without send"):
        env.recv()
    env.send(nothing)
    with pytest.raises(RuntimeError, match="without recv"):
        env.send(nothing)
    env.reset()  # also with a step on its way
    env.step(nothing)


def test_send_and_recv_are_the_halves_of_step(env):
    first, _ = env.reset(seed=3)
    whole = env.step(np.array([2, 0]))
    again, _ = env.reset(seed=[3, 4])
    actions = np.array([2, 0])
    env.send(actions)
    actions[:] = 1  # the caller may reuse its array
    halves = env.recv()
    np.testing.assert_array_equal(first, again)
    for a, b in zip(whole[:4], halves[:4], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("suite", [Atari57(tasks=["pong"], sticky_actions=0.25), Catch(rows=7)])
def test_suites_can_be_sent_to_other_processes(suite):
    sent = pickle.loads(pickle.dumps(suite))
    assert vars(sent) == vars(suite)
    sent.check()
    sent.make(sent.tasks[0], 1, [0]).reset()


# Catch


def test_catch_random_return_is_the_mean_over_all_games():
    """Every ball column under every sequence of actions, played: the expectation, exactly."""
    rows, columns = 4, 3
    suite = Catch(rows=rows, columns=columns)
    start, _ = catch(100, rows=rows, columns=columns).reset()
    ball = start[:, 0, 0].argmax(axis=1)
    sequences = list(itertools.product([LEFT, STAY, RIGHT], repeat=rows - 1))
    games = [(int(np.argmax(ball == c)), s) for c in range(columns) for s in sequences]
    env = suite.make(suite.tasks[0], len(games), [seed for seed, _ in games])
    env.reset()
    total, ends = np.zeros(len(games)), np.zeros(len(games))
    for actions in np.array([s for _, s in games]).T:
        _, rewards, terminated, _, _ = env.step(actions)
        total += rewards
        ends += terminated
    assert (ends == 1).all()
    assert total.mean() == pytest.approx(suite.tasks[0].random_return, abs=1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(10, 5), (4, 6), (2, 2)])
def test_catch_random_return_by_dynamic_programming(rows, columns):
    paddle = np.eye(columns)[columns // 2]
    for _ in range(rows - 1):
        left, right = np.roll(paddle, -1), np.roll(paddle, 1)
        left[-1], right[0] = 0.0, 0.0
        left[0] += paddle[0]
        right[-1] += paddle[-1]
        paddle = (left + paddle + right) / 3
    expected = sum((2 * p - 1) / columns for p in paddle)
    task = Catch(rows=rows, columns=columns).tasks[0]
    assert task.random_return == pytest.approx(expected, abs=1e-12)


def test_catch_can_be_won_and_restarts_in_the_same_step():
    env = catch(64)
    frames, info = env.reset()
    assert frames.dtype == np.uint8 and set(np.unique(frames)) == {0, 255} and not info
    for game, step in itertools.product(range(3), range(9)):
        ball = frames[:, 0, :-1].max(axis=1).argmax(axis=1)
        paddle = frames[:, 0, -1].argmax(axis=1)
        frames, rewards, terminated, truncated, info = env.step(STAY + np.sign(ball - paddle))
        last = step == 8
        assert terminated.tolist() == [last] * 64, (game, step)
        assert rewards.tolist() == [1.0 if last else 0.0] * 64
        assert not truncated.any() and ("final_obs" in info) == last
    assert (info["final_obs"][:, 0, :-1] == 0).all(), "the ball has arrived at the paddle"
    assert (info["final_obs"][:, 0, -1].max(axis=1) == 255).all()
    assert (frames[:, 0, 0].max(axis=1) == 255).all() and (frames[:, 0, -1, 2] == 255).all()


def test_catch_misses_cost_one():
    env = catch(200, rows=6)
    ball = env.reset()[0][:, 0, 0].argmax(axis=1)
    total = sum(env.step(np.full(200, LEFT))[1] for _ in range(5))
    np.testing.assert_array_equal(total, np.where(ball == 0, 1.0, -1.0))


def test_catch_balls_are_seeded_and_evenly_spread():
    def balls_of(env: TaskVectorEnv) -> np.ndarray:
        return np.array([env.reset()[0][:, 0, 0].argmax(axis=1) for _ in range(20)])

    alone, together = balls_of(catch(1, [7])), balls_of(catch(3, [5, 7, 9]))
    assert alone[:, 0].tolist() == together[:, 1].tolist() != together[:, 0].tolist()
    env, balls = catch(1000), []
    balls.append(env.reset()[0][:, 0, 0].argmax(axis=1))
    for _ in range(9):
        balls.append(env.reset()[0][:, 0, 0].argmax(axis=1))  # later resets go on: other games
    for axis in (0, 1):  # over games of a board, and over boards
        counts = np.bincount(np.array(balls).reshape(-1), minlength=5)
        assert np.abs(counts - 2000).max() < 200, "five standard deviations"
        assert (np.array(balls).std(axis=axis) > 0).all()


# What works on this machine


@pytest.fixture
def rom_directory(tmp_path: Path, monkeypatch) -> Path:
    """ROMs of pong, whole, and breakout, damaged; none of any other game."""
    shutil.copy(str(roms.get_rom_path("pong")), tmp_path / "pong.bin")
    (tmp_path / "breakout.bin").write_bytes(b"not this game")
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    return tmp_path


def test_check_names_the_roms_that_are_missing_or_damaged(rom_directory):
    Atari57(tasks=["pong"]).check()
    with pytest.raises(ValueError, match="2 of 3 ROMs") as error:
        Atari57(tasks=["pong", "breakout", "qbert"]).check()
    message = str(error.value)
    assert "breakout: " in message and "hash" in message and "qbert.bin" in message
    assert "pong" not in message and "ALE_ROMS_DIR" in message


def test_all_57_roms_are_here():
    Atari57().check()


def test_check_says_how_to_get_ale_py(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(ValueError, match="pip install"):
        Atari57(tasks=["pong"]).check()


def test_check_command_reports_what_works(capsys, rom_directory):
    assert check.main(["--suite", "catch"]) == 0
    assert "catch: 1 of 1 games work" in capsys.readouterr().out
    assert check.main(["--tasks", "pong,catch"]) == 0
    assert capsys.readouterr().out.count("1 of 1 games work") == 2
    assert check.main(["--tasks", "pong,breakout,qbert"]) == 1
    printed = capsys.readouterr().out
    assert "atari57: 1 of 3 games work" in printed
    assert printed.count("FAILS") == 2 and "hash" in printed and "qbert.bin" in printed


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [(["--suite", "atari"], "atari57"), (["--tasks", "pongg"], "did you mean pong")],
)
def test_check_command_refuses_unknown_names(capsys, arguments, hint):
    with pytest.raises(SystemExit) as stop:
        check.main(arguments)
    assert stop.value.code == 2 and hint in capsys.readouterr().err
