"""`python -m suites.prebuild suite=dmlab30`: fills the level cache before a run.

Makes the map that a game begins with, for every seed of suite.seeds_per_task (100 if it is not
given) of every task that has generated maps. A run with the same seeds_per_task then finds them.
It can be stopped and goes on where it was: maps that are there already take little time. Exit code
0 if all maps are there, else 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing

import numpy as np

from suites.apart import Failure, each_apart
from suites.chosen import chosen
from suites.dmlab30 import DUMMY_IMAGES, DmLab30
from suites.lab import LabEnv
from suites.progress_line import ProgressLine
from suites.suite import Task

SEEDS = 100
SEEDS_AT_ONCE = 10  # of one instance of the engine
MAP_BYTES = 80_000  # at most, of those that were seen


def build(suite: DmLab30, task: Task, seeds: range) -> list[int]:
    """Hits, misses and failures of the cache while the games with these seeds begin."""
    environment = suite.make(task, 1, [0])
    assert isinstance(environment, LabEnv)
    counts = np.zeros(3, np.int64)
    try:
        for seed in seeds:
            counts += environment.generate(seed)
            if not counts.any():
                break  # this task has no generated maps
    finally:
        environment.close()
    return counts.tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.prebuild", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="suite=dmlab30 suite.KEY=VALUE")
    parser.add_argument("--workers", type=int, help="processes; default: one for each core")
    options = parser.parse_args(arguments)
    try:
        suite = chosen(options.words, seeds_per_task=SEEDS, dataset_path=DUMMY_IMAGES)
        workers = options.workers or len(os.sched_getaffinity(0))
        return _prebuild(_checked(suite), workers)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


def _checked(suite: object) -> DmLab30:
    if not isinstance(suite, DmLab30):
        raise ValueError("only suite=dmlab30 has maps to build")
    suite.check()
    if suite.cache is None or suite.seeds_per_task is None:
        raise ValueError("suite.level_cache and suite.seeds_per_task must not be null here")
    most_bytes = len(suite.tasks) * suite.seeds_per_task * MAP_BYTES
    if most_bytes > suite.cache.most_bytes:
        raise ValueError(
            f"{len(suite.tasks)} tasks with suite.seeds_per_task={suite.seeds_per_task} may take"
            f" {most_bytes / 2**30:.1f} GB: set a greater suite.level_cache_gb, here and in the run"
        )
    return suite


def _prebuild(suite: DmLab30, workers: int) -> int:
    assert suite.cache is not None and suite.seeds_per_task is not None
    seeds = range(suite.seeds_per_task)
    calls = [
        (suite, task, seeds[start : start + SEEDS_AT_ONCE])
        for task in suite.tasks
        for start in range(0, len(seeds), SEEDS_AT_ONCE)
    ]
    log = suite.cache.folder / "prebuild.log"
    print(
        f"{len(suite.tasks)} tasks with {len(seeds)} seeds each, {workers} processes;"
        f" cache {suite.cache.folder}, what the engine prints in {log}",
        flush=True,
    )
    there = made = failed = 0
    progress = ProgressLine(len(calls))
    with ExitStack() as stack:
        stack.callback(suite.tidy)
        stack.callback(progress.close)
        progress.show(0, "the first maps are being made")
        results = stack.enter_context(closing(each_apart(build, calls, workers, log)))
        for done, ((_, task, some), result) in enumerate(results, 1):
            if isinstance(result, Failure):
                failed += 1
                progress.say(f"{task.name}, seeds {some[0]} to {some[-1]}: {result.cause}")
            else:
                there, made, failed = np.add((there, made, failed), result)
            progress.show(
                done, f"{made} maps made, {there} were there, {failed} failures; {task.name}"
            )
    if not failed:
        print(f"train with suite.seeds_per_task={len(seeds)} to play on them")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
