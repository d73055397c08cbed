"""From the configuration to the parts of a run: what `launch.py` hands to `impala.experiment`."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from impala.actor_pool import ActorPool, assign_tasks
from impala.agents.agent import Agent
from impala.cores import available_cores
from impala.evaluation.beside_training import BesideTraining
from impala.evaluation.evaluation import Evaluation
from impala.evaluation.video import check_encoder
from impala.inference_server import Batching
from impala.learner import Learner
from impala.loggers.logger import Logger, RunInfo
from impala.mix import Mix, task_weights
from impala.population_member import PopulationMember
from refusals import UsageError
from suites.camera import check_filmable
from suites.suite import Suite
from sweep import run_name

NICENESS = 15  # of evaluation beside training, 10 more than actors have


def build_agent(cfg: DictConfig, suite: Suite) -> Agent:
    torch.manual_seed(cfg.seed)
    return instantiate(
        cfg.algorithm.agent,
        frame_shape=suite.spec.frame_shape,
        num_actions=suite.spec.num_actions,
        torso=instantiate(cfg.network.torso),
        core=instantiate(cfg.network.core),
        feed_back=cfg.network.feed_back,
        language=partial(
            instantiate(cfg.network.language), vocabulary_size=suite.spec.vocabulary_size
        )
        if suite.spec.instruction_length
        else None,
        _recursive_=False,
    )


def build_pool(cfg: DictConfig, suite: Suite, agent: Agent, run_dir: Path) -> ActorPool:
    in_process = cfg.choices.transport == "in_process"
    if in_process and cfg.actors.outside == "always":
        raise UsageError("actors.outside=always makes processes: transport=in_process has none")
    mix, batching = build_mix(cfg, suite), build_batching(cfg)
    tasks = assign_tasks(
        len(suite.tasks),
        # Two for each core where another process answers: one plays while the other waits for it.
        cfg.num_actors or available_cores() * (2 if batching else 1),
        cfg.envs_per_actor,
        cfg.min_environments,
        mix,
    )
    check_slots(cfg, sum(map(len, tasks)))
    outside = cfg.actors.outside
    if outside == "auto" and suite.spec.outside and not in_process:
        outside = "always"
    return ActorPool(
        suite=suite,
        agent=copy.deepcopy(agent),
        tasks=tasks,
        unroll_length=cfg.algorithm.unroll_length,
        life_loss_ends_episode=cfg.algorithm.life_loss_ends_episode,
        outside=range(len(suite.tasks)) if outside == "always" else (),
        move_slow=outside == "auto",
        mix=mix,
        batching=batching,
        log_dir=run_dir / "engine" if suite.spec.outside else None,
    )


def build_mix(cfg: DictConfig, suite: Suite) -> Mix | None:
    given = cfg.actors.mix
    if isinstance(given, str) and given.startswith("{"):  # see conf/config.yaml
        given = OmegaConf.create(given)
    mix = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
    weights = task_weights(cast(Any, mix), [task.name for task in suite.tasks])
    return None if weights is None else Mix(weights, cfg.actors.reassign_every_s)


def build_batching(cfg: DictConfig) -> Batching | None:
    if not cfg.inference:
        return None
    if cfg.choices.transport == "in_process":
        raise UsageError("inference=server is a process: transport=in_process has none")
    options = cast(dict[str, Any], OmegaConf.to_container(cfg.inference, resolve=True))
    device = pick_device(options.get("device", "auto"), "inference.device")
    return Batching(**{**options, "device": device.type})


def check_slots(cfg: DictConfig, environments: int) -> None:
    slots = cfg.transport.slots_per_environment
    fresh = cfg.algorithm.batch_size // cfg.algorithm.passes
    if fresh > environments * (slots - 1):
        raise UsageError(
            f"algorithm.batch_size={cfg.algorithm.batch_size} with algorithm.passes="
            f"{cfg.algorithm.passes} takes {fresh} unrolls at once, and {environments} environments"
            f" with transport.slots_per_environment={slots} have at most"
            f" {environments * (slots - 1)} waiting: set a smaller batch, more environments"
            " (envs_per_actor, num_actors, min_environments) or more slots"
        )


def build_learner(cfg: DictConfig, agent: Agent, device: torch.device) -> Learner:
    algorithm = cfg.algorithm
    return Learner(
        agent,
        optimizer=instantiate(algorithm.optimizer),
        lr_schedule=instantiate(algorithm.lr_schedule),
        max_grad_norm=algorithm.max_grad_norm,
        device=device,
        threads=cfg.learner.threads or available_cores(),
        autocast=pick_autocast(cfg.learner.autocast, device),
        compile_loss=cfg.learner.compile,
        max_skipped=cfg.learner.max_skipped,
    )


def build_loggers(
    cfg: DictConfig,
    suite: Suite,
    run_dir: Path,
    resume_frames: int | None = None,
    evaluated_frames: int | None = None,
) -> list[Logger]:
    run = RunInfo(
        run_dir=run_dir,
        name=run_name(run_dir),
        title=f"{suite.name} / {cfg.algorithm.name}",
        config=cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True)),
        total_frames=cfg.total_frames,
        task_names=tuple(task.name for task in suite.tasks),
        headline=suite.headline,
        resume_frames=resume_frames,
        evaluated_frames=evaluated_frames,
    )
    return [
        instantiate(logger)(run)
        for name, logger in cfg.loggers.items()
        if evaluated_frames is None or name != "console"  # an evaluation shows itself
    ]


def build_population(cfg: DictConfig, learner: Learner) -> PopulationMember | None:
    """The run's place in a population, if hydra/sweeper=population has started it."""
    if cfg.population is None:
        return None
    return PopulationMember(
        directory=Path(cfg.population.directory),
        member=cfg.population.member,
        setters={  # of command_line.IN_PLACE
            "algorithm.optimizer.lr": partial(learner.set_option, "lr"),
            "algorithm.optimizer.eps": partial(learner.set_option, "eps"),
            "algorithm.agent.entropy_cost": partial(setattr, learner.agent, "entropy_cost"),
            "algorithm.max_grad_norm": partial(setattr, learner, "max_grad_norm"),
        },
    )


