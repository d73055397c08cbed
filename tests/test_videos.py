"""Videos read back: every frame of the very game that was scored, at true speed."""

import os
from dataclasses import replace
from itertools import pairwise

import av
import numpy as np
import pytest

from impala.evaluation.evaluation import Evaluation
from impala.evaluation.player import Player
from impala.evaluation.video import CAPTION, Video, check_encoder
from suites.atari57 import Atari57
from suites.camera import ObservationCamera, check_filmable
from suites.catch import Catch
from tests.counting import CountingAgent, CountingSuite
from tests.test_evaluation import SeedAgent


def read(path):
    """Pictures uint8 [frames, height, width, 3], and how many a second."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return np.stack(frames), float(stream.average_rate)


def film(suite, run_dir, *, games=2, videos=1, agent=None):
    given = Evaluation(
        suite=suite, agent=agent or SeedAgent(), games=games, greedy=False, seed=5,
        num_workers=1, videos=videos,
    )  # fmt: skip
    player = Player(given, run_dir, 700)
    played = player.play(next(given.chunks()))
    player.close()
    return played


def test_an_atari_game_has_every_frame_of_the_emulator_in_colour(tmp_path):
    suite = Atari57(tasks=["breakout"], sticky_actions=0.25, max_frames=120)
    games = film(suite, tmp_path)
    (path,) = tmp_path.rglob("*.mp4")
    assert path == tmp_path / "evaluation/700.videos/breakout_0.mp4"
    assert os.listdir(path.parent) == [path.name]
    pictures, rate = read(path)
    assert (rate, pictures.shape) == (60.0, (1 + games[0].length, 420 + CAPTION, 320, 3))
    below = pictures[:, CAPTION:].astype(int)
    assert (abs(below[..., 0] - below[..., 2]) > 60).mean() > 0.02  # breakout's walls are colourful
    assert (below[1:] != below[:-1]).any((1, 2, 3)).mean() > 0.5  # not every fourth frame only


@pytest.mark.parametrize(
    "tasks",
    [["skiing", "pong"], ["pong"], ["berzerk"]],  # all 18 actions, its own, a start of its own
)
def test_the_camera_sees_what_the_agent_saw(tasks):
    suite = Atari57(tasks=tasks, sticky_actions=0.25)
    task = suite.tasks[0]
    environment = suite.make(task, 1, [9], "test")
    frame, info = environment.reset()
    camera = suite.camera(task, 9, frame[0], info)
    generator = np.random.default_rng(1)
    for _ in range(60):
        action = generator.integers(suite.spec.num_actions, size=1)
        frame, reward, *_ = environment.step(action)
        shots = camera.step(int(action[0]), float(reward[0]), frame[0])
        # The agent's frame is the maximum of the last two, in grey and smaller.
        latest = np.maximum(shots[-1][0], shots[-2][0]) @ [0.299, 0.587, 0.114]
        rows, columns = latest.mean(1), latest.mean(0)
        seen = frame[0, -1].astype(float)
        for mine, theirs in ((rows, seen.mean(1)), (columns, seen.mean(0))):
            places = np.linspace(0, len(mine) - 1, 84)
            smoothed = np.convolve(mine, np.ones(3) / 3, "same")
            error = abs(np.interp(places, np.arange(len(mine)), smoothed) - theirs)[4:-4]
            assert error.mean() < 4.0
    environment.close()


@pytest.mark.slow
def test_every_game_is_played_again_as_it_was():
    suite = Atari57()
    for task in suite.tasks:
        environment = suite.make(task, 1, [9], "test")
        frame, info = environment.reset()
        camera = suite.camera(task, 9, frame[0], info)
        generator = np.random.default_rng(1)
        for _ in range(400):
            action = generator.integers(suite.spec.num_actions, size=1)
            frame, reward, terminated, *_ = environment.step(action)
            camera.step(int(action[0]), float(reward[0]), frame[0])  # an error where it differs
            if terminated[0]:
                break
        environment.close()


def test_another_game_than_was_played_is_an_error(tmp_path):
    suite = Atari57(tasks=["pong"])
    frame, info = suite.make(suite.tasks[0], 1, [9], "test").reset()
    camera = suite.camera(suite.tasks[0], 9, frame[0], info)
    camera.step(0, 0.0, frame[0])
    with pytest.raises(RuntimeError, match=r"gave 0\.0 where the game itself gave 1\.0"):
        camera.step(0, 1.0, frame[0])


def test_catch_can_be_followed(tmp_path):
    film(Catch(), tmp_path, videos=2)
    paths = sorted(tmp_path.rglob("*.mp4"))
    assert [path.name for path in paths] == ["catch_0.mp4", "catch_1.mp4"]
    pictures, rate = read(paths[0])
    assert (rate, pictures.shape) == (5.0, (10, 640 + CAPTION, 320, 3))
    ball_rows = [np.flatnonzero(p[CAPTION:].mean((1, 2)) > 20)[0] // 64 for p in pictures]
    assert ball_rows == list(range(10))  # the last one is of the game's end, not of the next one


def test_other_suites_show_their_observations(tmp_path):
    film(CountingSuite(), tmp_path, agent=CountingAgent())
    pictures, rate = read(next(tmp_path.rglob("*.mp4")))
    assert (rate, pictures.shape) == (15.0, (4, 320 + CAPTION, 320, 3))


def test_a_suite_without_pictures_is_refused():
    suite = CountingSuite()
    check_filmable(suite)
    suite.spec = replace(suite.spec, frame_shape=(4,))
    with pytest.raises(ValueError, match=r"counting cannot be filmed.*\(4,\), are no pictures"):
        check_filmable(suite)


def test_score_and_value_are_drawn_in(tmp_path):
    camera = ObservationCamera(np.zeros((3, 10, 320), np.uint8), 15.0)
    with Video(tmp_path / "a.mp4", camera, "a game") as video:
        for reward, value in ((0.0, 1.0), (0.0, 1.0), (5.0, 1.0), (0.0, 2.0)):
            video.add(0, reward, np.zeros((3, 10, 320), np.uint8), value)
        video.save()
    pictures, _ = read(tmp_path / "a.mp4")
    score, value = pictures[:, 20:CAPTION, :160], pictures[:, 20:CAPTION, 160:]

    def changes(parts):
        return [bool((abs(b.astype(int) - a) > 100).any()) for a, b in pairwise(parts)]

    assert changes(score) == [False, False, True, False]
    assert changes(value) == [False, False, False, True]


def test_what_was_not_finished_leaves_nothing(tmp_path):
    camera = ObservationCamera(np.zeros((1, 10, 320), np.uint8), 15.0)
    with pytest.raises(KeyError), Video(tmp_path / "a.mp4", camera, "a game"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_without_the_encoder_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "av" else object())
    with pytest.raises(ValueError, match=r"videos need av.*pip install 'impala\[videos\]'"):
        check_encoder()
