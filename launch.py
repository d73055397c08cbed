"""The front door: `python launch.py suite=atari57` trains, scores, stops, resumes and evaluates.

Builds the parts that `conf/` names and hands them to `impala.experiment`. Config stops here.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast

if __name__ == "__main__":  # before the imports that take seconds
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not by an exception: half an import could swallow it, or fail in another way.
        signal.signal(number, lambda number, _: os._exit(128 + number))
    print("launch.py: loading", file=sys.stderr, flush=True)
elif __name__ == "__mp_main__":  # an actor's process begins here, and ends with the learner
    from impala.children import die_with_parent

    die_with_parent()

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, read_write

import command_line
from building import (
    build_agent,
    build_evaluations,
    build_learner,
    build_loggers,
    build_pool,
    build_population,
    evaluation_of,
    pick_device,
)
from impala.actor_pool import actor_seeds
from impala.checkpoint import Checkpoints, check_vocabulary, fitting
from impala.children import StopRequests
from impala.cores import available_cores
from impala.evaluation.evaluation import EvaluationBusy
from impala.evaluation.evaluator import evaluate
from impala.experiment import Experiment, Schedule, Staleness
from impala.loggers.json_lines import EpisodeLog, JsonLines
from impala.population_directory import PopulationDirectory, told
from impala.population_runs import seed_again
from impala.transport.restarts import Restarts
from impala.whole_file import write_whole
from refusals import CONF, UsageError
from run_directory import claimed, is_job_of_sweep, link_latest, quoted, resume_command, shown
from suites.score import Scoreboard
from suites.suite import Suite
from sweep import clear
from sweep_job import as_job

log = logging.getLogger("launch")

Run = Callable[[], float | None]
"""Runs what was built; returns the suite's headline score in per cent, if there is one."""


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Returns the suite's headline score, for sweepers."""
    return as_job(cfg, run_alone) if is_job_of_sweep() else run_alone(cfg)


def run_alone(cfg: DictConfig) -> float | None:
    with command_line.refusing(HydraConfig.get().runtime.output_dir):
        cfg, run_dir = command_line.configured(cfg)
        build = build_training if cfg.mode == "train" else build_evaluation
        run = build(cfg, run_dir)
    with command_line.reporting(run_dir, cfg.mode):
        return run()


def seeded_again(cfg: DictConfig) -> DictConfig:
    """How a member of a population goes on whose run has failed: from another's checkpoint, as the
    rule says; if there is none, from its own or from the beginning.
    """
    directory, member = PopulationDirectory(Path(cfg.population.directory)), cfg.population.member
    run_dir = directory.member(member)
    with claimed(run_dir):
        if record := seed_again(directory, member):
            log.info("%s", told(record))
        if Checkpoints(run_dir / "checkpoints").newest_frames() is None:
            clear(run_dir)
            return cfg
        if not (run_dir / "config.yaml").exists():  # it failed before it began
            save_config(command_line.configured(cfg)[0], run_dir)
    cfg.resume = str(run_dir)
    overrides = HydraConfig.get().overrides.task
    with read_write(cast(Any, overrides)):
        overrides.append(f"resume={quoted(str(run_dir))}")
    return cfg


def build_training(cfg: DictConfig, run_dir: Path) -> Run:
    suite: Suite = instantiate(cfg.suite)
    suite.check()
    device = pick_device(cfg.device)
    torch.set_num_threads(1)  # micro-batches are what runs side by side, see Learner
    agent = build_agent(cfg, suite)
    pool = build_pool(cfg, suite, agent, run_dir)
    lock = claimed(run_dir) if cfg.resume is not None else None
    checkpoints = Checkpoints(run_dir / "checkpoints", cfg.checkpoint.keep)
    state = checkpoints.load() if cfg.resume is not None else None
    scoreboard = Scoreboard(suite.tasks)
    schedule = Schedule(
        cfg.total_frames,
        cfg.log_every_s,
        cfg.log_every_frames,
        cfg.checkpoint.every_s,
        cfg.stop_frames,
    )
    if lock and state and state["frames"] >= schedule.end_frames:
        lock.close()
        return lambda: already_finished(cfg, suite, scoreboard, state, run_dir)
    learner = build_learner(cfg, agent, device)
    transport = instantiate(cfg.transport)(builder=pool, restarts=Restarts(**cfg.restarts))
    algorithm = cfg.algorithm
    experience = instantiate(algorithm.experience)(transport.storage, pin=device.type == "cuda")
    frames = state["frames"] if state else None
    metrics_file = JsonLines(  # cut before loggers read it
        run_dir / "metrics.jsonl", frames, state.get("points") if state else None
    )
    evaluations = build_evaluations(cfg, suite, agent, run_dir, frames)
    experiment = Experiment(
        suite=suite,
        learner=learner,
        transport=transport,
        experience=experience,
        checkpoints=checkpoints,
        metrics_file=metrics_file,
        episodes_file=EpisodeLog(
            run_dir / "episodes.jsonl", frames, state.get("games") if state else None
        ),
        loggers=build_loggers(cfg, suite, run_dir, frames),
        scoreboard=scoreboard,
        schedule=schedule,
        run_dir=run_dir,
        seed=cfg.seed,
        staleness=Staleness(algorithm.max_lag, drop=algorithm.stale == "drop"),
        evaluations=evaluations,
        about={"commit": commit(), "machine": machine()},
        resume=state,
        population=build_population(cfg, learner),
    )
    lock = lock or claimed(run_dir)  # a new run's directory is nobody else's until now
    save_config(cfg, run_dir)
    save_suite(suite, run_dir)
    if cfg.resume is None:
        link_latest(run_dir)
    announce(cfg, suite, pool.tasks, device, run_dir, frames or 0, experiment.actors_seed)
    return lambda: train(experiment, run_dir, lock, member=cfg.population is not None)


