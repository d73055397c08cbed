"""Who answers the actor: its own copy of the weights, refreshed once an unroll."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from impala.agents.agent import Agent, CoreState
from impala.trajectory import Step, Trajectory, leaves, map_structure


class WeightsSource(Protocol):
    """Where published weights are read from."""

    def load(self, agent: Agent, version: int) -> int:
        """Copies the newest snapshot into `agent` if it is not `version`; returns its version."""
        ...


class Question(NamedTuple):
    """Row `t` of these slots of the storage waits for an agent's outputs."""

    group: int  # of the actor: for whoever asks, to know the answer by
    environments: NDArray[np.int64]  # of the actor, one for each slot: whose core states these are
    slots: slice
    t: int


class Inference(Protocol):
    """What an actor knows of the network. Answers are written into the storage.

    At row 0 of an unroll the core states before it and the version of the weights are written, too.
    """

    @property
    def connection(self) -> Connection | None:
        """Readable when there are answers; None: they come at once."""
        ...

    def ask(self, questions: Sequence[Question]) -> None: ...

    def answered(self) -> list[int]:
        """The groups whose questions have been answered since the last call."""
        ...

    def value(self, step: Step, environments: NDArray[np.int64]) -> NDArray[np.float32]:
        """[n]: value of `step` [n, ...], the true last observations of these environments."""
        ...


class LocalInference:
    """Answers N environments with a copy of the agent in the actor's process.

    It owns the core states and the random state that actions are drawn with.

    storage: where questions are read and answers written; not needed for `act` alone.
    """

    connection: Connection | None = None

    def __init__(
        self,
        agent: Agent,
        weights: WeightsSource,
        *,
        num_environments: int,
        num_actions: int,
        seed: int,
        greedy: bool = False,
        storage: Trajectory | None = None,
    ) -> None:
        self._agent = agent.eval()
        self._weights = weights
        self._version = -1
        self._noise = torch.zeros(num_environments, num_actions)
        self._generator = torch.Generator().manual_seed(seed)
        self._greedy = greedy
        self._storage = storage
        self._answered: list[int] = []
        self._core_state: CoreState = map_structure(
            torch.clone, agent.initial_state(num_environments)
        )

    def act(self, step: Step) -> Any:
        """The agent's outputs for one row [N, ...]; moves the core states on."""
        with torch.inference_mode():
            outputs, self._core_state = self._forward(step, self._core_state)
        return outputs

    def ask(self, questions: Sequence[Question]) -> None:
        assert self._storage is not None
        with torch.inference_mode():
            if any(question.t == 0 for question in questions):
                self._version = self._weights.load(self._agent, self._version)
            answer(self._storage, questions, self._core_state, self._version, self._forward)
        self._answered += [question.group for question in questions]

    def answered(self) -> list[int]:
        answered, self._answered = self._answered, []
        return answered

    def value(self, step: Step, environments: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.inference_mode():
            state = map_structure(lambda leaf: leaf[environments], self._core_state)
            return self._agent.value(step, state).numpy()

    def _forward(self, step: Step, state: CoreState) -> tuple[Any, CoreState]:
        noise = self._noise[: len(step.reward)]
        if not self._greedy:
            gumbel_(noise, self._generator)
        return self._agent.act(step, state, noise)


def gumbel_(noise: Tensor, generator: torch.Generator) -> None:
    """Fills `noise` with Gumbel(0, 1) samples: argmax(logits + noise) is a sample of the policy."""
    noise.exponential_(generator=generator).log_().neg_()


def answer(
    storage: Trajectory,
    questions: Sequence[Question],
    core_state: CoreState,
    version: int,
    forward: Any,
) -> None:
    """One forward pass for all questions; moves their rows of `core_state` on, in place.

    forward: (step, state) -> (outputs, state), of one row [n, ...].
    """
    states = leaves(core_state)
    rows = torch.from_numpy(np.concatenate([question.environments for question in questions]))
    before = tuple(leaf[rows] for leaf in states)
    outputs, after = forward(_rows(storage.steps, questions), before)
    for leaf, value in zip(states, leaves(after), strict=True):
        leaf[rows] = value
    for question, part in zip(questions, parts(questions), strict=True):
        write_answer(storage, question, version, outputs, before, part)


def parts(questions: Sequence[Question]) -> Iterator[slice]:
    """Which rows of a batch of them all are each one's."""
    used = 0
    for question in questions:
        yield slice(used, used := used + len(question.environments))


def write_answer(
    storage: Trajectory,
    question: Question,
    version: int,
    outputs: Any,
    core_state: CoreState,
    part: slice,
) -> None:
    """outputs, core_state: of a batch, and the states before it; `part` of it is the question's."""
    _, _, slots, t = question
    for stored, value in zip(leaves(storage.outputs), leaves(outputs), strict=True):
        stored[t, slots] = value[part]
    if t == 0:
        storage.version[slots] = version
        for stored, state in zip(leaves(storage.core_state), core_state, strict=True):
            stored[slots] = state[part]


def _rows(steps: Step, questions: Sequence[Question]) -> Step:
    if len(questions) == 1:  # a view: nothing is copied
        (_, _, slots, t) = questions[0]
        return map_structure(lambda leaf: leaf[t, slots], steps)
    return map_structure(lambda leaf: torch.cat([leaf[q.t, q.slots] for q in questions]), steps)
