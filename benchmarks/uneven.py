"""Tasks of uneven speed: what one slow task costs the others, and what mix the learner gets.

    python -m benchmarks.uneven

Trains on eight Atari games, of which the last is made slower than the others by sleeping in each
step: so many times the others' own time between two steps of an environment, measured first.
Writes outputs/benchmarks/uneven.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.training_run import exit_on_sigterm, points_of
from impala.pace import LONG_S, SAMPLES
from suites.atari57 import Atari57
from suites.suite import Task, TaskVectorEnv

GAMES: tuple[str, ...] = (
    "pong",
    "breakout",
    "boxing",
    "freeway",
    "seaquest",
    "qbert",
    "space_invaders",
    "skiing",
)
OTHERS, SLOW = GAMES[:-1], GAMES[-1]
PER_TASK = 8  # environments
MIX_FACTOR = 20


class SlowAtari(Atari57):
    """Atari57, of which each step of each environment of a game takes `sleep_s` longer."""

    def __init__(self, *, slow: str, sleep_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._slow, self._sleep_s = slow, sleep_s

    def make(self, task: Task, num_envs: int, *arguments: Any, **options: Any) -> TaskVectorEnv:
        environment = super().make(task, num_envs, *arguments, **options)
        if task.name == self._slow:
            whole, sleep_s = environment._recv, self._sleep_s * num_envs

            def recv() -> Any:
                time.sleep(sleep_s)
                return whole()

            environment._recv = recv
        return environment


@dataclass(frozen=True)
class Played:
    """A run: what the learner got in its windows."""

    others_per_s: float  # agent steps of the games that are not slow: the median window's
    slow_per_s: float
    all_per_s: float
    shares: dict[str, float]  # of the learner's frames, in all windows together
    coverage: float  # of the suite, at the end


def train(
    games: Sequence[str], overrides: Sequence[str], *, warm_up_s: float, seconds: float,
    windows: int, sleep_s: float | None = None,
) -> Played:  # fmt: skip
    """Plays `games` until the windows are full, `seconds` long each, after `warm_up_s`."""
    own = [
        "suite=atari57", f"suite.tasks=[{','.join(games)}]", "suite.full_action_space=true",
        f"envs_per_actor={len(games) * PER_TASK // 2}", "num_actors=2",
        "total_frames=1_000_000_000",
    ]  # fmt: skip
    if sleep_s is not None:
        own += ["suite._target_=benchmarks.uneven.SlowAtari"]
        own += [f"+suite.slow={SLOW}", f"+suite.sleep_s={sleep_s}"]
    points = points_of([*own, *overrides], seconds=warm_up_s + windows * seconds)
    return summed(points, games, warm_up_s, seconds, windows)


def summed(
    points: Sequence[dict[str, Any]], games: Sequence[str], warm_up_s: float, seconds: float,
    windows: int,
) -> Played:  # fmt: skip
    rates = []
    total = dict.fromkeys(games, 0.0)
    start_s = points[0]["time_s"] + warm_up_s
    for window in range(windows):
        edges = start_s + window * seconds, start_s + (window + 1) * seconds
        steps, elapsed_s = dict.fromkeys(games, 0.0), 0.0
        for before, point in pairwise(points):
            if edges[0] <= before["time_s"] and point["time_s"] <= edges[1]:
                elapsed_s += point["time_s"] - before["time_s"]
                learned = (point["frames"] - before["frames"]) / 4
                for game in games:
                    steps[game] += learned * point.get(f"share/{game}", 0.0)
        if not elapsed_s:
            raise RuntimeError(f"nothing was learned in window {window}, {edges} s")
        rates.append({game: count / elapsed_s for game, count in steps.items()})
        for game, count in steps.items():
            total[game] += count
    last = points[-1]
    others = [sum(rate for game, rate in each.items() if game != SLOW) for each in rates]
    return Played(
        others_per_s=statistics.median(others),
        slow_per_s=statistics.median(each.get(SLOW, 0.0) for each in rates),
        all_per_s=statistics.median(sum(each.values()) for each in rates),
        shares={game: count / sum(total.values()) for game, count in total.items()},
        coverage=last["score/coverage"],
    )


def stall_rows(options: argparse.Namespace) -> tuple[list[list[str]], float]:
    """A slow game beside seven others; also seconds between two steps of an environment."""
    times = {"seconds": options.seconds, "windows": options.windows}
    first = train(OTHERS, [], warm_up_s=15, seconds=options.seconds, windows=1)
    between_s = len(OTHERS) * PER_TASK / first.others_per_s
    cases = [(factor, True) for factor in options.factors]
    cases += [(options.factors[0], False)] * options.lockstep
    # The eight environments of the game sleep one after the other until they are found slow.
    slowest_s = max(options.factors) * between_s * PER_TASK
    warm_up_s = 30 + 2 * min((SAMPLES + 2) * slowest_s, LONG_S + 2 * slowest_s)
    alone: list[Played] = []
    beside: dict[tuple[int, bool], list[Played]] = {case: [] for case in cases}
    for _ in range(options.rounds):  # in turns: the machine's own speed changes by the minute
        alone.append(train(OTHERS, [], warm_up_s=warm_up_s, **times))
        report.say(f"seven games: {alone[-1].others_per_s:.0f} steps/s")
        for factor, outside in cases:
            overrides = [] if outside else ["actors.outside=never"]
            sleep_s = sleep_of(factor, outside, between_s)
            played = train(GAMES, overrides, warm_up_s=warm_up_s, sleep_s=sleep_s, **times)
            beside[factor, outside].append(played)
            report.say(f"{factor} times slower: others {played.others_per_s:.0f} steps/s")
    without = max(each.others_per_s for each in alone)
    rows = []
    for (factor, outside), runs in beside.items():
        beside_it = max(each.others_per_s for each in runs)
        rows.append(
            [
                f"{factor} times slower, " + ("by default" if outside else "all in lockstep"),
                f"{sleep_of(factor, outside, between_s) * 1e3:,.0f}", report.number(without),
                report.number(beside_it), f"{beside_it / without:.3f}",
                f"{runs[-1].slow_per_s:.1f}", f"{runs[-1].coverage:.3f}",
            ]
        )  # fmt: skip
    return rows, between_s


def sleep_of(factor: int, outside: bool, between_s: float) -> float:
    """Of one environment; in lockstep the eight of the game sleep one after the other."""
    return factor * between_s / (1 if outside else PER_TASK)


def mix_rows(options: argparse.Namespace, between_s: float) -> list[list[str]]:
    rows = []
    times = {"seconds": options.seconds, "windows": options.windows}
    weights: dict[str, float] = dict.fromkeys(GAMES, 1.0) | {"pong": 4.0, "breakout": 2.0}
    given = ",".join(f"{game}:{weight:g}" for game, weight in weights.items() if weight != 1)
    cases = [
        ("equal_actors", "equal_actors", None, 15.0),
        ("equal_frames", "equal_frames", None, 15.0),
        (f"{{{given}}}", f"{{{given}}}", None, 15.0),
        ("equal_frames", f"equal_frames, {SLOW} {MIX_FACTOR} times slower", MIX_FACTOR, 120.0),
    ]
    for mix, name, factor, warm_up_s in cases:
        sleep_s = None if factor is None else factor * between_s
        played = train(GAMES, [f"actors.mix={mix}"], warm_up_s=warm_up_s, sleep_s=sleep_s, **times)
        target = weights if mix.startswith("{") else dict.fromkeys(GAMES, 1.0)
        off = {
            game: share * sum(target.values()) / target[game]
            for game, share in played.shares.items()
        }
        low, high = min(off, key=lambda game: off[game]), max(off, key=lambda game: off[game])
        report.say(f"{name}: {off[low]:.3f} to {off[high]:.3f}, {played.all_per_s:.0f} steps/s")
        rows.append(
            [
                name, f"{off[low]:.3f} ({low})", f"{off[high]:.3f} ({high})",
                f"{played.shares[SLOW]:.4f}", report.number(played.all_per_s),
            ]
        )  # fmt: skip
    return rows


def main() -> None:
    parser = report.parser("benchmarks.uneven", __doc__)
    parser.add_argument("--factors", nargs="+", type=int, default=[20, 100])
    parser.add_argument("--seconds", type=float, default=15.0, help="of a window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="of the first table, in turns")
    parser.add_argument("--lockstep", action="store_true", help="with actors.outside=never, too")
    parser.add_argument("--no-mixes", action="store_true", help="only the first table")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "uneven.md")
    options = parser.parse_args()
    exit_on_sigterm()
    stalls, between_s = stall_rows(options)
    write(options, stalls, [], between_s)
    if not options.no_mixes:
        write(options, stalls, mix_rows(options, between_s), between_s)


def write(
    options: argparse.Namespace, stalls: list[list[str]], mixes: list[list[str]], between_s: float
) -> None:
    parts = [
        "# Tasks of uneven speed",
        report.facts(report.made_here("benchmarks.uneven")),
        f"Eight games with {PER_TASK} environments each in two actors, the shallow network;"
        f" {SLOW} sleeps in each step. Rates are agent steps/s that the learner learned from, the"
        f" median of {options.windows} windows of {options.seconds:g} s, and in the first table the"
        f" best of {options.rounds} runs.",
        "## What one slow task costs the others",
        "*sleep*: of one environment in each step. *ratio*: of the seven others' rate with it to"
        " that without it. *coverage*: tasks with a finished game at the end; the suite has a"
        " score from the first of them on.",
        report.table(
            ["the eighth game is", "sleep, ms", "without it, steps/s", "with it, steps/s", "ratio",
             f"{SLOW}, steps/s", "coverage"], stalls
        ),
    ]  # fmt: skip
    if mixes:
        most_slow = len(GAMES) * PER_TASK - len(OTHERS)
        limit = most_slow * len(GAMES) / (MIX_FACTOR * between_s)
        parts += [
            "## What mix the learner gets",
            "Each task's share of the learner's frames, divided by what `actors.mix` gives it: the"
            " least and the most of eight. Equal shares are 1. With `equal_actors` shares are meant"
            " to fall where speed puts them. A game that sleeps uses no core, so that what limits"
            " the last case is the number of environments: with all but one of each other game"
            f" at {SLOW}, {len(GAMES)} equal shares make {limit:,.0f} steps/s.",
            report.table(
                ["actors.mix", "least", "most", f"share of {SLOW}", "all, steps/s"], mixes
            ),
        ]
    report.write(options.out, *parts)


if __name__ == "__main__":
    main()
