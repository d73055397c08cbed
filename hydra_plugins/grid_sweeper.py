"""`python launch.py -m key=a,b`: a job for each combination of the values that are given."""

from __future__ import annotations

import copy
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import cast

import psutil
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import configure_log
from hydra.errors import InstantiationException
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from allowed_values import CHOICES
from command_line import RunFailed, changeable, configured
from hydra_plugins.launchers import jobs_at_once
from impala.population_directory import PopulationDirectory
from refusals import UsageError, explained
from run_directory import claimed, key_of, new_sweep_dir, quoted, remove_made, resume_command, shown
from supervisor import supervised
from sweep import (
    Job,
    Sweep,
    changing,
    clear,
    in_words,
    named_jobs,
    read_state,
    read_states,
    read_sweep,
    reasons,
    show,
    stop,
    table,
    write_summary,
    write_sweep,
)

log = logging.getLogger("sweep")

SUBDIR = "${hydra:job.num}"  # as conf/config.yaml has it


class GridSweeper(BasicSweeper):
    """A sweeper of Hydra's, for any launcher.

    All jobs are checked before the first begins. A job that fails does not stop the others, unless
    `sweep.on_error=stop`; the sweep then fails as a whole at its end. `sweep.resume` goes on with
    one that was stopped or killed.
    """

    def __init__(self, params: dict[str, str] | None = None) -> None:
        super().__init__(max_batch_size=None, params=params)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        super().setup(
            hydra_context=hydra_context,
            task_function=supervised,
            config=config,
        )

    def sweep(self, arguments: list[str]) -> None:
        assert self.config is not None
        try:
            directory = checked_directory(self.config)
            sweep, todo = self._planned(arguments, directory)
        except BaseException:
            remove_made()
            raise
        directory.mkdir(parents=True, exist_ok=True)
        with claimed(directory):
            self._run(sweep, todo)

    def _planned(self, arguments: list[str], directory: Path) -> tuple[Sweep, dict[int, list[str]]]:
        """The sweep, and the overrides of the jobs that are to be run, all of them checked."""
        assert self.config is not None
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        parsed = parser.parse_overrides([*self._parse_config(), *arguments])
        given = [o for o in parsed if not str(o.key_or_group).startswith("sweep.")]
        if wrong := [
            f"{o.input_line}: expected one value, for the whole sweep"
            for o in parsed if o not in given and o.is_sweep_override()
        ] + [
            f"{o.input_line}: has no list of values that a job could be run for each of;"
            " give values with commas between, choice(...) or range(...)"
            for o in given if o.is_sweep_override() and not o.is_discrete_sweep()
        ]:  # fmt: skip
            raise UsageError("; ".join(wrong))
        on_error = self.config.sweep.on_error
        if on_error not in CHOICES["sweep.on_error"]:
            raise UsageError(f"sweep.on_error={on_error}: expected continue or stop")
        hydra = self.config.hydra
        jobs_at_once(hydra.runtime.choices["hydra/launcher"], hydra.launcher)  # one at least
        (overrides,) = self.split_arguments(given, None)
        if not overrides:
            swept = ", ".join(str(o.input_line) for o in given if o.is_sweep_override())
            raise UsageError(f"{swept}: there are no values, and so there is no job")
        if self.config.sweep.resume is None:
            if (directory / "sweep.json").exists():
                raise UsageError(
                    f"{shown(directory)} has a sweep: give sweep.resume to go on with it, or"
                    " another hydra.sweep.dir"
                )
            jobs = named_jobs(overrides)
            todo = {job.number: list(job.overrides) for job in jobs}
        else:
            if len(overrides) > 1:
                raise UsageError("sweep.resume has its jobs already: no key may have many values")
            if (population := PopulationDirectory(directory)).is_one():
                population.settings()  # which may be what is wrong with it
                command = resume_command(directory, "-m", key="sweep.resume")
                raise UsageError(f"{shown(directory)} is a population: go on with {command}")
            if wrong := [each for each in overrides[0] if not changeable(key_of(each))]:
                raise UsageError(f"{', '.join(wrong)}: cannot change for jobs that were begun")
            before = read_sweep(directory)
            jobs = before.jobs
            if not any(o.key_or_group == "sweep.on_error" for o in parsed):
                on_error = before.on_error
            todo = {job.number: self._resumed(before, job, overrides[0]) for job in jobs}
            todo = {number: each for number, each in todo.items() if each is not None}
            if overrides[0] and not todo:
                raise UsageError(
                    f"{', '.join(overrides[0])}: the {len(jobs)} jobs of {shown(directory)} have"
                    " finished, and change no more. To train them for longer give their"
                    f" directories: resume={shown(directory)}/0,... total_frames=..."
                )
        sweep = Sweep(directory, jobs, on_error, socket.gethostname(), os.getpid())
        for number in todo:
            job = sweep.jobs[number]
            placed = self._placed(sweep, number, todo[number])
            name = f"job {job.number} ({job.name})"
            check(self.hydra_context, self.config, placed, sweep.job_dir(number), name)
        return sweep, todo

    def _resumed(self, sweep: Sweep, job: Job, given: list[str]) -> list[str] | None:
        """The overrides that the job goes on with; None if it is finished."""
        job_dir = sweep.job_dir(job.number)
        state = read_state(job_dir)
        if state.state == "finished":
            return None
        if state.state == "running" and state.is_here:
            raise UsageError(
                f"job {job.number} of {shown(sweep.directory)} is running as process {state.pid}:"
                " stop that first"
            )
        overrides = [*job.overrides, *given]
        if (job_dir / "checkpoints" / "last.pt").exists():
            overrides.append(f"resume={quoted(str(job_dir))}")
        return overrides

    def _placed(self, sweep: Sweep, number: int, overrides: list[str]) -> list[str]:
        """With the directory: Hydra would number the jobs of a resumed sweep anew."""
        where = [f"hydra.sweep.dir={quoted(str(sweep.directory))}", f"hydra.sweep.subdir={number}"]
        return [*overrides, *where]

    def _run(self, sweep: Sweep, todo: dict[int, list[str]]) -> None:
        assert self.config is not None
        for number in todo:
            clear(sweep.job_dir(number), "job.json")
        (sweep.directory / ".stop").unlink(missing_ok=True)
        write_sweep(sweep)
        OmegaConf.save(self.config, sweep.directory / "multirun.yaml")
        where, done = shown(sweep.directory), len(sweep.jobs) - len(todo)
        log.info(
            "sweep of %d jobs in %s%s", len(sweep.jobs), where, f", {done} finished" * bool(done)
        )
        if sweep.on_error == "stop":
            log.info("the first job that fails stops it (sweep.on_error=stop)")
        try:
            with passing_signals_on(sweep):
                self._launch(sweep, todo)
        finally:
            self._report(sweep)
        if unfinished := [s for s in read_states(sweep) if s.state != "finished"]:
            raise RunFailed(
                f"{len(unfinished)} of {len(sweep.jobs)} jobs did not finish: {in_words(sweep)}"
            )

    def _launch(self, sweep: Sweep, todo: dict[int, list[str]]) -> None:
        assert self.launcher is not None
        while todo:
            jobs = [self._placed(sweep, number, overrides) for number, overrides in todo.items()]
            before = {number: read_state(sweep.job_dir(number)) for number in todo}
            try:
                self.launcher.launch(jobs, initial_job_idx=min(todo))
            except BrokenProcessPool as error:  # with it go all jobs that were running
                reason = str(error).splitlines()[0]
                log.error("a process of the launcher was killed, and with it all jobs: %s", reason)
                left = [n for n in todo if read_state(sweep.job_dir(n)) == before[n]]  # not begun
                if len(left) == len(todo) or sweep.on_error == "stop":
                    raise RunFailed("the launcher's processes were killed") from error
                todo = {number: todo[number] for number in left}
            else:
                return

    def _report(self, sweep: Sweep) -> None:
        """The table; which jobs were not run; how to go on."""
        assert self.config is not None
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)  # not a job's
        with changing(sweep.directory):
            write_summary(sweep)
        show(table(sweep))
        for reason in reasons(sweep):
            log.error("%s", reason)
        states = read_states(sweep)
        not_run = [
            str(j.number) for j, s in zip(sweep.jobs, states, strict=True) if s.state == "not run"
        ]
        if not_run:
            log.info("not run: job%s %s", "s" * (len(not_run) > 1), ", ".join(not_run))
        if any(state.state != "finished" for state in states):
            given = cast(list[str], OmegaConf.to_container(self.config.hydra.overrides.hydra))
            launcher = [override for override in given if "launcher" in override]
            command = resume_command(sweep.directory, "-m", *launcher, key="sweep.resume")
            log.info("go on with: %s", command)
        log.info("summary: %s", shown(sweep.directory / "summary.csv"))


