"""Aggregates of human-normalised scores over tasks and seeds, and how sure they are.

The order is always the same: mean over games, normalise, cap, aggregate over tasks, interval over
seeds. Scores come here normalised, in per cent, as `[..., runs, tasks]`: each the mean over a
run's games of a task. Runs differ in their seed only. The arithmetic is that of Agarwal et al.
(2021), "Deep reinforcement learning at the edge of the statistical precipice", and their `rliable`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Aggregate = Callable[[Scores], Scores]
"""From scores [..., runs, tasks] to one number each [...]."""

PERCENTILES = (5, 10, 20, 30, 40, 50)
RESAMPLES = 2000
LEVEL = 0.95


def median(scores: Scores) -> Scores:
    """Over tasks, of each one's mean over runs."""
    return np.median(scores.mean(-2), -1)


def mean(scores: Scores) -> Scores:
    return scores.mean((-2, -1))


def mean_capped(scores: Scores) -> Scores:
    """Of min(100, score): "mean capped" in Espeholt et al. (2018), with no lower bound."""
    return np.minimum(scores, 100.0).mean((-2, -1))


def mean_capped_floored(scores: Scores) -> Scores:
    """Of max(0, min(100, score)): "capped" in Badia et al. (2020), Agent57, section 5."""
    return np.clip(scores, 0.0, 100.0).mean((-2, -1))


def iqm(scores: Scores) -> Scores:
    """Interquartile mean: without the floor(n / 4) lowest and as many highest of n scores.

    The n are those of all runs and tasks together; with fewer than four it is the mean.
    """
    values = np.sort(scores.reshape(*scores.shape[:-2], -1), -1)
    trimmed = values.shape[-1] // 4
    return values[..., trimmed : values.shape[-1] - trimmed].mean(-1)


def optimality_gap(scores: Scores) -> Scores:
    """What is missing to 100 %, on average, where anything is: less is better."""
    return 100.0 - mean_capped(scores)


def above_human(scores: Scores) -> Scores:
    """How many tasks have a mean over runs above 100 %."""
    return (scores.mean(-2) > 100.0).sum(-1).astype(np.float64)


def percentile(rank: float) -> Aggregate:
    """Over tasks, of each one's mean over runs: `rank` per cent of tasks are at it or below."""

    def percentile_of(scores: Scores) -> Scores:
        return np.asarray(np.percentile(scores.mean(-2), rank, axis=-1))

    return percentile_of


AGGREGATES: dict[str, Aggregate] = {
    "median": median,
    "mean": mean,
    "mean_capped": mean_capped,
    "mean_capped_floored": mean_capped_floored,
    "iqm": iqm,
    "optimality_gap": optimality_gap,
    "above_human": above_human,
} | {f"percentile_{rank}": percentile(rank) for rank in PERCENTILES}


def bootstrap(scores: Scores, *, resamples: int = RESAMPLES, seed: int = 0) -> Scores:
    """Scores [runs, tasks] drawn anew, [resamples, runs, tasks].

    Stratified: each task's runs are drawn with replacement, independently of other tasks'.
    """
    runs, tasks = scores.shape
    draws = np.random.default_rng(seed).integers(runs, size=(resamples, runs, tasks))
    return np.take_along_axis(scores[None], draws, axis=1)


def interval(
    aggregate: Aggregate, scores: Scores, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """The middle 95 % of `aggregate` over stratified bootstraps of scores [runs, tasks].

    None for a single run: it says nothing of what another seed would give.
    """
    if len(scores) < 2:
        return None
    return middle(aggregate(bootstrap(scores, resamples=resamples, seed=seed)))


def middle(values: Scores) -> tuple[float, float]:
    """The bounds of the middle 95 % of values [n]."""
    low, high = np.percentile(values, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)


def probability_of_improvement(first: Scores, second: Scores) -> float:
    """That a run of `first` scores more than one of `second` in the same task, mean over tasks.

    Scores [runs, tasks] of the same tasks; equal scores count one half (Mann and Whitney's U).
    """
    if first.shape[1] != second.shape[1]:
        raise ValueError(f"{first.shape[1]} and {second.shape[1]} tasks: expected the same ones")
    difference = first[:, None, :] - second[None, :, :]
    return float(((np.sign(difference) + 1) / 2).mean())


def improvement_interval(
    first: Scores, second: Scores, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """The middle 95 % of `probability_of_improvement`; None unless both have several runs."""
    if min(len(first), len(second)) < 2:
        return None
    pairs = zip(
        bootstrap(first, resamples=resamples, seed=seed),
        bootstrap(second, resamples=resamples, seed=seed + 1),
        strict=True,
    )
    return middle(np.array([probability_of_improvement(*pair) for pair in pairs]))


def performance_profile(scores: Scores, thresholds: Scores) -> Scores:
    """Share of runs and tasks that score above each threshold, [..., thresholds]."""
    return (scores[..., None] > thresholds).mean((-3, -2))
