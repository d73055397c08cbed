"""The acting loop: environments x inference, a generator of unrolls.

Environments that step together are a group: all that live in the actor's own process are one, and
each that lives in a process of its own is another, so that nobody waits for a slow one. A group has
slots of its own and goes from row to row at its own pace; each forward pass answers whoever has a
row waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from impala.crew import Crew, crew_size
from impala.inference import Inference, Question
from impala.messages import (
    GAME,
    NO_TASK,
    Broken,
    Free,
    Order,
    Reformed,
    Restart,
    Said,
    Slow,
    Unroll,
)
from impala.pace import Pace
from impala.trajectory import Step, Trajectory, empty_step, leaves, map_structure
from impala.worker import WorkerEnv, WorkerError
from suites.suite import TaskVectorEnv


class Turns(Protocol):
    """Which tasks are to play, where shares of the learner's frames are configured."""

    def plays(self, tasks: Sequence[int], steps: Sequence[int]) -> list[bool]:
        """Whether each of these is to play an unroll now, of so many steps; counts those that do.

        tasks: of vector environments.
        """
        ...

    def took(self, task: int, seconds: float) -> None:
        """An unroll of one of the task's environments took so long."""
        ...


@dataclass
class _Member:
    """A vector environment of a group."""

    environment: TaskVectorEnv
    task: int
    numbers: NDArray[np.int64]  # of its environments, among the actor's


@dataclass
class _Group:
    members: list[_Member]
    started: bool = True  # whether the first observation is there
    broken: bool = False
    asking: bool = False  # its row is to be asked about,
    awaiting: bool = False  # was, and has no answer
    actions: NDArray[np.int64] | None = None  # the answer: sent to environments that are at it
    sent_s: float = 0.0  # when
    free: list[slice] = field(default_factory=list)
    slots: slice | None = None  # that the unroll is written to; None between two
    t: int = 0  # the newest row
    began_s: float = 0.0
    playing: list[tuple[_Member, slice]] = field(default_factory=list)  # and its columns
    numbers: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def worker(self) -> WorkerEnv | None:
        """Its only environment, if that has a process of its own."""
        environment = self.members[0].environment
        return environment if isinstance(environment, WorkerEnv) else None

    @property
    def busy(self) -> bool:
        """Its environments owe an answer."""
        return not self.broken and (not self.started or self.actions is not None)

    @property
    def rests(self) -> bool:
        """It could begin an unroll."""
        return not (self.broken or self.busy or self.slots is not None) and bool(self.free)


