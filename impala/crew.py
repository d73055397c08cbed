"""Which environments an actor plays, and which of them step together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import NamedTuple


class Seat(NamedTuple):
    """Some environments of one task."""

    task: int
    count: int
    outside: bool = False  # each in a process of its own, and stepped alone


Crew = tuple[Seat, ...]


def crew_of(tasks: Sequence[int], outside: Collection[int] = ()) -> Crew:
    """A crew for the task of each environment, in order; those in `outside` sit outside."""
    return tuple(Seat(task, len(list(run)), task in outside) for task, run in groupby(tasks))


def group_sizes(crew: Crew) -> list[int]:
    """Environments of each group, which is stepped as one and has slots of its own.

    All that sit inside are the first group, if there are any; each one outside is another.
    """
    inside = sum(seat.count for seat in crew if not seat.outside)
    outside = sum(seat.count for seat in crew if seat.outside)
    return ([inside] if inside else []) + [1] * outside


def crew_size(crew: Crew) -> int:
    return sum(seat.count for seat in crew)


def without(crew: Crew, task: int) -> Crew:
    return tuple(seat for seat in crew if seat.task != task)


def moved_outside(crew: Crew, task: int) -> Crew:
    return tuple(seat._replace(outside=seat.outside or seat.task == task) for seat in crew)


def played(crew: Crew) -> list[int]:
    """The task of each environment."""
    return [seat.task for seat in crew for _ in range(seat.count)]
