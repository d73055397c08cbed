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
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from impala.population import FAILED, Choice, Interval, Space, Value, Values
from impala.whole_file import write_whole

# What each population.json has, apart from numbers that may be null
SETTINGS = {"size": int, "fitness": str, "rule": dict, "space": list}
MEND = "Put back a copy of it, or train a new population in another directory"
MEND_OWN = "Remove it: the member's checkpoints have what it says"
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

    def is_one(self) -> bool:
        """Whether there is a population, if only what is left of one."""
        return self.exists() or (self.path / "lineage.jsonl").exists()

    def settings(self) -> dict[str, Any]:
        """ValueError if the file is missing or damaged."""
        path = self.path / "population.json"
        try:
            settings = json.loads(path.read_text())
            missing = [k for k, kind in SETTINGS.items() if not isinstance(settings.get(k), kind)]
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing, which says what the population is. {MEND}"
            ) from None
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: expected JSON, {error}. {MEND}") from error
        if missing:
            raise ValueError(f"{path} is damaged: wrong or missing: {', '.join(missing)}. {MEND}")
        return settings

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        write_whole(self.path / "population.json", json.dumps(settings, indent=1) + "\n")

    # Its history

    def lineage(self) -> list[Record]:
        """By generation and member. A member's own file knows best of the member.

        ValueError if a file is damaged, or a generation of a member is missing.
        """
        whole = self.path / "lineage.jsonl"
        records = list(_read(whole, MEND))
        for own in self.path.glob("*/lineage.jsonl"):
            records += _read(own, MEND_OWN)
        found = {(record.generation, record.member): record for record in records}
        if self.exists():
            newest = {member: generation for generation, member in sorted(found)}
            for member in range(self.settings()["size"]):
                for generation in range(newest.get(member, 0) + 1):
                    if (generation, member) not in found:
                        raise ValueError(
                            f"{whole} {'lacks' if whole.exists() else 'is missing, and with it'}"
                            f" generation {generation} of member {member}. {MEND}"
                        )
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
        f"{short(key, record.new)} {shown_change(record.old.get(key), value)}"
        for key, value in record.new.items()
    )
    return (
        f"member {record.member}, generation {record.generation}, fitness {fitness}:{copied} goes"
        f" on with {values}"
    )


def short(key: str, keys: Collection[str]) -> str:
    """The last part of a key, if no other one has the same."""
    name = key.rpartition(".")[2]
    return key if sum(other.endswith(f".{name}") for other in keys) > 1 else name


def shown_change(old: Value | None, new: Value) -> str:
    """Such as "0.001 -> 0.0012"; the new one alone if nothing has changed."""
    return _shown(new) if old in (None, new) else f"{_shown(old)} -> {_shown(new)}"


def _shown(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _read(path: Path, what_to_do: str) -> Iterator[Record]:
    """The records of a file, which may be gone by the time it is read.

    ValueError if a line is damaged, the last one too: the file is replaced as a whole, so that no
    crash can tear it. what_to_do: then.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("it ends in the middle")
            record = Record(**json.loads(line))
            if not (
                isinstance(record.member, int)
                and isinstance(record.generation, int)
                and isinstance(record.new, dict)
            ):
                raise TypeError("a value is of another type")
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is damaged: expected the generation of a member as JSON,"
                f" {error}. {what_to_do}"
            ) from error
        yield record
