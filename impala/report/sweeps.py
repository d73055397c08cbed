"""What became of the jobs of a sweep, also of those that left no run to show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from impala.report.checked_json import number, read_object, read_or_name, text

FAILED = ("failed", "killed", "interrupted")


class Job(NamedTuple):
    """state: as `job.json` says, "not run" where there is none. error: why it failed, or empty."""

    number: int
    name: str
    state: str
    score: float | None  # headline score, per cent
    error: str


@dataclass(frozen=True)
class Sweep:
    directory: Path
    jobs: list[Job]

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def failures(self) -> list[str]:
        """A line for each job that did not come to its end."""
        return [
            " ".join(
                f"job {job.number} of {self.name} ({job.name}) {job.state}: {job.error}".split()
            )
            for job in self.jobs
            if job.state in FAILED
        ]

    @property
    def in_words(self) -> str:
        """Such as "2 finished, 1 failed"."""
        count = Counter(job.state for job in self.jobs)
        return ", ".join(f"{number} {state}" for state, number in count.items())


def find_sweeps(paths: Iterable[Path]) -> tuple[list[Sweep], list[str]]:
    """All in and below `paths`, each once, and what is to be said of damaged files."""
    directories = {
        file.parent: None for path in paths for file in sorted(path.resolve().rglob("sweep.json"))
    }
    damaged: list[str] = []
    sweeps = [_read(directory, damaged) for directory in directories]
    return [sweep for sweep in sweeps if sweep is not None], damaged


def _read(directory: Path, damaged: list[str]) -> Sweep | None:
    try:
        content = read_object(directory / "sweep.json", {"jobs": _jobs})
    except ValueError as error:
        damaged.append(f"{directory / 'sweep.json'}: {error}")
        return None
    names = [job["name"] for job in content["jobs"]]
    return Sweep(directory, [_job(directory, i, name, damaged) for i, name in enumerate(names)])


def _job(directory: Path, index: int, name: str, damaged: list[str]) -> Job:
    found = read_or_name(
        directory / str(index) / "job.json", damaged, {"state": text},
        {"score": number, "error": text},
    )  # fmt: skip
    if found is None:
        return Job(index, name, "not run", None, "")
    # A process that was killed could not write it down.
    state = "running or killed" if found["state"] == "running" else found["state"]
    return Job(index, name, state, found.get("score"), found.get("error") or "")


def _jobs(value: Any) -> bool:
    """a list of objects with a name"""
    return isinstance(value, list) and all(
        isinstance(job, dict) and text(job.get("name")) for job in value
    )
