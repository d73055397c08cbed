"""Environments and actors that die in each way, and runs that go on."""

import logging
import os
import signal
import time
from collections import Counter

import numpy as np
import pytest

from impala import patience
from impala.actor_pool import ActorPool, actor_seeds
from impala.measures import FaultCounts
from impala.patience import Patience
from impala.transport import shared_memory
from impala.transport.restarts import NO_TASK, Budget, Fault, Restarts
from impala.transport.shared_memory import SharedMemoryTransport
from impala.transport.transport import ActorError
from tests.counting import CountingAgent, CountingSuite
from tests.test_transport import receive

NAMES = ["three", "five"]
WHOLE = {(0, 6.0, 12), (1, 15.0, 20)}  # task, return and length of every whole game
CAUSES = {
    "raise": "this environment broke at its 50th step",
    "pipe": "a pipe of this environment broke",
    "unbuildable": "this environment cannot be built",
    "nan": "the environment returned rewards [nan",
    "shape": "the environment returned rewards of shape (2, 1)",
    "exit": "its process ended with exit code 3 and left no traceback",
    "kill": "its process was killed by SIGKILL",
    "hang": "it got no answer for 5 s (restarts.step_timeout_s) and was killed",
}


@pytest.fixture
def started():
    """Makes transports of two actors that play both tasks, and closes them."""
    transports = []

    def start(restarts, tasks=((0, 0, 1, 1), (1, 1)), **suite):
        pool = ActorPool(CountingSuite(NAMES, **suite), CountingAgent(), tasks, 7, False)
        transport = SharedMemoryTransport(builder=pool, restarts=restarts)
        transports.append(transport)
        transport.start(CountingAgent(), 0, seed=1)
        return transport

    yield start
    for transport in transports:
        transport.close()


class Seen:
    """What came in so far; every delivery is released."""

    def __init__(self, transport):
        self.transport = transport
        self.count = Counter()  # deliveries of each actor
        self.sizes, self.games, self.faults = set(), set(), []

    def until(self, done, seconds=120.0):
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end
            for delivery in self.transport.receive(0.2):
                self.received(delivery)
                self.transport.release(delivery.slots)
                self.count[delivery.actor] += 1
                self.sizes.add(len(delivery.slots))
                self.games.update(map(tuple, delivery.games.tolist()))
            for fault in self.transport.faults():
                self.faults.append(fault)
                self.count.clear()

    def received(self, delivery):
        pass


SLOW = ("raise", "nan", "shape", "exit", "pipe", "hang", "unbuildable")


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in CAUSES]
)
def test_an_actor_that_fails_is_named_and_starts_again(fault, started, tmp_path, caplog):
    restarts = Restarts(per_task=3, backoff_s=0.1, step_timeout_s=5.0 if fault == "hang" else None)
    seen = Seen(started(restarts, fault=fault, faulty="five", once=tmp_path / "once"))
    with caplog.at_level(logging.WARNING):
        seen.until(lambda: seen.faults and seen.count[seen.faults[0].actor] >= 30)
    assert seen.games == WHOLE
    (first,) = seen.faults
    assert (first.task, first.restarted, first.lost) == (1, True, NO_TASK)
    played = [0, 0, 1, 1] if first.actor == 0 else [1, 1]
    assert first.aborted == ([] if fault == "unbuildable" else played)
    assert f"actor {first.actor} (playing" in caplog.text
    assert "failed in five; it starts again in 0.1 s (failure 1 of 3)" in caplog.text
    assert CAUSES[fault] in caplog.text
    assert ("Traceback" in caplog.text) == (fault not in ("exit", "kill", "hang"))


@pytest.mark.slow
def test_an_actor_that_is_stopped_is_killed_and_starts_again(started, caplog):
    transport = started(Restarts(per_task=3, backoff_s=0.1, step_timeout_s=4.0))
    seen = Seen(transport)
    seen.until(lambda: len(seen.count) == 2)
    # None stands in an environment when it is stopped: both have filled all their slots.
    held, end = [], time.monotonic() + 120
    while sum(len(delivery.slots) for delivery in held) < transport.total_slots:
        assert time.monotonic() < end
        held += transport.receive(0.2)
    time.sleep(6.0)  # an actor that waits for slots gives signs of life
    assert not transport.receive(0.2) and not transport.faults()
    os.kill(transport._processes[1].pid, signal.SIGSTOP)
    seen.until(lambda: seen.faults)
    assert [(fault.actor, fault.task) for fault in seen.faults] == [(1, NO_TASK)]
    assert "it gave no sign of life for 4 s (restarts.step_timeout_s) and was killed" in caplog.text
    for delivery in held:
        transport.release(delivery.slots)
    transport._patience = Patience(None)  # a busy machine may need longer to start it
    seen.count.clear()
    seen.until(lambda: len(seen.count) == 2)


