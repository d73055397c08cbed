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


def seated(crew: Crew) -> tuple[int, int]:
    """How many environments sit inside, where they are stepped as one, and how many outside."""
    inside = sum(seat.count for seat in crew if not seat.outside)
    return inside, crew_size(crew) - inside


def crew_size(crew: Crew) -> int:
    return sum(seat.count for seat in crew)


def without(crew: Crew, task: int) -> Crew:
    return tuple(seat for seat in crew if seat.task != task)


def moved_outside(crew: Crew, task: int) -> Crew:
    return tuple(seat._replace(outside=seat.outside or seat.task == task) for seat in crew)


def played(crew: Crew) -> list[int]:
    """The task of each environment."""
    return [seat.task for seat in crew for _ in range(seat.count)]
