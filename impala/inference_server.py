"""One process answers all actors: batches of whoever is waiting, on an accelerator.

Actors write observations into the slots of the storage as ever, and ask about rows of it through a
pipe; answers are written into the storage, and a few bytes say that they are there. Core states
stay with the server.
"""

from __future__ import annotations

import copy
import pickle
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from impala.agents.agent import Agent
from impala.inference import Question, WeightsSource, gumbel_, parts, write_answer
from impala.patience import Patience
from impala.remote_inference import ASK, VALUE
from impala.trajectory import Step, Trajectory, leaves, map_structure

_SIGN_S = 1.0  # between signs of life, at most, unless it hangs
_JOIN = struct.Struct("<qq")  # an actor's number, and the first of its environments among all


@dataclass(frozen=True)
class Batching:
    """When the server answers.

    min_batch: rows that it waits for, but not longer than `timeout_s` for the first of them.
    max_batch: rows that it answers at once; more only if one question has more.
    device: cpu or cuda.
    """

    min_batch: int = 16
    max_batch: int = 1024
    timeout_s: float = 0.001
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 1 <= self.min_batch <= self.max_batch:
            raise ValueError(
                f"inference.min_batch={self.min_batch}, inference.max_batch={self.max_batch}:"
                " expected 1 <= min_batch <= max_batch"
            )
        if not self.timeout_s >= 0:
            raise ValueError(f"inference.timeout_s={self.timeout_s}: expected 0 or more")