class Actor:
    """Plays the environments of a crew and writes rows straight into slots.

    make: (task, count, outside) -> a vector environment, a `WorkerEnv` if outside.
    capacity: the environments that it may ever have.
    storage: slots; those that a `Free` names belong to this actor until it yields them.
    life_loss_ends_episode: a lost life ends the episode *for learning*; games and scores go on.
    watch: told the task of an environment that is about to be called, and -1 afterwards.
    step_timeout_s: that an environment outside may take for an answer, or to be built.
    pace: finds which environments are too slow to be stepped with others; None: none is.
    """

    def __init__(
        self,
        *,
        crew: Crew,
        make: Callable[[int, int, bool], TaskVectorEnv],
        inference: Inference,
        storage: Trajectory,
        unroll_length: int,
        life_loss_ends_episode: bool,
        watch: Callable[[int], None] = lambda task: None,
        capacity: int | None = None,
        turns: Turns | None = None,
        step_timeout_s: float | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._make = make
        self._inference = inference
        self._unroll_length = unroll_length
        self._life_loss_ends_episode = life_loss_ends_episode
        self._watch = watch
        self._turns = turns
        self._step_timeout_s = step_timeout_s
        self._pace = pace
        self._storage: Any = map_structure(lambda leaf: leaf.numpy(), storage)
        size = capacity or crew_size(crew)
        # By number of the environment: the row that its next unroll begins with, and its game.
        first_row = empty_step(tuple(storage.steps.frame.shape[2:]), size)
        self._carry: Any = map_structure(lambda leaf: leaf.numpy(), first_row)
        self._task = np.zeros(size, np.int64)
        self._return = np.zeros(size)
        self._steps = np.zeros(size, np.int32)
        self._lives = np.zeros(size, np.int32)
        self._unused = list(range(size))  # numbers
        self._games: list[tuple[int, float, int]] = []
        self._environments_s = self._inference_s = 0.0
        self._clock: list[float] = []  # before and after each of the first group was sent to
        self._since_s = time.perf_counter()
        self._said: list[Broken | Slow | Reformed] = []
        self._reform: Crew | None = None
        self._groups: list[_Group] = []
        self._recruit(crew)

    def play(
        self, orders: Callable[[], Sequence[Order]], wake: Connection | None = None
    ) -> Iterator[Said | None]:
        """Plays for ever. None: there is nothing to do until there are orders.

        orders: those that came since the last call.
        wake: readable when there are orders.
        """
        while True:
            for order in orders():
                self._obey(order)
            if self._reform is not None and not any(group.awaiting for group in self._groups):
                self._said.append(Reformed(self._recruit(self._reform)))
                self._reform = None
            self._begin_all()
            self._ask()
            for index in self._inference.answered():
                self._send(index)
            received = self._receive_all()
            for group in self._groups:
                if group.slots is not None and group.t == self._unroll_length:
                    received = True
                    yield self._finish(group)
                    self._since_s = time.perf_counter()
            if self._said:
                yield self._said.pop(0)
            elif not received and not self._wait(wake):
                yield None

    def close(self) -> None:
        for group in self._groups:
            for member in group.members:
                member.environment.close()

    # Who plays

    def _obey(self, order: Order) -> None:
        if isinstance(order, Free):
            self._groups[order.group].free.append(order.slots)
        elif isinstance(order, Restart):
            group = self._groups[order.group]
            (member,) = group.members
            group.members = [self._member(member.task, True, member.numbers)]
            group.broken, group.sent_s = False, time.monotonic()
        else:
            self._reform = order.crew

    def _recruit(self, crew: Crew) -> list[int]:
        """Makes the groups of a crew, of those there are and new ones.

        Returns the task of each game that is given up.
        """
        aborted: list[int] = []
        inside = [m for group in self._groups if group.worker is None for m in group.members]
        outside = [group for group in self._groups if group.worker and not group.broken]
        for group in self._groups:
            self._withdraw(group)
            if group.worker and group.broken:
                self._unused += group.members[0].numbers.tolist()
        stay: dict[int, list[_Member]] = {seat.task: [] for seat in crew if not seat.outside}
        open_seats = {seat.task: seat.count for seat in crew if not seat.outside}
        for member in inside:
            if len(member.numbers) <= open_seats.get(member.task, 0):
                stay[member.task].append(member)
                open_seats[member.task] -= len(member.numbers)
            else:
                aborted += self._dismiss(member)
        go_on: dict[int, list[_Group]] = {seat.task: [] for seat in crew if seat.outside}
        open_outside = {seat.task: seat.count for seat in crew if seat.outside}
        for group in outside:
            (member,) = group.members
            if open_outside.get(member.task, 0):
                go_on[member.task].append(group)
                open_outside[member.task] -= 1
            else:
                games = self._dismiss(member)
                aborted += games if group.started else []
        members = []
        for task, staying in stay.items():
            members += staying
            if open_seats[task]:
                members.append(self._member(task, False, self._numbers(open_seats[task])))
        groups = [_Group(members)] if members else []
        for task, staying in go_on.items():
            groups += staying
            for _ in range(open_outside[task]):
                member = self._member(task, True, self._numbers(1))
                groups.append(_Group([member], started=False, sent_s=time.monotonic()))
        self._groups = groups
        if self._pace is not None:
            self._pace.clear()
        return aborted

    def _withdraw(self, group: _Group) -> None:
        """Gives up the unroll that a group is in the middle of; its games go on."""
        if group.slots is not None and group.actions is None:
            self._keep_row(group)
        group.free.clear()
        group.slots, group.t, group.asking = None, 0, False

    def _numbers(self, count: int) -> NDArray[np.int64]:
        self._unused.sort()
        numbers, self._unused = self._unused[:count], self._unused[count:]
        return np.array(numbers, np.int64)

    def _dismiss(self, member: _Member) -> list[int]:
        member.environment.close()
        self._unused += member.numbers.tolist()
        return [member.task] * len(member.numbers)

    def _member(self, task: int, outside: bool, numbers: NDArray[np.int64]) -> _Member:
        self._watch(task)
        environment = self._make(task, len(numbers), outside)
        self._task[numbers] = task
        member = _Member(environment, task, numbers)
        if not outside:
            self._start(member)
        self._watch(NO_TASK)
        return member

    def _start(self, member: _Member) -> None:
        """The first observation; one outside is asked only when it is there."""
        numbers = member.numbers
        frame, info = member.environment.reset()
        for leaf in leaves(self._carry):
            leaf[numbers] = 0
        self._carry.frame[numbers] = frame
        # The row before an unroll's first reads as the end of an episode: the core state is zero.
        self._carry.terminated[numbers] = True
        self._return[numbers] = 0.0
        self._steps[numbers] = 0
        self._lives[numbers] = info.get("lives", 0)

    # Unrolls

    def _begin_all(self) -> None:
        for group in self._groups:
            if group.rests:
                members = group.members
                if self._turns is not None:
                    steps = [len(member.numbers) * self._unroll_length for member in members]
                    plays = self._turns.plays([member.task for member in members], steps)
                    members = [m for m, play in zip(members, plays, strict=True) if play]
                if members:
                    self._begin(group, members)

    def _begin(self, group: _Group, members: list[_Member]) -> None:
        """Step T of the unroll before is step 0 of this one."""
        slots = group.free.pop(0)
        group.playing, used = [], 0
        for member in members:
            end = used + len(member.numbers)
            group.playing.append((member, slice(used, end)))
            used = end
        group.numbers = np.concatenate([member.numbers for member in members])
        group.slots = slice(slots.start, slots.start + used)
        group.t, group.asking, group.began_s = 0, True, time.monotonic()
        for stored, carried in zip(leaves(self._storage.steps), leaves(self._carry), strict=True):
            np.take(carried, group.numbers, axis=0, out=stored[0, group.slots], mode="clip")
        self._storage.task[group.slots] = self._task[group.numbers]

    def _keep_row(self, group: _Group) -> None:
        for stored, carried in zip(leaves(self._storage.steps), leaves(self._carry), strict=True):
            carried[group.numbers] = stored[group.t, group.slots]

    def _finish(self, group: _Group) -> Unroll:
        assert group.slots is not None
        slots = group.slots
        self._keep_row(group)
        group.slots, group.t = None, 0
        if self._turns is not None:
            seconds = time.monotonic() - group.began_s
            for member, _ in group.playing:
                self._turns.took(member.task, seconds)
        games = np.array(self._games, GAME)
        self._games.clear()
        environments_s, inference_s = self._environments_s, self._inference_s
        self._environments_s = self._inference_s = 0.0
        waiting_s = time.perf_counter() - self._since_s - environments_s - inference_s
        return Unroll(slots, games, environments_s, inference_s, max(waiting_s, 0.0))

    # Rows

    def _ask(self) -> None:
        questions = []
        for index, group in enumerate(self._groups):
            if group.asking and group.slots is not None:
                questions.append(Question(index, group.numbers, group.slots, group.t))
                group.asking, group.awaiting = False, True
        if questions:
            start = time.perf_counter()
            self._inference.ask(questions)
            self._inference_s += time.perf_counter() - start

    def _send(self, index: int) -> None:
        group = self._groups[index]
        group.awaiting = False
        actions = self._storage.outputs.action[group.t, group.slots]
        start = time.perf_counter()
        group.actions, group.sent_s = actions, time.monotonic()
        if group.worker is not None:
            with self._breaking(index):
                group.worker.send(actions)
        else:
            self._clock = [start]
            for member, columns in group.playing:
                self._watch(member.task)
                member.environment.send(actions[columns])
                self._clock.append(time.perf_counter())
        self._environments_s += time.perf_counter() - start

    def _receive_all(self) -> bool:
        """From all inside, and from those outside who are ready; whether there were any."""
        received = False
        for index, group in enumerate(self._groups):
            worker = group.worker
            if not group.busy:
                continue
            if worker is None:
                self._receive(group)
            elif not worker.ready():
                self._break_if_late(index)
                continue
            else:
                with self._breaking(index):
                    if group.started:
                        self._receive(group)
                    else:
                        self._start(group.members[0])
                        group.started = True
            received = True
        return received

    def _receive(self, group: _Group) -> None:
        """Writes what the environments answer into the next row."""
        start = time.perf_counter()
        clock = [start]
        numbers, actions = group.numbers, group.actions
        assert actions is not None
        if group.slots is not None:
            t, slots = group.t + 1, group.slots
            rows = map_structure(lambda leaf: leaf[t, slots], self._storage.steps)
        else:  # the unroll was given up: the row begins the next one
            (number,) = numbers
            rows = map_structure(lambda leaf: leaf[number : number + 1], self._carry)
        rows.last_action[:] = actions
        rows.truncation_value[:] = 0.0
        lives = self._lives[numbers]
        for member, columns in group.playing:
            if group.worker is None:
                self._watch(member.task)
            (
                rows.frame[columns], rows.reward[columns], rows.terminated[columns],
                rows.truncated[columns], info,
            ) = member.environment.recv()  # fmt: skip
            if "lives" in info:
                lives[columns] = info["lives"]
            if rows.truncated[columns].any():
                cut = columns.start + np.flatnonzero(
                    rows.truncated[columns] & ~rows.terminated[columns]
                )
                final = [info["final_obs"][i - columns.start] for i in cut]
                rows.truncation_value[cut] = self._value(final, cut, rows, numbers)
            clock.append(time.perf_counter())
        self._watch(NO_TASK)
        if self._pace is not None and group.worker is None and len(group.playing) > 1:
            seconds = (np.diff(self._clock) + np.diff(clock)).tolist()
            last = group.playing[-1][0].task
            if self._pace.too_slow(last, seconds):
                self._said.append(Slow(last))
            group.playing.append(group.playing.pop(self._pace.longest(seconds)))
        rows.truncated[:] &= ~rows.terminated
        self._count(rows, numbers)
        if self._life_loss_ends_episode:
            rows.terminated[:] |= (lives < self._lives[numbers]) & ~rows.truncated
        self._lives[numbers] = lives
        group.actions = None
        if group.slots is not None:
            group.t += 1
            group.asking = group.t < self._unroll_length
        self._environments_s += time.perf_counter() - start

    def _count(self, rows: Step, numbers: NDArray[np.int64]) -> None:
        """Sums whole games: raw rewards and steps, whatever an episode of learning is."""
        self._return[numbers] += rows.reward
        self._steps[numbers] += 1
        ended = numbers[np.asarray(rows.terminated | rows.truncated)]
        for i in ended:
            self._games.append((int(self._task[i]), float(self._return[i]), int(self._steps[i])))
        self._return[ended] = 0.0
        self._steps[ended] = 0

    def _value(
        self, final: list[Any], cut: NDArray[np.intp], rows: Step, numbers: NDArray[np.int64]
    ) -> NDArray[np.float32] | float:
        """Values of the true last observations where a time limit cut the episode."""
        if not final:
            return 0.0
        frames = np.stack([np.asarray(frame) for frame in final])
        step = empty_step(tuple(frames.shape[1:]), len(cut))._replace(
            frame=torch.from_numpy(frames),
            reward=torch.from_numpy(np.asarray(rows.reward)[cut]),
            last_action=torch.from_numpy(np.asarray(rows.last_action)[cut]),
        )
        return self._inference.value(step, numbers[cut])

    # Waiting, and those who are waited for in vain

    def _wait(self, wake: Connection | None) -> bool:
        """Until somebody has an answer; False if there is nobody to wait for."""
        sources = []
        deadline = np.inf
        for group in self._groups:
            if (
                group.worker
                and not group.broken
                and (not group.started or group.actions is not None)
            ):
                sources.append(group.worker.connection)
                deadline = min(deadline, group.sent_s + (self._step_timeout_s or np.inf))
        environments = bool(sources)
        if any(group.awaiting for group in self._groups) and self._inference.connection:
            sources.append(self._inference.connection)
        if any(group.rests for group in self._groups) and wake is not None:
            deadline = time.monotonic() + 0.005  # until a task is behind again
        elif not sources:
            return False
        if wake is not None:
            sources.append(wake)
        start = time.perf_counter()
        wait(sources, None if deadline == np.inf else max(deadline - time.monotonic(), 0.0))
        if environments:
            self._environments_s += time.perf_counter() - start
        elif self._inference.connection in sources:
            self._inference_s += time.perf_counter() - start
        return True

    def _break_if_late(self, index: int) -> None:
        timeout_s = self._step_timeout_s
        if timeout_s is not None and time.monotonic() > self._groups[index].sent_s + timeout_s:
            with self._breaking(index):
                raise WorkerError(
                    f"it got no answer for {timeout_s:g} s (restarts.step_timeout_s) and was killed"
                )

    @contextmanager
    def _breaking(self, index: int) -> Iterator[None]:
        """What goes wrong outside costs that environment only."""
        try:
            yield
        except WorkerError as error:
            group = self._groups[index]
            (member,) = group.members
            member.environment.close()
            if group.slots is not None:
                group.free.insert(0, group.slots)
            self._said.append(Broken(index, member.task, group.started, str(error)))
            group.broken, group.started = True, False
            group.slots, group.actions, group.t, group.asking = None, None, 0, False
