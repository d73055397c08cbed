"""What an unroll is.

Steps are fence posts, agent outputs the rails between them: row t of the outputs answers row t of
the steps, and step T of one unroll is step 0 of the next. Arrays are time-major. `T` is the unroll
length, `B` the number of columns (unrolls) of a batch, `N` the environments of one actor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Step(NamedTuple):
    """What the environments said on arriving at a row; shapes are [T+1, B, ...] or [N, ...].

    An episode here is one of *learning*: where a lost life ends it, `terminated` is set although
    the game goes on.
    """

    frame: Tensor  # uint8; where an episode ended, the first observation of the next one
    reward: Tensor  # float32, raw, of the transition that arrived here
    terminated: Tensor  # bool: the transition that arrived here ended an episode, nothing follows
    truncated: Tensor  # bool: it ended by a time limit, the value of what would follow counts
    truncation_value: Tensor  # float32: value of the true last observation if truncated, else 0
    last_action: Tensor  # int64: the action of the transition that arrived here; 0 at first

    @property
    def first(self) -> Tensor:
        """bool: this row is the first of an episode, so that the core state is zeroed before it."""
        return self.terminated | self.truncated


class Trajectory(NamedTuple):
    """A batch of unrolls, or the storage of all slots (then B is the number of slots)."""

    steps: Step  # [T+1, B, ...]
    outputs: Any  # a NamedTuple of the agent's own, [T, B, ...], with at least `action`
    core_state: tuple[Tensor, ...]  # [B, ...]: the actor's state before row 0 is read
    task: Tensor  # int64 [B]: index into suite.tasks
    version: Tensor  # int64 [B]: of the weights that acted from row 0 on


def map_structure(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Applies `function` to the leaves of nested (named) tuples of the same structure."""
    if isinstance(tree, tuple):
        mapped = [
            map_structure(function, *children) for children in zip(tree, *others, strict=True)
        ]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)
    return function(tree, *others)


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested (named) tuples, in order."""
    if isinstance(tree, tuple):
        return [leaf for child in tree for leaf in leaves(child)]
    return [tree]
