"""An agent that counts, for the suite that counts: every off-by-one shows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from impala.agents.agent import Agent, CoreState, Loss
from impala.trajectory import Step, Trajectory
from tests.counting_suite import LENGTHS, CountingEnv, CountingSuite

__all__ = ["LENGTHS", "CountingAgent", "CountingEnv", "CountingOutput", "CountingSuite"]


class CountingOutput(NamedTuple):
    action: Tensor
    seen: Tensor  # the state after this row was read
    version: Tensor  # the weight that acted


class CountingAgent(Agent):
    """Its core state counts the rows since an episode began; its value is 100 x the frame,
    and 1000 x the first word of the instruction, if there is one.

    `weight` stands for the network. `learn` says what the loss is: "count" makes a gradient of one
    for each update, "nan" a loss that is not finite for columns of task `bad_task`.
    """

    def __init__(self, *, bad_task: int | None = None, num_weights: int = 1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(num_weights))
        self.bad_task = bad_task

    def initial_state(self, batch_size: int) -> CoreState:
        return (torch.zeros(batch_size, 1),)

    def act(self, step: Step, state: CoreState, noise: Tensor) -> tuple[Any, CoreState]:
        count = state[0].masked_fill(step.first[:, None], 0.0) + 1
        action = torch.ones(len(step.reward), dtype=torch.int64)
        version = self.weight[0].detach().expand(len(step.reward))
        return CountingOutput(action, count[:, 0], version), (count,)

    def value(self, step: Step, state: CoreState) -> Tensor:
        words = step.instruction[:, 0] if isinstance(step.instruction, Tensor) else 0
        return 100.0 * step.frame[:, 0, 0, 0].float() + state[0][:, 0] + 1000.0 * words

    def loss(self, trajectory: Trajectory) -> Loss:
        columns = self.weight.mean().expand(len(trajectory.task)).clone()
        if self.bad_task is not None:
            columns = columns + torch.where(trajectory.task == self.bad_task, torch.nan, 0.0)
        return Loss(columns, {"loss/total": columns.detach().sum()})
