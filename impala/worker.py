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
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from impala.children import how_it_ended, signals_held
from impala.cores import on_any_core
from impala.memory import SharedMemory
from suites.suite import Spec, Suite, Task, TaskVectorEnv

LAST_BYTES = 2000  # of what a process printed that ended without a word
_DONE, _FAILED = b".", b"!"


class WorkerError(RuntimeError):
    """An environment's process failed; the message is its own traceback, or how it ended."""


class WorkerEnv(TaskVectorEnv):
    """`suite.make(task, num_envs, seeds, split)` in a process that this starts.

    The environment is built and reset at once. `connection` is readable when the answer to the last
    request is there, so that `reset` or `recv` will not wait.

    log_dir: where what the process prints goes, into a file named like the task and its first seed;
        None: where this one's goes. If it ends without a word, the file's last lines are its cause.
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
        log_dir: Path | None = None,
    ) -> None:
        spec = suite.spec
        super().__init__(num_envs=num_envs, seeds=seeds, spec=spec)
        memory = SharedMemory(_record(spec, num_envs).itemsize)
        self._extras = tuple(_extras(spec))
        self._shared = _views(memory, spec, num_envs)
        self.connection, theirs = Pipe()
        code = (
            "import sys; sys.path[:] = sys.argv[4:]; from impala import children;"
            " children.die_with_parent(); from impala.worker import work;"  # which takes a while
            " work(*map(int, sys.argv[1:4]))"
        )
        numbers = (theirs.fileno(), memory.descriptor, niceness)
        self._log: Path | None = None
        with ExitStack() as stack:
            output = None
            if log_dir is not None:
                log_dir.mkdir(parents=True, exist_ok=True)
                self._log = log_dir / f"{task.name}_{seeds[0]}.log"
                output = stack.enter_context(self._log.open("ab"))
            stack.enter_context(signals_held())
            stack.enter_context(on_any_core())
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", code, *map(str, numbers), *sys.path],
                pass_fds=numbers[:2],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
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
        return self._shared["observations"].copy(), self._info()

    def _send(self, actions: np.ndarray) -> None:
        self._shared["actions"][:] = actions
        self._send_bytes(b"s")

    def _recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        self._wait()
        shared = self._shared
        return (
            shared["observations"], shared["rewards"], shared["terminated"], shared["truncated"],
            self._info(),
        )  # fmt: skip

    def _info(self) -> dict[str, Any]:
        shared = self._shared
        present = zip(self._extras, shared["present"].tolist(), strict=True)
        return {name: shared[name].copy() for name, there in present if there}

    def _send_bytes(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            self._wait()  # which finds out why

    def _wait(self) -> None:
        try:
            answer = self.connection.recv_bytes()
        except (EOFError, OSError):
            raise WorkerError(how_it_ended(self._process.wait()) + self._last_words()) from None
        if answer[:1] == _FAILED:
            raise WorkerError(answer[1:].decode())

    def _last_words(self) -> str:
        if self._log is None or not self._log.exists():
            return ""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - LAST_BYTES))
            return f"; the end of {self._log}:\n{file.read().decode(errors='replace').rstrip()}"


def _extras(spec: Spec) -> dict[str, tuple[type, tuple[int, ...]]]:
    """What `info` may have besides: type and shape of it for each environment."""
    extras: dict[str, tuple[type, tuple[int, ...]]] = {
        "final_obs": (np.uint8, spec.frame_shape),
        "lives": (np.int32, ()),
        "frames": (np.int64, ()),
        "level_cache": (np.int32, (3,)),
    }
    if spec.instruction_length:
        ids = np.int32, (spec.instruction_length,)
        extras |= {"instruction": ids, "final_instruction": ids}
    return extras


def _record(spec: Spec, num_envs: int) -> np.dtype:
    """What parent and child share, as one structured value."""
    fields: list[tuple[str, type, tuple[int, ...]]] = [
        ("actions", np.int64, ()),
        ("rewards", np.float64, ()),
        ("terminated", np.bool_, ()),
        ("truncated", np.bool_, ()),
        ("observations", np.uint8, spec.frame_shape),
    ]
    extras = _extras(spec)
    fields += [(name, kind, shape) for name, (kind, shape) in extras.items()]
    record = [(name, kind, (num_envs, *shape)) for name, kind, shape in fields]
    return np.dtype([*record, ("present", np.bool_, (len(extras),))])


def _views(memory: SharedMemory, spec: Spec, num_envs: int) -> dict[str, np.ndarray]:
    """The arrays of the record, by name."""
    record = _record(spec, num_envs)
    value = memory.array().view(record)[0]
    return {name: value[name] for name in record.names or ()}


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
    memory = SharedMemory(_record(suite.spec, num_envs).itemsize, memory_descriptor)
    shared = _views(memory, suite.spec, num_envs)
    memory.close()
    extras = tuple(_extras(suite.spec))
    environment: TaskVectorEnv = suite.make(task, num_envs, seeds, split)

    def show(frames: np.ndarray, info: dict[str, Any], ended: Sequence[int] = ()) -> None:
        shared["observations"][:] = frames
        for i, name in enumerate(extras):
            shared["present"][i] = name in info
            if name not in info:
                continue
            if name.startswith("final_"):  # its other rows mean nothing, and may be of any type
                for row in ended:
                    shared[name][row] = info[name][row]
            else:
                shared[name][:] = info[name]

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
            show(frames, info, np.flatnonzero(terminated | truncated).tolist())
            shared["rewards"][:] = rewards
            shared["terminated"][:] = terminated
            shared["truncated"][:] = truncated
        connection.send_bytes(_DONE)


def _next(connection: Connection) -> bytes | None:
    """The next request; None when nobody is there to make any."""
    try:
        return connection.recv_bytes()
    except (EOFError, ConnectionResetError):
        return None
