"""How much each task plays, where shares of the learner's frames are configured.

Two means. In the short run environments take turns: one whose task is ahead of its share rests for
an unroll, while those behind play on. In the long run environments are given from tasks that have
more than they need to tasks that cannot keep up, by how long an unroll of each takes.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from impala.crew import Crew, Seat

SLACK_UNROLLS = 2  # that a task may be ahead of the last, so that nobody rests for chance,
SLACK_SHARE = 0.01  # and of what that one has played,
SLACK_STEPS = 20_000  # but no more than this
DEBT = 2.0  # times that, at most, is caught up with; who is further behind was away
AWAY_S, AWAY_UNROLLS = 2.0, 3.0  # without asking for a turn, and a task is not waited for
WORTH_IT = 1.25  # times as much can be played: then environments change tasks
NEWEST = 0.25  # weight of the newest unroll in the average of what they take


@dataclass(frozen=True)
class Mix:
    """weights: the share of each task, summing to 1. Environments change tasks every so often."""

    weights: NDArray[np.float64]
    reassign_every_s: float = 20.0


class Ledger:
    """What every actor has begun to play of each task, in memory that processes share.

    An actor writes only its own rows, without locks, but for `forgiven`. Times are of the monotonic
    clock, which is one for all processes of a machine.
    """

    def __init__(self, num_actors: int, num_tasks: int, memory: NDArray[np.uint8]) -> None:
        used = memory[: self.size(num_actors, num_tasks)].view(np.float64)
        rows = used.reshape(3, num_actors + 1, num_tasks)
        self.steps = rows[0, :-1]  # of unrolls that were begun
        self.forgiven = rows[0, -1]  # steps that a task was behind when it came back
        self.asked_s = rows[1, :-1]  # when one last was, or would have been, were it its turn
        self.unroll_s = rows[2, :-1]  # seconds an unroll of its takes, lately; 0: not known

    @staticmethod
    def size(num_actors: int, num_tasks: int) -> int:
        """Bytes needed."""
        return 3 * (num_actors + 1) * num_tasks * 8


class TaskTurns:
    """See `impala.actor.Turns`: a task plays unless it is ahead of the last one.

    Steps divided by the task's weight are its time, as in fair queuing, and all tasks are to have
    the same time. A task that has not asked for a turn for a while (its environments are being
    built, or are broken) is not waited for; when it comes back it need not catch up.

    weights: of the tasks, summing to 1.
    """

    def __init__(self, ledger: Ledger, actor: int, weights: NDArray[np.float64]) -> None:
        self._ledger = ledger
        self._actor = actor
        self._weights = weights

    def plays(self, tasks: Sequence[int], steps: Sequence[int]) -> list[bool]:
        ledger = self._ledger
        now = time.monotonic()
        time_of_task = (ledger.steps.sum(0) + ledger.forgiven) / self._weights
        away_s = np.maximum(AWAY_S, AWAY_UNROLLS * ledger.unroll_s.max(0))
        away = now - ledger.asked_s.max(0) > away_s
        plays = []
        for task, size in zip(tasks, steps, strict=True):
            others = ~away
            others[task] = False
            # Of those that play, the last one: nobody may be ahead of it by more than the slack.
            last = time_of_task[others].min() if others.any() else time_of_task[task]
            slack = SLACK_UNROLLS * size / self._weights[task]
            slack += min(SLACK_SHARE * last, SLACK_STEPS / self._weights[task])
            debt = last - time_of_task[task] - (0.0 if away[task] else DEBT * slack)
            if debt > 0:  # it was away
                ledger.forgiven[task] += debt * self._weights[task]
                time_of_task[task] += debt
            play = bool(time_of_task[task] <= last + slack)
            plays.append(play)
            ledger.asked_s[self._actor, task] = now
            if play:
                ledger.steps[self._actor, task] += size
        return plays

    def took(self, task: int, seconds: float) -> None:
        known_s = self._ledger.unroll_s[self._actor, task] or seconds
        self._ledger.unroll_s[self._actor, task] = known_s + NEWEST * (seconds - known_s)


class Balance:
    """Decides when tasks change environments."""

    def __init__(self, ledger: Ledger, mix: Mix) -> None:
        self._ledger = ledger
        self._weights = mix.weights
        self._every_s = mix.reassign_every_s
        self._then = time.monotonic()

    def crews(self, crews: Sequence[Crew], given_up: Collection[int] = ()) -> list[Crew] | None:
        """What actors should play from now on, if that lets all play much more at the same mix.

        given_up: tasks that some actor does not play any more; their environments stay as they are.

        At a mix all can play no more than the task that can do least for its weight: one with few
        environments, or slow ones.
        """
        now = time.monotonic()
        if now - self._then < self._every_s:
            return None
        self._then = now
        tables = np.array([environments([crew], len(self._weights)) for crew in crews])
        has = tables.sum(0)
        # Of those actors that play it and know.
        counts = np.where(self._ledger.unroll_s > 0, tables, 0)
        unroll_s = (self._ledger.unroll_s * counts).sum(0) / np.maximum(counts.sum(0), 1)
        known = np.array([task for task in np.flatnonzero(unroll_s) if task not in given_up], int)
        if len(known) < 2:
            return None
        cost = (self._weights * unroll_s)[known]
        wanted = has.copy()
        wanted[known] = apportioned(cost, int(has[known].sum()))
        if (wanted[known] / cost).min() < WORTH_IT * (has[known] / cost).min():
            return None
        return reassigned(crews, wanted)


def task_weights(mix: str | dict[str, float], names: Sequence[str]) -> NDArray[np.float64] | None:
    """Of the tasks, summing to 1; None where shares fall where speed puts them.

    mix: "equal_actors", "equal_frames", or a weight for each name, 1 where there is none.
    Raises ValueError for anything else.
    """
    if mix == "equal_actors":
        return None
    given = {} if mix == "equal_frames" else mix
    if not isinstance(given, dict):
        raise ValueError(
            f"actors.mix={mix}: expected equal_actors, equal_frames, or a weight for each task such"
            f" as {{{names[0]}: 2}}"
        )
    for name, weight in given.items():
        if name not in names:
            near = difflib.get_close_matches(str(name), names, 1)
            hint = f"did you mean {near[0]}?" if near else f"these are: {', '.join(names)}."
            raise ValueError(
                f"actors.mix: {name} is no task that is played; {hint}"
                " Or set actors.mix=equal_actors"
            )
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < 1e6:
            raise ValueError(
                f"actors.mix: {name} has weight {weight}, expected a number above 0 and below 1e6"
            )
    weights = np.array([float(given.get(name, 1.0)) for name in names])
    return weights / weights.sum()


def apportioned(weights: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Whole numbers in proportion to `weights` that sum to `total`, each at least 1.

    By largest remainders, of what is left after everyone's 1.
    """
    exact = weights / weights.sum() * total
    counts = np.maximum(np.floor(exact), 1).astype(np.int64)
    while counts.sum() > total:  # those who have the most beyond what is theirs give
        counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    while counts.sum() < total:
        counts[np.argmax(exact - counts)] += 1
    return counts


