"""The contract of an agent: a network, how it acts, and the loss it learns by.

An agent never sees a queue, a file, a logger or a config.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from impala.trajectory import Step, Trajectory

CoreState = tuple[Tensor, ...]  # each [B, ...]; () for an agent without memory


class Loss(NamedTuple):
    """What a batch has to say.

    `columns` has the loss of each unroll, summed over time, so that batches can be split into
    micro-batches whose gradients add up, and so that a non-finite one names its task.
    """

    columns: Tensor  # float32 [B], carries gradient
    metrics: dict[str, Tensor]  # "group/name" -> scalar *sum over the B columns*, no gradient
    priorities: Tensor | None = None  # float32 [B], for prioritised replay


class Agent(nn.Module):
    """Base class of agents. Outputs of `act` are NamedTuples with at least `action` [N] int64."""

    def initial_state(self, batch_size: int) -> CoreState:
        """The core state before the first observation of an episode, [batch_size, ...]."""
        raise NotImplementedError

    def act(self, step: Step, state: CoreState, noise: Tensor) -> tuple[Any, CoreState]:
        """Answers N environments. Zeroes `state` where `step.first` before using it.

        step:   one row, [N, ...].
        noise:  float32 [N, A], Gumbel(0, 1) samples: argmax(logits + noise) is a sample of the
                policy; zeros make the greedy action. The caller owns the random state.
        """
        raise NotImplementedError

    def value(self, step: Step, state: CoreState) -> Tensor:
        """float32 [N]: value of `step` given the state before it, used where a time limit cut."""
        raise NotImplementedError

    def loss(self, trajectory: Trajectory) -> Loss:
        """The loss of each column of a batch on the agent's device."""
        raise NotImplementedError
