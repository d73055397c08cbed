"""What an unroll is.

Steps are fence posts, agent outputs the rails between them: row t of the outputs answers row t of
the steps, and step T of one unroll is step 0 of the next. Arrays are time-major. `T` is the unroll
length, `B` the number of columns (unrolls) of a batch, `N` the environments of one actor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from impala.agents.agent import Agent
    from suites.suite import Spec


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
    instruction: Tensor | tuple[()] = ()  # int32 [..., L]: word ids, 0 is padding; () if none

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


@dataclass(frozen=True)
class Field:
    """One array of a trajectory: [rows, columns, *shape], or [columns, *shape] if `rows` is 0."""

    rows: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def empty_step(frame_shape: tuple[int, ...], size: int, instruction_length: int = 0) -> Step:
    """A row of zeros for `size` environments."""
    words = torch.zeros(size, instruction_length, dtype=torch.int32)
    return Step(
        frame=torch.zeros(size, *frame_shape, dtype=torch.uint8),
        reward=torch.zeros(size),
        terminated=torch.zeros(size, dtype=torch.bool),
        truncated=torch.zeros(size, dtype=torch.bool),
        truncation_value=torch.zeros(size),
        last_action=torch.zeros(size, dtype=torch.int64),
        instruction=words if instruction_length else (),
    )


def trajectory_layout(agent: Agent, spec: Spec, unroll_length: int) -> Trajectory:
    """A Trajectory of `Field`s, derived from one real act on the CPU.

    So a new field in an agent's outputs or core state changes no other file.
    """

    def field(rows: int) -> Callable[[Tensor], Field]:
        return lambda row: Field(rows, tuple(row.shape[1:]), row.dtype)

    step = empty_step(spec.frame_shape, 1, spec.instruction_length)
    state = agent.initial_state(1)
    with torch.inference_mode():
        outputs, _ = agent.act(step, state, torch.zeros(1, spec.num_actions))
    return Trajectory(
        steps=map_structure(field(unroll_length + 1), step),
        outputs=map_structure(field(unroll_length), outputs),
        core_state=map_structure(field(0), state),
        task=map_structure(field(0), step.last_action),
        version=map_structure(field(0), step.last_action),
    )


Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


def allocate(layout: Trajectory, columns: int, empty: Allocate | None = None) -> Trajectory:
    """Arrays of `layout` for `columns` unrolls, made by `empty(shape, dtype)`."""

    def make(field: Field) -> Tensor:
        rows = (field.rows,) if field.rows else ()
        shape = (*rows, columns, *field.shape)
        return empty(shape, field.dtype) if empty else torch.zeros(shape, dtype=field.dtype)

    return map_structure(make, layout)


def gather(storage: Trajectory, slots: Tensor, out: Trajectory) -> None:
    """Copies the columns `slots` (int64 [B]) of `storage` into `out`, which has B columns."""
    for part, sources, targets in zip(storage._fields, storage, out, strict=True):
        columns = 1 if part in ("steps", "outputs") else 0  # these have rows before them
        for source, target in zip(leaves(sources), leaves(targets), strict=True):
            torch.index_select(source, columns, slots, out=target)
