"""Where runs go: directories that no two runs share, and the way back to them."""

from __future__ import annotations

import datetime
import fcntl
import os
import re
import shlex
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from impala.whole_file import naming

_made: list[Path] = []  # directories that this program made, outermost last


def new_run_dir(resume: str | int | None, parent: str, seed: int) -> str:
    """The directory to run in: the resumed one, or one made here, that no other run can have."""
    if resume is not None:
        return str(existing_run_dir(resume))
    return _new_directory(Path(parent), f"_seed{seed}")


def new_sweep_dir(resume: str | int | None, parent: str) -> str:
    """The directory of a sweep: the resumed one, or one made here; its jobs run in directories of
    it. FileNotFoundError if there is no such sweep.
    """
    if resume is None:
        return _new_directory(Path(parent), "")
    path = Path(str(resume)).expanduser()
    if not (path / "sweep.json").is_file():
        what = "has no sweep.json" if path.is_dir() else "is no directory"
        raise FileNotFoundError(
            f"sweep.resume={resume}: expected the directory of a sweep, but it {what}"
        )
    return str(path.resolve())


def remove_made() -> None:
    """The directories that were made here for a run or a sweep that is refused, as far as they are
    empty. Others stay, empty or not.
    """
    for path in sorted(_made, reverse=True):  # what is inside before it
        with suppress(OSError):
            path.rmdir()
    _made.clear()


def existing_run_dir(resume: str | int) -> Path:
    """The directory that `resume` names, links followed. FileNotFoundError if it is not a run's."""
    path = Path(str(resume)).expanduser()
    if not (path / "config.yaml").is_file():
        what = "has no config.yaml" if path.is_dir() else "is a file"
        raise FileNotFoundError(
            f"resume={resume}: expected the directory of a run, but it"
            f" {what if path.exists() else 'does not exist'}"
        )
    return path.resolve()


def claimed(run_dir: Path, what: str = "trained") -> IO[str]:
    """A file that is locked while it is open, so that only one program trains the run.

    The system gives it up with the program, whatever ends that. ValueError if another has it.

    what: "trained" or "evaluated"; one program can do this while another does that.
    """
    path = run_dir / {"trained": ".lock", "evaluated": "evaluation/.lock"}[what]
    path.parent.mkdir(exist_ok=True)
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another program"
        file.close()
        raise ValueError(f"{shown(run_dir)} is being {what} by {owner}: stop that first") from None
    with naming(path):
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()
    return file


def is_job_of_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def sweep_name() -> str | None:
    """What the jobs of a sweep have in common; null for a single run, or where none runs yet."""
    return Path(HydraConfig.get().sweep.dir).name if is_job_of_sweep() else None


def job_type() -> str:
    """What a run is for: it may be a member of a population."""
    is_member = is_job_of_sweep() and (
        HydraConfig.get().runtime.choices.get("hydra/sweeper") == "population"
    )
    return "member" if is_member else "train"


def link_latest(run_dir: Path) -> None:
    """`latest`, beside the runs, leads to the one that began last; a sweep's jobs have none."""
    if is_job_of_sweep():
        return
    temporary = run_dir.parent / f".latest.{run_dir.name}"
    temporary.symlink_to(run_dir.name)
    os.replace(temporary, run_dir.parent / "latest")


def shown(path: Path) -> str:
    """`path` from the working directory where it is below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def resume_command(run_dir: Path, *overrides: str, key: str = "resume") -> str:
    """A line for the shell that goes on with the run."""
    return shlex.join(["python", "launch.py", *overrides, f"{key}={quoted(shown(run_dir))}"])


def as_started(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line; where it goes on with a population, which is more than its
    jobs, with all that the population was started with and that is not given anew.

    ValueError if its directory does not say that any more.
    """
    given = {key_of(each): each for each in arguments if not each.startswith("-")}
    sweeper = given.get("hydra/sweeper", "").partition("=")[2]
    if not {"-m", "--multirun"} & {*arguments} or sweeper not in ("", "population"):
        return [*arguments]
    resume = given.get("sweep.resume", "").partition("=")[2].strip("'\"")
    directory = Path(resume).expanduser()
    if not resume or not (directory / "population.json").exists():
        return [*arguments]
    path = directory / "multirun.yaml"
    try:
        saved: Any = OmegaConf.to_container(OmegaConf.load(path))
        started = [*saved["hydra"]["overrides"]["hydra"], *saved["hydra"]["overrides"]["task"]]
    except Exception as error:  # of the file, the YAML reader, and what is in it
        raise ValueError(
            f"{shown(path)} does not say what the population was started with"
            f" ({type(error).__name__}): give the whole command with hydra/sweeper=population, and"
            f" sweep.resume={resume}"
        ) from error
    here = ("hydra.mode", "hydra.sweep.dir", "sweep.resume")
    return [*arguments, *(each for each in started if key_of(each) not in (*given, *here))]


def key_of(override: str) -> str:
    """Of a line such as `+key=value`: the key."""
    return override.partition("=")[0].lstrip("+~")


def quoted(path: str) -> str:
    """As a value in Hydra's grammar."""
    if re.fullmatch(r"[\w/.+-]+", path):  # what it reads without quotes
        return path
    return '"' + path.replace('"', '\\"') + '"'


def _new_directory(parent: Path, suffix: str) -> str:
    while True:
        now = datetime.datetime.now()
        stamp = f"{now:%Y-%m-%d_%H-%M-%S}_{now.microsecond // 1000:03d}"
        path = parent / f"{stamp}{suffix}"
        missing = [p for p in (path.absolute(), *path.absolute().parents) if not p.exists()]
        try:
            path.mkdir(parents=True)
            _made.extend(missing)
        except FileExistsError:  # another began in the same millisecond
            continue
        return str(path)


for _resolver in (
    new_run_dir,
    new_sweep_dir,
    sweep_name,
    job_type,
):  # that conf/ calls by these names
    OmegaConf.register_new_resolver(
        _resolver.__name__,
        _resolver,
        use_cache=_resolver in (new_run_dir, new_sweep_dir),
        replace=True,
    )
