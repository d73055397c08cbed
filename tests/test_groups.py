"""Environments of one actor at their own pace: partial batches, moves, changes of crew."""

import logging
import re
import time
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch

from impala.actor_pool import ActorPool
from impala.crew import Seat, crew_of, moved_outside, played, seated, without
from impala.messages import Broken, Free, Reform, Reformed, Restart, Unroll
from impala.mix import Mix
from impala.pace import SAMPLES, Pace
from impala.patience import Patience
from impala.trajectory import allocate, gather, leaves, map_structure
from impala.transport.restarts import NO_TASK, Restarts
from impala.transport.shared_memory import SharedMemoryTransport
from impala.transport.transport import Slots
from tests.counting import CountingAgent, CountingSuite
from tests.test_actor import FixedWeights
from tests.test_restarts import WHOLE, Seen

NAMES = ["three", "five"]
UNROLL = 7


class Played:
    """An actor whose slots are freed at once; every unroll that it fills is kept, in order."""

    def __init__(self, crew, capacity=None, *, fault=None, lives=False, **suite):
        size = capacity or sum(seat.count for seat in crew)
        suite = CountingSuite(NAMES, fault=fault, lives=lives, **suite)
        self.pool = ActorPool(suite, CountingAgent(), [[0] * size], UNROLL, False)
        self.storage = allocate(self.pool.layout, 2 * size)
        self.slots = Slots([size], 2)
        self.orders = []
        self.actor = self.pool.build(0, self.storage, 1, weights=FixedWeights(), crew=crew)
        self.said = self.actor.play(self.ordered)
        self.unrolls, self.games = [], []
        self.recrew(crew)

    def ordered(self):
        taken, self.orders = self.orders, []
        return taken

    def recrew(self, crew):
        self.slots.partition(0, *seated(crew))
        self.orders += self.slots.free(0)

    def until(self, done):
        """The last thing it said, `done` of which is true."""
        end = time.monotonic() + 120
        for said in self.said:
            assert time.monotonic() < end
            if isinstance(said, Unroll):
                columns = range(said.slots.start, said.slots.stop)
                copy = allocate(self.pool.layout, len(columns))
                gather(self.storage, torch.tensor(columns), copy)
                self.unrolls.append(copy)
                self.games += said.games.tolist()
                group = next(
                    f.group
                    for f in self.slots.free(0)
                    if columns[0] in range(f.slots.start, f.slots.stop)
                )
                self.orders.append(Free(group, said.slots))
            if done(said):
                return said
        raise AssertionError

    def columns(self, task):
        """Each environment's unrolls of a task, in order, where it has one column in each."""
        return [u for u in self.unrolls if u.task[0] == task]


@pytest.fixture
def play():
    actors = []

    def make(*args, **kwargs):
        actors.append(Played(*args, **kwargs))
        return actors[-1]

    yield make
    for played_one in actors:
        played_one.actor.close()


@pytest.mark.parametrize(("outside", "seconds"), [(False, 0.025), (True, 0.05)])
def test_what_a_step_takes_is_told_of_each_task(play, outside, seconds):
    """Inside, two environments share a step of 50 ms; outside, each takes that by itself."""
    crew = (Seat(0, 1), Seat(1, 2, outside))
    actor = play(crew, fault="sluggish", faulty="five")
    told: dict[int, list[float]] = {0: [0.0, 0], 1: [0.0, 0]}

    def enough(said):
        for task, spent, steps in getattr(said, "step_times", ()):
            told[task][0] += spent
            told[task][1] += steps
        return min(steps for _, steps in told.values()) >= 2

    actor.until(enough)
    (three_s, three), (five_s, five) = told.values()
    assert three_s / three < 0.01
    assert seconds <= five_s / five < 1.8 * seconds


