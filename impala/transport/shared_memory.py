"""Actors in processes of one machine: slots preallocated in shared memory, indices through pipes.

One pipe for each actor, no locks and no queues shared between actors, so that a process killed at
any moment can block no other. An actor that loses its learner reads the end of its pipe and ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import numpy as np
from numpy.typing import NDArray

from impala.agents.agent import Agent
from impala.children import how_it_ended, kill_all, signals_held
from impala.cores import available_cores
from impala.crew import Crew, crew_size, moved_outside, played, seated, without
from impala.messages import (
    NO_TASK,
    Broken,
    Failed,
    Order,
    Reform,
    Reformed,
    Restart,
    Said,
    Slow,
    Unroll,
    packed,
    unpacked,
)
from impala.mix import Balance, environments
from impala.patience import Patience
from impala.transport.actor_process import act
from impala.transport.inference_process import InferenceProcess
from impala.transport.memory import Shared
from impala.transport.restarts import Budget, Fault, Restarts
from impala.transport.transport import ActorBuilder, ActorError, Delivery, Slots

log = logging.getLogger(__name__)

START_S = 60.0  # that a process may take to start, if restarts.step_timeout_s is not longer
_SPARE_FILES = 64  # open files that everything else may need: libraries, logs, checkpoints


class SharedMemoryTransport:
    """See `transport.Transport`.

    niceness: added to that of the actors. The learner then runs whenever it has a batch and the
        actors fill what it leaves, so that every core is busy and unrolls wait little.
    pin: whether each actor stays on one core where every core gets the same number of them. Left to
        the system, actors meet on one core now and then, and another has nothing to do.
    restarts: what becomes of actors that fail. One that is started again gets all slots of the
        first that the learner does not have; what those held is lost, and nothing else.
    """

    def __init__(
        self,
        *,
        builder: ActorBuilder,
        slots_per_environment: int = 2,
        niceness: int = 5,
        pin: bool = True,
        restarts: Restarts | None = None,
    ) -> None:
        self._builder = builder
        self._niceness = niceness
        self._pin = pin and len(builder.crews) % available_cores() == 0
        self._restarts = restarts or Restarts()
        self._budget = Budget(self._restarts)
        self._crews = list(builder.crews)
        num_actors = len(self._crews)
        self._slots = Slots([crew_size(crew) for crew in self._crews], slots_per_environment)
        self.total_slots = self._slots.total
        _check_open_files(num_actors, max(outside for _, outside in map(seated, self._crews)))
        self._shared = Shared(builder, self.total_slots)
        self.storage = self._shared.storage()
        self._beats = self._shared.beats()
        self._weights = self._shared.weights(builder.agent)
        self._balance = Balance(self._shared.ledger(), builder.mix) if builder.mix else None
        self._answers = self._shared.answers()
        self._answers_before = self._answers.counts
        self._server: InferenceProcess | None = None
        self._servers = 0  # started so far
        self._processes: dict[int, BaseProcess] = {}
        self._connections: dict[int, Connection] = {}
        self._due: dict[int, float] = {}  # when an actor that failed is started again,
        self._groups_due: dict[tuple[int, int], float] = {}  # and a group of one
        self._reforming: dict[int, Crew] = {}  # actors that were told to, and have not answered
        self._lives = [0] * num_actors
        step_timeout_s = self._restarts.step_timeout_s
        self._patience = Patience(step_timeout_s)
        self._patience_at_start = Patience(
            step_timeout_s and max(step_timeout_s, START_S),
            f"to start: restarts.step_timeout_s, but {START_S:g} s at least",
        )
        self._hanging: set[int] = set()  # killed for it, and not yet buried
        self._faults: list[Fault] = []
        self._given_up: set[int] = set()  # tasks, by some actor

    def start(self, agent: Agent, version: int, seed: int) -> None:
        self._seed = seed
        self.publish(agent, version)
        self._start_server()
        for actor in range(len(self._crews)):
            self._spawn(actor)

    def receive(self, timeout_s: float) -> list[Delivery]:
        self._start_those_due()
        self._end_those_hanging()
        self._reassign()
        deliveries = []
        actors = {connection: actor for actor, connection in self._connections.items()}
        sources = [*actors, *([self._server.control] if self._server else [])]
        if not sources:
            time.sleep(timeout_s)
        for connection in wait(sources, timeout_s):
            assert isinstance(connection, Connection)
            if connection not in actors:
                assert self._server is not None
                self._server_failed(self._server.cause_of_death())
                break  # every actor was ended with it
            actor = actors[connection]
            try:
                said: Said = unpacked(connection.recv_bytes())
            except (EOFError, OSError):  # its end, also in the middle of a message
                said = Failed(self._cause_of_death(actor))
            if isinstance(said, Unroll):
                slots = np.arange(said.slots.start, said.slots.stop)
                self._slots.taken(slots)
                delivery = Delivery(
                    actor, slots, said.games, *said.seconds, said.level_cache, said.step_times
                )
                deliveries.append(delivery)
            else:
                self._heard(actor, said)
        return deliveries

    def exhausted(self) -> bool:
        changing = self._due or self._groups_due or self._reforming
        return not changing and not any(map(self._slots.free, self._connections))

    def faults(self) -> list[Fault]:
        faults, self._faults = self._faults, []
        return faults

    def metrics(self) -> dict[str, float]:
        counts = self._answers.counts
        batches, rows = np.subtract(counts, self._answers_before)
        self._answers_before = counts
        return {"inference/batch_size": float(rows / batches)} if batches else {}

    def release(self, slots: NDArray[np.int64]) -> None:
        for actor, free in self._slots.released(slots):
            # Else it gets all its free sets when it is started, or has changed its groups.
            if actor in self._connections and actor not in self._reforming:
                self._tell(actor, free)

    def publish(self, agent: Agent, version: int) -> None:
        self._weights.publish(agent, version)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        kill_all(self._processes.values())  # actors have nothing to save, and may be deep in a game
        for process in self._processes.values():
            process.close()
        self._connections.clear()
        self._processes.clear()
        self._due.clear()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._shared.close()

    # Actors that come and go

    def _spawn(self, actor: int) -> None:
        self._beats.clear(actor)
        self._hanging.discard(actor)
        context = multiprocessing.get_context("spawn")  # private: the program's own is untouched
        ours, theirs = context.Pipe(duplex=True)
        server = self._server.pipe(actor) if self._server else None
        process = context.Process(
            target=act,
            name=f"actor-{actor}",
            args=(actor, self._builder, theirs, server, self._crews[actor], self._shared),
            kwargs={
                "seed": self._seed,
                "life": self._lives[actor],
                "niceness": self._niceness,
                "core": actor if self._pin else None,
                "step_timeout_s": self._restarts.step_timeout_s,
            },
            daemon=True,
        )
        with signals_held():
            process.start()
        for end in (theirs, server):
            if end is not None:
                end.close()
        self._processes[actor] = process
        self._connections[actor] = ours
        self._offer_all(actor)

    def _offer_all(self, actor: int) -> None:
        self._slots.partition(actor, *seated(self._crews[actor]))
        for free in self._slots.free(actor):
            self._tell(actor, free)

    def _tell(self, actor: int, order: Order) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            # If it died: `receive` finds what it left in its pipe and says why.
            self._connections[actor].send_bytes(packed(order))

    def _heard(self, actor: int, said: Said) -> None:
        if isinstance(said, Failed):
            self._failed(actor, said.cause)
        elif isinstance(said, Broken):
            self._broke(actor, said)
        elif isinstance(said, Slow):
            crew = moved_outside(self._crews[actor], said.task)
            if crew != self._crews[actor]:
                name = self._name(said.task)
                log.info(
                    "actor %d: %s keeps its other tasks waiting: each environment of it gets a"
                    " process of its own", actor, name,
                )  # fmt: skip
                self._reform(actor, crew)
        elif isinstance(said, Reformed):
            crew = self._reforming.pop(actor)
            if said.aborted:
                self._faults.append(Fault(actor, NO_TASK, said.aborted, False, NO_TASK))
            if crew == self._crews[actor]:
                self._offer_all(actor)
            else:  # it was changed again since
                self._reform(actor, self._crews[actor])

    def _reform(self, actor: int, crew: Crew) -> None:
        """Lets an actor play another crew; games of environments that stay go on."""
        self._crews[actor] = crew
        self._forget_groups_due(actor)
        if actor in self._connections and actor not in self._reforming:
            self._reforming[actor] = crew
            self._tell(actor, Reform(crew))

    def _reassign(self) -> None:
        """Gives tasks that fall short of their share more environments, if a mix says so."""
        if self._balance is None or self._reforming or self._due:
            return
        crews = self._balance.crews(self._crews, self._given_up)
        if crews is None:
            return
        names = self._builder.task_names
        before, after = environments(self._crews, len(names)), environments(crews, len(names))
        log.info(
            "environments change tasks, so that shares are as actors.mix says: %s",
            ", ".join(
                f"{name} has {now} (had {then})"
                for name, then, now in zip(names, before, after, strict=True)
                if then != now
            ),
        )
        for actor, crew in enumerate(crews):
            if crew != self._crews[actor]:
                self._reform(actor, crew)

    def _start_those_due(self) -> None:
        now = time.monotonic()
        for actor in [actor for actor, due in self._due.items() if due <= now]:
            del self._due[actor]
            self._spawn(actor)
        for actor, group in [key for key, due in self._groups_due.items() if due <= now]:
            del self._groups_due[actor, group]
            self._tell(actor, Restart(group))

    def _end_those_hanging(self) -> None:
        for actor in self._beats.hanging(self._patience, self._patience_at_start):
            if actor in self._processes and actor not in self._hanging:
                self._hanging.add(actor)
                self._processes[actor].kill()  # `receive` finds the end of its pipe
        if self._server is not None and self._answers.hangs(self._patience):
            self._server_failed(f"it gave no sign of life for {self._patience} and was killed")

    def _start_server(self) -> None:
        if self._builder.batching is not None:
            self._answers.alive(until_s=START_S)
            self._server = InferenceProcess(self._builder, self._shared, self._seed, self._servers)
            self._servers += 1

    def _server_failed(self, cause: str) -> None:
        """Its core states are lost, so that every game is: all start again."""
        assert self._server is not None
        self._server.close()
        self._server = None
        where = "the inference server failed"
        wait_s = self._spend(NO_TASK, where, cause) or 0.0
        aborted = []
        for actor in list(self._connections):
            aborted += self._buried(actor)
            self._due[actor] = time.monotonic() + wait_s
        self._start_server()
        self._report(where, cause, Fault(NO_TASK, NO_TASK, aborted, True, NO_TASK), wait_s)

    def _buried(self, actor: int) -> list[int]:
        """Ends what is left of an actor; returns the task of each game that nobody will finish."""
        self._connections.pop(actor).close()
        process = self._processes.pop(actor)
        process.kill()
        process.join()
        process.close()
        aborted = played(self._crews[actor]) if self._beats.playing(actor) else []
        self._beats.clear(actor)
        self._lives[actor] += 1
        self._reforming.pop(actor, None)
        self._forget_groups_due(actor)
        return aborted

    def _forget_groups_due(self, actor: int) -> None:
        """All of its environments are built anyway."""
        for key in [key for key in self._groups_due if key[0] == actor]:
            del self._groups_due[key]

    def _failed(self, actor: int, cause: str) -> None:
        """An actor failed: it starts again, or is given up."""
        task = self._beats.task(actor)
        where = f"actor {actor} (playing {self._names(played(self._crews[actor]))}) failed"
        if task != NO_TASK:
            where += f" in {self._name(task)}"
        aborted = self._buried(actor)
        wait_s = self._spend(task, where, cause)
        lost = NO_TASK if wait_s is not None else task
        self._reform(actor, without(self._crews[actor], lost))
        again = bool(self._crews[actor])
        if again:
            self._due[actor] = time.monotonic() + (wait_s or 0.0)
        self._report(where, cause, Fault(actor, task, aborted, again, lost), wait_s)

    def _broke(self, actor: int, broken: Broken) -> None:
        """An environment that has a process of its own failed: the rest of its actor plays on."""
        task = broken.task
        where = f"actor {actor}: an environment failed in {self._name(task)}"
        wait_s = self._spend(task, where, broken.cause)
        lost = NO_TASK if wait_s is not None else task
        if wait_s is None:
            self._reform(actor, without(self._crews[actor], lost))
        elif actor not in self._reforming:
            self._groups_due[actor, broken.group] = time.monotonic() + wait_s
        again = bool(self._crews[actor])
        if not again:
            self._buried(actor)
        fault = Fault(actor, task, [task] if broken.aborted else [], again, lost)
        self._report(where, broken.cause, fault, wait_s)

    def _spend(self, task: int, where: str, cause: str) -> float | None:
        """Seconds before a restart, None if the run is to go on without the task."""
        wait_s = self._budget.spend(task)
        if wait_s is None and (self._restarts.then == "stop" or task == NO_TASK):
            often = self._restarts.per_task
            where += f", more often than restarts.per_task={often} times" if often else ""
            raise ActorError(f"{where}:\n{cause}")
        return wait_s

    def _report(self, where: str, cause: str, fault: Fault, wait_s: float | None) -> None:
        if wait_s is not None:
            often = self._budget.text(fault.task)
            then = f"it starts again in {wait_s:g} s (failure {often})"
        elif fault.restarted:
            then = f"it goes on without {self._name(fault.lost)}"
        else:
            then = "it has no other task and stays away"
        log.warning("%s; %s:\n%s", where, then, cause)
        self._faults.append(fault)
        if fault.lost != NO_TASK:
            self._given_up.add(fault.lost)
        if not (self._connections or self._due):
            raise ActorError(f"{where}, and no actor has a task left:\n{cause}")

    def _name(self, task: int) -> str:
        return self._builder.task_names[task]

    def _names(self, tasks: Sequence[int]) -> str:
        return ", ".join(self._name(task) for task in dict.fromkeys(tasks))

    def _cause_of_death(self, actor: int) -> str:
        if actor in self._hanging:
            if self._beats.task(actor) != NO_TASK:
                return f"it got no answer for {self._patience} and was killed"
            started = self._beats.playing(actor)
            patience = self._patience if started else self._patience_at_start
            return f"it gave no sign of life for {patience} and was killed"
        process = self._processes[actor]
        process.join(5.0)
        return how_it_ended(process.exitcode)


def _check_open_files(num_actors: int, outside: int) -> None:
    """outside: the most environments of an actor that have processes, and pipes, of their own."""
    needed = 2 * max(num_actors, outside) + _SPARE_FILES
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ValueError(
            f"{num_actors} actors, with up to {outside} environments in processes of their own,"
            f" need about {needed} open files and the limit is {limit}: raise it"
            f" (`ulimit -n {needed}`) or set a smaller num_actors or envs_per_actor"
        )