def train(experiment: Experiment, run_dir: Path, lock: IO[str], *, member: bool) -> float | None:
    with lock:
        result = experiment.run()
    if result.exit_code:
        if result.status == "finished":  # and an evaluation beside it was given up
            log.info("evaluate what was trained with: %s", resume_command(run_dir, "mode=evaluate"))
        elif not member:  # of a population, which goes on as a whole
            log.info("go on with: %s", resume_command(run_dir))
        sys.exit(result.exit_code)
    log.info("results are in %s", shown(run_dir))
    if not member:
        log.info("evaluate with: %s", resume_command(run_dir, "mode=evaluate"))
    return result.score


def already_finished(
    cfg: DictConfig, suite: Suite, scoreboard: Scoreboard, state: dict[str, Any], run_dir: Path
) -> float | None:
    """Loggers send what they have not sent of it, as of a run that was killed at its end."""
    for logger in build_loggers(cfg, suite, run_dir, state["frames"]):
        logger.finish(0)
    end = "stop_frames" if (cfg.stop_frames or math.inf) < cfg.total_frames else "total_frames"
    log.info(
        "nothing to do: the run has %s frames already and %s=%s.%s",
        f"{state['frames']:,}", end, f"{cfg[end]:,}",
        "" if cfg.population else f" Give a greater {end} to go on",
    )  # fmt: skip
    scoreboard.load_state_dict(state["scoreboard"])
    return scoreboard.metrics().get(f"score/{suite.headline}")


def announce(
    cfg: DictConfig,
    suite: Suite,
    tasks: Sequence[Sequence[int]],
    device: torch.device,
    run_dir: Path,
    frames: int,
    actors_seed: int,
) -> None:
    log.info("command line: %s", shlex.join(HydraConfig.get().overrides.task) or "(all defaults)")
    log.info("run directory: %s", shown(run_dir))
    log.info(
        "suite %s, tasks %d, frames %s of %s, learner on %s, seed %d",
        suite.name, len(suite.tasks), f"{frames:,}", f"{cfg.total_frames:,}", device, cfg.seed,
    )  # fmt: skip
    for actor, its_tasks in enumerate(tasks):
        policy_seed, *seeds = actor_seeds(actors_seed, actor, len(its_tasks))
        played: dict[str, list[str]] = {}
        for task, seed in zip(its_tasks, seeds, strict=True):
            played.setdefault(suite.tasks[task].name, []).append(str(seed))
        log.info(
            "actor %d: environments %d, tasks %d, seeds %d (policy); %s",
            actor, len(its_tasks), len(played), policy_seed,
            "; ".join(f"{name} {' '.join(each)}" for name, each in played.items()),
        )  # fmt: skip
    log.info(
        "making %d environments; numbers come once a batch of unrolls is full",
        sum(map(len, tasks)),
    )


def build_evaluation(cfg: DictConfig, run_dir: Path) -> Run:
    suite: Suite = instantiate(cfg.suite)
    suite.check()
    agent = build_agent(cfg, suite)
    lock = claimed(run_dir, "evaluated")
    state = Checkpoints(run_dir / "checkpoints").load()
    with fitting():
        check_vocabulary(state, suite.spec)
        agent.load_state_dict(state["learner"]["agent"])
    frames = state["frames"]
    evaluation = evaluation_of(cfg, suite, agent, seed=cfg.seed + frames)
    loggers = build_loggers(cfg, suite, run_dir, evaluated_frames=frames)
    again = shlex.join(["python", "launch.py", *HydraConfig.get().overrides.task])

    def run() -> float:
        with lock:
            try:
                return evaluate(
                    evaluation, frames=frames, run_dir=run_dir, loggers=loggers, again=again
                )
            except EvaluationBusy as error:  # by the run's own training
                raise UsageError(str(error)) from error

    return run


def commit() -> str | None:
    """Of this code, with a plus sign if it was changed since; None outside a git checkout."""
    git = ["git", "-C", str(CONF.parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        if head.returncode:
            return None
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True)
    except FileNotFoundError:  # no git on this machine
        return None
    return head.stdout.strip() + ("+" if changed.returncode else "")


def machine() -> str:
    return (
        f"{available_cores()} cores, {platform.machine()}, {platform.system()}, Python"
        f" {platform.python_version()}, torch {torch.__version__}"
    )


def save_config(cfg: DictConfig, run_dir: Path) -> None:
    """What the run is, whatever it was started or resumed by: `config.yaml`, resolved."""
    saved = copy.deepcopy(cfg)
    saved.mode, saved.resume, saved.sweep.resume = "train", None, None
    write_whole(run_dir / "config.yaml", OmegaConf.to_yaml(saved, resolve=True))


def save_suite(suite: Suite, run_dir: Path) -> None:
    """What is played and how it is scored, from the first moment: `suite.json`."""
    about = {
        "suite": suite.name,
        "headline": suite.headline,
        "tasks": [task.name for task in suite.tasks],
        "provenance": suite.provenance,
    }
    write_whole(run_dir / "suite.json", json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    stop_requests = StopRequests()
    for number in (signal.SIGINT, signal.SIGTERM):  # until the experiment handles them
        signal.signal(
            number, lambda number, _: sys.exit(128 + number) if stop_requests.is_new() else None
        )
    command_line.run(main)
