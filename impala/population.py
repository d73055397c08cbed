"""Population-based training by the rule of Espeholt et al. 2018, appendix F.

Pure functions on a list of members: who copies whom, and what becomes of the hyperparameters.
Chance is a function of the seed, the generation and the member, so that a population that is
resumed goes on as it would have done.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Value = float | int | str | bool
Values = dict[str, Value]  # of each hyperparameter, by its key

FAILED = -math.inf  # the fitness of a member whose run has failed


@dataclass(frozen=True)
class Interval:
    """A number in [low, high]; a perturbation multiplies it and stays within.

    log: starting values are drawn evenly on a logarithmic scale. Needs 0 < low.
    integer: whole numbers; one that is multiplied changes by 1 at least.
    starts: if not empty, one of these is the starting value.
    """

    key: str
    low: float
    high: float
    log: bool = False
    integer: bool = False
    starts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(
                f"{self.key}: interval({self.low:g}, {self.high:g}) has no number in it: expected"
                " interval(low, high) with low < high"
            )
        if self.integer and math.ceil(self.low) > math.floor(self.high):
            raise ValueError(
                f"{self.key}: int(interval({self.low:g}, {self.high:g})) has no whole number in it"
            )
        if self.log and self.low <= 0:
            raise ValueError(
                f"{self.key}: interval({self.low:g}, {self.high:g}) on a logarithmic scale:"
                " expected both ends above 0"
            )

    @property
    def ends(self) -> tuple[Value, Value]:
        return self._fitted(self.low), self._fitted(self.high)

    def start(self, rng: np.random.Generator) -> Value:
        if self.starts:
            return self._fitted(float(rng.choice(self.starts)))
        if self.log:
            return self._fitted(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return self._fitted(float(rng.uniform(self.low, self.high)))

    def perturbed(self, value: Value, up: bool, factor: float) -> Value:
        moved = float(value) * (factor if up else 1.0 / factor)
        if self.integer and round(moved) == value:
            moved = float(value) + (1 if up else -1)
        return self._fitted(moved)

    def _fitted(self, number: float) -> Value:
        if self.integer:
            return min(max(round(number), math.ceil(self.low)), math.floor(self.high))
        return min(max(number, self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """One of several values; a perturbation steps to the one before or after, and not further."""

    key: str
    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if len(set(self.values)) < 2:
            raise ValueError(f"{self.key}: expected two different values at least to choose from")

    @property
    def ends(self) -> tuple[Value, Value]:
        return self.values[0], self.values[-1]

    def start(self, rng: np.random.Generator) -> Value:
        return self.values[int(rng.integers(len(self.values)))]

    def perturbed(self, value: Value, up: bool, factor: float) -> Value:
        position = self.values.index(value) + (1 if up else -1)
        return self.values[min(max(position, 0), len(self.values) - 1)]


Hyperparameter = Interval | Choice
Space = Sequence[Hyperparameter]


class Member(NamedTuple):
    index: int
    fitness: float | None  # None: not known yet, as not all tasks have a finished game
    values: Values  # of the hyperparameters by which this fitness was reached


class Change(NamedTuple):
    """What a member goes on with."""

    parent: int  # whose weights: its own index, if it copies nobody
    values: Values


@dataclass(frozen=True)
class Rule:
    """How a population evolves. Raises ValueError for what is out of range.

    selection: a name of `SELECTIONS`.
    threshold: of "tournament": by how much the other has to be better, in the fitness's unit.
    quantile: of "truncation": the share of members that copy, and that are copied.
    perturb_probability, perturb_factor: of each hyperparameter, by itself.
    burn_in_frames: of a member; before, it goes on unchanged.
    """

    selection: str = "tournament"
    threshold: float = 5.0
    quantile: float = 0.2
    perturb_probability: float = 0.33
    perturb_factor: float = 1.2
    burn_in_frames: int = 20_000_000
    seed: int = 1

    def __post_init__(self) -> None:
        if self.selection not in SELECTIONS:
            wanted = " or ".join(SELECTIONS)
            raise ValueError(f"selection={self.selection}: expected {wanted}")
        for name, low, high, wanted in (
            ("threshold", 0, math.inf, "a number, at least 0"),
            ("quantile", sys.float_info.min, 0.5, "a number above 0 and at most 0.5"),
            ("perturb_probability", 0, 1, "a number from 0 to 1"),
            ("perturb_factor", math.nextafter(1, 2), math.inf, "a number above 1"),
            ("burn_in_frames", 0, math.inf, "a number, at least 0"),
            ("seed", 0, math.inf, "a whole number, at least 0"),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (is_number and low <= value <= high):
                raise ValueError(f"{name}={value}: expected {wanted}")


def starting_values(space: Space, seed: int, member: int) -> Values:
    """A draw from the priors."""
    rng = _rng(seed, 0, member)
    return {hyperparameter.key: hyperparameter.start(rng) for hyperparameter in space}


def member_seed(seed: int, member: int) -> int:
    """Of a member's run: far from all others', since a run adds its frames to its seed."""
    sequence = np.random.SeedSequence(seed, spawn_key=(member,))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def evolved(
    index: int, population: Sequence[Member], rule: Rule, space: Space, generation: int, frames: int
) -> Change:
    """What member `index` goes on with in this generation.

    It copies the weights and hyperparameters of another or it does not, as `rule.selection` says.
    In both cases each hyperparameter is then perturbed with a certain probability. A member whose
    fitness is not known waits, and so does everyone in burn-in. One that has failed copies one
    that has not, of those with a known fitness if there are any.

    ValueError if it has failed and so have all others.
    """
    member = next(member for member in population if member.index == index)
    others = [other for other in population if other.index != index and other.fitness != FAILED]
    failed = member.fitness == FAILED
    if failed and not others:
        raise ValueError(f"member {index} has failed, and there is none that it could copy")
    if not failed and (member.fitness is None or frames < rule.burn_in_frames):
        return Change(index, dict(member.values))
    rng = _rng(rule.seed, generation, index)
    drawn, draws = rng.random(), rng.random((len(space), 2))
    ranked = [other for other in others if other.fitness is not None]
    if ranked or not failed:
        parent = SELECTIONS[rule.selection](member, ranked, rule, drawn) or member
    else:
        parent = others[int(drawn * len(others))]
    values = {
        hyperparameter.key: hyperparameter.perturbed(
            parent.values[hyperparameter.key], bool(up < 0.5), rule.perturb_factor
        )
        if perturb < rule.perturb_probability
        else parent.values[hyperparameter.key]
        for hyperparameter, (perturb, up) in zip(space, draws, strict=True)
    }
    return Change(parent.index, values)


def tournament(member: Member, others: Sequence[Member], rule: Rule, drawn: float) -> Member | None:
    """One other, drawn evenly, if it is better by more than the threshold; the paper's."""
    if not others:
        return None
    other = others[int(drawn * len(others))]
    return other if _fitness(other) > _fitness(member) + rule.threshold else None


