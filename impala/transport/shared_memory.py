"""Actors in processes of one machine: slots preallocated in shared memory, indices through pipes.

One pipe for each actor, no locks and no queues shared between actors, so that a process killed at
any moment can block no other. An actor that loses its learner reads the end of its pipe and ends.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import struct
import sys
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import numpy as np
import torch
from numpy.typing import NDArray

from impala.actor import GAME
from impala.agents.agent import Agent
from impala.children import die_with, signals_held
from impala.transport.memory import SharedMemory, carve, carved_size
from impala.transport.transport import ActorBuilder, ActorError, Delivery, Slots
from impala.weights import Weights

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
    """

    def __init__(
        self, *, builder: ActorBuilder, slots_per_environment: int = 2, niceness: int = 5
    ) -> None:
        self._builder = builder
        self._niceness = niceness
        self._slots = Slots(builder.actor_sizes, slots_per_environment)
        self.total_slots = self._slots.total
        _check_open_files(len(builder.actor_sizes))
        self._memory = SharedMemory(carved_size(builder.layout, self.total_slots))
        self.storage = carve(builder.layout, self.total_slots, self._memory.tensor())
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def start(self, agent: Agent, version: int, seed: int) -> None:
        weights_memory = SharedMemory(Weights.size(agent))
        self._weights = Weights(agent, weights_memory.tensor())
        self.publish(agent, version)
        context = multiprocessing.get_context("spawn")  # private: the program's own is untouched
        for actor, sets in enumerate(self._slots.sets):
            ours, theirs = context.Pipe(duplex=True)
            process = context.Process(
                target=_act,
                name=f"actor-{actor}",
                args=(actor, self._builder, self._memory, weights_memory, theirs, sets),
                kwargs={
                    "total_slots": self.total_slots,
                    "seed": seed,
                    "niceness": self._niceness,
                    "learner": os.getpid(),
                },
                daemon=True,
            )
            with signals_held():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
            for index in range(len(sets)):
                ours.send_bytes(_SET.pack(index))
        weights_memory.close()
        self._memory.close()

    def receive(self, timeout_s: float) -> list[Delivery]:
        deliveries = []
        for connection in wait(self._connections, timeout_s):
            actor = self._connections.index(connection)  # type: ignore[arg-type]
            try:
                message = connection.recv_bytes()  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                raise self._error(actor, self._cause_of_death(actor)) from None
            kind, start, stop, *seconds = _HEADER.unpack_from(message)
            if kind == _FAILURE:
                raise self._error(actor, message[_HEADER.size :].decode())
            slots = np.arange(start, stop)
            self._slots.taken(slots)
            games = np.frombuffer(message, GAME, offset=_HEADER.size)
            deliveries.append(Delivery(actor, slots, games, *seconds))
        return deliveries

    def release(self, slots: NDArray[np.int64]) -> None:
        for actor, index in self._slots.released(slots):
            try:
                self._connections[actor].send_bytes(_SET.pack(index))
            except (BrokenPipeError, ConnectionResetError):
                continue  # it died: `receive` finds what it left in its pipe and says why

    def publish(self, agent: Agent, version: int) -> None:
        self._weights.publish(agent, version)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()  # an actor has nothing to save, and may be deep in an emulator
        for process in self._processes:
            process.join()
            process.close()
        self._connections.clear()
        self._processes.clear()
        self._memory.close()

    def _error(self, actor: int, cause: str) -> ActorError:
        tasks = self._builder.actor_tasks[actor]
        return ActorError(f"actor {actor} (playing {tasks}) failed:\n{cause}")

    def _cause_of_death(self, actor: int) -> str:
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
    memory: SharedMemory,
    weights_memory: SharedMemory,
    connection: Connection,
    sets: list[slice],
    *,
    total_slots: int,
    seed: int,
    niceness: int,
    learner: int,
) -> None:
    """The life of an actor's process."""
    die_with(learner)
    os.nice(niceness)
    torch.set_num_threads(1)
    try:
        storage = carve(builder.layout, total_slots, memory.tensor())
        weights = Weights(builder.agent, weights_memory.tensor())
        memory.close()
        weights_memory.close()

        def acquire() -> slice:
            (index,) = _SET.unpack(connection.recv_bytes())
            return sets[index]

        for unroll in builder.build(actor, storage, weights, seed).unrolls(acquire):
            connection.send_bytes(
                _HEADER.pack(_UNROLL, unroll.slots.start, unroll.slots.stop, *unroll.seconds)
                + unroll.games.tobytes()
            )
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(0)  # the learner is gone
    except Exception:
        connection.send_bytes(
            _HEADER.pack(_FAILURE, 0, 0, 0, 0, 0) + traceback.format_exc().encode()
        )
        sys.exit(1)