def build_evaluations(
    cfg: DictConfig, suite: Suite, agent: Agent, run_dir: Path, resume_frames: int | None
) -> BesideTraining | None:
    every_frames = cfg.evaluation.every_frames
    if every_frames is None:
        return None
    if every_frames > cfg.total_frames:
        raise UsageError(
            f"evaluation.every_frames={every_frames} with total_frames={cfg.total_frames}: there"
            " would be no evaluation, set it to as many frames at most"
        )
    copied = copy.deepcopy(agent).cpu()
    return BesideTraining(
        evaluation_of(cfg, suite, copied, seed=cfg.seed, num_workers=1, niceness=NICENESS),
        every_frames=every_frames,
        same_seed=cfg.evaluation.seed is not None,
        run_dir=run_dir,
        resume_frames=resume_frames,
    )


def evaluation_of(
    cfg: DictConfig,
    suite: Suite,
    agent: Agent,
    *,
    seed: int,
    num_workers: int | None = None,
    niceness: int = 0,
) -> Evaluation:
    """seed, num_workers: unless the configuration names them; None: a worker for each core."""
    if cfg.videos:
        check_encoder()
        check_filmable(suite)
    return Evaluation(
        suite=suite,
        agent=agent,
        games=cfg.evaluation.games,
        greedy=cfg.evaluation.greedy,
        seed=seed if cfg.evaluation.seed is None else cfg.evaluation.seed,
        num_workers=cfg.evaluation.num_workers or num_workers or available_cores(),
        at_once=cfg.evaluation.at_once,
        outside=suite.spec.outside,
        timeout_s=cfg.evaluation.timeout_s,
        videos=cfg.videos,
        niceness=niceness,
    )


def pick_device(name: str, key: str = "device") -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError(f"{key}=cuda: this machine has no CUDA device that PyTorch can use")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def pick_autocast(choice: bool | str, device: torch.device) -> bool:
    """auto: where the processor multiplies bfloat16 in hardware (GPUs, and CPUs with AMX)."""
    if choice == "auto":
        if device.type == "cuda":
            return torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.cpu._is_amx_tile_supported()
    return bool(choice)
