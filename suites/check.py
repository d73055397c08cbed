"""`python -m suites.check`: which games, ROMs and engines work on this machine.

Every game is built and played for two steps, of suite=NAME, or of those whose engines are installed
with this program. Keys of the suite are given as to launch.py: suite.tasks=[a,b] suite.KEY=VALUE.
Exit code 0 if all work, else 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from suites.apart import Failure, each_apart
from suites.atari57 import Atari57
from suites.catch import Catch
from suites.chosen import SUITES, chosen
from suites.suite import EngineMissing, Suite, Task, select_names

BY_DEFAULT = (Atari57, Catch)
STEPS = 2


def problem(suite: Suite, task: Task, split: str = "train") -> str | None:
    """What goes wrong when `task` is built and played for `STEPS` steps; None if nothing does."""
    try:
        env = suite.make(task, 1, [0], split)
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
    parser.add_argument("words", nargs="*", metavar="suite=NAME suite.KEY=VALUE")
    parser.add_argument("--suite", help="only this suite: " + ", ".join(SUITES))
    parser.add_argument("--tasks", help="only these games, separated by commas: pong,breakout")
    options = parser.parse_args(arguments)
    words = [*([f"suite={options.suite}"] if options.suite else []), *options.words]
    try:
        if words:
            suites: list[Suite] = [chosen(words)]
        else:
            suites = [make() for make in (SUITES.values() if options.tasks else BY_DEFAULT)]
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
    """Prints a line for each level as it is tried, and a summary; returns how many fail."""
    try:
        suite.check()
    except EngineMissing as error:
        print(f"{error}\n")
        return len(tasks)
    except ValueError as error:  # what there is is tried all the same
        print(f"{suite.name}: {error}")
    engine = suite.provenance["engine"]
    width = 2 + max(len("level (ROM)"), *(len(task.test_level) for task in tasks))
    game_width = 2 + max(18, *(len(task.name) for task in tasks))
    engine_width = 2 + max(14, len(engine))
    print(
        f"{'suite':10}{'game':{game_width}}{'level (ROM)':{width}}{'engine':{engine_width}}result"
    )
    levels = failures = 0
    for task, level, error in _tried(suite, tasks):
        levels += 1
        failures += error is not None
        result = "works" if error is None else f"FAILS: {error}"
        print(
            f"{suite.name:10}{task.name:{game_width}}{level:{width}}{engine:{engine_width}}"
            f"{result}",
            flush=True,
        )
    print(f"{suite.name}: {levels - failures} of {levels} games work on {engine}\n")
    return failures


def _tried(suite: Suite, tasks: Sequence[Task]) -> Iterator[tuple[Task, str, str | None]]:
    """Each level of these tasks and what is wrong with it; engines that may crash are apart."""
    calls = [(suite, task, "train") for task in tasks]
    calls += [(suite, task, "test") for task in tasks if task.test_level != task.train_level]
    if not suite.spec.outside:
        for call in calls:
            yield call[1], _level(call), problem(*call)
        return
    with ExitStack() as stack:
        printed = stack.enter_context(tempfile.NamedTemporaryFile("r", suffix=".log"))
        stack.callback(suite.tidy)
        results = stack.enter_context(closing(each_apart(problem, calls, 1, Path(printed.name))))
        for call, found in results:
            text = printed.read().strip()
            yield (
                call[1],
                _level(call),
                f"{found[0]}\n{text}" if isinstance(found, Failure) else found,
            )


def _level(call: tuple[Suite, Task, str]) -> str:
    _, task, split = call
    return task.train_level if split == "train" else task.test_level


if __name__ == "__main__":
    sys.exit(main())
