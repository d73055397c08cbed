"""DMLab-30: its tasks and scores, its environments, and what is said where something is missing."""

from __future__ import annotations

import os
import pickle
import signal
import sys

import numpy as np
import psutil
import pytest

from impala.worker import WorkerEnv, WorkerError
from suites import check, prebuild
from suites.chosen import chosen
from suites.dmlab30 import DmLab30, read_scores
from suites.instructions import word_ids
from suites.lab import ACTION_SETS, game_seed
from suites.score import aggregates, human_normalised
from suites.suite import Task

SHORT = "rooms_select_nonmatching_object"  # 720 frames, fast to reset
EARLY = "rooms_exploit_deferred_effects"
LANGUAGE = "language_select_described_object"


@pytest.fixture
def make(lab):
    made = []

    def make(task=SHORT, seeds=(1,), split="train", **options):
        suite = DmLab30(tasks=[task], **options)
        made.append(suite.make(suite.tasks[0], len(seeds), seeds, split))
        return made[-1]

    yield make
    for env in made:
        env.close()


def to_the_end(env, action=0):
    """Steps until a game ends: the observation before, and the step at which it did."""
    actions, before = np.full(env.num_envs, action), None
    for _ in range(5000):
        step = env.step(actions)
        if (step[2] | step[3]).any():
            return before, step
        before = step
    raise AssertionError("no game ended")


# Data


def test_the_30_tasks_in_their_order():
    tasks = DmLab30().tasks
    assert len(tasks) == 30
    assert tasks[0] == Task(
        "rooms_collect_good_objects", "rooms_collect_good_objects_train",
        "rooms_collect_good_objects_test", 0.073, 10.0,
    )  # fmt: skip
    assert [tasks[i].name for i in (9, 10, 17, 29)] == [
        "lasertag_one_opponent_small", "lasertag_three_opponents_small",
        "skymaze_irreversible_path_varied", "explore_object_rewards_many",
    ]  # fmt: skip
    assert [task.name for task in tasks if task.train_level != task.test_level] == [
        "rooms_collect_good_objects", EARLY,
    ]  # fmt: skip
    assert all(task.name == task.train_level == task.test_level for task in tasks[2:])
    spec = DmLab30().spec
    assert spec.frame_shape == (3, 72, 96) and spec.frames_per_step == 4 and spec.num_actions == 9
    assert (spec.instruction_length, spec.vocabulary_size, spec.outside) == (16, 1000, True)


@pytest.mark.parametrize(
    ("column", "renamed", "published"),
    [
        ("impala_deep_pbt", False, 49.4),
        ("impala_experts", False, 44.5),
        ("r2d2", True, 78.3),
        ("r2d2_plus", True, 85.7),
        ("impala_shallow_r2d2", True, 73.6),
        ("impala_deep_r2d2", True, 85.1),
    ],
)
def test_published_scores_of_tasks_give_the_published_aggregates(column, renamed, published):
    """renamed: the R2D2 paper's laser-tag labels are those of table B.1."""
    rows, tasks = read_scores(), {task.name: task for task in DmLab30().tasks}
    scored = {row["table_b1_label"]: tasks[name] for name, row in rows.items()}
    tasks_of_labels = {task.test_level: task for task in tasks.values()}
    scores = {
        name: human_normalised(
            float(row[column]), (scored if renamed else tasks_of_labels)[row["test_level"]]
        )
        for name, row in rows.items()
    }
    assert aggregates(scores)[DmLab30.headline] == pytest.approx(published, abs=0.06)


def test_by_their_labels_the_papers_scores_are_not_what_it_published():
    """What the docstring of suites/dmlab30.py says of the laser-tag levels."""
    rows, tasks = read_scores(), {task.test_level: task for task in DmLab30().tasks}
    for column, wrong in (("impala_deep_pbt", 50.06), ("impala_experts", 45.74)):
        by_label = {
            row["table_b1_label"]: human_normalised(
                float(row[column]), tasks[row["table_b1_label"]]
            )
            for row in rows.values()
        }
        assert aggregates(by_label)["mean_capped"] == pytest.approx(wrong, abs=0.005)
        exchanged = {row["task"] for row in rows.values() if row["test_level"] not in by_label}
        assert not exchanged


def test_action_sets():
    assert ACTION_SETS["nine"][6] == (-20, 0, 0, 1, 0, 0, 0)
    for name, size in (("nine", 9), ("fifteen", 15)):
        assert len(set(ACTION_SETS[name])) == size == DmLab30(action_set=name).spec.num_actions


