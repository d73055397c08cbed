"""Who copied whom, at a glance: a table of one generation of a population."""

from __future__ import annotations

import math
from collections.abc import Collection

from rich.table import Table

from impala.population_directory import Record, short, shown_change


def generation_table(records: Collection[Record], title: str) -> Table:
    """The fittest first, by what they reached before it; then those without a fitness."""
    table = Table(title=title)
    keys = list(next(iter(records)).new)
    for column in ("member", "fitness", "copied from", *(short(key, keys) for key in keys)):
        table.add_column(column, overflow="fold")
    for record in sorted(records, key=lambda r: math.inf if r.fitness is None else -r.fitness):
        fitness = "failed" if record.failed else "-"
        table.add_row(
            str(record.member),
            fitness if record.fitness is None else f"{record.fitness:.1f}",
            str(record.parent) if record.copied else "",
            *(shown_change(record.old.get(key), record.new[key]) for key in keys),
        )
    return table
