"""Named transforms of rewards, applied in the learner only: returns and scores stay raw."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

RewardTransform = Callable[[Float[Tensor, "*shape"]], Float[Tensor, "*shape"]]


def clamp(rewards: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Into [-1, 1], as for Atari and for single DeepMind Lab tasks (Espeholt et al. 2018)."""
    return rewards.clamp(-1.0, 1.0)


def sign(rewards: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """-1, 0 or 1. Differs from `clamp` only for rewards smaller than one."""
    return torch.sign(rewards)


def soft_asymmetric(rewards: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """5 tanh(r / 5), negative ones times 0.3: the paper's optimistic asymmetric clipping.

    This is the form of the authors' code (`scalable_agent/experiment.py`), which later work
    follows. `soft_asymmetric_caption` is what the paper says: five times as steep above zero, and
    down to -0.3 rather than -1.5 below.
    """
    squeezed = 5.0 * torch.tanh(rewards / 5.0)
    return torch.where(rewards < 0, 0.3 * squeezed, squeezed)


def soft_asymmetric_caption(rewards: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """0.3 min(tanh r, 0) + 5 max(tanh r, 0): the caption of the paper's figure D.1."""
    squeezed = torch.tanh(rewards)
    return torch.where(rewards < 0, 0.3 * squeezed, 5.0 * squeezed)


def none(rewards: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Rewards as the environment gave them."""
    return rewards


REWARD_TRANSFORMS: Mapping[str, RewardTransform] = MappingProxyType(
    {
        function.__name__: function
        for function in (clamp, sign, soft_asymmetric, soft_asymmetric_caption, none)
    }
)


def reward_transform(name: str) -> RewardTransform:
    """The transform of that name. Raises ValueError, naming the nearest one, if there is none."""
    if name not in REWARD_TRANSFORMS:
        nearest = difflib.get_close_matches(str(name), REWARD_TRANSFORMS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"no reward transform {name!r}: choose one of {', '.join(REWARD_TRANSFORMS)}{hint}"
        )
    return REWARD_TRANSFORMS[name]
