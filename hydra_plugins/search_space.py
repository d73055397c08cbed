"""From Hydra's sweep grammar to the hyperparameters of a population and their priors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from impala.population import Choice, Hyperparameter, Interval, Value


def split(overrides: Sequence[Override]) -> tuple[list[Hyperparameter], list[str]]:
    """What is swept, and the overrides that all members have. Of the same key the last counts.

    ValueError for what cannot be read as a search space.
    """
    by_key = {override.get_key_element(): override for override in overrides}
    swept = [hyperparameter(o) for o in by_key.values() if o.is_sweep_override()]
    return swept, [str(o.input_line) for o in by_key.values() if not o.is_sweep_override()]


def hyperparameter(override: Override) -> Hyperparameter:
    """- interval(a, b): a number, tag(log, interval(a, b)) on a logarithmic scale; whole with
      int(interval(a, b)) or tag(int, interval(a, b)).
    - choice(a, b, c) of numbers that are not all whole: one of them to start with, then any number
      between the least and the greatest, as the paper has it for RMSProp's epsilon.
    - choice(a, b, c) of whole numbers or words, and range(a, b): always one of these.
    """
    key, sweep = override.key_or_group, override.value()
    if isinstance(sweep, IntervalSweep):
        tags = sweep.tags - {"log", "int"}
        if tags:
            raise ValueError(f"{key}: tag {', '.join(sorted(tags))} is none of log, int")
        low, high = cast(float, sweep.start), cast(float, sweep.end)
        integer = "int" in sweep.tags or isinstance(low, int)
        return Interval(key, low, high, log="log" in sweep.tags, integer=integer)
    values = [_value(key, value) for value in override.sweep_iterator()]
    numbers = [value for value in values if type(value) in (int, float)]
    whole = all(type(value) is int for value in values)
    if whole or len(numbers) < len(values) or isinstance(sweep, RangeSweep):
        return Choice(key, tuple(values))
    starts = tuple(float(number) for number in numbers)
    if len(set(starts)) < 2:
        raise ValueError(f"{key}: expected two different values at least to choose from")
    return Interval(key, min(starts), max(starts), starts=starts)


def _value(key: str, value: object) -> Value:
    value = getattr(value, "text", value)  # of a quoted string
    if not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"{key}: {value} cannot be swept: expected numbers or words")
    return value
