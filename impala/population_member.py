"""A run's place in a population: what it logs of it, and with whom it is compared while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from impala.checkpoint import read
from impala.population import (
    Change,
    Member,
    Rule,
    evolved,
    fitness,
    rank,
)
from impala.population_directory import (
    PopulationDirectory,
    Record,
    short,
    space_from_json,
    told,
)

log = logging.getLogger(__name__)

TRIES = 3  # to read a donor's checkpoint, which may be replaced by a newer one meanwhile


class PopulationMember:
    """See the module. Members know of each other only what is in the population's directory.

    setters: what can be changed while the run goes on, by the hyperparameter's key.
    """

    def __init__(
        self, *, directory: Path, member: int, setters: Mapping[str, Callable[[Any], None]]
    ) -> None:
        self._directory = PopulationDirectory(directory)
        self._index = member
        settings = self._directory.settings()
        self._fitness_key: str = settings["fitness"]
        self._games: int | None = settings.get("games")  # None: the sweeper compares members
        self._rule = Rule(**settings["rule"])
        self._space = space_from_json(settings["space"])
        self._setters = setters
        self._compared_games = 0
        self._records = [r for r in self._directory.lineage() if r.member == member]
        if self._games is not None:  # what happened since the start is in the run's checkpoint
            del self._records[1:]
        self._rank = self._ranked()

    def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """`population/...`, given the other metrics of a point."""
        record, own = self._records[-1], fitness(metrics, self._fitness_key)
        result = {"generation": float(record.generation)}
        if own is not None:
            result["fitness"] = own
        if self._rank is not None:
            result["rank"] = float(self._rank)
        if record.parent is not None:
            result["parent"] = float(record.parent)
        for key, value in record.new.items():
            if not isinstance(value, str):
                result[short(key, record.new)] = float(value)
        return {f"population/{name}": value for name, value in result.items()}

    # With schedule=asynchronous

    def due(self, games: int) -> bool:
        """Whether it is time to compare, `games` having been finished since the run began."""
        return self._games is not None and games >= self._compared_games + self._games

    def compared(
        self, frames: int, games: int, metrics: Mapping[str, float], checkpoint: Path
    ) -> dict[str, Any] | None:
        """Lets others copy this member as it is, and may copy one of them.

        checkpoint: of now. Returns the state of the member whose weights are to be taken, if one
        is; then `apply` sets the hyperparameters. The next checkpoint has what was decided.
        """
        self._compared_games = games
        last = self._records[-1]
        generation = last.generation + 1
        pinned = self._directory.pin(self._index, generation, checkpoint)
        own = Member(self._index, fitness(metrics, self._fitness_key), last.new)
        state, parent, change = self._change(own, generation, frames)
        record = Record(
            member=self._index,
            generation=generation,
            frames=frames,
            parent=change.parent,
            parent_generation=parent.generation - 1 if parent else last.generation,
            fitness=own.fitness,
            failed=False,
            old=last.new,
            new=change.values,
            checkpoint=pinned,
        )
        self._records.append(record)
        self._rank = self._ranked()
        log.info("%s", told(record))
        return state

    def apply(self) -> None:
        """Makes the learner use the hyperparameters of the newest generation."""
        if self._games is None:
            return  # the command line has them
        for key, value in self._records[-1].new.items():
            self._setters[key](value)

    def state_dict(self) -> dict[str, Any]:
        records = [record._asdict() for record in self._records[1:]]
        return {"records": records, "compared_games": self._compared_games}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._games is not None:
            self._records[1:] = [Record(**record) for record in state["records"]]
            self._compared_games = state["compared_games"]
            self._rank = self._ranked()
            self.apply()

    def commit(self) -> None:
        """A checkpoint has what was decided: now others are told."""
        if self._games is not None:
            self._directory.write_lineage(self._records, self._index)

    def _change(
        self, own: Member, generation: int, frames: int
    ) -> tuple[dict[str, Any] | None, Record | None, Change]:
        """With the state and the record of the parent, if it is another."""
        for _ in range(TRIES):
            latest = {
                index: record
                for index, record in self._directory.latest().items()
                if index != self._index and record.checkpoint is not None
            }
            others = [Member(i, record.fitness, record.old) for i, record in latest.items()]
            change = evolved(
                self._index, [own, *others], self._rule, self._space, generation, frames
            )
            if change.parent == self._index:
                return None, None, change
            parent = latest[change.parent]
            path = self._directory.path / str(parent.checkpoint)
            try:
                return read(path), parent, change
            except Exception as error:  # PyTorch raises many kinds
                log.warning(
                    "the checkpoint %s of member %d cannot be read (%s: %s)",
                    path, parent.member, type(error).__name__, error,
                )  # fmt: skip
        log.warning("no other member is copied this time")
        return None, None, evolved(
            self._index, [own], self._rule, self._space, generation, frames
        )  # fmt: skip

    def _ranked(self) -> int | None:
        """By the fitness with which each was last compared; in rounds, all at one instant."""
        latest = self._directory.latest().values()
        others = [record.scored for record in latest if record.member != self._index]
        return rank(self._records[-1].scored, others)


def inherited(
    own: Mapping[str, Any] | None, donor: Mapping[str, Any], frames: int
) -> dict[str, Any]:
    """The checkpoint of a member that copies another.

    Weights, optimizer and the last games of each task, which these weights have played, are the
    donor's: the member's fitness is the donor's until games of its own push those out. All else is
    its own: frames, and with them the schedule, updates, time, counts of games and faults.

    own: None if the member has failed before its first checkpoint.
    """
    if own is None:
        others = "games", "points", "population"
        state = {key: value for key, value in donor.items() if key not in others}
        none = [0 for _ in donor["scoreboard"]["games"]]
        return {
            **state,
            "frames": frames,
            "updates": 0,
            "time_s": 0.0,
            "faults": {},
            "learner": {**donor["learner"], "skipped": 0},
            "scoreboard": {**donor["scoreboard"], "games": none},
        }
    return {
        **own,
        "frames": frames,
        "learner": {**donor["learner"], "skipped": own["learner"]["skipped"]},
        "scoreboard": {**donor["scoreboard"], "games": own["scoreboard"]["games"]},
    }
