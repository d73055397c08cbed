"""An environment in a process of its own: slow, crashing or hanging, it delays and ends no other.

The process knows the suite and nothing of agents (no torch), so that it is small. Observations come
through memory that both share; a byte through a pipe says that a step is wanted or done.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from impala.children import how_it_ended, signals_held
from impala.cores import on_any_core
from impala.memory import SharedMemory
from suites.suite import Spec, Suite, Task, TaskVectorEnv

_DONE, _FAILED = b".", b"!"


class WorkerError(RuntimeError):
    """An environment's process failed; the message is its own traceback, or how it ended."""


class WorkerEnv(TaskVectorEnv):
    """`suite.make(task, num_envs, seeds, split)` in a process that this starts.

    The environment is built and reset at once. `connection` is readable when the answer to the last
    request is there, so that `reset` or `recv` will not wait.
    """

    def __init__(
        self,
        suite: Suite,
        task: Task,
        num_envs: int,
        seeds: Sequence[int],
        split: str = "train",
        *,
        niceness: int = 0,
    ) -> None:
        spec = suite.spec
        super().__init__(
            num_envs=num_envs,
            seeds=seeds,
            frame_shape=spec.frame_shape,
            num_actions=spec.num_actions,
        )
        record = _record(spec, num_envs)
        memory = SharedMemory(record.itemsize)
        self._shared = memory.array().view(record)[0]
        self.connection, theirs = Pipe()
        code = (
            "import sys; sys.path[:] = sys.argv[4:]; from impala import children;"
            " children.die_with_parent(); from impala.worker import work;"  # which takes a while
            " work(*map(int, sys.argv[1:4]))"
        )
        numbers = (theirs.fileno(), memory.descriptor, niceness)
        with signals_held(), on_any_core():
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *map(str, numbers), *sys.path],
                pass_fds=numbers[:2],
                stdin=subprocess.DEVNULL,
            )
        theirs.close()
        memory.close()
        self._send_bytes(pickle.dumps((suite, task, num_envs, list(map(int, seeds)), split)))
        self._resetting = True

    def close(self, **kwargs: Any) -> None:
        self.connection.close()
        self._process.kill()  # it has nothing to save
        self._process.wait()

    def _reset(self, seeds: np.ndarray | None) -> tuple[np.ndarray, dict[str, Any]]:
        if not self._resetting:
            self._send_bytes(b"r" + (b"" if seeds is None else seeds.tobytes()))
        self._wait()
        self._resetting = False
        return self._shared["frames"].copy(), self._info()

    def _send(self, actions: np.ndarray) -> None:
        self._shared["actions"][:] = actions
        self._send_bytes(b"s")

    def _recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        self._wait()
        shared = self._shared
        info = self._info()
        if shared["has_final"]:
            info["final_obs"] = shared["final_frames"].copy()
        return (
            shared["frames"], shared["rewards"], shared["terminated"], shared["truncated"], info
        )  # fmt: skip

    def _info(self) -> dict[str, Any]:
        return {"lives": self._shared["lives"].copy()} if self._shared["has_lives"] else {}

    def _send_bytes(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            self._wait()  # which finds out why

    def _wait(self) -> None:
        try:
            answer = self.connection.recv_bytes()
        except (EOFError, OSError):
            raise WorkerError(how_it_ended(self._process.wait())) from None
        if answer[:1] == _FAILED:
            raise WorkerError(answer[1:].decode())


def _record(spec: Spec, num_envs: int) -> np.dtype:
    """What parent and child share, as one structured value."""
    frames = (num_envs, *spec.frame_shape)
    return np.dtype(
        [
            ("actions", np.int64, (num_envs,)),
            ("rewards", np.float64, (num_envs,)),
            ("lives", np.int32, (num_envs,)),
            ("terminated", np.bool_, (num_envs,)),
            ("truncated", np.bool_, (num_envs,)),
            ("has_lives", np.bool_),
            ("has_final", np.bool_),
            ("frames", np.uint8, frames),
            ("final_frames", np.uint8, frames),
        ]
    )


def work(connection_descriptor: int, memory_descriptor: int, niceness: int) -> None:
    """The life of the process."""
    os.nice(niceness)
    connection = Connection(connection_descriptor)
    try:
        try:
            _serve(connection, memory_descriptor)
        except Exception:
            connection.send_bytes(_FAILED + traceback.format_exc().encode())
            sys.exit(1)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(0)  # nobody is there any more


def _serve(connection: Connection, memory_descriptor: int) -> None:
    suite, task, num_envs, seeds, split = pickle.loads(connection.recv_bytes())
    record = _record(suite.spec, num_envs)
    memory = SharedMemory(record.itemsize, memory_descriptor)
    shared = memory.array().view(record)[0]
    memory.close()
    environment: TaskVectorEnv = suite.make(task, num_envs, seeds, split)

    def show(frames: np.ndarray, info: dict[str, Any]) -> None:
        shared["frames"][:] = frames
        shared["has_lives"] = "lives" in info
        if "lives" in info:
            shared["lives"][:] = info["lives"]

    show(*environment.reset())
    connection.send_bytes(_DONE)
    while True:
        request = _next(connection)
        if request is None:
            return
        if request[:1] == b"r":
            seeds = np.frombuffer(request[1:], np.int64) if len(request) > 1 else None
            show(*environment.reset(seed=seeds))
        else:
            frames, rewards, terminated, truncated, info = environment.step(shared["actions"])
            show(frames, info)
            shared["rewards"][:] = rewards
            shared["terminated"][:] = terminated
            shared["truncated"][:] = truncated
            shared["has_final"] = "final_obs" in info
            if "final_obs" in info:
                ended = np.flatnonzero(terminated | truncated)
                for index in ended:
                    shared["final_frames"][index] = info["final_obs"][index]
        connection.send_bytes(_DONE)


def _next(connection: Connection) -> bytes | None:
    """The next request; None when nobody is there to make any."""
    try:
        return connection.recv_bytes()
    except (EOFError, ConnectionResetError):
        return None