@pytest.mark.parametrize(
    "options",
    [
        {"action_set": "ten"},
        {"time_limit": "none"},
        {"renderer": "gpu"},
        {"level_cache_gb": 0},
        {"seeds_per_task": 0},
        {"instruction_length": 0},
        {"tasks": ["rooms_watermase"]},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options)) if "tasks" not in options else "maze"):
        DmLab30(**options)


# Environments


def test_frames_are_the_engines_with_the_channels_first(make, lab):
    for env in (make(), make(seeds=(1, 2))):
        frames, info = env.reset()
        seed = game_seed(1, 0)
        engine = lab.Lab(
            f"contributed/dmlab30/{SHORT}", ["RGB_INTERLEAVED"], {"width": "96", "height": "72"}
        )
        engine.reset(seed=seed)
        expected = engine.observations()["RGB_INTERLEAVED"]
        engine.close()
        np.testing.assert_array_equal(frames[0], np.moveaxis(expected, 2, 0))
        assert (frames[0] != frames[-1]).any() or env.num_envs == 1
        assert info["instruction"].shape == (env.num_envs, 16) and not info["instruction"].any()


@pytest.mark.parametrize("time_limit", ["terminated", "truncated"])
def test_a_game_ends_by_its_time_with_its_last_observation(make, lab, time_limit):
    env = make(seeds=(1, 2), time_limit=time_limit)
    env.reset()
    before, (frames, _, terminated, truncated, info) = to_the_end(env)
    ended = terminated | truncated
    assert (truncated if time_limit == "truncated" else terminated).any()
    assert not (terminated if time_limit == "truncated" else truncated).any()
    np.testing.assert_array_equal(info["final_obs"][ended], before[0][ended])
    assert (info["final_obs"][ended] != frames[ended]).any(), "which are the next game's"
    assert info["final_instruction"].shape == (2, 16)
    assert info["frames"].dtype == np.int64
    assert (info["frames"] >= 1).all() and (info["frames"] <= 4).all()
    if hasattr(lab, "LEVELS"):  # the double shows the number of the frame
        assert frames[:, :, 0, 0].tolist() == [[0, 0, 0]] * 2
        assert info["final_obs"][:, :2, 0, 0].tolist() == [[716 % 256, 716 // 256]] * 2


def test_a_game_that_ends_early_is_terminated_whatever_a_time_limit_is(make, lab):
    if not hasattr(lab, "LEVELS"):
        pytest.skip("of the double, whose games of some seeds end early")
    early, late = (
        next(s for s in range(100) if ends_early(lab, game_seed(s, 0)) is wanted)
        for wanted in (True, False)
    )
    env = make(EARLY, seeds=(early,), time_limit="truncated")
    env.reset()
    _, (_, _, terminated, truncated, info) = to_the_end(env)
    assert terminated.tolist() == [True] and truncated.tolist() == [False]
    assert info["frames"].tolist() == [4]
    env = make(EARLY, seeds=(late,), time_limit="truncated")
    env.reset()
    _, (_, _, terminated, truncated, _) = to_the_end(env)
    assert terminated.tolist() == [False] and truncated.tolist() == [True]


def ends_early(lab, seed: int) -> bool:
    env = lab.Lab(f"contributed/dmlab30/{EARLY}_train", ["INSTR"], {"width": "96", "height": "72"})
    env.reset(seed=seed)
    early = env._end < env._length
    env.close()
    return early


def test_frames_are_those_that_were_played(make, lab, monkeypatch):
    if not hasattr(lab, "LEVELS"):
        pytest.skip("a level whose length is no multiple of four is made of the double")
    init = lab.Lab.__init__

    def ten_frames(self, *args, **options):
        init(self, *args, **options)
        self._length = 10

    monkeypatch.setattr(lab.Lab, "__init__", ten_frames)
    env = make(time_limit="truncated")
    env.reset()
    played = [env.step(np.zeros(1, int)) for _ in range(6)]
    assert [step[4]["frames"].tolist() for step in played] == [[4], [4], [2]] * 2
    assert [step[3].tolist() for step in played] == [[False], [False], [True]] * 2


def test_rewards_and_instructions_are_the_engines(make, lab):
    env = make(LANGUAGE, seeds=(3,))
    _, info = env.reset()
    engine = lab.Lab(f"contributed/dmlab30/{LANGUAGE}", ["INSTR"], {"width": "96", "height": "72"})
    engine.reset(seed=game_seed(3, 0))
    actions = np.random.default_rng(0).integers(9, size=400)
    table = np.array(ACTION_SETS["nine"], np.intc)
    changes = 0
    for action in actions:
        text = engine.observations()["INSTR"]
        assert info["instruction"][0].tolist() == word_ids(text, 16, 1000).tolist() and text
        expected = engine.step(table[action], num_steps=4)
        before = info["instruction"]
        _, rewards, _, _, info = env.step(np.array([action]))
        assert rewards.tolist() == [expected]
        changes += (info["instruction"] != before).any()
    engine.close()
    if hasattr(lab, "LEVELS"):
        assert changes


def test_every_game_has_a_seed_of_its_own(make):
    seeds = {game_seed(seed, game) for seed in range(100) for game in range(100)}
    assert len(seeds) == 10_000 and all(type(s) is int and 0 <= s < 2**31 for s in seeds)
    assert {game_seed(seed, 0, 5) for seed in range(200)} == set(range(5))
    first, same, other = make(seeds=(7, 8)), make(seeds=(7,)), make(seeds=(8,))
    games = [[env.reset()[0] for _ in range(3)] for env in (first, same, other)]
    for i in range(3):
        np.testing.assert_array_equal(games[0][i][0], games[1][i][0])
        np.testing.assert_array_equal(games[0][i][1], games[2][i][0])
    assert len({game.tobytes() for game in games[1]}) == 3


def test_a_seed_given_later_repeats_itself_but_for_the_first_game(make):
    env = make(seeds=(7,))
    fresh = env.reset()[0]
    again = [env.reset(seed=[7])[0] for _ in range(2)]
    np.testing.assert_array_equal(*again)
    assert (fresh != again[0]).any(), "as the engine does: see docs/dmlab30.md"


def test_held_out_levels_and_maps_are_for_testing_only(make, lab, monkeypatch):
    configs = []
    original = lab.Lab

    def remembering(level, observations, config, **options):
        configs.append((level.rpartition("/")[2], dict(config)))
        return original(level, observations, config, **options)

    monkeypatch.setattr(lab, "Lab", remembering)
    mixed, held_out = {"mixerSeed": str(0x600D5EED)}, {"allowHoldOutLevels": "true"}
    for task, split, level, extra in (
        (SHORT, "train", SHORT, {}),
        (SHORT, "test", SHORT, mixed),
        (EARLY, "train", f"{EARLY}_train", {}),
        (EARLY, "test", f"{EARLY}_test", mixed | held_out),
        ("psychlab_continuous_recognition", "test", "psychlab_continuous_recognition",
         mixed | {"datasetPath": "dummy"}),
    ):  # fmt: skip
        env = make(task, split=split, dataset_path="dummy")
        env.reset()
        env.close()
        size = {"width": "96", "height": "72", "fps": "60", "logLevel": "WARN"}
        assert configs[-1] == (level, size | extra)


def test_a_closed_environment_raises_where_the_engine_would_crash(make, tmp_path):
    env = make()
    env.reset()
    env.close()
    env.close()
    for call in (env.reset, lambda: env.send(np.zeros(1, int))):
        with pytest.raises(RuntimeError, match="after close"):
            call()
    assert not list(tmp_path.glob("impala_dmlab_*/*"))


def test_an_engine_that_cannot_be_made_leaves_nothing(make, lab, tmp_path):
    if not hasattr(lab, "LEVELS"):
        pytest.skip("the real one may have this renderer")
    with pytest.raises(RuntimeError, match="renderer"):
        make(renderer="hardware")
    assert not list(tmp_path.glob("impala_dmlab_*/*"))


# The level cache


def test_hits_and_misses_are_counted_for_each_environment(make):
    options = {"task": "language_answer_quantitative_question", "seeds": (3,)}
    _, info = make(**options).reset()
    assert info["level_cache"].dtype == np.int32 and info["level_cache"].shape == (1, 3)
    hits, misses, failures = info["level_cache"][0].tolist()
    assert not hits and misses and not failures
    env = make(**options)
    _, info = env.reset()
    assert info["level_cache"].tolist() == [[misses, 0, 0]]
    assert env.step(np.zeros(1, int))[4]["level_cache"].tolist() == [[0, 0, 0]]
    assert "level_cache" not in make(**options, level_cache=None).reset()[1]


def test_prebuild_fills_it_for_the_seeds_of_a_run(lab, capsys):
    words = ["suite=dmlab30", "suite.seeds_per_task=12"]
    words += [f"suite.tasks=[language_answer_quantitative_question,{SHORT}]"]
    assert prebuild.main([*words, "--workers", "2"]) == 0
    printed = capsys.readouterr().out
    assert "12 maps made, 0 were there, 0 failures" in printed
    shown = [line for line in printed.splitlines() if line.endswith(" left")]
    assert shown[0].startswith("  0 %  the first maps") and shown[-1].startswith("100 %  ")
    assert prebuild.main([*words, "--workers", "1"]) == 0
    assert "0 maps made, 12 were there, 0 failures" in capsys.readouterr().out
    suite = chosen(words)
    env = suite.make(suite.tasks[0], 1, [99])
    for _ in range(5):
        assert env.reset()[1]["level_cache"].tolist() == [[1, 0, 0]]
    env.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no suite given"),
        (["suite=catch"], "only suite=dmlab30"),
        (["suite=dmlab30", "suite.level_cache=null"], "must not be null"),
        (["suite=dmlab30", "suite.seeds_per_task=1_000_000"], "greater suite.level_cache_gb"),
        (["suite=dmlab30", "suite.seeds=1"], "or suite.seeds_per_task"),
    ],
)
def test_prebuild_refuses_in_a_line(lab, capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        prebuild.main(words)
    assert stop.value.code == 2 and message in capsys.readouterr().err


# In a process of its own


@pytest.fixture
def worker(lab, tmp_path):
    made = []

    def make(task=SHORT, **options):
        suite = DmLab30(tasks=[task], **options)
        made.append(WorkerEnv(suite, suite.tasks[0], 1, [3], log_dir=tmp_path / "engine"))
        return made[-1]

    yield make
    for env in made:
        env.close()


def test_a_worker_says_what_the_environment_itself_says(worker, make):
    outside, inside = worker(time_limit="truncated"), make(seeds=(3,), time_limit="truncated")
    answers = [outside.reset(), inside.reset()]
    for step in range(200):
        for found, expected in zip(*answers, strict=True):
            if isinstance(found, dict):
                assert found.keys() == expected.keys(), step
                for key in found:
                    np.testing.assert_array_equal(found[key], expected[key])
                    assert found[key].dtype == expected[key].dtype
            else:
                np.testing.assert_array_equal(found, expected)
        answers = [env.step(np.array([step % 9])) for env in (outside, inside)]


def test_what_the_engine_prints_is_in_a_log_and_part_of_how_it_died(worker, lab, capfd, tmp_path):
    if not hasattr(lab, "LEVELS"):
        pytest.skip("of the double, which surely prints")
    env = worker()
    env.reset()
    log = tmp_path / "engine" / f"{SHORT}_3.log"
    assert "a new episode" in log.read_text() and capfd.readouterr() == ("", "")
    os.kill(env._process.pid, signal.SIGSEGV)
    with pytest.raises(WorkerError, match=r"(?s)SIGSEGV.*a new episode.*Fatal Python error"):
        env.step(np.zeros(1, int))


def test_a_worker_that_is_killed_leaves_its_folder_to_the_next_and_to_tidy(worker, tmp_path):
    first = worker()
    first.reset()

    def folders():
        return list(tmp_path.glob("impala_dmlab_*/*/dmlab_temp_folder_*"))

    assert len(folders()) == 1
    first._process.kill()
    first._process.wait()
    assert len(folders()) == 1
    first.close()
    second = worker()
    second.reset()
    assert len(folders()) == 1
    second.close()
    DmLab30().tidy()
    assert not folders()


def test_its_process_has_no_torch(worker):
    env = worker()
    env.reset()
    maps = [m.path for m in psutil.Process(env._process.pid).memory_maps()]
    assert not any("torch" in path for path in maps)


# What is missing


def test_without_the_engine_it_is_said_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepmind_lab", None)
    with pytest.raises(ValueError, match="dmlab-gym build") as error:
        DmLab30().check()
    assert "\n" not in str(error.value)
    assert check.main(["suite=dmlab30"]) == 1
    assert "dmlab-gym build" in capsys.readouterr().out


@pytest.mark.parametrize("path", [None, "", "/nowhere"])
def test_missing_images_are_named_with_what_to_set(lab, path):
    with pytest.raises(ValueError, match=r"dataset_path.*dummy"):
        DmLab30(dataset_path=path).check()
    DmLab30(dataset_path="dummy").check()
    DmLab30(tasks=[SHORT], dataset_path=path).check()


def test_a_cache_that_cannot_be_made_is_refused(lab, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"level_cache=.*choose another"):
        DmLab30(tasks=[SHORT], level_cache=str(tmp_path / "file" / "cache")).check()


def test_the_suite_can_be_sent_to_other_processes():
    suite = DmLab30(tasks=[SHORT])
    assert vars(pickle.loads(pickle.dumps(suite))) == vars(suite)


def test_check_plays_every_level_apart(lab, capsys):
    words = ["suite=dmlab30", f"suite.tasks=[{EARLY},psychlab_continuous_recognition]"]
    assert check.main(words) == 1
    printed = capsys.readouterr().out
    assert "2 of 3 games work" in printed and "suite.dataset_path" in printed
    assert f"{EARLY}_test" in printed and "FAILS: RuntimeError" in printed
    assert "a new episode" not in printed
    assert check.main([*words, "suite.dataset_path=dummy"]) == 0
    assert "3 of 3 games work" in capsys.readouterr().out
