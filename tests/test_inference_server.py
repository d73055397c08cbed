"""One process answers all actors: the same contract, whatever is batched together."""

import os
import signal
import threading
from functools import partial
from itertools import pairwise
from multiprocessing import Pipe

import numpy as np
import psutil
import pytest
import torch

from impala.actor_pool import ActorPool
from impala.inference import Question
from impala.inference_server import Answers, Batching, Server, join
from impala.patience import Patience
from impala.remote_inference import RemoteInference
from impala.trajectory import allocate, empty_step, gather, leaves
from impala.transport.restarts import Restarts
from impala.transport.shared_memory import SharedMemoryTransport
from impala.transport.transport import ActorError
from tests.counting import CountingAgent, CountingSuite
from tests.test_groups import UNROLL, Counted, check_rows, starting
from tests.test_restarts import WHOLE


@pytest.fixture
def started():
    with starting() as start:
        yield partial(start, batching=Batching())


class Kept(Counted):
    """A copy of every unroll, by the slots that it was in."""

    def __init__(self, transport):
        super().__init__(transport)
        self.unrolls = []

    def received(self, delivery):
        super().received(delivery)
        copy = allocate(self.transport._builder.layout, len(delivery.slots))
        gather(self.transport.storage, torch.from_numpy(delivery.slots), copy)
        self.unrolls.append((delivery.actor, copy))


def test_unrolls_keep_the_contract(started):
    """Two actors, one of which has environments of their own pace, and time limits."""
    seen = Kept(started([[0, 0, 1, 1], [0, 1, 1]], outside=[1]))
    seen.until(lambda: seen.tasks[1] >= 60 and min(seen.count.values()) >= 10)
    for _, unroll in seen.unrolls:
        check_rows(unroll)
        assert torch.equal(
            unroll.steps.truncation_value[1:] == 505.0, unroll.steps.truncation_value[1:] > 0
        )
    for actor in (0, 1):
        inside = [u for a, u in seen.unrolls if a == actor and u.task[0] == 0]
        for before, after in pairwise(inside):
            for last, first in zip(leaves(before.steps), leaves(after.steps), strict=True):
                assert torch.equal(last[-1], first[0])
    assert seen.games == WHOLE


def test_the_version_is_the_oldest_that_acted(started):
    transport, agent = started([[0, 0], [1]]), CountingAgent()
    seen, version = Kept(transport), 0

    def publish():
        nonlocal version
        version += 1
        with torch.no_grad():
            agent.weight.fill_(float(version))
        transport.publish(agent, version)
        return len(seen.unrolls) >= 200

    seen.until(publish)
    changed = 0
    for _, unroll in seen.unrolls:
        acted = unroll.outputs.version
        assert torch.equal(acted[0], unroll.version.float())
        assert (acted[1:] >= acted[:-1]).all()
        changed += int((acted[-1] > acted[0]).any())
    assert changed > 0  # it does not wait for an unroll's end to take newer weights


@pytest.mark.slow
def test_an_actor_that_is_killed_joins_again(started):
    transport = started([[0, 0], [1, 1]], restarts=Restarts(per_task=3, backoff_s=0.0))
    seen = Kept(transport)
    seen.until(lambda: len(seen.count) == 2)
    os.kill(transport._processes[1].pid, signal.SIGKILL)
    seen.until(lambda: seen.faults and len(seen.count) == 2 and min(seen.count.values()) >= 20)
    assert seen.games == WHOLE
    for _, unroll in seen.unrolls:
        check_rows(unroll)


@pytest.mark.slow
def test_a_server_that_is_killed_starts_again_with_all_actors(started, caplog):
    transport = started([[0, 0], [1, 1]], restarts=Restarts(per_task=1, backoff_s=0.0))
    seen = Kept(transport)
    seen.until(lambda: len(seen.count) == 2)
    os.kill(transport._server.pid, signal.SIGKILL)
    seen.until(lambda: seen.faults and len(seen.count) == 2 and min(seen.count.values()) >= 20)
    assert [sorted(fault.aborted) for fault in seen.faults] == [[0, 0, 1, 1]]
    assert "the inference server failed" in caplog.text
    assert "its process was killed by SIGKILL" in caplog.text
    for _, unroll in seen.unrolls:
        check_rows(unroll)
    os.kill(transport._server.pid, signal.SIGKILL)
    with pytest.raises(ActorError, match=r"the inference server failed, more often than.*1 times"):
        seen.until(lambda: False)


@pytest.mark.slow
def test_a_server_dies_while_an_environment_is_to_start_again(started):
    transport = started(
        [[0, 0, 1], [1, 1]], outside=[1], restarts=Restarts(per_task=3, backoff_s=3.0)
    )
    seen = Counted(transport)
    seen.until(lambda: len(seen.count) == 2)
    actor = psutil.Process(transport._processes[1].pid)
    actor.children()[0].kill()
    seen.until(lambda: seen.faults)
    os.kill(transport._server.pid, signal.SIGKILL)
    seen.until(lambda: len(seen.faults) == 2)
    seen.count.clear()
    seen.until(lambda: len(seen.count) == 2 and min(seen.count.values()) >= 20)
    assert len(seen.faults) == 2


@pytest.mark.slow
def test_a_server_that_hangs_is_killed_and_starts_again(started, caplog):
    transport = started([[0, 0], [1]], restarts=Restarts(backoff_s=0, per_task=1, step_timeout_s=4))
    seen = Counted(transport)
    seen.until(lambda: len(seen.count) == 2)
    os.kill(transport._server.pid, signal.SIGSTOP)
    seen.until(lambda: seen.faults)
    assert "it gave no sign of life for 4 s (restarts.step_timeout_s)" in caplog.text
    transport._patience = Patience(None)  # a busy machine may need longer to start it
    seen.count.clear()
    seen.until(lambda: len(seen.count) == 2)