def dealt(weights: NDArray[np.float64], num_actors: int, total: int) -> list[list[int]]:
    """The task of every environment of every actor: of each task as many as its weight says.

    They are dealt one by one, so that every actor plays much the same, and each task is played by
    as many actors as can be.
    """
    counts = apportioned(weights, total)
    tasks = np.repeat(np.arange(len(weights)), counts)
    return [tasks[actor::num_actors].tolist() for actor in range(num_actors)]


def environments(crews: Sequence[Crew], num_tasks: int) -> NDArray[np.int64]:
    """How many each task has."""
    counts = np.zeros(num_tasks, np.int64)
    for crew in crews:
        for seat in crew:
            counts[seat.task] += seat.count
    return counts


def reassigned(crews: Sequence[Crew], wanted: NDArray[np.int64]) -> list[Crew]:
    """Crews with the `wanted` number of environments of each task, and as few changes as can be.

    Every actor has as many as before. A task that sits outside anywhere sits outside.
    """
    outside = {seat.task for crew in crews for seat in crew if seat.outside}
    tables = [environments([crew], len(wanted)) for crew in crews]
    sizes = [int(table.sum()) for table in tables]
    for task, target in enumerate(wanted):
        while sum(table[task] for table in tables) > target:
            # On a tie from whoever has most left, so that the last of each task are spread.
            max(tables, key=lambda table, task=task: (table[task], table.sum()))[task] -= 1
    for task, target in enumerate(wanted):
        while sum(table[task] for table in tables) < target:
            room = [size - int(table.sum()) for size, table in zip(sizes, tables, strict=True)]
            tables[int(np.argmax(room))][task] += 1
    return [
        tuple(
            Seat(task, int(count), task in outside)
            for task, count in enumerate(table) if count
        )
        for table in tables
    ]  # fmt: skip
