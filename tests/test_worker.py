"""Environments that have a process of their own."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from impala.cores import stay_on
from impala.worker import WorkerEnv, WorkerError
from suites.catch import Catch
from tests.counting_suite import CountingSuite


@pytest.fixture
def worker():
    made = []

    def make(suite, task=0, num_envs=2):
        made.append(WorkerEnv(suite, suite.tasks[task], num_envs, range(num_envs)))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


def until_ready(environment):
    end = time.monotonic() + 60
    while not environment.connection.poll(0):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("task", [0, 1])  # one that terminates, and one that is truncated
def test_it_answers_as_the_environment_itself_does(worker, task, more):
    suite = CountingSuite(["three", "five"], lives=more, instructions=more)
    outside, inside = worker(suite, task), suite.make(suite.tasks[task], 2, range(2))
    for step in range(12):
        if step in (0, 7):
            answers = [[*environment.reset()] for environment in (outside, inside)]
        else:
            answers = [[*environment.step(np.ones(2, int))] for environment in (outside, inside)]
        (*found, info), (*expected, expected_info) = answers
        assert all((a == b).all() for a, b in zip(found, expected, strict=True))
        assert info.keys() == expected_info.keys()
        ended = found[2] | found[3] if len(found) == 4 else np.zeros(2, bool)
        for key in info:
            rows = ended if key.startswith("final_") else slice(None)
            np.testing.assert_array_equal(info[key][rows], expected_info[key][rows])


def test_it_is_on_any_core_though_its_actor_stays_on_one(worker):
    cores = os.sched_getaffinity(0)
    try:
        stay_on(0)
        environment = worker(CountingSuite())
        assert os.sched_getaffinity(0) == {min(cores)}
        assert set(psutil.Process(environment._process.pid).cpu_affinity()) == cores
    finally:
        os.sched_setaffinity(0, cores)


def test_seeds_reach_it(worker):
    suite = Catch()
    outside, inside = worker(suite), suite.make(suite.tasks[0], 2, range(2))
    for seed in (None, None, [7, 8], [7, 8]):
        (frames, _), (expected, _) = outside.reset(seed=seed), inside.reset(seed=seed)
        assert (frames == expected).all()


def test_nobody_waits_for_it(worker):
    environment = worker(CountingSuite(["three"], fault="slow"))
    until_ready(environment)
    environment.reset()
    environment.send(np.zeros(2, int))
    assert not environment.connection.poll(0)
    until_ready(environment)
    assert environment.recv()[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raise", "Traceback (?s:.*)this environment broke at its 50th step"),
        ("unbuildable", "Traceback (?s:.*)this environment cannot be built"),
        ("nan", "Traceback (?s:.*)the environment returned rewards \\[nan"),
        ("exit", "its process ended with exit code 3 and left no traceback"),
        ("kill", "its process was killed by SIGKILL"),
        ("pipe", "Traceback (?s:.*)a pipe of this environment broke"),
    ],
)
def test_how_it_failed_is_said(worker, fault, cause):
    environment = worker(CountingSuite(["three"], fault=fault))

    def play():
        environment.reset()
        for _ in range(50):
            environment.step(np.zeros(2, int))

    with pytest.raises(WorkerError, match=cause):
        play()


def test_one_that_does_not_answer_can_be_killed(worker):
    environment = worker(CountingSuite(["three"], fault="slow"))
    environment.reset()
    environment.send(np.zeros(2, int))
    environment._process.kill()
    with pytest.raises(WorkerError, match="SIGKILL"):
        environment.recv()
    with pytest.raises(WorkerError, match="SIGKILL"):
        environment.send(np.zeros(2, int))


def test_closing_leaves_nothing():
    me = psutil.Process()
    files, children = me.num_fds(), len(me.children())
    suite = Catch()
    for _ in range(2):  # the first starts multiprocessing's resource tracker
        environment = WorkerEnv(suite, suite.tasks[0], 2, range(2))
        environment.reset()
        environment.close()
    assert me.num_fds() <= files + 1 and len(me.children()) <= children + 1


def test_it_ends_with_its_parent(tmp_path):
    code = """
        import time
        from impala.worker import WorkerEnv
        from suites.catch import Catch
        suite = Catch()
        environment = WorkerEnv(suite, suite.tasks[0], 1, [0])
        environment.reset()
        print(environment._process.pid, flush=True)
        time.sleep(600)
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE, text=True, env=environment,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()  # it is small
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 30
    while psutil.pid_exists(pid):
        assert time.monotonic() < end
        time.sleep(0.05)