class Unable(CountingAgent):
    def act(self, step, state, noise):
        if len(step.reward) > 1:  # a layout is made from one
            raise RuntimeError("this network is broken")
        return super().act(step, state, noise)


def test_what_is_wrong_with_the_network_is_shown():
    pool = ActorPool(CountingSuite(), Unable(), [[0, 0]], UNROLL, False, batching=Batching())
    transport = SharedMemoryTransport(builder=pool)
    transport.start(Unable(), 0, seed=1)
    seen = Counted(transport)
    try:
        with pytest.raises(ActorError, match=r"(?s)Traceback.*this network is broken"):
            seen.until(lambda: False)
    finally:
        transport.close()


@pytest.mark.slow
def test_how_many_are_answered_at_once_is_measured(started):
    transport = started([[0, 0], [1]])
    assert transport.metrics() == {}  # nobody has asked
    Counted(transport).until(lambda: transport._answers.counts[0] >= 10)
    assert 1 <= transport.metrics()["inference/batch_size"] <= 3
    batches, rows = transport._answers_before
    assert batches <= rows <= 3 * batches


def test_closing_leaves_nothing(started):
    transport = started([[0, 0], [1]])
    seen = Counted(transport)
    seen.until(lambda: len(seen.count) == 2)
    pids = [transport._server.pid, *(p.pid for p in transport._processes.values())]
    transport.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


class Weights:
    def load(self, agent, version):
        return 7


class Asked:
    """A server in a thread, and actors that ask it by hand."""

    def __init__(self, batching, actors=2, environments=4):
        pool = ActorPool(CountingSuite(), CountingAgent(), [[0] * environments], UNROLL, False)
        self.environments = environments
        self.counted = Answers(np.zeros(Answers.size(), np.uint8))
        self.storage = allocate(pool.layout, actors * environments)
        self.server = Server(
            CountingAgent(), Weights(), self.storage, num_environments=actors * environments,
            most=environments, num_actions=2, batching=batching, device=torch.device("cpu"), seed=1,
            answers=self.counted,
        )  # fmt: skip
        self.control, theirs = Pipe()
        self.actors = []
        for actor in range(actors):
            ours, its = Pipe()
            join(self.control, os.getpid(), actor, actor * environments, its)
            its.close()
            self.actors.append(RemoteInference(ours))
        self.thread = threading.Thread(target=self.server.serve, args=(theirs,), daemon=True)
        self.thread.start()

    def ask(self, actor, group, first, size, t=0):
        environments = np.arange(first, first + size)
        start = actor * self.environments + first
        slots = slice(start, start + size)
        self.actors[actor].ask([Question(group, environments, slots, t)])

    def answers(self, actor, patience_s):
        if not self.actors[actor].connection.poll(patience_s):
            return []
        return self.actors[actor].answered()

    def close(self):
        self.control.close()
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def asked():
    made = []

    def make(*args, **kwargs):
        made.append(Asked(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_it_waits_for_a_minimum_and_answers_together(asked):
    each = asked(Batching(min_batch=6, max_batch=64, timeout_s=1000.0))
    each.ask(0, 5, 0, 4)
    assert each.answers(0, 0.3) == []
    each.ask(1, 9, 1, 2)
    assert (each.answers(0, 60), each.answers(1, 60)) == ([5], [9])
    assert each.counted.counts == (1, 6)
    assert each.storage.version.tolist() == [7, 7, 7, 7, 0, 7, 7, 0]


def test_it_does_not_wait_for_ever(asked):
    each = asked(Batching(min_batch=6, max_batch=64, timeout_s=0.01))
    each.ask(0, 5, 0, 1)
    assert each.answers(0, 60) == [5]


def test_batches_have_a_maximum_and_the_first_come_first(asked):
    each = asked(Batching(min_batch=3, max_batch=3, timeout_s=1000.0), environments=3)
    each.ask(0, 1, 0, 2)
    each.ask(0, 2, 1, 2)  # two and two do not fit: one after the other
    assert each.answers(0, 60) == [1]
    assert each.answers(0, 0.3) == []
    each.ask(1, 3, 0, 1)
    assert each.answers(0, 60) == [2] and each.answers(1, 60) == [3]
    assert each.counted.counts == (2, 5)


def test_a_question_may_be_larger_than_the_maximum(asked):
    each = asked(Batching(min_batch=2, max_batch=2, timeout_s=1000.0))
    each.ask(0, 1, 0, 4)
    assert each.answers(0, 60) == [1]
    assert each.storage.outputs.seen[0].tolist() == [1.0] * 4 + [0.0] * 4


def test_core_states_stay_with_the_server_and_go_where_a_row_0_is(asked):
    each = asked(Batching(min_batch=1, max_batch=64, timeout_s=0.0))
    for count in range(1, 4):
        each.ask(1, 0, 0, 3, t=count % UNROLL)
        assert each.answers(1, 60) == [0]
        assert each.storage.outputs.seen[count, 4:7].tolist() == [count] * 3
    each.ask(1, 0, 1, 2, t=0)
    assert each.answers(1, 60) == [0]
    assert each.storage.core_state[0][4:, 0].tolist() == [0, 3, 3, 0]
    assert each.storage.outputs.seen[0, 4:].tolist() == [0, 4, 4, 0]
    step = empty_step((1, 2, 2), 2)
    step = step._replace(frame=step.frame + 5)
    assert each.actors[1].value(step, np.array([0, 1])).tolist() == [503.0, 504.0]


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match=r"1 <= min_batch <= max_batch"):
        Batching(min_batch=9, max_batch=8)
    with pytest.raises(ValueError, match=r"timeout_s=-1"):
        Batching(timeout_s=-1)
