"""What the members of a population know of each other: files in the population's directory.

    population.json       what the population is; written once
    lineage.jsonl         a line for each generation of each member: what it began with, and why
    <member>/             the run of a member, and with schedule=asynchronous its own lineage.jsonl
    donors/               checkpoints as they were when their member was scored
    best/                 the best member's checkpoint and configuration

Every file has one writer and is replaced as a whole, so that a reader sees an old one or a new one,
also over a shared file system. A checkpoint that somebody may still copy is pinned by a second
name, so that it outlives what its run keeps.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from impala.loggers.json_lines import read_points
from impala.population import FAILED, Choice, Interval, Space, Value, Values
from impala.whole_file import write_whole

PINNED = 2  # checkpoints of a member that stay: one may be read while the next is written


class Record(NamedTuple):
    """How a generation of a member began. Its weights are those of `parent`, of the generation
    `parent_generation`; of the member itself, one before, if it copied nobody."""

    member: int
    generation: int
    frames: int  # of the member when it began
    parent: int | None  # None for generation 0, which has new weights
    parent_generation: int | None
    fitness: float | None  # that the member's last generation has reached; None: not known
    failed: bool  # its run had failed
    old: Values  # of the last generation
    new: Values
    checkpoint: str | None  # of the member's last generation, below the population's directory

    @property
    def scored(self) -> float | None:
        """The fitness, with a failure as the worst."""
        return FAILED if self.failed else self.fitness

    @property
    def copied(self) -> bool:
        return self.parent not in (None, self.member)


class PopulationDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path

    def member(self, index: int) -> Path:
        """The directory of a member's run."""
        return self.path / str(index)

    # What the population is

    def exists(self) -> bool:
        return (self.path / "population.json").exists()

    def settings(self) -> dict[str, Any]:
        return json.loads((self.path / "population.json").read_text())

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        write_whole(self.path / "population.json", json.dumps(settings, indent=1) + "\n")

    # Its history

    def lineage(self) -> list[Record]:
        """By generation and member. A member's own file knows best of the member."""
        files = [self.path / "lineage.jsonl", *self.path.glob("*/lineage.jsonl")]
        found = {
            (record.generation, record.member): record for file in files for record in _read(file)
        }
        return [found[key] for key in sorted(found)]

    def latest(self) -> dict[int, Record]:
        """The newest record of each member."""
        return {record.member: record for record in self.lineage()}

    def write_lineage(self, records: Iterable[Record], member: int | None = None) -> None:
        """Of the population, or of one member."""
        folder = self.path if member is None else self.member(member)
        lines = (json.dumps(record._asdict(), allow_nan=False) + "\n" for record in records)
        write_whole(folder / "lineage.jsonl", "".join(lines))

    # Checkpoints that others may copy

    def pin(self, member: int, generation: int, checkpoint: Path) -> str:
        """Gives a checkpoint a second name; returns it. Those of long ago are let go."""
        folder = self.path / "donors"
        folder.mkdir(exist_ok=True)
        pinned = folder / f"{member}_{generation}.pt"
        temporary = folder / f".{pinned.name}"
        temporary.unlink(missing_ok=True)
        try:
            os.link(checkpoint, temporary)
        except OSError:  # this file system has no second names
            shutil.copyfile(checkpoint, temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(temporary, pinned)
        (folder / f"{member}_{generation - PINNED}.pt").unlink(missing_ok=True)
        return str(pinned.relative_to(self.path))


def space_as_json(space: Space) -> list[dict[str, Any]]:
    return [asdict(hyperparameter) for hyperparameter in space]


def space_from_json(rows: list[dict[str, Any]]) -> Space:
    return [
        Choice(row["key"], tuple(row["values"]))
        if "values" in row
        else Interval(**{**row, "starts": tuple(row["starts"])})
        for row in rows
    ]


def told(record: Record) -> str:
    """A line for the log."""
    fitness = "failed" if record.failed else "not known yet"
    if record.fitness is not None:
        fitness = f"{record.fitness:.1f}"
    copied = f" copies member {record.parent} and" if record.copied else ""
    values = ", ".join(
        f"{short(key, record.new)} {_shown(record.old[key])} -> {_shown(value)}"
        if record.old.get(key) != value
        else f"{short(key, record.new)} {_shown(value)}"
        for key, value in record.new.items()
    )
    return (
        f"member {record.member}, generation {record.generation}, fitness {fitness}:{copied} goes"
        f" on with {values}"
    )


def short(key: str, keys: Mapping[str, Value]) -> str:
    """The last part of a key, if no other one has the same."""
    name = key.rpartition(".")[2]
    return key if sum(other.endswith(f".{name}") for other in keys) > 1 else name


def _shown(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _read(path: Path) -> Iterator[Record]:
    """The records of a file, which may be gone by the time it is read."""
    with suppress(FileNotFoundError):
        yield from (Record(**point) for point in read_points(path))
