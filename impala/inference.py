"""Who answers the actor: its own copy of the weights, refreshed once an unroll."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from impala.agents.agent import Agent, CoreState
from impala.trajectory import Step, map_structure


class WeightsSource(Protocol):
    """Where published weights are read from."""

    def load(self, agent: Agent, version: int) -> int:
        """Copies the newest snapshot into `agent` if it is not `version`; returns its version."""
        ...


class LocalInference:
    """Answers N environments with a copy of the agent in the actor's process.

    It owns the core states and the random state that actions are drawn with.
    """

    def __init__(
        self,
        agent: Agent,
        weights: WeightsSource,
        *,
        num_environments: int,
        num_actions: int,
        seed: int,
        greedy: bool = False,
    ) -> None:
        self._agent = agent.eval()
        self._weights = weights
        self._version = -1
        self._noise = torch.zeros(num_environments, num_actions)
        self._generator = torch.Generator().manual_seed(seed)
        self._greedy = greedy
        self.core_state: CoreState = agent.initial_state(num_environments)

    def refresh(self) -> int:
        """Takes the newest weights; returns their version. Once at the start of an unroll."""
        self._version = self._weights.load(self._agent, self._version)
        return self._version

    def act(self, step: Step) -> Any:
        """The agent's outputs for one row [N, ...]; moves the core states on."""
        with torch.inference_mode():
            if not self._greedy:
                # -log of an exponential variate is a Gumbel variate: argmax(logits + it) samples.
                self._noise.exponential_(generator=self._generator).log_().neg_()
            outputs, self.core_state = self._agent.act(step, self.core_state, self._noise)
        return outputs

    def value(self, step: Step, indices: Tensor) -> Tensor:
        """float32 [n]: value of `step` [n, ...], the true last observations of `indices`."""
        with torch.inference_mode():
            state = map_structure(lambda leaf: leaf[indices], self.core_state)
            return self._agent.value(step, state)
