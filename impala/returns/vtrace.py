"""V-trace: value targets and advantages for a policy other than the one that acted.

Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
Actor-Learner Architectures", section 4.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class VTrace(NamedTuple):
    """Targets and what they were made with. No gradient flows into any of them."""

    vs: Float[Tensor, "T B"]  # targets of the values
    pg_advantages: Float[Tensor, "T B"]  # weights of grad log pi, importance weight included
    rhos: Float[Tensor, "T B"]  # pi / mu, not clipped


@torch.no_grad()
def vtrace(
    *,
    log_rhos: Float[Tensor, "T B"],
    rewards: Float[Tensor, "T B"],
    discounts: Float[Tensor, "T B"],
    values: Float[Tensor, "T B"],
    bootstrap_value: Float[Tensor, " B"],
    truncated: Bool[Tensor, "T B"] | None = None,
    truncation_values: Float[Tensor, "T B"] | None = None,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
    lambda_: float = 1.0,
) -> VTrace:
    """Equation 1 of the paper, by the backward recursion of its remark 1:

        delta_s = min(rho_bar, rho_s) (r_s + g_s V(x_{s+1}) - V(x_s))
        v_s = V(x_s) + delta_s + g_s lambda min(c_bar, rho_s) (v_{s+1} - V(x_{s+1}))
        advantage_s = min(pg_rho_bar, rho_s) (r_s + g_s v_{s+1} - V(x_s))

    Row t is the transition taken at t.

    log_rhos:           log pi(a_t | x_t) - log mu(a_t | x_t).
    rewards:            already clipped or otherwise transformed.
    discounts:          0 where the transition terminated an episode.
    values:             V(x_t).
    bootstrap_value:    V(x_T), of what follows the last transition.
    truncated:          where a time limit ended an episode. The row after belongs to another one,
                        so V(x_{t+1}) and v_{t+1} both are `truncation_values`, and no
                        correction crosses. Where the discount is 0, termination wins.
    truncation_values:  the value of the true last observation; read only where `truncated`.
    rho_bar, c_bar, pg_rho_bar: clips, None for no clip. `rho_bar` decides which policy's values
                        are learned, `c_bar` only how fast; the paper demands rho_bar >= c_bar.
    lambda_:            in [0, 1], of the paper's remark 2.

    Raises ValueError for shapes that do not fit each other and for impossible clips.
    """
    _check_shapes(
        log_rhos, rewards, discounts, values, bootstrap_value, truncated, truncation_values
    )
    _check_clips(rho_bar, c_bar, lambda_)

    rhos = log_rhos.exp()
    next_values = torch.cat([values[1:], bootstrap_value[None]])
    traces = (lambda_ * discounts) * _clip(rhos, c_bar)
    if truncated is not None and truncation_values is not None:
        next_values = torch.where(truncated, truncation_values, next_values)
        traces = traces.masked_fill(truncated, 0.0)
    deltas = _clip(rhos, rho_bar) * (rewards + discounts * next_values - values)

    # The only sequential part: one fused operation a row.
    corrections = torch.empty_like(values)
    correction = torch.zeros_like(bootstrap_value)
    rows = zip(corrections.unbind(), deltas.unbind(), traces.unbind(), strict=True)
    for row, delta, trace in reversed(list(rows)):
        correction = torch.addcmul(delta, trace, correction, out=row)
    vs = values + corrections

    next_vs = torch.cat([vs[1:], bootstrap_value[None]])
    if truncated is not None and truncation_values is not None:
        next_vs = torch.where(truncated, truncation_values, next_vs)
    pg_advantages = _clip(rhos, pg_rho_bar) * (rewards + discounts * next_vs - values)
    return VTrace(vs=vs, pg_advantages=pg_advantages, rhos=rhos)


def _clip(rhos: Float[Tensor, "T B"], threshold: float | None) -> Float[Tensor, "T B"]:
    return rhos if threshold is None else rhos.clamp(max=threshold)


def _check_clips(rho_bar: float | None, c_bar: float | None, lambda_: float) -> None:
    rho = float("inf") if rho_bar is None else rho_bar
    c = float("inf") if c_bar is None else c_bar
    if not rho >= c >= 0:
        raise ValueError(
            f"V-trace needs rho_bar >= c_bar >= 0 (None is infinite), got {rho_bar=}, {c_bar=}"
        )
    if not 0 <= lambda_ <= 1:
        raise ValueError(f"V-trace needs lambda_ in [0, 1], got {lambda_}")


def _check_shapes(
    log_rhos: Tensor,
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    truncated: Tensor | None,
    truncation_values: Tensor | None,
) -> None:
    # Broadcasting would accept most mistakes in silence, such as a bootstrap of [B, 1].
    if values.ndim != 2 or values.shape[0] == 0:
        raise ValueError(f"values must be [T, B] with T > 0, got shape {tuple(values.shape)}")
    if (truncated is None) != (truncation_values is None):
        raise ValueError("give both truncated and truncation_values, or neither")
    for name, tensor, shape in (
        ("log_rhos", log_rhos, values.shape),
        ("rewards", rewards, values.shape),
        ("discounts", discounts, values.shape),
        ("bootstrap_value", bootstrap_value, values.shape[1:]),
        ("truncated", truncated, values.shape),
        ("truncation_values", truncation_values, values.shape),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} where values of shape "
                f"{tuple(values.shape)} demand {tuple(shape)}"
            )
