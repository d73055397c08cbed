"""Population-based training as a Hydra sweeper: `python launch.py -m hydra/sweeper=population ...`.

Hydra accepts sweepers only whose module's name begins with `hydra_plugins.`.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

import command_line
from command_line import RunFailed
from hydra_plugins import search_space
from hydra_plugins.grid_sweeper import check, checked_directory, passing_signals_on
from hydra_plugins.launchers import jobs_at_once
from hydra_plugins.population_settings import changed
from hydra_plugins.population_table import generation_table
from impala.population import (
    FAILED,
    Member,
    Rule,
    Value,
    best,
    best_first,
    evolved,
    member_seed,
    starting_values,
)
from impala.population_directory import MEND, PopulationDirectory, Record, space_as_json
from impala.whole_file import write_whole
from refusals import UsageError
from run_directory import claimed, key_of, quoted, resume_command, shown
from suites.score import Scoreboard
from supervisor import supervised
from sweep import Job, Sweep, clear, show, write_sweep

log = logging.getLogger(__name__)

OWN_KEYS = ("resume", "stop_frames", "population", "sweep.on_error")  # that jobs are given


class PopulationSweeper(Sweeper):
    """Its arguments are the keys of conf/hydra/sweeper/population.yaml, where they are explained.

    A sweep is resumed by `sweep.resume`; `run_directory.as_started` adds what it was started with.
    What has happened is in the population's directory only: nothing is kept here from round to
    round.
    """

    def __init__(
        self,
        *,
        size: int,
        schedule: str,
        round_frames: int,
        games: int,
        fitness: str,
        max_failures: int,
        params: DictConfig,
        **rule: Any,
    ) -> None:
        self._size = _whole("size", size, 2, "for a population of 1 there is nobody to copy")
        if schedule not in ("rounds", "asynchronous"):
            raise ValueError(f"hydra.sweeper.schedule={schedule}: expected rounds or asynchronous")
        self._asynchronous = schedule == "asynchronous"
        self._round_frames = _whole("round_frames", round_frames, 1)
        self._games = _whole("games", games, 1)
        self._max_failures = _whole("max_failures", max_failures, 0)
        self._fitness = fitness
        self._params = params
        self._rule_options = rule
        names = {field.name for field in fields(Rule)} - {"seed"}  # which is the run's
        if unknown := rule.keys() - names:
            raise ValueError(f"hydra.sweeper.{min(unknown)}: there is no such key")
        try:
            Rule(**rule)
        except ValueError as error:
            raise ValueError(f"hydra.sweeper.{error}") from error
        self._failures = 0  # that the lineage does not have

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._config, self._context = config, hydra_context
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context,
            task_function=supervised,
            config=config,
        )

    def sweep(self, arguments: list[str]) -> None:
        """Trains the population. RunFailed if more members failed than may."""
        given = [*(f"{key}={value}" for key, value in self._params.items()), *arguments]
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        parsed = parser.parse_overrides(given)
        parsed = [o for o in parsed if o.key_or_group != "sweep.resume"]
        self._space, self._fixed = search_space.split(parsed)
        cfg = self._checked()
        self._rule = Rule(**self._rule_options, seed=cfg.seed)
        self._total_frames = int(cfg.total_frames)
        self._open_directory()
        with claimed(self._directory.path):
            self._remember()
            write_sweep(self._sweep)
            for left in (".stop", ".failed"):
                (self._directory.path / left).unlink(missing_ok=True)
            try:
                (self._run_asynchronously if self._asynchronous else self._run_rounds)()
                self._finish()
            except BaseException:
                command = resume_command(self._directory.path, "-m", key="sweep.resume")
                log.info("go on with: %s", command)
                raise

    # Before the first job

    def _checked(self) -> DictConfig:
        """The configuration of member 0. Raises if something is wrong with the command line."""
        if not self._space:
            raise UsageError(
                "nothing is swept: give a population hyperparameters, such as"
                " 'algorithm.optimizer.lr=tag(log, interval(1e-5, 1e-2))'"
            )
        own = [o for o in self._fixed if key_of(o) in OWN_KEYS]
        if own:
            raise UsageError(f"{', '.join(own)}: that is up to the population")
        least, most = ({h.key: h.ends[end] for h in self._space} for end in (0, 1))
        drawn = starting_values(self._space, 0, 0)  # no whole number, where ends may be
        for values in (least, most, drawn):  # a misspelt key is found, and a value that cannot be
            overrides = [*self._fixed, *_as_overrides(values), f"hydra.sweep.dir={os.devnull}"]
            cfg = check(self._context, self._config, overrides, Path(os.devnull), "members")
        if cfg.mode != "train":
            raise UsageError(f"mode={cfg.mode}: a population trains. Evaluate its best member")
        changeable = [key for key in command_line.CHANGEABLE if key.startswith("algorithm.")]
        allowed = command_line.IN_PLACE if self._asynchronous else changeable
        if wrong := [h.key for h in self._space if h.key not in allowed]:
            raise UsageError(
                f"{', '.join(wrong)} cannot change while a member"
                f" {'runs' if self._asynchronous else 'trains'}: a population can adapt"
                f" {', '.join(allowed)}"
            )
        suite = instantiate(cfg.suite)
        suite.check()
        self._scoreboard = scoreboard = Scoreboard(suite.tasks)
        for task in range(len(suite.tasks)):
            scoreboard.add(task, 0.0, 1)
        if self._fitness not in (metrics := scoreboard.metrics()):
            names = [key for key in metrics if key.startswith("score/")]
            raise UsageError(
                f"hydra.sweeper.fitness={self._fitness}: no run writes such a metric of games."
                f" Expected {', '.join(names)}, or hns/, return/ or length/ of a task"
            )
        self._check_launcher()
        return cfg

    def _check_launcher(self) -> None:
        name = self._config.hydra.runtime.choices["hydra/launcher"]
        at_once = jobs_at_once(name, self._config.hydra.launcher)
        if self._asynchronous and at_once is not None and at_once < self._size:
            raise UsageError(
                f"hydra.sweeper.schedule=asynchronous runs all {self._size} members at once, and"
                f" hydra/launcher={name} at most {at_once} as it is configured: give"
                f" hydra/launcher=joblib hydra.launcher.n_jobs={self._size} or another parallel"
                " launcher with room for as many, or"
                " hydra.sweeper.schedule=rounds"
            )

    def _open_directory(self) -> None:
        # Not before: Hydra loads this module in all processes of a launcher, too.
        from impala.population_runs import PopulationRuns

        path = checked_directory(self._config)
        if (path / "sweep.json").exists():
            if not PopulationDirectory(path).is_one():
                raise UsageError(f"{shown(path)} is a sweep of independent jobs, and no population")
            PopulationDirectory(path).settings()  # without them it would begin anew
        path.mkdir(parents=True, exist_ok=True)
        with read_write(self._config), open_dict(self._config):
            self._config.hydra.sweep.dir = str(path)
        self._directory = PopulationDirectory(path)
        # It lists all jobs with all overrides, round after round.
        launcher = type(self._launcher).__module__.rpartition(".")[0]
        logging.getLogger(launcher).setLevel(logging.WARNING)
        jobs = tuple(Job(i, f"member {i}", ()) for i in range(self._size))
        self._sweep = Sweep(path, jobs, "continue", socket.gethostname(), os.getpid())
        self._runs = PopulationRuns(self._directory, self._fitness, self._scoreboard)

    def _remember(self) -> None:
        """Writes what the population is; of one that is resumed, it has to be the same."""
        settings = {
            "overrides": self._fixed,
            "space": space_as_json(self._space),
            "size": self._size,
            "round_frames": None if self._asynchronous else self._round_frames,
            "games": self._games if self._asynchronous else None,
            "fitness": self._fitness,
            "rule": asdict(self._rule),
            "total_frames": self._total_frames,
        }
        settings = json.loads(json.dumps(settings))  # as it is read again
        if self._directory.exists():
            saved = self._directory.settings()
            if other := ", its ".join(changed(saved, settings)):
                where = shown(self._directory.path)
                raise UsageError(f"{where} has another population: its {other}")
            self._check_whole()
            log.info("going on with the population in %s", shown(self._directory.path))
            return
        OmegaConf.save(self._config, self._directory.path / "multirun.yaml")
        self._directory.write_lineage(
            Record(i, 0, 0, None, None, None, False, {}, values, None)
            for i in range(self._size)
            for values in [starting_values(self._space, self._rule.seed, i)]
        )
        self._directory.write_settings(settings)
        log.info("population of %d in %s", self._size, shown(self._directory.path))
        show(generation_table(self._directory.lineage(), "what members begin with"))

    def _check_whole(self) -> None:
        """A member that has been compared has a checkpoint; one that copies may not have it yet."""
        for record in self._directory.latest().values():
            has_none = self._runs.frames(record.member) is None
            if has_none and record.generation and (self._asynchronous or not record.copied):
                folder = shown(self._directory.member(record.member) / "checkpoints")
                raise UsageError(
                    f"{folder} has no checkpoint left, and by lineage.jsonl member {record.member}"
                    f" is in generation {record.generation}, at {record.frames:,} frames. {MEND}"
                )

    # Two schedules

    def _run_rounds(self) -> None:
        """All members train to the end of a round, then are compared, then the next begins."""
        lineage = self._directory.lineage()
        ends = [*range(self._round_frames, self._total_frames, self._round_frames)]
        ends.append(self._total_frames)
        for generation, end in enumerate(ends):
            if any(record.generation > generation for record in lineage):
                continue
            latest = {record.member: record for record in lineage}
            if behind := [i for i, r in latest.items() if r.generation != generation]:
                raise UsageError(
                    f"{shown(self._directory.path / 'lineage.jsonl')} lacks generation {generation}"
                    f" of member {', '.join(map(str, behind))}. {MEND}"
                )
            for record in latest.values():
                if record.copied:
                    assert record.parent is not None
                    self._runs.place(record, latest[record.parent])
            log.info("round %d of %d: to %s frames", generation + 1, len(ends), f"{end:,}")
            failed = self._trained(end)
            if end < self._total_frames:
                compared = self._compared(latest, failed, end)
                lineage += compared
                self._directory.write_lineage(lineage)
                self._failures -= len(failed)  # which the lineage has now
                title = f"after round {generation + 1} of {len(ends)}, at {end:,} frames"
                show(generation_table(compared, title))

    def _trained(self, end: int) -> set[int]:
        """Trains everyone who is not there yet; returns those who have failed."""
        failed: set[int] = set()
        while pending := [i for i in self._before(end) if i not in failed]:
            failed |= self._launched(pending, end)
        return failed

    def _compared(
        self, latest: dict[int, Record], failed: Collection[int], frames: int
    ) -> list[Record]:
        """The next generation."""
        members = [
            Member(i, FAILED if i in failed else self._runs.fitness(i), latest[i].new)
            for i in range(self._size)
        ]
        records = []
        for member in members:
            last = latest[member.index]
            generation = last.generation + 1
            try:
                change = evolved(member.index, members, self._rule, self._space, generation, frames)
            except ValueError as error:
                raise RunFailed(str(error)) from error
            is_failed = member.fitness == FAILED
            records.append(
                Record(
                    member=member.index,
                    generation=generation,
                    frames=frames if is_failed else self._runs.frames(member.index) or 0,
                    parent=change.parent,
                    parent_generation=last.generation,
                    fitness=None if is_failed else member.fitness,
                    failed=is_failed,
                    old=last.new,
                    new=change.values,
                    checkpoint=None if is_failed else self._runs.pin(member.index, generation),
                )
            )
        return records

    def _run_asynchronously(self) -> None:
        """Members compare themselves while they run, and `supervisor` starts those again that fail.

        Here those go on whose supervisor has ended, too.
        """
        while pending := self._before(self._total_frames):
            self._launched(pending, None)

    def _before(self, frames: int) -> list[int]:
        """Members that are not there yet, once nobody trains any of them."""
        for member in range(self._size):
            _wait_until_free(self._directory.member(member))
        return [i for i in range(self._size) if (self._runs.frames(i) or 0) < frames]

    # Jobs

    def _launched(self, members: Sequence[int], stop_frames: int | None) -> set[int]:
        """Runs jobs of these members; returns those whose job has failed.

        A launcher that fails, as one does whose process was killed, counts as one failure, and
        nobody is to blame: its jobs go on from their checkpoints. RunFailed after too many.
        """
        latest = self._directory.latest()
        jobs = [self._job(latest[i], stop_frames) for i in members]
        failed = {}
        try:
            with passing_signals_on(self._sweep):
                returns = self._launcher.launch(jobs, initial_job_idx=0)
        except Exception:
            log.exception("the launcher failed")
            self._failures += 1
        else:
            for member, result in zip(members, returns, strict=True):
                if result.status == JobStatus.FAILED:
                    failed[member] = result._return_value  # its property prints, too
                elif member in self._before(stop_frames or self._total_frames):
                    failed[member] = RuntimeError("its job ended before its time")
        if (ended := self._directory.path / ".failed").exists():
            raise RunFailed(ended.read_text())
        for member, error in failed.items():
            log.error("member %d failed: %s", member, error)
        self._failures += len(failed)
        failures = self._failures + self._recorded_failures()
        if failures > self._max_failures:
            raise RunFailed(
                f"members have failed {failures} times, and"
                f" hydra.sweeper.max_failures={self._max_failures}"
            )
        return set(failed)

    def _recorded_failures(self) -> int:
        return sum(record.failed for record in self._directory.lineage())

    def _job(self, record: Record, stop_frames: int | None) -> list[str]:
        """The overrides of a member's job, which begins or goes on."""
        path = self._directory.member(record.member)
        where = quoted(str(self._directory.path))
        most = f",max_failures:{self._max_failures}" if self._asynchronous else ""
        overrides = [
            *self._fixed,
            *_as_overrides(record.new),
            f"seed={member_seed(self._rule.seed, record.member)}",
            f"population={{directory:{where},member:{record.member}{most}}}",
            f"hydra.sweep.dir={where}",
            f"hydra.sweep.subdir={record.member}",
        ]
        if stop_frames is not None:
            overrides.append(f"stop_frames={stop_frames}")
        if self._runs.frames(record.member) is None:
            clear(path, "job.json")
            return overrides
        if not (path / "config.yaml").exists():  # it failed before it began, and copies another
            cfg = check(self._context, self._config, overrides, path, f"member {record.member}")
            write_whole(path / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        return [*overrides, f"resume={quoted(str(path))}"]

    # After the last job

    def _finish(self) -> None:
        """Writes what a person wants to see: the best member, a table, pictures."""
        latest = self._directory.latest()
        if self._asynchronous:
            self._directory.write_lineage(self._directory.lineage())
        late = self._before(self._total_frames)  # those whose last job has failed
        members = [
            Member(i, FAILED if i in late else self._runs.fitness(i), latest[i].new)
            for i in range(self._size)
        ]
        self._write_members(members, latest)
        fittest = best(members)
        if fittest is None:
            log.warning("no member has played a whole game of every task: there is no best")
            return
        folder = self._runs.copy_best(fittest.index)
        config = OmegaConf.load(self._directory.member(fittest.index) / "config.yaml")
        for key, value in {**fittest.values, "population": None, "stop_frames": None}.items():
            OmegaConf.update(config, key, value)
        write_whole(folder / "config.yaml", OmegaConf.to_yaml(config))
        log.info("member %d is the best, with fitness %.1f", fittest.index, fittest.fitness)
        log.info("evaluate it with: %s", resume_command(folder, "mode=evaluate"))
        self._draw()

    def _write_members(self, members: Sequence[Member], latest: dict[int, Record]) -> None:
        keys = [hyperparameter.key for hyperparameter in self._space]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["member", "fitness", "generation", "frames", *keys, "directory"])
        for member in best_first(members):
            fitness = "failed" if member.fitness == FAILED else member.fitness
            row = [member.index, fitness, latest[member.index].generation]
            row += [self._runs.frames(member.index), *(member.values[key] for key in keys)]
            writer.writerow([*row, shown(self._directory.member(member.index))])
        write_whole(self._directory.path / "members.csv", text.getvalue())

    def _draw(self) -> None:
        path = self._directory.path
        if find_spec("plotly") is None or find_spec("jinja2") is None:
            log.info("for a page install jinja2 and plotly: python -m impala.report %s", path)
            return
        from impala.report.export import NoBrowserError
        from impala.report.report import make_of_population

        try:
            page = make_of_population(path)
        except NoBrowserError as error:
            log.info("no pictures beside population.html: %s", error)
            return
        log.info("wrote %s", shown(page))


def _wait_until_free(run_dir: Path) -> None:
    """Until nobody trains it: jobs that were started elsewhere outlive a sweeper that is killed."""
    said = False
    while run_dir.exists():
        try:
            claimed(run_dir).close()
            return
        except ValueError as error:
            if not said:
                log.warning("%s: waiting for it", str(error).partition(":")[0])
            said = True
            time.sleep(1.0)


def _as_overrides(values: dict[str, Value]) -> list[str]:
    return [f"{key}={_text(value)}" for key, value in values.items()]


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return quoted(value) if isinstance(value, str) else repr(value)


def _whole(name: str, value: Any, least: int, why: str = "") -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or value < least:
        why = f": {why}" if why else ""
        raise ValueError(
            f"hydra.sweeper.{name}={value}: expected a whole number, at least {least}{why}"
        )
    return value
