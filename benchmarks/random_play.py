"""What a uniformly random policy gets, measured beside the reference scores."""

from __future__ import annotations

import numpy as np

from suites.suite import Suite

MOST_ENVIRONMENTS = 8  # of each task


def random_returns(suite: Suite, games: int, seed: int) -> dict[str, list[float]]:
    """Raw returns of at least `games` whole games of each task.

    Every environment plays the same number of games to their end. The first so many games to end
    would be the short ones.
    """
    if games < 1:
        raise ValueError(f"games={games}: expected at least 1")
    size = min(games, MOST_ENVIRONMENTS)
    each = -(-games // size)
    generator = np.random.default_rng(seed)
    environments = [
        suite.make(task, size, generator.integers(0, 2**31, size).tolist(), "test")
        for task in suite.tasks
    ]
    returns: list[list[list[float]]] = [[[] for _ in range(size)] for _ in environments]
    running = np.zeros((len(environments), size))
    for environment in environments:
        environment.reset()
    playing = list(range(len(environments)))
    while playing:
        for i in playing:
            environments[i].send(generator.integers(0, suite.spec.num_actions, size))
        for i in playing:
            _, reward, terminated, truncated, _ = environments[i].recv()
            running[i] += reward
            for column in np.flatnonzero(terminated | truncated):
                returns[i][column].append(float(running[i, column]))
                running[i, column] = 0.0
        playing = [i for i in playing if min(map(len, returns[i])) < each]
    for environment in environments:
        environment.close()
    return {
        task.name: [value for column in columns for value in column[:each]]
        for task, columns in zip(suite.tasks, returns, strict=True)
    }