class Answers:
    """What the server says of itself, in memory that it shares with the learner."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        numbers = memory[: self.size()].view(np.float64)
        self._counts, self._alive_s = numbers[:2], numbers[2:]

    @staticmethod
    def size() -> int:
        """Bytes needed."""
        return 3 * 8

    @property
    def counts(self) -> tuple[int, int]:
        """Batches that were answered so far, and rows in them."""
        return int(self._counts[0]), int(self._counts[1])

    def answered(self, rows: int) -> None:
        self._counts += 1, rows

    def alive(self, until_s: float = 0.0) -> None:
        """until_s: it needs to give no other sign before so many seconds from now."""
        self._alive_s[0] = time.monotonic() + until_s

    def hangs(self, patience: Patience) -> bool:
        """Whether it has given no sign of life for too long."""
        return bool(self._alive_s[0] < patience.horizon_s())


def join(control: Connection, pid: int, actor: int, first: int, theirs: Connection) -> None:
    """Gives the server in process `pid` an actor's pipe. `first`: of its environments, among all.

    It takes the place of an earlier one of that actor.
    """
    control.send_bytes(_JOIN.pack(actor, first))
    reduction.send_handle(control, theirs.fileno(), pid)


@dataclass
class _Waiting:
    """A question of an actor, with environments numbered among all."""

    connection: Connection  # of the actor
    question: Question
    since_s: float


@dataclass(frozen=True)
class _Flight:
    """A batch on its way through the accelerator, and where its answers arrive."""

    waiting: list[_Waiting]
    version: int
    arrived: torch.cuda.Event | None
    outputs: Any
    core_state: tuple[Tensor, ...]


class Server:
    """Answers questions about rows of `storage`.

    agent: on the CPU; a copy of it on `device` is what answers.
    weights: read before a batch, if there are newer ones. So the version written at row 0 of an
        unroll is the oldest that acts in it.
    num_environments: of all actors.
    most: rows that a question can have.
    answers: what it says of itself.
    """

    def __init__(
        self,
        agent: Agent,
        weights: WeightsSource,
        storage: Trajectory,
        *,
        num_environments: int,
        most: int,
        num_actions: int,
        batching: Batching,
        device: torch.device,
        seed: int,
        answers: Answers,
    ) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._weights = weights
        self._version = -1
        self._storage = storage
        self._batching = batching
        self._largest = min(max(batching.max_batch, most), num_environments)
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._latest = agent.eval()  # where weights are read into
        self._agent = agent
        self._copied: torch.cuda.Event | None = None  # the newest weights to `device`
        if self._cuda:
            for value in (*agent.parameters(), *agent.buffers()):
                value.data = value.data.pin_memory()
            self._agent = copy.deepcopy(agent).to(device)
        self._core_state = map_structure(
            lambda leaf: leaf.clone().to(device), agent.initial_state(num_environments)
        )
        self._noise = torch.zeros(self._largest, num_actions, device=device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._actors: dict[int, Connection] = {}
        self._first: dict[Connection, int] = {}  # of an actor's environments, among all
        self._waiting: deque[_Waiting] = deque()
        self._in_flight: deque[_Flight] = deque()
        # Two sets of buffers: one batch is gathered while another is computed.
        self._buffers = deque(_Buffers(storage, self._largest, self._cuda) for _ in range(2))
        self._answers = answers

    def serve(self, control: Connection) -> None:
        """Until the other end of `control` is closed."""
        with torch.inference_mode():
            while self._hear(control):
                while self._due():
                    self._launch()
                while self._in_flight and (self._in_flight[0].arrived is None or self._landed()):
                    self._deliver(self._in_flight.popleft())

    # Questions

    def _hear(self, control: Connection) -> bool:
        """Takes what came in, waiting no longer than there is nothing else to do."""
        self._answers.alive()
        for ready in wait([control, *self._first], self._patience_s()):
            assert isinstance(ready, Connection)
            if ready is control:
                try:
                    self._join(control)
                except EOFError:
                    return False
            elif ready in self._first:  # it was not replaced just now
                try:
                    self._take(ready, ready.recv_bytes())
                except (EOFError, OSError):
                    self._leave(ready)
        return True

    def _patience_s(self) -> float:
        if self._in_flight:
            return 0.0 if self._waiting else 0.0001
        if not self._waiting:
            return _SIGN_S
        patience_s = self._waiting[0].since_s + self._batching.timeout_s - time.monotonic()
        return min(max(0.0, patience_s), _SIGN_S)

    def _join(self, control: Connection) -> None:
        actor, first = _JOIN.unpack(control.recv_bytes())
        connection = Connection(reduction.recv_handle(control))
        if actor in self._actors:
            self._leave(self._actors[actor])
        self._actors[actor] = connection
        self._first[connection] = first

    def _leave(self, connection: Connection) -> None:
        """An actor has ended: whatever it asked is not answered any more."""
        if self._first.pop(connection, None) is not None:
            self._waiting = deque(w for w in self._waiting if w.connection is not connection)
            connection.close()

    def _take(self, connection: Connection, message: bytes) -> None:
        first = self._first[connection]
        if message[:1] == VALUE:
            step, environments = pickle.loads(message[1:])
            connection.send_bytes(VALUE + self._value(step, first + environments))
            return
        numbers, now = np.frombuffer(message, np.int64, offset=1), time.monotonic()
        while len(numbers):
            group, start, stop, t = numbers[:4].tolist()
            end = 4 + stop - start
            question = Question(group, first + numbers[4:end], slice(start, stop), t)
            self._waiting.append(_Waiting(connection, question, now))
            numbers = numbers[end:]

    def _value(self, step: Any, environments: NDArray[np.int64]) -> bytes:
        on_device = map_structure(lambda leaf: torch.from_numpy(leaf).to(self._device), step)
        rows = torch.from_numpy(environments).to(self._device)
        with self._on_stream():
            state = map_structure(lambda leaf: leaf[rows], self._core_state)
            value = self._agent.value(on_device, state)
            return value.float().cpu().numpy().tobytes()

    # Batches

    def _due(self) -> bool:
        if not self._waiting or len(self._in_flight) == len(self._buffers):
            return False
        rows = sum(len(w.question.environments) for w in self._waiting)
        late = time.monotonic() >= self._waiting[0].since_s + self._batching.timeout_s
        return rows >= self._batching.min_batch or late

    def _launch(self) -> None:
        """Starts a batch of those who have waited longest."""
        taken, used = [], 0
        while self._waiting:
            size = len(self._waiting[0].question.environments)
            if taken and used + size > self._largest:
                break
            taken.append(self._waiting.popleft())
            used += size
        self._refresh()
        self._buffers.rotate(1)
        buffers = self._buffers[0]
        questions = [w.question for w in taken]
        environments = np.concatenate([question.environments for question in questions])
        with self._on_stream():
            step = buffers.gathered(self._storage.steps, questions, used)
            step = map_structure(lambda leaf: leaf.to(self._device, non_blocking=True), step)
            rows = buffers.indices(environments).to(self._device, non_blocking=True)
            before = tuple(leaf[rows] for leaf in leaves(self._core_state))
            noise = self._noise[:used]
            gumbel_(noise, self._generator)
            outputs, after = self._agent.act(step, before, noise)
            for leaf, value in zip(leaves(self._core_state), leaves(after), strict=True):
                leaf[rows] = value
            outputs, before = buffers.fetched(outputs, before, used)
            arrived = None
            if self._stream is not None:
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
        self._in_flight.append(_Flight(taken, self._version, arrived, outputs, before))
        self._answers.answered(used)

    def _landed(self) -> bool:
        """Whether the oldest batch is there; waits for it if there is nothing else to do."""
        arrived = self._in_flight[0].arrived
        assert arrived is not None
        if len(self._in_flight) == len(self._buffers):
            arrived.synchronize()
        return arrived.query()

    def _deliver(self, flight: _Flight) -> None:
        answered: dict[Connection, list[int]] = {}
        questions = [waiting.question for waiting in flight.waiting]
        for waiting, part in zip(flight.waiting, parts(questions), strict=True):
            if waiting.connection not in self._first:
                continue  # the actor has ended
            answered.setdefault(waiting.connection, []).append(waiting.question.group)
            write_answer(
                self._storage, waiting.question, flight.version, flight.outputs,
                flight.core_state, part,
            )  # fmt: skip
        for connection, groups in answered.items():
            with suppress(BrokenPipeError, ConnectionResetError):  # the next `wait` shows its end
                connection.send_bytes(ASK + np.array(groups, np.int64).tobytes())

    def _refresh(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # else what is being copied could change
        version = self._weights.load(self._latest, self._version)
        if version == self._version:
            return
        self._version = version
        if self._cuda:
            with self._on_stream():
                news = self._latest.state_dict().values()
                for value, new in zip(self._agent.state_dict().values(), news, strict=True):
                    value.copy_(new, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)

    def _on_stream(self) -> Any:
        return torch.cuda.stream(self._stream)  # of None: no stream, as on a CPU


class _Buffers:
    """Where the rows of a batch are gathered and its answers arrive, page-locked for a GPU."""

    def __init__(self, storage: Trajectory, rows: int, pin: bool) -> None:
        def of_rows(leaf: Tensor) -> Tensor:
            return torch.empty(rows, *leaf.shape[2:], dtype=leaf.dtype, pin_memory=pin)

        def once(leaf: Tensor) -> Tensor:
            return torch.empty(rows, *leaf.shape[1:], dtype=leaf.dtype, pin_memory=pin)

        self._pin = pin
        self._steps = map_structure(of_rows, storage.steps)
        self._outputs = map_structure(of_rows, storage.outputs)
        self._core_state = map_structure(once, storage.core_state)
        self._indices = torch.empty(rows, dtype=torch.int64, pin_memory=pin)

    def gathered(self, steps: Step, questions: Sequence[Question], rows: int) -> Step:
        for gathered, stored in zip(leaves(self._steps), leaves(steps), strict=True):
            for question, part in zip(questions, parts(questions), strict=True):
                gathered[part] = stored[question.t, question.slots]
        return map_structure(lambda leaf: leaf[:rows], self._steps)

    def indices(self, environments: NDArray[np.int64]) -> Tensor:
        indices = self._indices[: len(environments)]
        indices.copy_(torch.from_numpy(environments))
        return indices

    def fetched(self, outputs: Any, core_state: tuple[Tensor, ...], rows: int) -> tuple[Any, Any]:
        """Both on the CPU, once the stream gets there."""
        if not self._pin:  # they are
            return outputs, core_state

        def fetch(buffer: Tensor, value: Tensor) -> Tensor:
            return buffer[:rows].copy_(value, non_blocking=True)

        return (
            map_structure(fetch, self._outputs, outputs),
            map_structure(fetch, self._core_state, core_state),
        )
