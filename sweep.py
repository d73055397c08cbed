"""A sweep's files: which jobs it has, what became of each, and the table of them.

In the sweep's directory:

    sweep.json    the jobs, their names and overrides
    <n>/job.json  what became of job n, written by the process that runs it
    summary.csv   the same as a table, written anew whenever a job begins or ends
    .stop         while it is there no further job begins; it says why
    .failed       of a population: too many members have failed, and the others end, too

Jobs may run anywhere that sees the directory. Files that are read are always whole.
"""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import io
import json
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from command_line import RunFailed
from impala.whole_file import write_whole
from impala.words import per_cent
from run_directory import shown

COLUMNS = ("job", "overrides", "score", "state", "directory", "error")


@dataclass(frozen=True)
class Job:
    number: int  # from 0, also the name of its directory
    name: str  # the overrides that not all jobs of the sweep have
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """directory: of the sweep. host, pid: of the program that runs it."""

    directory: Path
    jobs: tuple[Job, ...]
    on_error: str  # continue | stop
    host: str
    pid: int

    def job_dir(self, number: int) -> Path:
        return self.directory / str(number)


@dataclass(frozen=True)
class JobState:
    """What became of a job.

    state: not run, running, finished, failed, interrupted (a signal ended it in order), killed.
    score: the suite's headline score in per cent.
    run_dir: of the run that it trains or evaluates, if that is not the job's own directory.
    accelerator: the device that its process has, as `CUDA_VISIBLE_DEVICES` names it.
    """

    state: str = "not run"
    score: float | None = None
    error: str | None = None
    name: str | None = None
    run_dir: str | None = None
    host: str | None = None
    pid: int | None = None
    accelerator: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether its process is one of this machine that has not ended."""
        return self.host == socket.gethostname() and self.pid is not None and _alive(self.pid)


def named_jobs(overrides: Sequence[Sequence[str]]) -> tuple[Job, ...]:
    """Jobs with these overrides, each named after what sets it apart from the others."""
    count = Counter(override for each in overrides for override in set(each))
    jobs = []
    for number, each in enumerate(overrides):
        apart = [override for override in each if count[override] < len(overrides)]
        jobs.append(Job(number, " ".join(apart or each) or str(number), tuple(each)))
    return tuple(jobs)


def write_sweep(sweep: Sweep) -> None:
    content = {
        "host": sweep.host,
        "pid": sweep.pid,
        "on_error": sweep.on_error,
        "jobs": [{"name": job.name, "overrides": job.overrides} for job in sweep.jobs],
    }
    write_whole(sweep.directory / "sweep.json", json.dumps(content, indent=2) + "\n")


def read_sweep(directory: Path) -> Sweep:
    """Raises FileNotFoundError, or ValueError where the file is not one of a sweep."""
    path = directory / "sweep.json"
    try:
        content = json.loads(path.read_text())
        jobs = tuple(
            Job(number, job["name"], tuple(job["overrides"]))
            for number, job in enumerate(content["jobs"])
        )
        if not jobs:
            raise ValueError("it has no jobs")
        return Sweep(directory, jobs, content["on_error"], content["host"], content["pid"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{shown(path)} is damaged and cannot be read: {error!r}") from error


def write_state(job_dir: Path, state: JobState) -> None:
    write_whole(job_dir / "job.json", json.dumps(dataclasses.asdict(state), indent=2) + "\n")


def read_state(job_dir: Path) -> JobState:
    """As it is now: a job that was running in a process of this machine that has ended is killed.

    Raises ValueError where the file is damaged.
    """
    path = job_dir / "job.json"
    try:
        state = JobState(**json.loads(path.read_text()))
    except FileNotFoundError:
        return JobState()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{shown(path)} is damaged and cannot be read: {error}") from error
    if state.state == "running" and state.host == socket.gethostname() and not state.is_here:
        return dataclasses.replace(state, state="killed", error="its process was killed")
    return state


def read_states(sweep: Sweep) -> list[JobState]:
    return [read_state(sweep.job_dir(job.number)) for job in sweep.jobs]


def run_name(run_dir: Path) -> str:
    """What a run is called: as a job of a sweep by its overrides, else as its directory."""
    return read_state(run_dir).name or run_dir.name


@contextmanager
def changing(directory: Path) -> Iterator[None]:
    """While the states of a sweep's jobs are changed: one process at a time."""
    with (directory / ".changing").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def writing(sweep: Sweep) -> Iterator[None]:
    """While a job's state changes, and after it the summary."""
    with changing(sweep.directory):
        yield
        write_summary(sweep)


