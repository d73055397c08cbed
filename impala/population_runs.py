"""The runs of a population's members on disk: how far they are, and what they go on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from impala.checkpoint import Checkpoints, read
from impala.population import FAILED, Member, Rule, Space, evolved, fitness
from impala.population_directory import PopulationDirectory, Record
from impala.population_member import inherited
from suites.score import Scoreboard


class PopulationRuns:
    """fitness_key: the metric of `scoreboard` that ranks members.

    scoreboard: of the suite that they play.
    """

    def __init__(
        self, directory: PopulationDirectory, fitness_key: str, scoreboard: Scoreboard
    ) -> None:
        self._directory = directory
        self._fitness_key = fitness_key
        self._scoreboard = scoreboard

    def frames(self, member: int) -> int | None:
        """Of the newest checkpoint of a member; None if it has none yet."""
        return self._checkpoints(member).newest_frames()

    def fitness(self, member: int) -> float | None:
        """By the newest checkpoint: a point of the same frames may be missing, if it was killed."""
        state = self._state(member)
        if state is None:
            return None
        self._scoreboard.load_state_dict(state["scoreboard"])
        return fitness(self._scoreboard.metrics(), self._fitness_key)

    def pin(self, member: int, generation: int) -> str | None:
        """See `PopulationDirectory.pin`; None if there is no checkpoint."""
        numbered = self._checkpoints(member).numbered()
        return self._directory.pin(member, generation, numbered[-1]) if numbered else None

    def place(self, record: Record, donor: Record) -> None:
        """Has the member go on from its parent's checkpoint, if it has not gone on from it yet.

        donor: the parent's record of the same generation.
        """
        own = self._state(record.member)
        if own is not None and own["frames"] > record.frames:
            return
        state = read(self._directory.path / str(donor.checkpoint))
        self._checkpoints(record.member).save(inherited(own, state, record.frames))

    def seed_again(self, index: int, rule: Rule, space: Space, latest: dict[int, Record]) -> Record:
        """Has a member whose run has failed go on from another; for schedule=asynchronous.

        latest: newest record of each member. ValueError if all others have failed, too.
        """
        own, last = self._state(index), latest[index]
        frames = own["frames"] if own else 0
        members = [
            Member(i, FAILED if i == index else self.fitness(i), record.new)
            for i, record in latest.items()
            if i == index or self.frames(i) is not None
        ]
        change = evolved(index, members, rule, space, last.generation + 1, frames)
        record = Record(
            member=index,
            generation=last.generation + 1,
            frames=frames,
            parent=change.parent,
            parent_generation=latest[change.parent].generation,
            fitness=None,
            failed=True,
            old=last.new,
            new=change.values,
            checkpoint=None,
        )
        donor = self._checkpoints(change.parent).load()
        history = own["population"] if own else {"records": [], "compared_games": 0}
        state = inherited(own, donor, frames)
        state["population"] = {**history, "records": [*history["records"], record._asdict()]}
        self._checkpoints(index).save(state)
        return record

    def remove_unstarted(self, member: int) -> None:
        """What a run has left that was ended before its first checkpoint: it starts again."""
        shutil.rmtree(self._directory.member(member))

    def copy_best(self, member: int) -> Path:
        """The member's newest checkpoint as `best/`; returns that directory."""
        newest = self._checkpoints(member).numbered()[-1]
        best = self._directory.path / "best"
        (best / "checkpoints").mkdir(parents=True, exist_ok=True)
        temporary = best / "checkpoints" / ".last.pt"
        shutil.copyfile(newest, temporary)
        temporary.replace(best / "checkpoints" / "last.pt")
        return best

    def _state(self, member: int) -> dict[str, Any] | None:
        """ValueError if there are checkpoints and none can be read."""
        return None if self.frames(member) is None else self._checkpoints(member).load()

    def _checkpoints(self, member: int) -> Checkpoints:
        return Checkpoints(self._directory.member(member) / "checkpoints")
