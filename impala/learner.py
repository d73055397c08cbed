"""The learning loop's step: batch -> loss -> gradient -> update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from impala.agents.agent import Agent, Loss
from impala.experience.experience import Batch
from impala.trajectory import Trajectory, map_structure

_Weighted = tuple[Trajectory, Tensor | None]  # a micro-batch, and the weights of its columns


class NonFiniteError(RuntimeError):
    """Too many updates in a row had a non-finite loss or gradient."""


class Learner:
    """Owns the weights and their optimizer.

    optimizer: called with the parameters.
    lr_schedule: factor on the optimizer's learning rate, given the share of `total_frames` done.
    max_grad_norm: global norm that gradients are clipped to; None: they are not.
    device: where the agent learns.
    threads: micro-batches that are worked on at once, on a CPU. Their gradients are added in order,
        so that the sum is the same for any number of threads.
    autocast: bfloat16 autocast.
    compile_loss: `torch.compile` the loss; needs a C++ compiler at run time.
    max_skipped: updates in a row that may be skipped because they were not finite.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        lr_schedule: Callable[[float], float],
        max_grad_norm: float | None,
        device: torch.device,
        threads: int = 1,
        autocast: bool = False,
        compile_loss: bool = False,
        max_skipped: int = 10,
    ) -> None:
        self.agent = agent.to(device).train()
        self._parameters = [p for p in agent.parameters() if p.requires_grad]
        self._gradient_sum = [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradient_sum, strict=True):
            parameter.grad = gradient
        self.optimizer = optimizer(self._parameters)
        self._base_lr = [group["lr"] for group in self.optimizer.param_groups]
        self._lr_schedule = lr_schedule
        self.max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        self._device = device
        self._autocast = autocast
        self._loss: Callable[[Trajectory], Loss] = (
            torch.compile(agent.loss) if compile_loss else agent.loss
        )
        self._workers = ThreadPoolExecutor(threads, "learner") if threads > 1 else None
        self._max_skipped = max_skipped
        self._skipped_in_a_row = 0
        self.skipped = 0
        self._sums: dict[str, Tensor] = {}
        self._norms = 0.0
        self._updates = 0
        self._columns = 0

    def update(
        self,
        batch: Batch,
        progress: float,
        interrupted: Callable[[], bool] = lambda: False,
        backlog: bool = True,
        weights: NDArray[np.float32] | None = None,
    ) -> list[int] | None:
        """One optimizer step, unless something is not finite.

        progress: share of the run's frames done, for the schedule.
        interrupted: asked between micro-batches; if true the update is given up.
        backlog: whether another batch is waiting. If not, the actors are what limits the run, and
            one thread leaves them more: several slow each other down a little.
        weights: of the loss of each column, if not all 1. Logged losses are without them.
        Returns the indices of tasks whose loss or gradient was not finite (the update was skipped,
        the weights are as before); an empty list if the update was made; None if given up.
        """
        for gradient in self._gradient_sum:
            gradient.zero_()
        sums: dict[str, Tensor] = {}
        total = torch.zeros((), device=self._device)
        parts = list(_weighted(batch.parts, weights))
        for gradients, loss in self._gradients(parts, interrupted, backlog):
            if loss is None:
                return None
            for total_gradient, gradient in zip(self._gradient_sum, gradients, strict=True):
                total_gradient.add_(gradient)
            total += loss.columns.detach().sum()
            for name, value in loss.metrics.items():
                sums[name] = sums[name] + value if name in sums else value
        norm = nn.utils.clip_grad_norm_(self._parameters, self.max_grad_norm, foreach=True)
        if not math.isfinite(float(norm + total)):
            return self._skip(batch)
        for group, lr in zip(self.optimizer.param_groups, self._base_lr, strict=True):
            group["lr"] = lr * self._lr_schedule(progress)
        self.optimizer.step()
        self._skipped_in_a_row = 0
        self._record(sums, float(norm), len(batch.task))
        return []

    def close(self) -> None:
        """Ends its threads."""
        if self._workers:
            self._workers.shutdown()

    def metrics(self) -> dict[str, float]:
        """Means since the last call: losses of a batch, other values of a column."""
        if not self._updates:
            return {"updates/skipped": float(self.skipped)}
        result = {
            name: float(value) / (self._updates if name.startswith("loss/") else self._columns)
            for name, value in self._sums.items()
        }
        if "value/target_squared" in result:
            variance = result["value/target_squared"] - result["value/target"] ** 2
            error = result["value/error_squared"]
            result["value/explained_variance"] = 1.0 - error / variance if variance else 0.0
        result["grad/norm"] = self._norms / self._updates
        result["lr"] = self.optimizer.param_groups[0]["lr"]
        result["updates/skipped"] = float(self.skipped)
        self._sums, self._updates, self._columns = {}, 0, 0
        self._norms = 0.0
        return result

    def set_option(self, name: str, value: float) -> None:
        """Of the optimizer, from the next update on; "lr" is what the schedule multiplies."""
        for group in self.optimizer.param_groups:
            if name not in group:
                raise ValueError(f"{type(self.optimizer).__name__} has no option {name!r}")
            group[name] = value
        if name == "lr":
            self._base_lr = [value for _ in self._base_lr]

    def state_dict(self) -> dict[str, Any]:
        return {
            "agent": self.agent.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Strict. Learning rate and other options stay those the learner was made with."""
        options = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        self.agent.load_state_dict(state["agent"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group, option in zip(self.optimizer.param_groups, options, strict=True):
            group.update(option)
        self.skipped = state["skipped"]

    def _gradients(
        self, parts: Sequence[_Weighted], interrupted: Callable[[], bool], backlog: bool
    ) -> Iterator[tuple[Sequence[Tensor], Loss | None]]:
        """The gradients and the loss of each part, in order; no loss once interrupted."""

        def work(part: _Weighted) -> tuple[Sequence[Tensor], Loss | None]:
            return ((), None) if interrupted() else self._gradient(*part)

        return (self._workers.map if self._workers and backlog else map)(work, parts)

    def _gradient(
        self, part: Trajectory, weights: Tensor | None = None
    ) -> tuple[Sequence[Tensor], Loss]:
        part = map_structure(lambda leaf: leaf.to(self._device, non_blocking=True), part)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            loss = self._loss(part)
        columns = loss.columns if weights is None else loss.columns * weights.to(self._device)
        gradients = torch.autograd.grad(
            columns.sum(), self._parameters, allow_unused=True, materialize_grads=True
        )
        return gradients, loss

    def _record(self, sums: dict[str, Tensor], norm: float, columns: int) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._norms += norm
        self._updates += 1
        self._columns += columns

    def _skip(self, batch: Batch) -> list[int]:
        """Names the tasks to blame, by looking at each column alone; rare, so it may be slow."""
        self.skipped += 1
        self._skipped_in_a_row += 1
        tasks = {int(task) for part in batch.parts for task in self._non_finite_tasks(part)} or set(
            batch.task.tolist()
        )
        if self._skipped_in_a_row > self._max_skipped:
            raise NonFiniteError(
                f"updates in a row with a non-finite loss or gradient: {self._skipped_in_a_row}"
            )
        return sorted(tasks)

    def _non_finite_tasks(self, part: Trajectory) -> Sequence[int]:
        tasks = []
        for column in range(len(part.task)):
            gradients, loss = self._gradient(_column(part, column))
            finite = all(bool(torch.isfinite(x).all()) for x in (loss.columns, *gradients))
            if not finite:
                tasks.append(int(part.task[column]))
        return tasks


def _weighted(
    parts: Sequence[Trajectory], weights: NDArray[np.float32] | None
) -> Iterator[_Weighted]:
    start = 0
    for part in parts:
        end = start + len(part.task)
        yield part, None if weights is None else torch.from_numpy(weights[start:end])
        start = end


def _column(part: Trajectory, column: int) -> Trajectory:
    one = slice(column, column + 1)
    return Trajectory(
        steps=map_structure(lambda leaf: leaf[:, one], part.steps),
        outputs=map_structure(lambda leaf: leaf[:, one], part.outputs),
        core_state=map_structure(lambda leaf: leaf[one], part.core_state),
        task=part.task[one],
        version=part.version[one],
    )


def linear_decay(progress: float) -> float:
    """From 1 to 0 over the run, as in the paper."""
    return max(0.0, 1.0 - progress)


def constant(progress: float) -> float:
    return 1.0