def check_rows(unroll):
    """What must hold in every unroll of the counting suite, whoever else was answered with it."""
    (state,) = unroll.core_state
    steps = unroll.steps
    for t in range(UNROLL):
        state = state.masked_fill(steps.first[t][:, None], 0.0) + 1
        assert torch.equal(
            state[:, 0], unroll.outputs.seen[t]
        )  # the actor's state is the learner's
        assert torch.equal(state[:, 0], steps.frame[t, :, 0, 0, 0] + 1.0)
    length = torch.where(unroll.task == 0, 3.0, 5.0)
    ended = steps.frame[1:, :, 0, 0, 0] == 0
    assert torch.equal(steps.first[1:], ended)
    counted = torch.where(ended, length, steps.frame[1:, :, 0, 0, 0].float())
    assert torch.equal(steps.reward[1:], counted)
    assert torch.equal(steps.truncation_value[1:] > 0, ended & (unroll.task == 1))
    assert (steps.last_action[1:] == 1).all()


def check_joints(unrolls):
    """Row T of an unroll is row 0 of the next one of the same environment."""
    for before, after in pairwise(unrolls):
        for last, first in zip(leaves(before.steps), leaves(after.steps), strict=True):
            assert torch.equal(last[-1], first[0])


def test_groups_are_all_inside_and_each_outside():
    crew = crew_of([0, 0, 1, 1, 2], outside=[1])
    assert crew == (Seat(0, 2), Seat(1, 2, True), Seat(2, 1))
    assert seated(crew) == (3, 2)
    assert seated(moved_outside(crew, 0)) == (1, 4)
    assert played(without(crew, 1)) == [0, 0, 2]
    assert seated(()) == (0, 0)


def test_where_slots_are_few_environments_outside_take_turns(play):
    actor = play(crew_of([0] * 4, outside=[0]))
    slot, actor.orders = actor.orders[0], []
    actor.until(lambda said: all(group.started for group in actor.actor._groups))
    actor.orders.append(slot)
    actor.until(lambda said: len(actor.unrolls) >= 12)
    begun_at = [int(unroll.steps.frame[0, 0, 0, 0, 0]) for unroll in actor.unrolls]
    assert begun_at == [0] * 4 + [UNROLL % 3] * 4 + [2 * UNROLL % 3] * 4


def test_environments_outside_play_by_the_same_contract(play):
    actor = play(crew_of([0, 0, 1, 1], outside=[1]))
    actor.until(lambda said: len(actor.columns(1)) >= 12)
    assert {len(u.task) for u in actor.columns(0)} == {2}
    assert {len(u.task) for u in actor.columns(1)} == {1}
    for unroll in actor.unrolls:
        check_rows(unroll)
    check_joints(actor.columns(0))
    assert {tuple(game) for game in actor.games} == WHOLE


def test_whoever_is_ready_is_answered(play):
    """A slow one outside takes 7 s for an unroll; the others, inside, do not wait for it."""
    actor = play(crew_of([0, 0, 1], outside=[1]), fault="slow", faulty="five")
    actor.until(lambda said: len(actor.columns(0)) >= 200)
    assert len(actor.columns(1)) <= 100
    for unroll in actor.unrolls:
        check_rows(unroll)


def test_a_crew_changes_and_games_go_on(play):
    first = crew_of([0, 0, 1, 1], outside=[1])
    second = (Seat(0, 3), Seat(1, 1, True))
    actor = play(first)
    actor.until(lambda said: len(actor.columns(1)) >= 3)
    for crew, gone in ((second, [1]), (first, [0]), (second, [1]), (second, [])):
        actor.until(lambda said: all(group.started for group in actor.actor._groups))
        actor.orders.append(Reform(crew))
        said = actor.until(lambda said: isinstance(said, Reformed))
        assert said.aborted == gone
        before, actor.unrolls = len(actor.games), []
        actor.recrew(crew)
        actor.until(lambda said: len(actor.columns(1)) >= 4 and len(actor.columns(0)) >= 4)
        assert {len(u.task) for u in actor.columns(0)} == {crew[0].count}
        for unroll in actor.unrolls:
            check_rows(unroll)
        check_joints(actor.columns(0))
        assert {tuple(game) for game in actor.games[before:]} == WHOLE  # none is cut or doubled


