"""Which runs the report takes for seeds of one, which it compares, and what it sets apart."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from impala.report.comparison import parts
from impala.report.runs import find_runs
from suites.statistics import mean
from tests.report_runs import (
    PROVENANCE,
    TASKS,
    write_evaluation,
    write_run,
)


def test_only_the_seed_makes_runs_one_group(tmp_path):
    for i, (seed, lr) in enumerate([(1, 0.1), (2, 0.1), (1, 0.2)]):
        write_run(tmp_path / str(i), seed=seed, lr=lr)
    (part,) = parts(find_runs([tmp_path])[0])
    assert [(group.label, len(group.runs)) for group in part.groups] == [
        ("lr=0.1", 2),
        ("lr=0.2", 1),
    ]


def test_a_seed_that_is_there_twice_is_no_second_seed(tmp_path):
    for i, seed in enumerate([1, 1, 2]):
        write_run(tmp_path / str(i), seed=seed)
    (part,) = parts(find_runs([tmp_path])[0])
    first, again = part.groups
    assert [run.config["seed"] for run in first.runs] == [1, 2]
    assert [run.config["seed"] for run in again.runs] == [1]
    assert again.label == f"{first.label}, again"
    assert again.training(part.tasks).scores.shape == (1, len(TASKS))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            {"provenance": {**PROVENANCE, "protocol": "sticky actions 0.25"}},
            "protocol: sticky actions",
        ),
        (
            {"provenance": {**PROVENANCE, "random": "another column"}},
            "random: another column, there r",
        ),
        ({"tasks": ("pong", "boxing")}, "tasks: boxing, there breakout$"),
    ],
)
def test_different_protocols_stand_apart_with_the_reason(tmp_path, other, reason):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=2, **other)
    first, second = parts(find_runs([tmp_path])[0])
    assert (len(first.runs), len(second.runs)) == (1, 1)
    assert first.differs == []
    assert re.match(reason, *second.differs)


def test_another_version_of_the_engine_stands_together(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", provenance={**PROVENANCE, "engine": "newer"})
    assert len(parts(find_runs([tmp_path])[0])) == 1


def test_a_group_scores_the_tasks_that_all_its_runs_have_finished(tmp_path):
    write_run(tmp_path / "a", scores=(10.0, 30.0))
    write_run(tmp_path / "b", seed=2, tasks=TASKS[:1], scores=(20.0,))
    about = json.loads((tmp_path / "a" / "suite.json").read_text())
    (tmp_path / "b" / "suite.json").write_text(json.dumps(about))
    (part,) = parts(find_runs([tmp_path])[0])
    result = part.groups[0].training(part.tasks)
    assert result.tasks == ("pong",)
    np.testing.assert_array_equal(result.scores, [[10.0], [20.0]])
    estimate = result.estimate(mean)
    assert estimate is not None
    assert (estimate.value, estimate.interval) == (15.0, (10.0, 20.0))


def test_evaluations_of_a_kind_that_all_seeds_have_stand_beside_training(tmp_path):
    for i in (2, 1):
        run = write_run(tmp_path / str(i), seed=i)
        write_evaluation(run, 200, greedy=False, scores=(1.0, 3.0))
        write_evaluation(run, 400, greedy=False, scores=(50.0 * i, 60.0))
    write_evaluation(run, 400, greedy=True, scores=(90.0, 90.0))  # one seed only: in no aggregate
    (part,) = parts(find_runs([tmp_path])[0])
    (group,) = part.groups
    (result,) = group.evaluations(part.tasks)
    assert result.kind == "evaluation, 5 games a task, sampled actions"
    assert result.frames == (400, 400)
    np.testing.assert_array_equal(result.scores, [[50.0, 60.0], [100.0, 60.0]])
    np.testing.assert_array_equal(group.training(part.tasks).scores, [[10.0, 30.0]] * 2)


def test_curves_are_straight_between_points_and_end_with_the_shortest_run(tmp_path):
    write_run(tmp_path / "a", points=4, every=100, scores=(40.0, 0.0))  # 10, 20, 30, 40
    write_run(tmp_path / "b", seed=2, points=2, every=150, scores=(40.0, 0.0))  # 20, 40 at 150, 300
    (part,) = parts(find_runs([tmp_path])[0])
    curve = part.groups[0].curve(["hns/pong"], mean, "frames")
    assert curve is not None
    np.testing.assert_array_equal(curve.x, [150, 200, 300])
    np.testing.assert_array_equal(curve.value, [(15 + 20) / 2, (20 + 80 / 3) / 2, (30 + 40) / 2])
    assert curve.low is not None
    assert curve.high is not None
    np.testing.assert_array_equal(curve.low, [15, 20, 30])
    np.testing.assert_allclose(curve.high, [20, 80 / 3, 40])
    assert part.groups[0].curve(["hns/nothing"], mean, "frames") is None