def test_who_was_stopped_itself_gives_others_their_time_anew(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    mine = Patience(10.0)
    for now[0] in range(100, 120):
        assert mine.horizon_s() == (now[0] - 10 if now[0] > 110 else -np.inf)
    now[0] += 7200.0  # Ctrl-Z, and later fg
    for _ in range(11):
        now[0] += 1.0
        assert mine.horizon_s() == -np.inf
    now[0] += 1.0
    assert mine.horizon_s() == now[0] - 10.0
    assert Patience(None).horizon_s() == -np.inf
    short, now[0] = Patience(1.5), now[0] + 2.0  # asked less often than it lasts
    assert short.horizon_s() == now[0] - 1.5


@pytest.mark.slow
def test_an_actor_that_is_stopped_while_it_starts_is_killed(started, caplog, monkeypatch):
    monkeypatch.setattr(shared_memory, "START_S", 1.0)
    transport = started(Restarts(per_task=1000, backoff_s=0.1, step_timeout_s=5.0))
    os.kill(transport._processes[1].pid, signal.SIGSTOP)
    seen = Seen(transport)
    seen.until(lambda: any(fault.actor == 1 for fault in seen.faults))
    cause = "5 s (to start: restarts.step_timeout_s, but 1 s at least) and was killed"
    assert f"it gave no sign of life for {cause}" in caplog.text


def test_it_is_known_when_nothing_more_can_come(started):
    transport = started(Restarts())
    held, end = [], time.monotonic() + 120
    while sum(len(delivery.slots) for delivery in held) < transport.total_slots:
        assert time.monotonic() < end and not transport.exhausted()
        held += transport.receive(0.2)
    assert transport.exhausted()
    transport.release(held[0].slots)
    assert not transport.exhausted()


def test_a_killed_actor_gives_back_its_slots_but_for_those_the_learner_has(started):
    transport = started(Restarts(per_task=100, backoff_s=0.0), tasks=[[0, 0]])
    held = []
    while not held:
        held = transport.receive(0.2)
    os.kill(transport._processes[0].pid, signal.SIGKILL)
    faults, others, end = [], [], time.monotonic() + 120
    while not (faults and others):
        assert time.monotonic() < end
        others += transport.receive(0.2)
        faults += transport.faults()
        if faults:  # what came before the end counts as well
            taken = [slot for delivery in held + others for slot in delivery.slots]
            assert len(taken) == len(set(taken))  # no slot is filled while the learner has it
    for delivery in held + others:
        transport.release(delivery.slots)
    deliveries = receive(transport, 20)
    slots = {slot for delivery in deliveries for slot in delivery.slots.tolist()}
    assert slots == set(range(transport.total_slots))


@pytest.mark.slow
def test_a_task_that_keeps_failing_is_left_out_if_that_is_wanted(started):
    restarts = Restarts(per_task=1, backoff_s=0.0, then="continue")
    seen = Seen(started(restarts, tasks=[[0, 0, 1]], fault="unbuildable", faulty="five"))
    seen.until(lambda: seen.count[0] >= 4)
    assert (seen.games, seen.sizes) == ({(0, 6.0, 12)}, {2})
    assert [(f.restarted, f.lost) for f in seen.faults] == [(True, NO_TASK), (True, 1)]


@pytest.mark.parametrize("then", [pytest.param("stop", marks=pytest.mark.slow), "continue"])
def test_the_run_ends_with_the_cause_if_nothing_is_left_to_try(started, then):
    restarts = Restarts(per_task=1, backoff_s=0.0, then=then)
    transport = started(restarts, tasks=[[1]], fault="unbuildable")
    with pytest.raises(ActorError, match=r"failed in five.*\n") as error:
        Seen(transport).until(lambda: False)
    assert "cannot be built" in str(error.value)
    assert ("no actor has a task left" in str(error.value)) == (then == "continue")


def test_waits_double_until_the_budget_of_a_task_is_spent():
    budget = Budget(Restarts(per_task=8, backoff_s=0.5))
    assert [budget.spend(3) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, None]
    assert budget.spend(4) == 0.5  # another task has its own
    assert Budget(Restarts()).spend(0) is None


def test_an_actor_that_starts_again_has_other_seeds():
    lives = [actor_seeds(1, 0, 3, life) for life in range(3)]
    assert lives[0] == actor_seeds(1, 0, 3)
    assert len({seed for seeds in lives for seed in seeds}) == 12


def test_faults_are_counted_by_task_and_the_counts_go_on_after_a_resume():
    counts = FaultCounts(NAMES)
    counts.add(Fault(actor=0, task=1, aborted=[0, 0, 1], restarted=True, lost=NO_TASK))
    counts.add(Fault(actor=0, task=NO_TASK, aborted=[], restarted=True, lost=NO_TASK))
    counts.add(Fault(actor=1, task=1, aborted=[], restarted=True, lost=1))  # with its other tasks
    counts.add(Fault(actor=1, task=1, aborted=[1], restarted=False, lost=1))
    resumed = FaultCounts(NAMES)
    resumed.load(counts.summary())
    for each in (counts, resumed):
        assert each.metrics() == {
            "restarts/five": 1, "restarts/none": 1, "aborted/three": 2, "aborted/five": 2
        }  # fmt: skip
    assert counts.summary()["given_up"] == ["five"]
    assert resumed.summary()["given_up"] == []


def test_an_unknown_end_is_refused():
    with pytest.raises(ValueError, match=r"restarts\.then=maybe: expected stop or continue"):
        Restarts(then="maybe")


def test_environments_that_return_nonsense_raise():
    for fault, message in (("nan", "rewards"), ("shape", "of shape")):
        suite = CountingSuite(["three"], fault=fault)
        environment = suite.make(suite.tasks[0], 2, [1, 2])
        environment.reset()
        for _ in range(49):
            environment.step(np.zeros(2, np.int64))
        with pytest.raises(RuntimeError, match=message):
            environment.step(np.zeros(2, np.int64))