def stop(directory: Path, reason: str) -> None:
    """No further job of the sweep begins."""
    write_whole(directory / ".stop", reason)


def check_not_stopped(directory: Path, job_dir: Path) -> None:
    """Before a job begins. RunFailed if the sweep was stopped."""
    if (directory / ".stop").exists():
        with suppress(OSError):  # it has something in it: the job has run before
            job_dir.rmdir()
        reason = (directory / ".stop").read_text()
        raise RunFailed(f"job {job_dir.name} is not run: {reason}")


def clear(job_dir: Path, *more: str) -> None:
    """Of a job that begins anew, because it had no checkpoint: its log stays.

    more: names of files to remove, too.
    """
    if (job_dir / "checkpoints" / "last.pt").exists():
        return
    for name in ("config.yaml", "metrics.jsonl", "episodes.jsonl", "summary.json", *more):
        (job_dir / name).unlink(missing_ok=True)
    shutil.rmtree(job_dir / "wandb", ignore_errors=True)


def rows(sweep: Sweep) -> list[dict[str, str]]:
    """A row of `COLUMNS` for each job."""
    return [
        {
            "job": str(job.number),
            "overrides": " ".join(job.overrides),
            "score": "" if state.score is None else f"{state.score:.6g}",
            "state": state.state,
            "directory": shown(Path(state.run_dir or sweep.job_dir(job.number))),
            "error": state.error or "",
        }
        for job, state in zip(sweep.jobs, read_states(sweep), strict=True)
    ]


def write_summary(sweep: Sweep) -> None:
    """`summary.csv`. Only while `changing`, so that no older table replaces a newer one."""
    write_table(sweep.directory / "summary.csv", COLUMNS, rows(sweep))


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    """A CSV file, whole at any moment."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def table(sweep: Sweep) -> Table:
    """For people: what sets the jobs apart, and what became of them."""
    shown_table = Table(title=f"{shown(sweep.directory)}: {in_words(sweep)}")
    for column in COLUMNS[:-1]:  # an error is too long: see `reasons`
        shown_table.add_column(column, overflow="fold")
    for job, row in zip(sweep.jobs, rows(sweep), strict=True):
        score = f"{per_cent(float(row['score']))} %" if row["score"] else "-"
        shown_table.add_row(row["job"], job.name, score, row["state"], row["directory"])
    return shown_table


def show(for_people: Table) -> None:
    """Prints it; where there is no screen, as wide as it is, so that words can be copied."""
    Console(width=None if sys.stdout.isatty() else 500).print(for_people)


def reasons(sweep: Sweep) -> list[str]:
    """A line for each job that says why it did not finish."""
    return [
        f"job {job.number} ({job.name}) {state.state}: {state.error}"
        for job, state in zip(sweep.jobs, read_states(sweep), strict=True)
        if state.error
    ]


def in_words(sweep: Sweep) -> str:
    """Such as "2 finished, 1 failed"."""
    count = Counter(state.state for state in read_states(sweep))
    return ", ".join(f"{number} {state}" for state, number in count.items())


def accelerators(visible: str | None, count: int) -> list[str]:
    """Names of devices, for `CUDA_VISIBLE_DEVICES`. visible: its value now, or None.

    count: of the devices that this process could use.
    """
    if visible is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in visible.split(",") if name.strip()][:count]


def accelerator_for(job_process: int, names: Sequence[str], states: Sequence[JobState]) -> str:
    """The device for a process of this machine: its own, else the one that fewest others have.

    A process keeps its device for good: CUDA looks at `CUDA_VISIBLE_DEVICES` once.
    """
    owned = {state.pid: state.accelerator for state in states if state.is_here}
    if own := owned.get(job_process):
        return own
    taken = Counter(owned.values())
    return min(names, key=lambda name: taken[name])


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