@pytest.mark.parametrize("fault", ["raise", pytest.param("hang", marks=pytest.mark.slow)])
def test_one_that_breaks_outside_costs_no_other(play, fault, tmp_path):
    actor = play(
        crew_of([0, 0, 1, 1], outside=[1]), fault=fault, faulty="five", once=tmp_path / "once"
    )  # fmt: skip
    if fault == "hang":
        # Only then: on a busy machine it may take long to build them.
        actor.until(lambda said: all(group.started for group in actor.actor._groups))
        actor.actor._patience = Patience(3.0)
    broken = actor.until(lambda said: isinstance(said, Broken))
    actor.actor._patience = Patience(None)
    assert (broken.task, broken.aborted) == (1, True) and broken.group in (1, 2)
    cause = "broke at its 50th step" if fault == "raise" else "it got no answer for 3 s"
    assert cause in broken.cause
    count = len(actor.columns(0)), len(actor.columns(1))
    actor.until(lambda said: len(actor.columns(0)) >= count[0] + 5)  # they play on without it
    actor.orders.append(Restart(broken.group))
    actor.until(lambda said: len(actor.columns(1)) >= count[1] + 30)
    actor.orders.append(Restart(broken.group))  # it comes too late: nothing is broken
    actor.until(lambda said: len(actor.columns(1)) >= count[1] + 60)
    for unroll in actor.unrolls:
        check_rows(unroll)
    check_joints(actor.columns(0))
    assert {tuple(game) for game in actor.games} == WHOLE


def paced(durations, parallel, steps, noise=0.0, busy_s=0.0):
    """Whom Pace finds slow, of environments that take so many seconds, in steps of them all.

    busy_s: that whoever is received from last waits for a core.
    """
    pace, order, found = Pace(), list(range(len(durations))), []
    draw = np.random.default_rng(0)
    for _ in range(steps):
        took = durations * draw.exponential(1.0, len(durations)) ** noise
        seconds, now = [], 0.0
        for one in order:  # in threads all work from the start on, else only while received from
            end = max(now, took[one]) if parallel else now + took[one]
            seconds.append(end - now + 1e-5)
            now = end
        seconds[-1] += busy_s * draw.uniform(0.5, 1.5)
        if pace.too_slow(order[-1], seconds):
            found.append(order[-1])
        order.append(order.pop(pace.next_last(seconds)))
    return found


@pytest.mark.parametrize("parallel", [True, False])
def test_pace_finds_the_one_that_others_wait_for(parallel):
    durations = np.array([1, 1, 20, 1, 1, 1]) / 1000
    assert paced(durations, parallel, SAMPLES) == []
    assert paced(durations, parallel, 4 * SAMPLES + 1) == [2, 2]  # every other step
    assert paced(durations * 1000, parallel, 5) == [2]  # they have waited long enough to know
    assert set(paced(10 * durations, parallel, 100, busy_s=0.01)) == {2}
    assert set(paced(durations, parallel, 100, noise=0.5)) == {2}
    two = np.array([0.01, 0.5, 0.01, 0.5, *[0.01] * 8])
    assert set(paced(two, False, 100)) in ({1}, {3}, {1, 3})  # the other is found after that one


@pytest.mark.parametrize("parallel", [True, False])
def test_pace_leaves_those_alone_that_take_much_the_same(parallel):
    draw = np.random.default_rng(1)
    assert paced(draw.uniform(0.5, 1.0, 12) / 100, parallel, 1000, noise=0.5) == []
    assert paced(np.full(2, 0.01), parallel, 1000) == []
    assert paced(np.array([1.0] * 28 + [3.0]) / 1000, False, 300) == []
    assert paced(np.array([1, 1, 20, 1]) / 10_000, parallel, 300) == []  # it is not worth it
    for count in (2, 8):  # who is last is not to blame
        assert paced(np.full(count, 0.0005), parallel, 1000, busy_s=0.02) == []


@contextmanager
def starting():
    """Makes transports whose actors play, and closes them."""
    transports = []

    def start(tasks, restarts=None, outside=(), move_slow=False, mix=None, batching=None, **suite):
        pool = ActorPool(
            CountingSuite(NAMES, **suite), CountingAgent(), tasks, UNROLL, False, outside,
            move_slow, mix, batching,
        )  # fmt: skip
        transports.append(SharedMemoryTransport(builder=pool, restarts=restarts))
        transports[-1].start(CountingAgent(), 0, seed=1)
        return transports[-1]

    try:
        yield start
    finally:
        for transport in transports:
            transport.close()


