"""Actors in processes of one machine: slots preallocated in shared memory, indices through pipes.

One pipe for each actor, no locks and no queues shared between actors, so that a process killed at
any moment can block no other. An actor that loses its learner reads the end of its pipe and ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import numpy as np
import torch
from numpy.typing import NDArray

from impala.actor import GAME
from impala.agents.agent import Agent
from impala.children import die_with_parent, signals_held
from impala.transport.memory import SharedMemory, carve, carved_size
from impala.transport.restarts import NO_TASK, Budget, Fault, Heartbeats, Restarts
from impala.transport.transport import ActorBuilder, ActorError, Delivery, Slots
from impala.weights import Weights

log = logging.getLogger(__name__)

_UNROLL, _FAILURE = 0, 1
_HEADER = struct.Struct(
    "<Bqqddd"
)  # kind, first slot, one past the last, seconds of impala.actor.Unroll
_SET = struct.Struct("<i")
_SPARE_FILES = 64  # open files that everything else may need: libraries, logs, checkpoints


class SharedMemoryTransport:
    """See `transport.Transport`.

    niceness: added to that of the actors. The learner then runs whenever it has a batch and the
        actors fill what it leaves, so that every core is busy and unrolls wait little.
    restarts: what becomes of actors that fail. One that is started again gets all slots of the
        first that the learner does not have; what those held is lost, and nothing else.
    """

    def __init__(
        self,
        *,
        builder: ActorBuilder,
        slots_per_environment: int = 2,
        niceness: int = 5,
        restarts: Restarts | None = None,
    ) -> None:
        self._builder = builder
        self._niceness = niceness
        self._restarts = restarts or Restarts()
        self._budget = Budget(self._restarts)
        num_actors = len(builder.tasks)
        self._slots = Slots([len(tasks) for tasks in builder.tasks], slots_per_environment)
        self.total_slots = self._slots.total
        _check_open_files(num_actors)
        self._memory = SharedMemory(carved_size(builder.layout, self.total_slots))
        self.storage = carve(builder.layout, self.total_slots, self._memory.tensor())
        self._beats_memory = SharedMemory(Heartbeats.size(num_actors))
        self._beats = Heartbeats(num_actors, self._beats_memory.tensor())
        self._weights_memory = SharedMemory(Weights.size(builder.agent))
        self._weights = Weights(builder.agent, self._weights_memory.tensor())
        self._processes: dict[int, BaseProcess] = {}
        self._connections: dict[int, Connection] = {}
        self._due: dict[int, float] = {}  # when an actor that failed is started again
        self._lives = [0] * num_actors
        self._without: list[set[int]] = [set() for _ in range(num_actors)]  # tasks given up
        self._hanging: set[int] = set()  # killed for it, and not yet buried
        self._faults: list[Fault] = []

    def start(self, agent: Agent, version: int, seed: int) -> None:
        self._seed = seed
        self.publish(agent, version)
        for actor in range(len(self._builder.tasks)):
            self._spawn(actor)

    def receive(self, timeout_s: float) -> list[Delivery]:
        self._start_those_due()
        self._end_those_hanging()
        deliveries = []
        actors = {connection: actor for actor, connection in self._connections.items()}
        if not actors:
            time.sleep(timeout_s)
        for connection in wait(list(actors), timeout_s):
            actor = actors[connection]  # type: ignore[index]
            try:
                message = connection.recv_bytes()  # type: ignore[union-attr]
            except (EOFError, OSError):  # its end, also in the middle of a message
                self._failed(actor, self._cause_of_death(actor))
                continue
            kind, start, stop, *seconds = _HEADER.unpack_from(message)
            if kind == _FAILURE:
                self._failed(actor, message[_HEADER.size :].decode())
                continue
            slots = np.arange(start, stop)
            self._slots.taken(slots)
            games = np.frombuffer(message, GAME, offset=_HEADER.size)
            deliveries.append(Delivery(actor, slots, games, *seconds))
        return deliveries

    def faults(self) -> list[Fault]:
        faults, self._faults = self._faults, []
        return faults

    def release(self, slots: NDArray[np.int64]) -> None:
        for actor, index in self._slots.released(slots):
            if actor in self._connections:  # else it gets all its free sets when it starts again
                self._offer(actor, index)

    def publish(self, agent: Agent, version: int) -> None:
        self._weights.publish(agent, version)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        for process in self._processes.values():
            process.kill()  # an actor has nothing to save, and may be deep in an emulator
        for process in self._processes.values():
            process.join()
            process.close()
        self._connections.clear()
        self._processes.clear()
        self._due.clear()
        for memory in (self._memory, self._beats_memory, self._weights_memory):
            memory.close()

    # Actors that come and go

    def _spawn(self, actor: int) -> None:
        size = sum(task not in self._without[actor] for task in self._builder.tasks[actor])
        sets = [slice(s.start, s.start + size) for s in self._slots.sets[actor]]
        self._beats.clear(actor)
        self._hanging.discard(actor)
        context = multiprocessing.get_context("spawn")  # private: the program's own is untouched
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(
            target=_act,
            name=f"actor-{actor}",
            args=(actor, self._builder, theirs, sets),
            kwargs={
                "memory": self._memory,
                "weights_memory": self._weights_memory,
                "beats_memory": self._beats_memory,
                "total_slots": self.total_slots,
                "seed": self._seed,
                "without": frozenset(self._without[actor]),
                "life": self._lives[actor],
                "niceness": self._niceness,
            },
            daemon=True,
        )
        with signals_held():
            process.start()
        theirs.close()
        self._processes[actor] = process
        self._connections[actor] = ours
        for index in self._slots.free(actor):
            self._offer(actor, index)

    def _offer(self, actor: int, index: int) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            # If it died: `receive` finds what it left in its pipe and says why.
            self._connections[actor].send_bytes(_SET.pack(index))

    def _start_those_due(self) -> None:
        now = time.monotonic()
        for actor in [actor for actor, due in self._due.items() if due <= now]:
            del self._due[actor]
            self._spawn(actor)

    def _end_those_hanging(self) -> None:
        timeout_s = self._restarts.step_timeout_s
        if timeout_s is None:
            return
        for actor in self._beats.hanging(timeout_s):
            if actor in self._processes and actor not in self._hanging:
                self._hanging.add(actor)
                self._processes[actor].kill()  # `receive` finds the end of its pipe

    def _failed(self, actor: int, cause: str) -> None:
        """Ends what is left of an actor, and starts it again or gives it up."""
        self._connections.pop(actor).close()
        process = self._processes.pop(actor)
        process.kill()
        process.join()
        process.close()
        task = self._beats.task(actor)
        played = [t for t in self._builder.tasks[actor] if t not in self._without[actor]]
        where = f"actor {actor} (playing {self._names(played)}) failed"
        if task != NO_TASK:
            where += f" in {self._name(task)}"
        aborted = played if self._beats.playing(actor) else []
        self._beats.clear(actor)
        self._lives[actor] += 1
        wait_s = self._budget.spend(task)
        lost = NO_TASK
        if wait_s is None:
            if self._restarts.then == "stop" or task == NO_TASK:
                often = self._restarts.per_task
                where += f", more often than restarts.per_task={often} times" if often else ""
                raise ActorError(f"{where}:\n{cause}")
            lost, wait_s = task, 0.0
            self._without[actor].add(task)
            played = [t for t in played if t != task]
        if played:
            self._due[actor] = time.monotonic() + wait_s
            then = f"it starts again in {wait_s:g} s (failure {self._budget.text(task)})"
        else:
            then = "it has no other task and stays away"
        if lost != NO_TASK:
            then = f"it goes on without {self._name(lost)}" if played else then
        log.warning("%s; %s:\n%s", where, then, cause)
        self._faults.append(Fault(actor, task, aborted, bool(played), lost))
        if not (self._connections or self._due):
            raise ActorError(f"{where}, and no actor has a task left:\n{cause}")

    def _name(self, task: int) -> str:
        return self._builder.task_names[task]

    def _names(self, tasks: Sequence[int]) -> str:
        return ", ".join(self._name(task) for task in dict.fromkeys(tasks))

    def _cause_of_death(self, actor: int) -> str:
        if actor in self._hanging:
            return (
                f"it got no answer for {self._restarts.step_timeout_s:g} s"
                " (restarts.step_timeout_s) and was killed"
            )
        process = self._processes[actor]
        process.join(5.0)
        code = process.exitcode
        if code is not None and code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code} and left no traceback"


def _check_open_files(num_actors: int) -> None:
    needed = 2 * num_actors + _SPARE_FILES
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ValueError(
            f"{num_actors} actors need about {needed} open files and the limit is {limit}:"
            f" raise it (`ulimit -n {needed}`) or set a smaller num_actors"
        )


def _act(
    actor: int,
    builder: ActorBuilder,
    connection: Connection,
    sets: list[slice],
    *,
    memory: SharedMemory,
    weights_memory: SharedMemory,
    beats_memory: SharedMemory,
    total_slots: int,
    seed: int,
    without: Collection[int],
    life: int,
    niceness: int,
) -> None:
    """The life of an actor's process."""
    die_with_parent()
    os.nice(niceness)
    torch.set_num_threads(1)
    try:
        storage = carve(builder.layout, total_slots, memory.tensor())
        weights = Weights(builder.agent, weights_memory.tensor())
        beats = Heartbeats(len(builder.tasks), beats_memory.tensor())
        for shared in (memory, weights_memory, beats_memory):
            shared.close()

        def acquire() -> slice:
            beats.plays(actor)
            with _learner_needed():
                (index,) = _SET.unpack(connection.recv_bytes())
            return sets[index]

        made = builder.build(
            actor, storage, weights, seed,
            watch=lambda task: beats.waits_for(actor, task), without=without, life=life,
        )  # fmt: skip
        for unroll in made.unrolls(acquire):
            header = _HEADER.pack(_UNROLL, unroll.slots.start, unroll.slots.stop, *unroll.seconds)
            with _learner_needed():
                connection.send_bytes(header + unroll.games.tobytes())
    except Exception:
        connection.send_bytes(
            _HEADER.pack(_FAILURE, 0, 0, 0, 0, 0) + traceback.format_exc().encode()
        )
        sys.exit(1)


@contextmanager
def _learner_needed() -> Iterator[None]:
    """Ends the process if the other end of the pipe is gone."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(0)
