"""Shared memory: whole snapshots, no names left, real kills, back-pressure."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from impala import memory as memory_module
from impala.actor_pool import ActorPool
from impala.memory import SharedMemory
from impala.messages import Free
from impala.trajectory import leaves
from impala.transport.in_process import InProcess
from impala.transport.memory import carve, carved_size, tensor
from impala.transport.shared_memory import SharedMemoryTransport
from impala.transport.transport import ActorError, Slots
from impala.weights import Weights
from tests.counting import CountingAgent, CountingSuite

SIZES = [[0, 0, 1], [1, 1]]


def pool(fault=None, tasks=SIZES):
    return ActorPool(
        CountingSuite(["three", "five"], fault=fault), CountingAgent(), tasks, 7, False
    )


def receive(transport, count, seconds=60.0):
    """`count` deliveries, releasing each; fails after `seconds`."""
    deliveries, end = [], time.monotonic() + seconds
    while len(deliveries) < count:
        assert time.monotonic() < end, f"only {len(deliveries)} deliveries in {seconds} s"
        for delivery in transport.receive(0.5):
            transport.release(delivery.slots)
            deliveries.append(delivery)
    return deliveries


@pytest.fixture
def transport():
    transport = SharedMemoryTransport(builder=pool(), slots_per_environment=2)
    yield transport
    transport.close()


@pytest.mark.parametrize("pin", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_core_has_its_actor(pin):
    cores = os.sched_getaffinity(0)
    transport = SharedMemoryTransport(builder=pool(tasks=[[0]] * len(cores)), pin=pin)
    try:
        transport.start(CountingAgent(), 0, seed=1)
        receive(transport, 1)
        actors = transport._processes.values()
        end = time.monotonic() + 60
        while pin and any(len(psutil.Process(each.pid).cpu_affinity()) > 1 for each in actors):
            assert time.monotonic() < end
            time.sleep(0.01)
        places = [tuple(psutil.Process(each.pid).cpu_affinity()) for each in actors]
    finally:
        transport.close()
    assert places == ([(core,) for core in sorted(cores)] if pin else [tuple(cores)] * len(cores))


def test_actors_that_cores_cannot_share_evenly_go_where_they_can():
    cores = os.sched_getaffinity(0)
    builder = pool(tasks=[[0]] * (len(cores) + 1))
    transport = SharedMemoryTransport(builder=builder)
    try:
        assert transport._pin == (len(cores) == 1)
    finally:
        transport.close()


def test_slots_are_free_again_when_a_whole_set_was_read():
    slots = Slots([3, 2], 2)
    assert slots.total == 10
    slots.partition(0, 3, 0)
    slots.partition(1, 2, 0)
    assert slots.free(0) == [Free(0, slice(0, 3)), Free(0, slice(3, 6))]
    assert slots.free(1) == [Free(0, slice(6, 8)), Free(0, slice(8, 10))]
    slots.taken(np.array([0, 1, 2]))
    slots.taken(np.array([8, 9]))
    assert slots.free(0) == [Free(0, slice(3, 6))]
    assert slots.released(np.array([0, 2, 8])) == []
    freed = slots.released(np.array([1, 9]))
    assert freed == [(0, Free(0, slice(0, 3))), (1, Free(0, slice(8, 10)))]


def test_those_inside_have_sets_and_those_outside_share_single_slots():
    slots = Slots([2, 4], 2)
    slots.partition(0, 2, 0)
    slots.partition(1, 2, 2)
    assert slots.free(1) == [
        Free(0, slice(4, 6)), Free(0, slice(6, 8)),
        Free(1, slice(8, 9)), Free(1, slice(9, 10)), Free(1, slice(10, 11)), Free(1, slice(11, 12)),
    ]  # fmt: skip
    slots.taken(np.array([6, 7]))
    slots.taken(np.array([9]))
    assert slots.released(np.array([6])) == []
    slots.partition(1, 3, 0)  # an environment fewer, all together, while the learner has some
    assert slots.free(1) == [Free(0, slice(4, 7))]
    assert slots.released(np.array([9])) == []
    assert slots.released(np.array([7])) == [(1, Free(0, slice(7, 10)))]
    assert slots.released(np.array([11])) == []  # it is in no set
    with pytest.raises(ValueError, match="4 and 1 environments in 8 slots"):
        slots.partition(1, 4, 1)


@pytest.mark.parametrize("inside", range(13))
def test_few_fast_environments_have_the_slots_that_many_slow_ones_do_not_need(inside):
    slots = Slots([5, 12], 2)
    outside = 12 - inside
    slots.partition(1, inside, outside)
    owned = [free.slots for free in slots.free(1)]
    assert sorted(n for each in owned for n in range(24)[each.start - 10 : each.stop - 10]) == (
        list(range(sum(each.stop - each.start for each in owned)))
    )
    sets = [free for free in slots.free(1) if inside and free.group == 0]
    singles = [free for free in slots.free(1) if free not in sets]
    if inside:
        assert len(sets) >= 2
    if inside in (1, 2, 3):
        assert inside * len(sets) > 24 - 1.25 * outside - 1 - inside
    assert len(singles) >= outside * 1.25
    assert all(free.group == min(inside, 1) for free in singles)


def test_both_transports_deliver_the_same_rows(transport):
    in_process = InProcess(builder=pool(), slots_per_environment=2)
    for each in (transport, in_process):
        each.start(CountingAgent(), 3, seed=1)
    found = {}
    for name, each in (("shared", transport), ("in", in_process)):
        first = {}
        while len(first) < 2:
            for delivery in each.receive(0.5):
                if delivery.actor not in first:
                    first[delivery.actor] = (
                        each.storage.steps.frame[:, delivery.slots].clone(),
                        each.storage.steps.truncation_value[:, delivery.slots].clone(),
                        each.storage.outputs.seen[:, delivery.slots].clone(),
                        each.storage.task[delivery.slots].clone(),
                        each.storage.version[delivery.slots].clone(),
                        delivery.games.tolist(),
                    )
        found[name] = first
    for actor in (0, 1):
        *arrays, games = found["shared"][actor]
        *others, other_games = found["in"][actor]
        assert all(torch.equal(a, b) for a, b in zip(arrays, others, strict=True))
        assert games == other_games
        assert arrays[4].tolist() == [3] * len(arrays[4])
    in_process.close()


def test_actors_wait_for_free_slots_and_drop_nothing(transport):
    transport.start(CountingAgent(), 0, seed=1)
    held, end = [], time.monotonic() + 60
    while sum(len(d.slots) for d in held) < transport.total_slots:
        assert time.monotonic() < end
        held += transport.receive(0.5)
    assert transport.receive(0.5) == []  # every slot is full: nobody plays on
    assert sorted(np.concatenate([d.slots for d in held])) == list(range(transport.total_slots))
    for delivery in held:
        transport.release(delivery.slots)
    assert len(receive(transport, 4)) >= 4


def test_published_weights_reach_the_actors(transport):
    agent = CountingAgent()
    transport.start(agent, 0, seed=1)
    receive(transport, 4)
    with torch.no_grad():
        agent.weight.fill_(5.0)
    transport.publish(agent, 9)
    receive(transport, 12)  # an actor is at most its sets behind
    last = receive(transport, 4)[-1]
    assert transport.storage.version[last.slots].tolist() == [9] * len(last.slots)
    assert (transport.storage.outputs.version[:, last.slots] == 5.0).all()


def _publish_for_ever(memory, size, stop):
    agent = CountingAgent(num_weights=size)
    weights = Weights(agent, tensor(memory))
    version = 0
    while not stop.is_set():
        version += 1
        with torch.no_grad():
            agent.weight.fill_(float(version % 1000))
        weights.publish(agent, version)


def test_a_reader_never_sees_a_torn_snapshot():
    context = get_context("spawn")
    size = 50_000
    agent = CountingAgent(num_weights=size)
    memory = SharedMemory(Weights.size(agent))
    weights = Weights(agent, tensor(memory))
    weights.publish(agent, 0)
    stop = context.Event()
    writer = context.Process(target=_publish_for_ever, args=(memory, size, stop), daemon=True)
    writer.start()
    try:
        version, seen, end = 0, set(), time.monotonic() + 120
        while len(seen) < 50:
            assert time.monotonic() < end
            version = weights.load(agent, version)
            assert (agent.weight == float(version % 1000)).all(), "torn"
            seen.add(version)
    finally:
        stop.set()
        writer.join()
        memory.close()


def test_storage_is_carved_without_overlap():
    layout = pool().layout
    block = torch.zeros(carved_size(layout, 6), dtype=torch.uint8)
    arrays = leaves(carve(layout, 6, block))
    for number, array in enumerate(arrays):
        array.fill_(number % 2)
    for number, array in enumerate(arrays):
        assert (array == number % 2).all()


def test_too_little_memory_is_said_with_figures():
    with pytest.raises(ValueError, match=r"need \d+ MB of shared memory, and there are \d+"):
        SharedMemory(1 << 50)


def test_without_memfd_the_size_of_dev_shm_is_checked(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = set(os.listdir("/dev/shm"))
    block = SharedMemory(1 << 16)
    assert set(os.listdir("/dev/shm")) == before
    block.close()
    monkeypatch.setattr(memory_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"need \d+ MB and /dev/shm has 0 MB free"):
        SharedMemory(1 << 21)


def test_open_file_limit_is_checked_before_anything_starts():
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (66, 66))
        from tests.test_transport import SharedMemoryTransport, pool
        try:
            SharedMemoryTransport(builder=pool())
        except ValueError as error:
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert (
        "2 actors, with up to 0 environments in processes of their own, need about 68" in run.stdout
    )
    assert "open files and the limit is 66" in run.stdout


@pytest.mark.parametrize("fault", ["raise", "unbuildable"])
def test_a_childs_failure_shows_its_traceback_task_and_actor(fault):
    transport = SharedMemoryTransport(builder=pool(fault, [[0, 0]]))
    transport.start(CountingAgent(), 0, seed=1)
    with pytest.raises(ActorError) as error:
        receive(transport, 1000)
    transport.close()
    message = str(error.value)
    assert "actor 0 (playing three)" in message and "Traceback" in message
    assert ("broke at its 50th step" if fault == "raise" else "cannot be built") in message


def test_a_killed_actor_is_named(transport):
    transport.start(CountingAgent(), 0, seed=1)
    receive(transport, 4)
    os.kill(transport._processes[1].pid, signal.SIGKILL)
    with pytest.raises(ActorError, match=r"actor 1 \(playing five\).*\n.*killed by SIGKILL"):
        receive(transport, 1000)


def test_close_leaves_nothing(transport):
    me = psutil.Process()
    files, shm = me.num_fds(), set(os.listdir("/dev/shm"))
    other = SharedMemoryTransport(builder=pool(), slots_per_environment=2)
    other.start(CountingAgent(), 0, seed=1)
    receive(other, 4)
    processes = list(other._processes.values())
    pids = [process.pid for process in processes]
    assert set(os.listdir("/dev/shm")) == shm
    other.close()
    other.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    del other, processes
    assert me.num_fds() <= files + 1  # the resource tracker of multiprocessing keeps one pipe


def test_actors_die_with_their_learner(tmp_path):
    code = """
        import sys, time
        from tests.test_transport import *
        if __name__ == "__main__":
            transport = SharedMemoryTransport(builder=pool(), slots_per_environment=2)
            transport.start(CountingAgent(), 0, seed=1)
            receive(transport, 4)
            print(*[process.pid for process in transport._processes.values()], flush=True)
            time.sleep(600)
    """
    script = tmp_path / "learner.py"
    script.write_text(textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as learner:
        assert learner.stdout is not None
        pids = [int(pid) for pid in learner.stdout.readline().split()]
        assert len(pids) == 2
        learner.kill()
    end = time.monotonic() + 30
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < end, "an actor outlived its learner"
        time.sleep(0.1)


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
