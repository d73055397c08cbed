"""Whether a population that goes on is the one that it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from command_line import changeable
from run_directory import key_of


def changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What it has that is given otherwise now, by name. Both as `population.json` has it.

    What any run may change that is resumed, such as `num_actors` or `device`, is left out.
    """
    for key, value in now.items():
        before: Any = saved.get(key)
        if key == "overrides":
            yield from _changed_overrides(before or (), value)
        elif key == "space":
            rows, others = ({row["key"]: row for row in each} for each in (before, value))
            for name in {**rows, **others}:
                if rows.get(name) != others.get(name):
                    yield f"{name} is {_as_swept(rows.get(name))}"
        elif key == "rule":
            yield from (f"{name} is {before.get(name)}" for name in value
                        if before.get(name) != value[name])  # fmt: skip
        elif before != value:
            yield f"{key} is {before}"


def _changed_overrides(saved: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    old, new = ({line.partition("=")[0]: line for line in lines} for lines in (saved, now))
    for key in {**old, **new}:
        name = key_of(key)
        if old.get(key) != new.get(key) and name != "seed" and not changeable(name):
            yield f"{key} is {old[key].partition('=')[2] if key in old else 'as by default'}"


def _as_swept(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not swept"
    return "swept as " + " ".join(f"{k}={v}" for k, v in row.items() if k != "key")
