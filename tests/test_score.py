"""Human-normalised scores, their aggregates, and the scoreboard of finished games."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from suites.atari57 import RANDOM_COLUMNS, Atari57, read_scores
from suites.score import Scoreboard, aggregates, human_normalised
from suites.suite import Task


def normalised(column: str, random_column: str) -> dict[str, float]:
    tasks = Atari57(random_column=random_column).tasks
    rows = read_scores()
    return {task.name: human_normalised(float(rows[task.name][column]), task) for task in tasks}


@pytest.mark.parametrize(
    ("agent", "random_column", "median", "mean"),
    [  # as printed in the papers
        ("impala_shallow", "random_impala", None, 466.4),
        ("impala_deep", "random_impala", 191.8, 957.6),
        ("impala_deep_multitask", "random_impala", 59.7, 176.9),
        ("apex_noop", "random_impala", 434.1, 1695.6),
        ("r2d2", "random_agent57_muzero", None, 4024.9),
        ("r2d2_bandit", "random_agent57_muzero", 2357.92, 5461.66),
        ("agent57", "random_agent57_muzero", 1933.49, 4766.25),
    ],
)
def test_published_aggregates_follow_from_published_scores(agent, random_column, median, mean):
    result = aggregates(normalised(agent, random_column))
    assert result["mean"] == pytest.approx(mean, abs=0.06)
    if median is not None:  # unreadable for shallow IMPALA; R2D2's is printed as 1920.6, not 1922.7
        assert result["median"] == pytest.approx(median, abs=0.05)


@pytest.mark.parametrize("random_column", RANDOM_COLUMNS)
def test_published_capped_means_and_games_above_human(random_column):
    capped = {"agent57": 100.0, "r2d2_bandit": 96.93}
    for agent, mean in capped.items():
        scores = normalised(agent, random_column)
        assert aggregates(scores)["mean_capped"] == pytest.approx(mean, abs=0.005)
    above_human = {"agent57": 57, "r2d2_bandit": 54, "r2d2": 52, "apex_noop": 49}
    for agent, games in above_human.items():
        assert sum(score > 100 for score in normalised(agent, random_column).values()) == games


def test_the_default_random_scores_are_those_of_impala():
    assert Atari57().tasks == Atari57(random_column="random_impala").tasks
    assert "IMPALA" in Atari57().provenance["random"]


def test_human_normalised_is_0_at_random_and_100_like_a_human():
    task = Task("t", "t", "t", random_return=-20.0, human_return=20.0)
    assert [human_normalised(r, task) for r in (-20.0, 20.0, 0.0, 60.0)] == [0, 100, 50, 200]


def test_aggregates_over_few_tasks_by_hand():
    scores = dict(zip("abcdefgh", [400.0, -1000.0, 10, 20, 30, 50, 60, 70], strict=True))
    result = aggregates(scores)
    assert result["median"] == 40.0
    assert result["mean"] == -360.0 / 8
    assert result["mean_capped"] == (-360.0 - 300.0) / 8
    assert result["iqm"] == (20 + 30 + 50 + 60) / 4
    assert aggregates({"a": 3.0, "b": 5.0, "c": 100.0})["iqm"] == 36.0
    with pytest.raises(ValueError, match="no task"):
        aggregates({})


@pytest.mark.parametrize("scores", [(1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0), (0.0, np.inf)])
def test_a_task_without_usable_reference_scores_is_refused(scores):
    with pytest.raises(ValueError, match=r"'t'.*reference"):
        Task("t", "t", "t", *scores)


# Scoreboard


def two_tasks() -> tuple[Task, Task]:
    return Task("a", "a", "a", 0.0, 10.0), Task("b", "b", "b", -10.0, 10.0)


def test_scoreboard_counts_whole_games_in_a_window():
    board = Scoreboard(two_tasks(), window=3)
    assert board.metrics() == {"score/coverage": 0.0}
    board.add_many([0] * 5, [100, 100, 1, 2, 3], [1, 1, 40, 80, 120])
    metrics = board.metrics()
    assert metrics["score/coverage"] == 0.5
    assert (metrics["return/a"], metrics["length/a"], metrics["hns/a"]) == (2.0, 80.0, 20.0)
    assert {metrics[f"score/{k}"] for k in ("median", "mean", "mean_capped", "iqm")} == {20.0}
    assert not any(key.endswith("/b") for key in metrics)
    assert (board.games(0), board.games(1)) == (5, 0)
    board.add(1, 10.0, 4)
    assert board.metrics()["score/coverage"] == 1.0
    assert board.metrics()["score/mean"] == 60.0


def test_scoreboard_state_round_trip_goes_on_with_the_same_numbers():
    board, other = Scoreboard(two_tasks(), window=3), Scoreboard(two_tasks(), window=3)
    board.add_many([0, 0, 0, 0, 1], np.arange(5.0), np.arange(1, 6))
    state = board.state_dict()
    rows = state["returns"] + state["lengths"]
    assert {type(row) for row in rows} == {list}
    assert {type(leaf) for row in rows for leaf in row} == {int, float}
    before = copy.deepcopy(state)
    other.load_state_dict(state)
    for each in (board, other):
        each.add(0, 7.0, 8)
    assert state == before, "the state must share nothing with the scoreboard"
    assert other.metrics() == board.metrics()
    assert other.games(0) == board.games(0) == 5


def test_scoreboard_refuses_a_state_of_other_tasks_by_name():
    tasks = two_tasks()
    board = Scoreboard(tasks)
    board.add(0, 1.0, 1)
    before = board.state_dict()
    other = Scoreboard([tasks[0], Task("zaxxon", "z", "z", 0.0, 1.0)]).state_dict()
    with pytest.raises(ValueError, match=r"lacks b.*besides zaxxon"):
        board.load_state_dict(other)
    with pytest.raises(ValueError, match="order"):
        board.load_state_dict(Scoreboard(tasks[::-1]).state_dict())
    with pytest.raises(ValueError, match="window 7"):
        board.load_state_dict(Scoreboard(tasks, window=7).state_dict())
    with pytest.raises(ValueError, match="damaged"):
        board.load_state_dict({**before, "lengths": []})
    with pytest.raises(ValueError, match="expected exactly"):
        board.load_state_dict({"tasks": ["a", "b"]})
    assert board.state_dict() == before


def test_scoreboard_refuses_what_is_no_finished_game():
    board = Scoreboard(two_tasks())
    for game, message in [
        ((0, float("nan"), 4), "return nan"),
        ((1, float("inf"), 4), "return inf"),
        ((0, 1.0, 0), "0 frames"),
        ((2, 1.0, 4), "task index 2"),
        ((-1, 1.0, 4), "task index -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            board.add(*game)
    assert board.metrics() == {"score/coverage": 0.0}