def truncation(member: Member, others: Sequence[Member], rule: Rule, drawn: float) -> Member | None:
    """One of the best, drawn evenly, if the member is among the worst (Jaderberg et al. 2017).

    Worst and best are the quantile of the members that are ranked, one at least. Of equal members
    the one of the lower index is taken for the better one.
    """
    if not others:
        return None
    best_first = sorted([*others, member], key=lambda m: (-_fitness(m), m.index))
    number = max(1, math.floor(rule.quantile * len(best_first)))
    if best_first.index(member) < len(best_first) - number and member.fitness != FAILED:
        return None
    best = [other for other in best_first[:number] if other is not member]
    return best[int(drawn * len(best))]


SELECTIONS: Mapping[
    str, Callable[[Member, Sequence[Member], Rule, float], Member | None]
] = {"tournament": tournament, "truncation": truncation}  # fmt: skip


def fitness(metrics: Mapping[str, Any], key: str) -> float | None:
    """The metric `key` of a point, or None where not all tasks have a finished game yet."""
    value = metrics.get(key)
    if metrics.get("score/coverage") != 1.0 or value is None or not math.isfinite(value):
        return None
    return float(value)


def rank(fitness: float | None, others: Sequence[float | None]) -> int | None:
    """1 is the best; None without a fitness."""
    if fitness is None:
        return None
    return 1 + sum(other is not None and other > fitness for other in others)


def best_first(members: Sequence[Member]) -> list[Member]:
    """Then those that have failed, then those whose fitness is not known."""
    return sorted(members, key=lambda member: (member.fitness is None, -(member.fitness or 0.0)))


def best(members: Sequence[Member]) -> Member | None:
    """None if no fitness is known."""
    ranked = [member for member in members if member.fitness not in (None, FAILED)]
    return next(iter(best_first(ranked)), None)


def _fitness(member: Member) -> float:
    assert member.fitness is not None
    return member.fitness


def _rng(seed: int, generation: int, member: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(generation, member)))
