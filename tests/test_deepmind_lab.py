"""What the suite relies on of the engine. On the double by default; `-m dmlab` on the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from suites.lab import ACTION_SETS, OBSERVATIONS

SHORT = "contributed/dmlab30/rooms_select_nonmatching_object"  # 720 frames, fast to reset
SIZE = {"width": "96", "height": "72"}
FORWARD = np.array(ACTION_SETS["nine"][0], np.intc)


@pytest.fixture
def make(lab):
    made = []

    def make(level=SHORT, observations=OBSERVATIONS, config=SIZE, **options):
        made.append(lab.Lab(level, observations, config, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def play(env, steps, action=FORWARD):
    """The observations and rewards of so many steps."""
    seen = [env.observations()]
    for _ in range(steps):
        reward = env.step(action, num_steps=4)
        seen.append({**env.observations(), "reward": reward})
    return seen


def same(a, b):
    return all(
        np.array_equal(x[key], y[key]) for x, y in zip(a, b, strict=True) for key in x.keys() | y
    )


def test_observations_and_actions_are_as_expected(make):
    env = make()
    specs = {spec["name"]: (spec["shape"], spec["dtype"]) for spec in env.observation_spec()}
    assert specs["RGB_INTERLEAVED"] == ((72, 96, 3), np.uint8) and specs["INSTR"] == ((), str)
    limits = np.array([(spec["min"], spec["max"]) for spec in env.action_spec()])
    assert [spec["name"] for spec in env.action_spec()] == [
        "LOOK_LEFT_RIGHT_PIXELS_PER_FRAME", "LOOK_DOWN_UP_PIXELS_PER_FRAME", "STRAFE_LEFT_RIGHT",
        "MOVE_BACK_FORWARD", "FIRE", "JUMP", "CROUCH",
    ]  # fmt: skip
    for actions in ACTION_SETS.values():
        assert (np.array(actions) >= limits[:, 0]).all()
        assert (np.array(actions) <= limits[:, 1]).all()
    env.reset(seed=1)
    seen, again = env.observations(), env.observations()
    assert list(seen) == OBSERVATIONS
    assert seen["RGB_INTERLEAVED"].dtype == np.uint8
    assert seen["RGB_INTERLEAVED"].shape == (72, 96, 3)
    assert type(seen["INSTR"]) is str and seen["INSTR"] == ""
    assert seen["FRAMES_REMAINING_AT_60"].shape == (1,)
    assert seen["FRAMES_REMAINING_AT_60"].dtype == np.float64
    assert not np.shares_memory(seen["RGB_INTERLEAVED"], again["RGB_INTERLEAVED"])
    seen["RGB_INTERLEAVED"][:] = 0  # which is writable
    assert isinstance(env.step(FORWARD, num_steps=4), float)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (TypeError, {"observations": tuple(OBSERVATIONS)}),
        (TypeError, {"config": {"width": 96}}),
        (ValueError, {"observations": ["NOTHING"]}),
        (RuntimeError, {"level": "contributed/dmlab30/nowhere"}),
        (RuntimeError, {"config": {"nothing": "1"}}),
        (RuntimeError, {"config": {"width": "97", "height": "72"}}),
        (RuntimeError, {"level": "contributed/dmlab30/rooms_collect_good_objects_test"}),
    ],
)
def test_wrong_arguments_are_refused_when_it_is_made(make, error, arguments):
    with pytest.raises(error):
        make(**arguments)


def test_wrong_actions_and_seeds_are_refused(make):
    env = make()
    for seed in (np.int64(1), 1.0, "1"):
        with pytest.raises(ValueError):  # noqa: PT011  (what it says is the engine's affair)
            env.reset(seed=seed)
    env.reset(seed=2**31 - 1)
    with pytest.raises(TypeError):
        env.step(FORWARD.tolist(), num_steps=4)
    for action in (FORWARD.astype(np.int64), FORWARD[:6], FORWARD[None]):
        with pytest.raises(ValueError):  # noqa: PT011  (what it says is the engine's affair)
            env.step(action, num_steps=4)


def test_an_episode_ends_by_its_time_and_then_nothing_is_shown(make):
    env = make()
    assert not env.is_running()
    for call in (env.observations, env.events, lambda: env.step(FORWARD)):
        with pytest.raises(RuntimeError):
            call()
    env.reset(seed=1)
    left, steps = [], 0
    while env.is_running():
        left.append(float(env.observations()["FRAMES_REMAINING_AT_60"][0]))
        env.step(FORWARD, num_steps=4)
        steps += 1
    assert 179 <= steps <= 181 and 0 < left[-1] <= 5 and left[-2] > 5
    assert np.allclose(np.diff(left), -4, atol=1)
    for call in (env.observations, lambda: env.step(FORWARD)):
        with pytest.raises(RuntimeError):
            call()
    env.reset(seed=1)
    asked = 0
    while env.is_running():
        env.step(FORWARD, num_steps=7)
        asked += 7
    assert env.num_steps() == asked  # and not the frames of the episode


def test_what_repeats_itself(make):
    first, other = make(), make()
    first.reset(seed=5)
    other.reset(seed=5)
    begun = play(first, 20)
    assert same(begun, play(other, 20))
    first.reset(seed=5)
    later = play(first, 20)
    other.reset(seed=6)
    assert not same(play(other, 20), later)
    other.reset(seed=5)
    assert same(play(other, 20), later)
    mixed = make(config={**SIZE, "mixerSeed": str(0x600D5EED)})
    mixed.reset(seed=5)
    assert not same(play(mixed, 20), begun)


def test_instructions_are_text(make):
    env = make("contributed/dmlab30/language_select_described_object")
    env.reset(seed=3)
    assert env.observations()["INSTR"].split()


def test_images_are_needed_by_two_levels(make):
    level = "contributed/dmlab30/psychlab_continuous_recognition"
    with pytest.raises(RuntimeError):
        make(level).reset(seed=1)
    make(level, config={**SIZE, "datasetPath": "dummy"}).reset(seed=1)


def test_held_out_levels_can_be_had(make):
    config = {**SIZE, "allowHoldOutLevels": "true", "mixerSeed": str(0x600D5EED)}
    make("contributed/dmlab30/rooms_collect_good_objects_test", config=config).reset(seed=1)


class Remembering:
    """A level cache in memory."""

    def __init__(self):
        self.maps, self.hits = {}, 0

    def fetch(self, key, pk3_path):
        if key in self.maps:
            Path(pk3_path).write_bytes(self.maps[key])
            self.hits += 1
            return True
        return None

    def write(self, key, pk3_path):
        self.maps[key] = Path(pk3_path).read_bytes()


def test_the_level_cache_is_asked_and_told(make):
    cache = Remembering()
    level = "contributed/dmlab30/language_answer_quantitative_question"
    for _ in range(2):
        env = make(level, level_cache=cache)
        env.reset(seed=1)
    assert cache.maps and cache.hits
    for key, content in cache.maps.items():
        assert "/" not in key and "_aas_" in key and len(content) > 1000
    assert make(SHORT).reset(seed=1)

    class Failing(Remembering):
        def fetch(self, key, pk3_path):
            raise LookupError("of the cache's own")

    with pytest.raises(LookupError):
        make(level, level_cache=Failing()).reset(seed=1)


def child(code: str, tmp_path: Path) -> subprocess.CompletedProcess:
    begin = f"""
        import os, signal, sys
        sys.path[:] = {sys.path}
        import deepmind_lab
        def make(level={SHORT!r}, **options):
            return deepmind_lab.Lab(level, {OBSERVATIONS}, {SIZE}, temp_folder={str(tmp_path)!r},
                                    **options)
    """
    code = textwrap.dedent(begin) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=200)


def folders(tmp_path: Path) -> int:
    return len(list(tmp_path.glob("dmlab_temp_folder_*")))


def test_a_reset_after_close_is_a_crash(lab, tmp_path):
    code = "e = make(); e.reset(seed=1); assert [e.close(), e.close()] == [True, False]; e.reset()"
    assert child(code, tmp_path).returncode == -signal.SIGSEGV


def test_a_promised_map_that_is_not_there_ends_the_process(lab, tmp_path):
    code = """
        class Liar:
            def fetch(self, key, path): return True
            def write(self, key, path): pass
        level = "contributed/dmlab30/language_answer_quantitative_question"
        make(level, level_cache=Liar()).reset(seed=1)
        os._exit(0)
    """
    assert child(code, tmp_path).returncode == 1


def test_its_temporary_folder_is_left_only_by_a_kill(lab, tmp_path):
    code = "e = make(); e.reset(seed=1); os.kill(os.getpid(), signal.SIGKILL)"
    assert child(code, tmp_path).returncode == -signal.SIGKILL and folders(tmp_path) == 1
    assert child("e = make(); e.reset(seed=1)", tmp_path).returncode == 0
    assert child("e = make(); e.reset(seed=1); e.close()", tmp_path).returncode == 0
    assert folders(tmp_path) == 1


# The double alone


@pytest.fixture
def double(lab):
    if not hasattr(lab, "LEVELS"):
        pytest.skip("of the double")
    return lab


def test_the_double_plays_what_was_recorded(double):
    for name, recorded in double.LEVELS.items():
        config = {**SIZE, "datasetPath": "dummy"}
        config |= {"allowHoldOutLevels": "true"} if name.endswith("_test") else {}
        env = double.Lab(f"contributed/dmlab30/{name}", ["INSTR"], config)
        env.reset(seed=0)
        rewards, instructions, steps = [], [], 0
        while env.is_running():
            text = env.observations()["INSTR"]
            if not instructions or instructions[-1][1] != text:
                instructions.append([steps, text])
            if reward := env.step(FORWARD, num_steps=4):
                rewards.append([steps, reward])
            steps += 1
        env.close()
        assert rewards == recorded["rewards"] and steps == recorded["steps"], name
        assert instructions == recorded["instructions"], name


def test_the_double_reads_a_strided_action_wrong_as_the_engine_does(double):
    both = np.zeros(14, np.intc)
    both[::2] = FORWARD
    seen = []
    for action in (FORWARD, both[::2]):
        env = double.Lab(SHORT, OBSERVATIONS, SIZE)
        env.reset(seed=1)
        seen.append(play(env, 3, action))
        env.close()
    assert not same(*seen)


def test_the_double_takes_the_time_that_it_is_told(double, monkeypatch):
    slept = []
    monkeypatch.setattr(double.time, "sleep", slept.append)
    env = double.Lab("contributed/dmlab30/skymaze_irreversible_path_hard", OBSERVATIONS, SIZE)
    env.reset(seed=1)
    assert not slept
    monkeypatch.setenv("DMLAB_DOUBLE_TIME_SCALE", "0.1")
    env.reset(seed=1)
    env.step(FORWARD, num_steps=4)
    assert slept == pytest.approx([2.3, 0.1 / 280])
    env.close()


def test_a_fork_of_a_process_that_plays_the_double_hangs(double, tmp_path):
    code = """
        import time
        e = make(); e.reset(seed=1)
        child = os.fork()
        if not child:
            os._exit(0)
        time.sleep(0.5)
        hangs = os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGKILL)
        os._exit(0 if hangs else 1)
    """
    assert child(code, tmp_path).returncode == 0


def test_the_double_prints_to_the_descriptor(double, tmp_path):
    found = child("make().reset(seed=1)", tmp_path)
    assert b"a new episode" in found.stdout and os.linesep.encode() in found.stdout
