"""The runs of a population's members on disk: how far they are, and what they go on from."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from impala.checkpoint import Checkpoints, read
from impala.population import FAILED, Member, Rule, evolved, fitness
from impala.population_directory import PopulationDirectory, Record, space_from_json
from impala.population_member import TRIES, inherited
from suites.score import Scoreboard

log = logging.getLogger(__name__)


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
        return _checkpoints(self._directory, member)


def seed_again(directory: PopulationDirectory, index: int) -> Record | None:
    """Has a member whose run has failed go on from another, while the others play on; for
    schedule=asynchronous. Only the member's own files are written.

    It takes one that has published a checkpoint; before anybody has, one that has any, whose
    fitness is not known yet. None if there is none that can be read: then nothing is changed.
    """
    settings = directory.settings()
    rule, space = Rule(**settings["rule"]), space_from_json(settings["space"])
    folder = _checkpoints(directory, index)
    own = folder.load() if folder.newest_frames() is not None else None
    # What was decided is in the checkpoint; others are told after it.
    first = next(r for r in directory.lineage() if r.member == index)
    history = own["population"] if own else {"records": [], "compared_games": 0}
    records = [first, *(Record(**record) for record in history["records"])]
    last, frames = records[-1], own["frames"] if own else 0
    failed = Member(index, FAILED, last.new)
    for _ in range(TRIES):
        others = {i: record for i, record in directory.latest().items() if i != index}
        members = [Member(i, r.fitness, r.old) for i, r in others.items() if r.checkpoint] or [
            Member(i, None, r.new)
            for i, r in others.items()
            if _checkpoints(directory, i).newest_frames() is not None
        ]
        if not members:
            return None
        change = evolved(index, [failed, *members], rule, space, last.generation + 1, frames)
        parent = others[change.parent]
        try:
            donor = _donor(directory, parent)
            break
        except Exception as error:  # PyTorch raises many kinds
            log.warning(
                "no checkpoint of member %d can be read (%s: %s)",
                parent.member, type(error).__name__, error,
            )  # fmt: skip
    else:
        return None
    record = Record(
        member=index,
        generation=last.generation + 1,
        frames=frames,
        parent=change.parent,
        parent_generation=parent.generation - 1 if parent.checkpoint else parent.generation,
        fitness=None,
        failed=True,
        old=last.new,
        new=change.values,
        checkpoint=None,
    )
    state = inherited(own, donor, frames)
    records.append(record)
    history = {**history, "records": [each._asdict() for each in records[1:]]}
    folder.save({**state, "population": history})
    directory.write_lineage(records, index)
    return record


def _donor(directory: PopulationDirectory, parent: Record) -> dict[str, Any]:
    """The state that the parent has published, or else its newest."""
    if parent.checkpoint:
        return read(directory.path / parent.checkpoint)
    return _checkpoints(directory, parent.member).load()


def _checkpoints(directory: PopulationDirectory, member: int) -> Checkpoints:
    return Checkpoints(directory.member(member) / "checkpoints")
