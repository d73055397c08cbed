"""The acting loop: environments x inference, a generator of unrolls.

Environments that step together are a group: all that live in the actor's own process are one, and
each that lives in a process of its own is another, so that nobody waits for a slow one. A group has
slots of its own and goes from row to row at its own pace; each forward pass answers whoever has a
row waiting.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from impala.crew import Crew, crew_size
from impala.group import Games, Group, Member
from impala.inference import Inference, Question
from impala.messages import (
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
from impala.patience import Patience
from impala.step_times import SAMPLED, StepTimes
from impala.trajectory import Step, Trajectory
from impala.worker import WorkerError
from suites.suite import TaskVectorEnv

REST_S = 0.005  # until a task may be behind again
SIGN_S = 1.0  # between two looks at orders, which are a sign of life, at most


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


class Actor:
    """Plays the environments of a crew and writes rows straight into slots.

    make: (task, count, outside) -> a vector environment, a `WorkerEnv` if outside.
    capacity: the environments that it may ever have.
    storage: slots; those that a `Free` names belong to this actor until it yields them.
    frames_per_step: that a step plays unless the environment says how many it did.
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
        frames_per_step: int,
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
        self._watch = watch
        self._turns = turns
        self._patience = Patience(step_timeout_s)
        self._pace = pace
        self._games = Games(
            storage,
            capacity or crew_size(crew),
            frames_per_step=frames_per_step,
            life_loss_ends_episode=life_loss_ends_episode,
        )
        self._environments_s = self._inference_s = 0.0
        self._level_cache = np.zeros(3, np.int64)
        self._step_times = StepTimes()
        self._since_s = time.perf_counter()
        self._said: list[Broken | Slow | Reformed] = []
        self._reform: Crew | None = None
        self._groups: list[Group] = []
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
            if group.broken:
                self._games.give_back(member.numbers)
                group.members = [self._member(member.task, True, 1)]
                group.broken, group.sent_s = False, time.monotonic()
        else:
            self._reform = order.crew

    def _recruit(self, crew: Crew) -> list[int]:
        """Makes the groups of a crew, of those there are and new ones.

        Returns the task of each game that is given up.
        """
        aborted: list[int] = []
        for group in self._groups:
            self._withdraw(group)
        inside, outside = Counter[int](), Counter[int]()
        for seat in crew:
            (outside if seat.outside else inside)[seat.task] += seat.count
        members, groups = [], []
        for group in self._groups:  # whoever can stay stays
            if group.worker is None:
                for member in group.members:
                    if len(member.numbers) <= inside[member.task]:
                        inside[member.task] -= len(member.numbers)
                        members.append(member)
                    else:
                        aborted += self._dismiss(member)
            elif outside[group.members[0].task] and not group.broken:
                outside[group.members[0].task] -= 1
                groups.append(group)
            else:
                games = self._dismiss(group.members[0])
                aborted += games if group.started else []
        members += [self._member(task, False, count) for task, count in inside.items() if count]
        for task in outside.elements():
            member = self._member(task, True, 1)
            groups.append(Group([member], started=False, sent_s=time.monotonic()))
        free: list[slice] = []
        for group in groups:
            group.free = free  # they share their slots
        self._groups = ([Group(members)] if members else []) + groups
        if self._pace is not None:
            self._pace.clear()
        return aborted

    def _withdraw(self, group: Group) -> None:
        """Gives up the unroll that a group is in the middle of; its games go on."""
        if group.slots is not None and group.actions is None:
            self._games.keep(group.t, group.slots, group.numbers)
        group.slots, group.t, group.asking = None, 0, False

    def _dismiss(self, member: Member) -> list[int]:
        member.environment.close()
        self._games.give_back(member.numbers)
        return [member.task] * len(member.numbers)

    def _member(self, task: int, outside: bool, count: int) -> Member:
        self._watch(task)
        environment = self._make(task, count, outside)
        member = Member(environment, task, self._games.numbers(task, count))
        if not outside:  # else it is asked for its first observation when that is there
            self._started(member)
        self._watch(NO_TASK)
        return member

    def _started(self, member: Member) -> None:
        frame, info = member.environment.reset()
        self._games.started(member.numbers, frame, info)
        self._count_levels(info)

    def _count_levels(self, info: dict[str, Any]) -> None:
        if "level_cache" in info:
            self._level_cache += info["level_cache"].sum(axis=0)

    # Unrolls

    def _begin_all(self) -> None:
        # Where slots are few, whoever has waited longest is first.
        for group in sorted(self._groups, key=lambda group: group.began_s):
            if group.rests:
                members = group.members
                if self._turns is not None:
                    steps = [len(member.numbers) * self._unroll_length for member in members]
                    plays = self._turns.plays([member.task for member in members], steps)
                    members = [m for m, play in zip(members, plays, strict=True) if play]
                if members:
                    self._begin(group, members)

    def _begin(self, group: Group, members: list[Member]) -> None:
        """Step T of the unroll before is step 0 of this one."""
        slots = group.free.pop(0)
        group.playing, used = [], 0
        for member in members:
            end = used + len(member.numbers)
            group.playing.append((member, slice(used, end)))
            used = end
        group.order = list(range(len(members)))
        group.numbers = np.concatenate([member.numbers for member in members])
        group.slots = slice(slots.start, slots.start + used)
        group.t, group.asking, group.began_s = 0, True, time.monotonic()
        self._games.begin(group.slots, group.numbers)

    def _finish(self, group: Group) -> Unroll:
        assert group.slots is not None
        slots = group.slots
        self._games.keep(group.t, slots, group.numbers)
        group.slots, group.t = None, 0
        if self._turns is not None:
            seconds = time.monotonic() - group.began_s
            for member, _ in group.playing:
                self._turns.took(member.task, seconds)
        games = self._games.take_finished()
        environments_s, inference_s = self._environments_s, self._inference_s
        self._environments_s = self._inference_s = 0.0
        waiting_s = time.perf_counter() - self._since_s - environments_s - inference_s
        hits, misses, failures = self._level_cache.tolist()
        self._level_cache[:] = 0
        seconds = environments_s, inference_s, max(waiting_s, 0.0)
        step_times = self._step_times.take()
        return Unroll(slots, games, *seconds, (hits, misses, failures), step_times)

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
        assert group.slots is not None
        actions = self._games.actions(group.t, group.slots)
        start = time.perf_counter()
        group.actions, group.sent_s, group.clock = actions, time.monotonic(), [start]
        if group.worker is not None:
            with self._breaking(index):
                group.worker.send(actions)
        else:
            for member, columns in group.playing:
                self._watch(member.task)
                member.environment.send(actions[columns])
                group.clock.append(time.perf_counter())
        self._environments_s += time.perf_counter() - start

    def _receive_all(self) -> bool:
        """From all inside, and from those outside who are ready; whether there were any."""
        busy = [(index, group) for index, group in enumerate(self._groups) if group.busy]
        received = False
        for _, group in busy:
            if group.worker is None:
                self._receive(group)
                received = True
        workers = [(index, group, group.worker) for index, group in busy if group.worker]
        ready = wait([worker.connection for _, _, worker in workers], 0) if workers else []
        horizon_s = self._patience.horizon_s()
        for index, group, worker in workers:
            if worker.connection not in ready:
                if group.sent_s < horizon_s:
                    with self._breaking(index):
                        raise WorkerError(f"it got no answer for {self._patience} and was killed")
                continue
            with self._breaking(index):
                if group.started:
                    self._receive(group)
                else:
                    self._started(group.members[0])
                    group.started = True
            received = True
        return received

    def _receive(self, group: Group) -> None:
        """Writes what the environments answer into the next row."""
        start = time.perf_counter()
        clock = [start]
        numbers, actions = group.numbers, group.actions
        assert actions is not None
        if group.slots is not None:
            rows = self._games.row(group.t + 1, group.slots)
        else:  # the unroll was given up: the row begins the next one
            rows = self._games.kept_row(*numbers)
        rows.last_action[:] = actions
        rows.truncation_value[:] = 0.0
        lives, frames = self._games.lives(numbers), self._games.frames_per_step(numbers)
        for index in group.order:
            member, columns = group.playing[index]
            if group.worker is None:
                self._watch(member.task)
            (
                rows.frame[columns], rows.reward[columns], rows.terminated[columns],
                rows.truncated[columns], info,
            ) = member.environment.recv()  # fmt: skip
            if "lives" in info:
                lives[columns] = info["lives"]
            self._count_levels(info)
            if "frames" in info:
                frames[columns] = info["frames"]
            if "instruction" in info:
                rows.instruction[columns] = info["instruction"]
            if rows.truncated[columns].any():
                cut = columns.start + np.flatnonzero(
                    rows.truncated[columns] & ~rows.terminated[columns]
                )
                rows.truncation_value[cut] = self._value(info, cut, columns.start, rows, numbers)
            clock.append(time.perf_counter())
        self._watch(NO_TASK)
        group.steps += 1
        if group.steps % SAMPLED == 0:
            self._add_step_times(group, clock)
        if self._pace is not None and group.worker is None and len(group.playing) > 1:
            self._watch_pace(group, np.diff(group.clock), np.diff(clock))
        self._games.stepped(rows, numbers, lives, frames)
        group.actions = None
        if group.slots is not None:
            group.t += 1
            group.asking = group.t < self._unroll_length
        self._environments_s += time.perf_counter() - start

    def _add_step_times(self, group: Group, clock: list[float]) -> None:
        """clock: before and after each was received from, in the order of that.

        Those that are stepped together work at the same time, so that what counts is how long the
        actor was at each of them.
        """
        if group.worker is not None:
            (member,) = group.members
            self._step_times.add(member.task, clock[-1] - group.clock[0], 1)
            return
        sending_s, receiving_s = np.diff(group.clock).tolist(), np.diff(clock).tolist()
        for index, seconds in zip(group.order, receiving_s, strict=True):
            member, _ = group.playing[index]
            self._step_times.add(member.task, sending_s[index] + seconds, len(member.numbers))

    def _watch_pace(
        self, group: Group, sending_s: NDArray[np.float64], receiving_s: NDArray[np.float64]
    ) -> None:
        """sending_s: in the order of the group; receiving_s: in the order of receiving."""
        assert self._pace is not None
        if not all(each.started for each in self._groups):
            return  # processes that start take the cores
        seconds = (sending_s[group.order] + receiving_s).tolist()
        member, _ = group.playing[group.order[-1]]
        if self._pace.too_slow(member.task, seconds):
            self._said.append(Slow(member.task))
        group.order.append(group.order.pop(self._pace.next_last(seconds)))

    def _value(
        self,
        info: dict[str, Any],
        cut: NDArray[np.intp],
        start: int,
        rows: Step,
        numbers: NDArray[np.int64],
    ) -> NDArray[np.float32] | float:
        """Values of the true last observations where a time limit cut the episode.

        cut: columns of `rows`; `start` is the first one of the environment that says `info`.
        """
        if not len(cut):
            return 0.0

        def final(name: str) -> Tensor:
            return torch.from_numpy(np.stack([np.asarray(info[name][i - start]) for i in cut]))

        step = Step(
            frame=final("final_obs"),
            reward=torch.from_numpy(np.asarray(rows.reward)[cut]),
            terminated=torch.zeros(len(cut), dtype=torch.bool),
            truncated=torch.zeros(len(cut), dtype=torch.bool),
            truncation_value=torch.zeros(len(cut)),
            last_action=torch.from_numpy(np.asarray(rows.last_action)[cut]),
            instruction=final("final_instruction") if "final_instruction" in info else (),
        )
        return self._inference.value(step, numbers[cut])

    # Waiting, and those who are waited for in vain

    def _wait(self, wake: Connection | None) -> bool:
        """Until somebody has an answer; False if there is nobody to wait for."""
        sources = [group.worker.connection for group in self._groups if group.worker and group.busy]
        environments = bool(sources)
        if any(group.awaiting for group in self._groups) and self._inference.connection:
            sources.append(self._inference.connection)
        resting = wake is not None and any(group.rests for group in self._groups)
        if not (sources or resting):
            return False
        if wake is not None:
            sources.append(wake)
        start = time.perf_counter()
        wait(sources, REST_S if resting else SIGN_S)
        if environments:
            self._environments_s += time.perf_counter() - start
        elif self._inference.connection in sources:
            self._inference_s += time.perf_counter() - start
        return True

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
