"""Shares of the learner's frames: turns, and environments that change tasks."""

import numpy as np
import pytest

from impala import mix
from impala.crew import Seat, crew_of
from impala.mix import Balance, Ledger, Mix, TaskTurns, apportioned, dealt, reassigned, task_weights

NAMES = ["pong", "breakout", "boxing", "freeway"]


@pytest.fixture
def clock(monkeypatch):
    """A clock that is moved by hand."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(mix.time, "monotonic", lambda: Clock.now)
    return Clock


def ledger(actors, tasks):
    return Ledger(actors, tasks, np.zeros(Ledger.size(actors, tasks), np.uint8))


def simulate(clock, book, weights, actors, seconds, tasks_s, size=20):
    """Actors that ask for turns as fast as their tasks allow; steps that each task played.

    actors: the tasks of each actor's environments. tasks_s: seconds of an unroll of each task.
    """
    turns = [TaskTurns(book, actor, weights) for actor in range(len(actors))]
    free_at = [[clock.now] * len(tasks) for tasks in actors]
    before, end = book.steps.sum(0), clock.now + seconds
    while clock.now < end:
        for actor, tasks in enumerate(actors):
            for index, task in enumerate(tasks):
                if free_at[actor][index] <= clock.now:
                    (plays,) = turns[actor].plays([task], [size])
                    if plays:
                        turns[actor].took(task, tasks_s[task])
                        free_at[actor][index] = clock.now + tasks_s[task]
        clock.now += 0.01
    return book.steps.sum(0) - before


@pytest.mark.parametrize("weights", [[0.25] * 4, [0.7, 0.1, 0.1, 0.1]])
def test_turns_make_shares_equal_to_weights_whatever_the_speed(clock, weights):
    weights = np.array(weights)
    tasks_s = [0.02, 0.03, 0.1, 0.07]
    actors = [[0, 1, 2, 3], [0, 0, 2, 3], [0, 1, 0, 0, 0, 0, 0, 0]]
    played = simulate(clock, ledger(3, 4), weights, actors, 60, tasks_s)
    assert played / played.sum() == pytest.approx(weights, rel=0.03)


def test_nobody_waits_for_a_task_that_is_away_and_it_need_not_catch_up(clock):
    weights, tasks_s = np.array([0.5, 0.25, 0.25]), [0.05, 0.05, 0.05]
    book = ledger(2, 3)
    alone = simulate(clock, book, weights, [[0, 0], [1, 1]], 60, tasks_s)
    assert alone[0] / alone.sum() == pytest.approx(2 / 3, rel=0.03)
    together = simulate(clock, book, weights, [[0, 0], [1, 2]], 60, tasks_s)
    assert together / together.sum() == pytest.approx(weights, rel=0.06)
    assert together.sum() > 0.7 * alone.sum() * 4 / 3 * 0.5  # nor does anybody stand still for it
    again = simulate(clock, book, weights, [[0, 0], [1, 1]], 60, tasks_s)
    assert again.sum() > 0.9 * alone.sum()


def test_tasks_that_rest_for_long_are_not_away(clock):
    weights, tasks_s = np.full(3, 1 / 3), [0.05, 0.05, 8.0]
    book = ledger(1, 3)
    simulate(clock, book, weights, [[0, 1, *[2] * 9]], 60, tasks_s)  # until all that is known
    forgiven = book.forgiven.copy()
    played = simulate(clock, book, weights, [[0, 1, *[2] * 9]], 240, tasks_s)
    assert played.min() >= played.max() - 12 * 20
    assert np.array_equal(book.forgiven, forgiven)


def test_the_balance_gives_environments_to_those_who_cannot_keep_up(clock):
    weights, tasks_s = np.full(4, 0.25), [0.02, 0.02, 0.02, 0.4]
    crews = [crew_of([0, 0, 1, 1, 2, 2, 3, 3], outside=[3])] * 3
    book = ledger(3, 4)
    balance = Balance(book, Mix(weights, 20.0))
    assert balance.crews(crews) is None  # it is too early
    played = simulate(clock, book, weights, [[0, 0, 1, 1, 2, 2, 3, 3]] * 3, 21, tasks_s)
    assert played[:3] / played.sum() == pytest.approx(0.25, rel=0.1)  # they rest for it
    idle = played.sum()
    unchanged = Balance(book, Mix(weights, 0.0))
    clock.now += 1
    assert unchanged.crews(crews, {3}) is None  # an actor has given it up: it gets no more
    changed = balance.crews(crews)
    counts = mix.environments(changed, 4)
    assert counts.tolist() == [1, 1, 1, 21]
    assert [sum(seat.count for seat in crew) for crew in changed] == [8, 8, 8]
    assert all(seat.outside == (seat.task == 3) for crew in changed for seat in crew)
    book = ledger(3, 4)
    tasks = [[seat.task for seat in crew for _ in range(seat.count)] for crew in changed]
    played = simulate(clock, book, weights, tasks, 60, tasks_s)
    assert played / played.sum() == pytest.approx(weights, rel=0.03)
    assert played.sum() / 60 > 3 * idle / 21


def test_the_balance_leaves_alone_what_is_in_balance(clock):
    weights = np.full(2, 0.5)
    book = ledger(1, 2)
    balance = Balance(book, Mix(weights, 1.0))
    simulate(clock, book, weights, [[0, 1]], 10, [0.02, 0.03])
    assert balance.crews([crew_of([0, 1])]) is None


def test_weights_are_given_by_name():
    assert task_weights("equal_actors", NAMES) is None
    assert task_weights("equal_frames", NAMES).tolist() == [0.25] * 4
    weights = task_weights({"pong": 3, "boxing": 0.5}, NAMES)
    assert weights == pytest.approx(np.array([3, 1, 0.5, 1]) / 5.5)
    for given, message in (
        ("equal", "expected equal_actors, equal_frames, or a weight"),
        ({"ping": 1}, "ping is no task that is played; did you mean pong"),
        ({"pong": 0}, "pong has weight 0, expected a number above 0"),
        ({"pong": True}, "expected a number"),
        ({"pong": "much"}, "pong has weight much"),
    ):
        with pytest.raises(ValueError, match=message):
            task_weights(given, NAMES)


def test_apportionment():
    assert apportioned(np.array([0.7, 0.1, 0.1, 0.1]), 64).tolist() == [45, 7, 6, 6]
    assert apportioned(np.array([100.0, 1.0, 1.0]), 4).tolist() == [2, 1, 1]
    assert apportioned(np.ones(57) / 57, 57).tolist() == [1] * 57
    rng = np.random.default_rng(0)
    for _ in range(200):
        weights, total = rng.exponential(size=9), int(rng.integers(9, 80))
        counts = apportioned(weights, total)
        assert counts.sum() == total and counts.min() >= 1


def test_every_actor_is_dealt_much_the_same():
    actors = dealt(np.array([0.5, 0.25, 0.25]), 3, 24)
    assert actors == [[0] * 4 + [1] * 2 + [2] * 2] * 3
    actors = dealt(np.ones(57) / 57, 2, 114)
    assert actors == [list(range(57))] * 2


def test_reassignment_leaves_every_actor_much_the_same():
    crews = [crew_of([task for task in range(8) for _ in range(4)])] * 2
    changed = reassigned(crews, np.array([1] * 7 + [57]))
    assert sorted(len(crew) for crew in changed) == [1 + 3, 1 + 4]


def test_reassignment_changes_little():
    crews = [crew_of([0, 0, 1, 2]), crew_of([0, 1, 1, 3], outside=[1, 3])]
    changed = reassigned(crews, np.array([1, 3, 1, 3]))
    assert changed == [
        (Seat(0, 1), Seat(1, 1, True), Seat(2, 1), Seat(3, 1, True)),
        (Seat(1, 2, True), Seat(3, 2, True)),
    ]
    assert reassigned(crews, np.array([3, 3, 1, 1]))[1] == crews[1]
