"""Aggregates over tasks and seeds, against slow forms and against other people's numbers."""

from __future__ import annotations

import numpy as np
import pytest

from suites import published
from suites.statistics import (
    AGGREGATES,
    bootstrap,
    improvement_interval,
    interval,
    iqm,
    mean,
    mean_capped,
    mean_capped_floored,
    median,
    performance_profile,
    probability_of_improvement,
)


def two_groups() -> tuple[np.ndarray, np.ndarray]:
    first = np.round(np.random.default_rng(7).lognormal(4, 1.5, (5, 9)) - 40, 1)
    second = np.round(np.random.default_rng(8).lognormal(4.4, 1.5, (5, 9)) - 40, 1)
    return first, second


def test_aggregates_are_those_of_rliable():
    """What rliable 1.2.0 says of these scores."""
    first, second = two_groups()
    expected = {"median": 4.08, "mean": 25.6111, "iqm": -0.665217, "optimality_gap": 91.177778}
    for name, value in expected.items():
        assert AGGREGATES[name](first) == pytest.approx(value, abs=1e-4), name
    assert probability_of_improvement(first, second) == pytest.approx(0.404444, abs=1e-6)
    shares = performance_profile(first, np.array([-20.0, 0, 50, 100, 200]))
    np.testing.assert_allclose(
        shares, [0.688889, 0.488889, 0.155556, 0.111111, 0.066667], atol=1e-6
    )


def test_intervals_are_those_of_rliable():
    """20,000 resamples there; what is left is chance."""
    first, second = two_groups()
    for aggregate, low, high in [(median, -9.42, 24.72), (iqm, -11.90, 11.21), (mean, 3.31, 50.84)]:
        found = interval(aggregate, first, resamples=5000)
        assert found == pytest.approx((low, high), abs=1.0)
    found = improvement_interval(first, second, resamples=1000)
    assert found == pytest.approx((0.284, 0.529), abs=0.015)


def test_aggregates_against_loops():
    scores = np.random.default_rng(3).normal(80, 90, (3, 7))
    of_tasks = [sum(scores[run, task] for run in range(3)) / 3 for task in range(7)]
    assert AGGREGATES["above_human"](scores) == sum(score > 100 for score in of_tasks)
    assert AGGREGATES["median"](scores) == pytest.approx(sorted(of_tasks)[3])
    assert AGGREGATES["percentile_50"](scores) == pytest.approx(sorted(of_tasks)[3])
    everything = sorted(scores.flat)
    assert AGGREGATES["iqm"](scores) == pytest.approx(sum(everything[5:-5]) / 11)
    capped = [min(100.0, score) for score in everything]
    assert mean_capped(scores) == pytest.approx(sum(capped) / 21)
    assert mean_capped_floored(scores) == pytest.approx(sum(max(0.0, s) for s in capped) / 21)
    for name, aggregate in AGGREGATES.items():  # many at once are the same as one by one
        drawn = bootstrap(scores, resamples=4)
        np.testing.assert_allclose(
            aggregate(drawn), [aggregate(each) for each in drawn], err_msg=name
        )


def test_scores_are_capped_before_anything_is_averaged():
    scores = np.array([[0.0], [300.0]])  # a mean over seeds of 150 would hide the first
    assert mean_capped(scores) == 50.0
    assert mean_capped(np.array([[-200.0, 300.0]])) == -50.0  # the paper's: no floor
    assert mean_capped_floored(np.array([[-200.0, 300.0]])) == 50.0


def test_seeds_are_drawn_for_each_task_by_itself():
    scores = np.array([[0.0, 100.0], [100.0, 0.0]])  # whole runs drawn would always have mean 50
    drawn = mean(bootstrap(scores, resamples=4000))
    shares = [float((drawn == value).mean()) for value in (0, 25, 50, 75, 100)]
    np.testing.assert_allclose(shares, np.array([1, 4, 6, 4, 1]) / 16, atol=0.03)  # exact odds


def test_one_seed_has_no_interval():
    assert interval(median, np.array([[1.0, 2.0, 3.0]])) is None
    assert improvement_interval(np.ones((1, 2)), np.ones((3, 2))) is None
    assert probability_of_improvement(np.ones((1, 2)), np.ones((3, 2))) == 0.5
    with pytest.raises(ValueError, match="2 and 3 tasks"):
        probability_of_improvement(np.ones((1, 2)), np.ones((1, 3)))


def test_published_aggregates_come_out_again():
    compared = list(published.comparisons())
    assert [c for c in compared if not c.as_expected] == []
    reproduced = {
        (c.published.suite, c.published.result, c.aggregate): abs(c.computed - float(c.printed))
        for c in compared
    }
    for key, digits in {
        ("atari57", "impala_deep", "median"): 0.05,
        ("atari57", "impala_deep_multitask", "median"): 0.05,
        ("atari57", "apex", "median"): 0.05,
        ("atari57", "r2d2", "mean"): 0.05,
        ("atari57", "agent57", "median"): 0.005,
        ("atari57", "agent57", "mean_capped_floored"): 0.005,
        ("dmlab30", "impala_deep_pbt", "mean_capped"): 0.05,
        ("dmlab30", "impala_experts", "mean_capped"): 0.06,  # 44.449: scores of tasks are rounded
    }.items():
        assert reproduced[key] <= digits, key
    assert (
        reproduced["atari57", "ngu", "median"] > 100
    )  # and the paper's table contradicts its text


def test_the_command_says_what_is_unexpected(monkeypatch, capsys):
    assert published.main([]) == 0
    assert "1208.11" in capsys.readouterr().out
    rows = published._rows

    def changed(name: str) -> list[dict[str, str]]:
        edit = {"expected": "60.0"} if name == "published_aggregates.csv" else {}
        return [{**row, **edit} for row in rows(name)]

    monkeypatch.setattr(published, "_rows", changed)
    assert published.main([]) == 1
    assert "UNEXPECTED: 60.0" in capsys.readouterr().out