@pytest.fixture
def started():
    with starting() as start:
        yield start


class Counted(Seen):
    """Counts the unrolls of each task."""

    def __init__(self, transport):
        super().__init__(transport)
        self.tasks = Counter()

    def received(self, delivery):
        storage = map_structure(torch.clone, self.transport.storage.task)
        self.tasks.update(storage[torch.from_numpy(delivery.slots)].tolist())


def test_what_keeps_others_waiting_is_moved_to_processes_of_its_own(started, caplog):
    transport = started([[0, 0, 1, 1]], move_slow=True, fault="sluggish", faulty="five")
    seen = Counted(transport)
    with caplog.at_level(logging.INFO):
        seen.until(lambda: seen.tasks[0] > 400)
    assert seen.tasks[1] < 200
    assert "actor 0: five keeps its other tasks waiting" in caplog.text
    assert seen.games == WHOLE
    seen.until(lambda: seen.faults)
    assert [(f.aborted, f.restarted, f.lost) for f in seen.faults] == [([1, 1], False, NO_TASK)]
    seen.tasks.clear()
    seen.until(lambda: seen.tasks[1] >= 4)


@pytest.mark.slow
def test_nothing_is_moved_that_is_not_asked_for(started):
    seen = Counted(started([[0, 0, 1, 1]], fault="sluggish", faulty="five"))
    seen.until(lambda: seen.tasks[0] > 40)
    assert seen.tasks[0] == seen.tasks[1]


@pytest.mark.parametrize("fault", ["kill", pytest.param("unbuildable", marks=pytest.mark.slow)])
def test_a_process_that_fails_is_named_and_starts_again_alone(fault, started, tmp_path, caplog):
    transport = started(
        [[0, 0, 1, 1]], Restarts(per_task=3, backoff_s=0.1), outside=[1],
        fault=fault, faulty="five", once=tmp_path / "once",
    )  # fmt: skip
    actor = transport._processes[0].pid
    seen = Counted(transport)
    with caplog.at_level(logging.WARNING):
        seen.until(lambda: seen.faults and seen.tasks[1] >= 30)
    assert transport._processes[0].pid == actor
    (fault_seen,) = seen.faults
    assert (fault_seen.task, fault_seen.restarted, fault_seen.lost) == (1, True, NO_TASK)
    assert fault_seen.aborted == ([] if fault == "unbuildable" else [1])
    assert "actor 0: an environment failed in five; it starts again in 0.1 s" in caplog.text
    assert seen.games == WHOLE


def test_a_task_outside_that_keeps_failing_is_left_out(started):
    restarts = Restarts(per_task=1, backoff_s=0.0, then="continue")
    transport = started([[0, 0, 1], [1]], restarts, [1], fault="unbuildable", faulty="five")
    seen = Counted(transport)
    seen.until(lambda: sum(f.lost == 1 for f in seen.faults) == 2)
    assert not seen.faults[-1].restarted or not seen.faults[-2].restarted  # actor 1 has no other
    seen.until(lambda: seen.tasks[0] > 100)
    assert (seen.tasks[1], seen.games) == (0, {(0, 6.0, 12)})


@pytest.mark.slow
def test_a_mix_holds_whatever_the_speed_and_environments_change_tasks(started, caplog):
    """One task is a hundred times slower than the other, and is to have two thirds of all steps."""
    transport = started(
        [[0, 0, 0, 1, 1, 1]] * 2, move_slow=True, mix=Mix(np.array([1 / 3, 2 / 3]), 2.0),
        fault="sluggish", faulty="five",
    )  # fmt: skip
    seen = Counted(transport)
    with caplog.at_level(logging.INFO):
        # How many depends on how slow the other is, too, on busy cores.
        seen.until(lambda: re.search(r"says: three has [1-4] .*five has (8|9|10|11) ", caplog.text))
    seen.until(lambda: not transport._reforming)
    seen.tasks.clear()
    seen.until(lambda: seen.tasks[1] >= 40)  # nobody waits for a task whose processes start
    seen.tasks.clear()
    seen.until(lambda: seen.tasks[0] >= 100)
    assert seen.tasks[1] / seen.tasks[0] == pytest.approx(2.0, rel=0.2)
    assert seen.games == WHOLE
