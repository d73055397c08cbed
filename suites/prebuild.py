"""`python -m suites.prebuild suite=dmlab30`: fills the level cache before a run.

Builds the map that every seed of `suite.seeds_per_task` begins with, for each task that has
generated maps. Without it 100 seeds of each. Maps that the cache has already take no time, so it
can be stopped and started again. Exit code 0 if all are there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from suites.apart import Failure, each_apart
from suites.chosen import chosen
from suites.dmlab30 import DmLab30
from suites.suite import Task

SEEDS = 100
SEEDS_AT_ONCE = 10  # of one instance of the engine
SAY_EVERY_S = 5.0


def build(suite: DmLab30, task: Task, seeds: Sequence[int]) -> list[int]:
    """Hits, misses and failures of the cache while a game with each of these seeds begins."""
    environment = suite.make_with_seeds(task, seeds)
    counts = np.zeros(3, np.int64)
    try:
        for _ in seeds:
            counts += environment.reset()[1]["level_cache"][0]
            if not counts.any():
                break  # this task has no generated maps
    finally:
        environment.close()
    return counts.tolist()