def check(
    context: HydraContext, config: DictConfig, overrides: list[str], job_dir: Path, name: str
) -> DictConfig:
    """The configuration of a job. Raises what it would be refused for when it begins."""
    job = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(job.hydra):
        job.hydra.runtime.output_dir = str(job_dir)
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(job)
    cfg = copy.deepcopy(job)
    with open_dict(cfg):
        del cfg["hydra"]
    logging.getLogger("hydra.utils").disabled = True  # it logs what it also raises
    try:
        cfg = configured(cfg)[0]
        instantiate(cfg.suite)  # knows its games; whether it can be played here, the job finds out
        return cfg
    except (ValueError, OSError, InstantiationException) as error:
        raise UsageError(f"{name}: {explained(error)}") from error
    finally:
        HydraConfig.instance().cfg = before


def checked_directory(config: DictConfig) -> Path:
    """The directory of a sweep, by the configuration; it may have one or be new.

    UsageError if it can be none.
    """
    subdir = cast(dict[str, str], OmegaConf.to_container(config.hydra.sweep))["subdir"]
    if subdir != SUBDIR:
        raise UsageError(
            f"hydra.sweep.subdir={subdir}: the directory of a job is its number, by which a sweep"
            " goes on. Leave it out; hydra.sweep.dir=... names the directory of the sweep"
        )
    given = config.hydra.sweep.dir
    path = Path(given).absolute()
    if config.sweep.resume is not None and path.resolve() != Path(
        new_sweep_dir(config.sweep.resume, "")
    ):
        raise UsageError(
            f"hydra.sweep.dir={given} is another directory than sweep.resume={config.sweep.resume}:"
            " leave one of them out"
        )
    if path.exists() and not path.is_dir():
        raise UsageError(f"hydra.sweep.dir={given}: expected a directory, and it is a file")
    if found := [name for name in ("config.yaml", "job.json") if (path / name).exists()]:
        raise UsageError(
            f"hydra.sweep.dir={given}: expected a new directory, and this is one of a run"
            f" ({found[0]})"
        )
    return path


@contextmanager
def passing_signals_on(sweep: Sweep) -> Iterator[None]:
    """While jobs run: no further one begins after SIGINT or SIGTERM, and those that run here in
    processes of their own save and end; the program exits after them. A second signal: at once.
    """
    caught: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        stop(sweep.directory, f"stopped by {signal.Signals(number).name}")
        running = _running_below(sweep)
        if caught or not running:
            sys.exit(128 + number)
        caught.append(number)
        log.info("stopping %d jobs", len(running))
        for process in running:
            process.send_signal(number)

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:  # also where the launcher has failed, since the signal reached its processes
            sys.exit(128 + caught[0])


def _running_below(sweep: Sweep) -> Sequence[psutil.Process]:
    """The processes of jobs that run below this one."""
    running = {s.pid for s in read_states(sweep) if s.state == "running" and s.host == sweep.host}
    return [p for p in psutil.Process().children(recursive=True) if p.pid in running]
