"""Atari-57: the emulator as the suite plays it."""

from __future__ import annotations

import ale_py
import gymnasium
import numpy as np
import pytest
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv

from suites.atari57 import Atari57, read_scores, shared_action_map
from suites.suite import TaskVectorEnv

# A step that ALE never finishes is killed rather than waited for.
pytestmark = pytest.mark.timeout(120, method="thread")


def atari(game: str, num_envs: int = 1, seeds=None, **options) -> TaskVectorEnv:
    suite = Atari57(tasks=[game], **options)
    return suite.make(suite.tasks[0], num_envs, range(num_envs) if seeds is None else seeds)


def played(env: TaskVectorEnv, steps: int, actions: int = 4) -> np.ndarray:
    """All frames [N, steps + 1, ...] under the same fixed actions in every environment."""
    frames = [env.reset()[0]]
    choose = np.random.default_rng(0)
    for action in choose.integers(0, actions, steps):
        frames.append(env.step(np.full(env.num_envs, action))[0])
    return np.stack(frames, axis=1)


def test_atari57_is_57_games_with_one_head():
    suite = Atari57()
    assert len(suite.tasks) == 57 and suite.spec.num_actions == 18
    assert suite.spec.frame_shape == (4, 84, 84) and suite.spec.frames_per_step == 4
    assert Atari57(tasks=["pong"]).spec.num_actions == 6
    assert Atari57(tasks=["pong"], full_action_space=True).spec.num_actions == 18
    two = Atari57(tasks=["qbert", "pong"])
    assert two.spec.num_actions == 18 and [task.name for task in two.tasks] == ["qbert", "pong"]
    gymnasium.register_envs(ale_py)
    assert {row["gymnasium_id"] for row in read_scores().values()} <= set(gymnasium.registry)


@pytest.mark.parametrize("game", ["breakout", "surround", "skiing", "alien"])
def test_minimal_action_sets_are_those_of_ale(game):
    emulator = ale_py.ALEInterface()
    emulator.loadROM(str(roms.get_rom_path(game)))
    num_actions = len(emulator.getMinimalActionSet())
    assert Atari57(tasks=[game]).spec.num_actions == num_actions
    env = atari(game)
    env.reset()
    env.step(np.array([num_actions - 1]))


def test_restarts_in_the_same_step_and_a_lost_life_ends_nothing():
    env = atari("breakout", 2)
    frames, info = env.reset()
    lives, lost, ended = info["lives"], 0, np.zeros(2, bool)
    choose = np.random.default_rng(0)
    while not ended.any():
        assert "final_obs" not in info
        frames, rewards, ended, truncated, info = env.step(choose.integers(0, 4, 2))
        assert not truncated.any() and (rewards >= 0).all()
        lost += int((info["lives"] < lives).sum())
        lives = info["lives"]
    assert ended.sum() == 1 and lost >= 4
    over = int(ended.argmax())
    assert lives[over] == 5, "already of the next game"
    assert (frames[over, :3] == 0).all(), "the next game's first observation has no past"
    assert (info["final_obs"][over, :3] != 0).any(), "the true last observation has one"
    assert (frames[1 - over, :3] != 0).any(), "the other game goes on"


def test_time_limit_truncates():
    env = atari("pong", 2, max_frames=400)
    env.reset()
    ends = []
    for step in range(1, 221):
        frames, _, terminated, truncated, info = env.step(np.zeros(2, np.int64))
        assert not terminated.any()
        if truncated.any():
            ends.append((step, truncated.tolist()))
            assert (info["final_obs"][:, :3] != 0).any() and (frames[:, :3] == 0).all()
    assert ends == [(100, [True, True]), (200, [True, True])]


def test_game_over_at_the_time_limit_is_a_game_over():
    def end(**options) -> tuple[int, bool, bool]:
        env = atari("breakout", **options)
        env.reset()
        choose = np.random.default_rng(0)
        for step in range(1, 1000):
            _, _, terminated, truncated, _ = env.step(choose.integers(0, 4, 1))
            if terminated[0] or truncated[0]:
                return step, bool(terminated[0]), bool(truncated[0])
        raise AssertionError("no end within 1000 steps")

    steps, *flags = end()
    assert flags == [True, False]
    assert end(max_frames=4 * steps) == (steps, True, False)
    assert end(max_frames=4 * steps - 4) == (steps - 1, False, True)


def test_rewards_are_raw():
    env = atari("alien", 2)
    env.reset()
    choose = np.random.default_rng(0)
    rewards = [env.step(choose.integers(0, 18, 2))[1].max() for _ in range(100)]
    assert max(rewards) >= 10


@pytest.mark.parametrize("sticky_actions", [0.0, 0.25])
def test_same_seed_same_game(sticky_actions):
    one = played(atari("breakout", 2, [5, 9], sticky_actions=sticky_actions), 40)
    two = played(atari("breakout", 2, [9, 5], sticky_actions=sticky_actions), 40)
    np.testing.assert_array_equal(one, two[::-1])
    assert (one[0] != one[1]).any()


def test_noops_and_sticky_actions_are_what_makes_games_differ():
    env = atari("breakout", 2, noop_max=0)
    assert env.reset()[1]["episode_frame_number"].tolist() == [0, 0]
    same = played(atari("breakout", 2, noop_max=0), 60)
    np.testing.assert_array_equal(same[0], same[1])
    sticky = played(atari("breakout", 2, noop_max=0, sticky_actions=0.25), 60)
    assert (sticky[0] != sticky[1]).any()


def test_later_resets_go_on_with_the_random_state():
    env = atari("breakout", 4)

    def noops(**options) -> list[int]:
        return env.reset(**options)[1]["episode_frame_number"].tolist()

    first, second = noops(), noops()
    assert len(set(first + second)) > 4, "from 0 to 30 of them, drawn for each game"
    assert noops(seed=0) == first != second
    assert noops(seed=[3, 2, 1, 0]) == first[::-1]


def test_skiing_plays_the_shared_actions_by_name():
    names = list(ale_py.Action.__members__)
    engine = AtariVectorEnv("skiing", 1, num_threads=1, full_action_space=True)
    own = [action.name for action in engine.ale.get_action_set()]
    played_by_name = {n: own[i] for n, i in zip(names, shared_action_map(own), strict=True)}
    assert {played_by_name[name] for name in own} == set(own)
    assert all(played_by_name[name] == name for name in own)
    assert played_by_name["FIRE"] == "NOOP" and played_by_name["UPFIRE"] == "UP"
    assert played_by_name["DOWNLEFTFIRE"] == "DOWNLEFT"
    np.testing.assert_array_equal(shared_action_map(names), np.arange(18))

    minimal = AtariVectorEnv("skiing", 1, num_threads=1).ale.get_action_set()
    minimal_names = [action.name for action in minimal]
    shared_env = atari("skiing", 4, [1] * 4, full_action_space=True)
    minimal_env = atari("skiing", 4, [1] * 4)
    frames, _ = shared_env.reset()
    np.testing.assert_array_equal(frames, minimal_env.reset()[0])
    shared = np.array([names.index(n) for n in ("RIGHT", "RIGHTFIRE", "FIRE", "LEFT")])
    plain = np.array([minimal_names.index(n) for n in ("RIGHT", "RIGHT", "NOOP", "LEFT")])
    for _ in range(20):
        frames, *_ = shared_env.step(shared)
        np.testing.assert_array_equal(frames, minimal_env.step(plain)[0])
    for one, other in [(0, 2), (0, 3), (2, 3)]:
        assert (frames[one] != frames[other]).any(), "the actions must matter for this to say much"
