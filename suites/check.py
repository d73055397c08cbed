"""`python -m suites.check`: which games, ROMs and engines work on this machine.

Every game is built and played for two steps. Exit code 0 if all work, else 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from suites.atari57 import Atari57
from suites.catch import Catch
from suites.suite import Suite, Task, select_names

SUITES = (Atari57, Catch)
STEPS = 2


def problem(suite: Suite, task: Task) -> str | None:
    """What goes wrong when `task` is built and played for `STEPS` steps; None if nothing does."""
    try:
        env = suite.make(task, 1, [0])
        frames, _ = env.reset()
        for _ in range(STEPS):
            frames = env.step(np.zeros(1, np.int64))[0]
        env.close()
    except Exception as error:  # whatever an engine raises is what is to be shown
        return f"{type(error).__name__}: {error}"
    if frames.shape != (1, *suite.spec.frame_shape) or frames.dtype != np.uint8:
        return (
            f"frames {frames.dtype} {frames.shape}, expected uint8 (1, *{suite.spec.frame_shape})"
        )
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m suites.check", description=__doc__)
    parser.add_argument("--suite", help="only this suite: " + ", ".join(s.name for s in SUITES))
    parser.add_argument("--tasks", help="only these games, separated by commas: pong,breakout")
    options = parser.parse_args(arguments)
    suites: list[Suite] = [make_suite() for make_suite in SUITES]
    try:
        if options.suite is not None:
            select_names([options.suite], [suite.name for suite in suites], kind="suite")
            suites = [suite for suite in suites if suite.name == options.suite]
        known = [task.name for suite in suites for task in suite.tasks]
        wanted = known
        if options.tasks is not None:
            wanted = select_names(options.tasks.split(","), known, kind="game of these suites")
    except ValueError as error:
        parser.error(str(error))
    failures = 0
    for suite in suites:
        tasks = [task for task in suite.tasks if task.name in wanted]
        if tasks:
            failures += _report(suite, tasks)
    return 1 if failures else 0


def _report(suite: Suite, tasks: Sequence[Task]) -> int:
    """Prints a line for each task as it is tried, and a summary; returns how many fail."""
    engine = suite.provenance["engine"]
    width = 2 + max(len("level (ROM)"), *(len(task.train_level) for task in tasks))
    print(f"{'suite':10}{'game':20}{'level (ROM)':{width}}{'engine':16}result")
    failures = 0
    for task in tasks:
        error = problem(suite, task)
        failures += error is not None
        result = "works" if error is None else f"FAILS: {error}"
        level = f"{task.train_level:{width}}"
        print(f"{suite.name:10}{task.name:20}{level}{engine:16}{result}", flush=True)
    print(f"{suite.name}: {len(tasks) - failures} of {len(tasks)} games work on {engine}\n")
    return failures


if __name__ == "__main__":
    sys.exit(main())
