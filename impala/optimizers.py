"""RMSProp as TensorFlow 1 computes it, which the paper's learning rates and epsilons are for."""

# torch._foreach_* are what PyTorch's own optimizers are made of.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor


class RMSProp(torch.optim.Optimizer):
    """RMSProp (Tieleman and Hinton 2012) of `tf.train.RMSPropOptimizer`:

        square = decay * square + (1 - decay) * gradient**2, beginning with 1
        velocity = momentum * velocity + lr * gradient / sqrt(square + eps)
        parameter = parameter - velocity

    `torch.optim.RMSprop` adds eps after the root and begins with 0. With the paper's eps of 0.01
    to 0.1 the first matters, and the second makes the first steps ten times as long.

    Raises ValueError for hyperparameters out of range.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        decay: float = 0.99,
        momentum: float = 0.0,
        eps: float = 0.01,
    ) -> None:
        for name, value, fits, wanted in (
            ("lr", lr, lr >= 0, "at least 0"),
            ("decay", decay, 0 <= decay < 1, "in [0, 1)"),
            ("momentum", momentum, 0 <= momentum < 1, "in [0, 1)"),
            ("eps", eps, eps > 0, "greater than 0"),
        ):
            if not fits:
                raise ValueError(f"RMSProp: {name} must be {wanted}, got {value}")
        super().__init__(params, {"lr": lr, "decay": decay, "momentum": momentum, "eps": eps})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        gradients = [p.grad for p in parameters]
        squares = [self._slot(p, "square", torch.ones_like) for p in parameters]
        torch._foreach_mul_(squares, group["decay"])
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["decay"])
        roots = torch._foreach_add(squares, group["eps"])
        torch._foreach_sqrt_(roots)
        if group["momentum"] == 0:
            torch._foreach_addcdiv_(parameters, gradients, roots, -group["lr"])
            return
        velocities = [self._slot(p, "velocity", torch.zeros_like) for p in parameters]
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_addcdiv_(velocities, gradients, roots, group["lr"])
        torch._foreach_sub_(parameters, velocities)

    def _slot(self, parameter: Tensor, name: str, initial: Callable[[Tensor], Tensor]) -> Tensor:
        state = self.state[parameter]
        if name not in state:
            state[name] = initial(parameter)
        return state[name]
