"""The front door: `python launch.py suite=atari57` trains, scores, stops, resumes and evaluates.

Builds the parts that `conf/` names and hands them to `impala.experiment`. Config stops here.
"""

from __future__ import annotations

import copy
import datetime
import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from impala.actor_pool import ActorPool, actor_seeds, assign_tasks
from impala.checkpoint import Checkpoints
from impala.evaluator import Evaluation, evaluate
from impala.experiment import Experiment, Schedule
from impala.learner import Learner
from impala.loggers.json_lines import EpisodeLog, JsonLines
from impala.loggers.logger import Logger, RunInfo
from suites.score import Scoreboard
from suites.suite import Suite

log = logging.getLogger("launch")

CHANGEABLE = (  # what a resumed run may be given anew; anything else would make it another run
    "mode", "resume", "total_frames", "num_actors", "envs_per_actor", "min_environments",
    "transport", "loggers", "device", "log_every_s", "log_every_frames", "checkpoint",
    "evaluation", "learner", "algorithm.optimizer.lr", "algorithm.agent.entropy_cost",
    "algorithm.max_grad_norm", "algorithm.micro_batch",
        "algorithm.passes",
)  # fmt: skip


CONF = Path(__file__).parent.resolve() / "conf"
_entered = False  # whether Hydra accepted the command line and called `main`


class UsageError(ValueError):
    """Something in the command line or the configuration is wrong; the message says what to do."""


def new_run_dir(resume: str | None, parent: str, seed: int) -> str:
    """The directory to run in: the resumed one, or one made here, that no other run can have."""
    if resume is not None:
        return resume
    while True:
        now = datetime.datetime.now()
        stamp = f"{now:%Y-%m-%d_%H-%M-%S}_{now.microsecond // 1000:03d}"
        path = Path(parent) / f"{stamp}_seed{seed}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another run began in the same millisecond
            continue
        return str(path)


OmegaConf.register_new_resolver("new_run_dir", new_run_dir, use_cache=True, replace=True)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Returns the suite's headline score, for sweepers."""
    global _entered
    _entered = True
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        if cfg.mode not in ("train", "evaluate"):
            raise UsageError(f"mode={cfg.mode}: expected train or evaluate")
        if cfg.resume is not None:
            cfg = resumed_config(cfg, run_dir, HydraConfig.get().overrides.task)
        run = (
            build_training(cfg, run_dir) if cfg.mode == "train" else build_evaluation(cfg, run_dir)
        )
    except (ValueError, FileNotFoundError, InstantiationException, OmegaConfBaseException) as error:
        log.debug("while building", exc_info=True)
        cause = error.__cause__ if isinstance(error, InstantiationException) else error
        print(f"launch.py: error: {cause or error}", file=sys.stderr)
        sys.exit(2)
    return run()


def build_training(cfg: DictConfig, run_dir: Path) -> Callable[[], float | None]:
    suite: Suite = instantiate(cfg.suite)
    suite.check()
    device = pick_device(cfg.device)
    agent = build_agent(cfg, suite)
    tasks = assign_tasks(
        len(suite.tasks),
        cfg.num_actors or available_cores(),
        cfg.envs_per_actor,
        cfg.min_environments,
    )
    algorithm = cfg.algorithm
    check_sizes(cfg, sum(map(len, tasks)))
    announce(cfg, suite, tasks, device, run_dir)
    pool = ActorPool(
        suite=suite,
        agent=copy.deepcopy(agent),
        tasks=tasks,
        unroll_length=algorithm.unroll_length,
        life_loss_ends_episode=algorithm.life_loss_ends_episode,
    )
    checkpoints = Checkpoints(run_dir / "checkpoints", cfg.checkpoint.keep)
    state = checkpoints.load() if cfg.resume is not None else None
    frames = state["frames"] if state else None
    learner = Learner(
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
    torch.set_num_threads(1)  # micro-batches are what runs side by side, see Learner
    transport = instantiate(cfg.transport)(builder=pool)
    metrics_file = JsonLines(run_dir / "metrics.jsonl", frames)  # cut before loggers read it
    OmegaConf.save(cfg, run_dir / "config.yaml", resolve=True)
    experiment = Experiment(
        suite=suite,
        learner=learner,
        transport=transport,
        experience=instantiate(algorithm.experience)(transport.storage, pin=device.type == "cuda"),
        checkpoints=checkpoints,
        metrics_file=metrics_file,
        episodes_file=EpisodeLog(run_dir / "episodes.jsonl", frames),
        loggers=build_loggers(cfg, suite, run_dir, frames),
        scoreboard=Scoreboard(suite.tasks),
        schedule=Schedule(
            cfg.total_frames, cfg.log_every_s, cfg.log_every_frames, cfg.checkpoint.every_s
        ),
        run_dir=run_dir,
        seed=cfg.seed,
        resume=state,
    )

    def run() -> float | None:
        result = experiment.run()
        if result.exit_code:
            sys.exit(result.exit_code)
        return result.score

    return run


def announce(
    cfg: DictConfig, suite: Suite, tasks: list[list[int]], device: torch.device, run_dir: Path
) -> None:
    log.info("run directory: %s", run_dir)
    log.info(
        "%d tasks of %s, %s frames, learner on %s; seed %d",
        len(suite.tasks), suite.name, f"{cfg.total_frames:,}", device, cfg.seed,
    )  # fmt: skip
    for actor, its_tasks in enumerate(tasks):
        seeds = actor_seeds(cfg.seed, actor, len(its_tasks))
        log.info(
            "actor %d: %d environments of %d tasks, seeds %d (policy) and %d..%d",
            actor, len(its_tasks), len(set(its_tasks)), seeds[0], min(seeds[1:]), max(seeds[1:]),
        )  # fmt: skip


def build_evaluation(cfg: DictConfig, run_dir: Path) -> Callable[[], float]:
    if cfg.resume is None:
        raise UsageError("mode=evaluate needs resume=<run directory>: the run whose agent plays")
    if cfg.evaluation.games < 1:
        raise UsageError(f"evaluation.games={cfg.evaluation.games}: expected at least 1")
    suite: Suite = instantiate(cfg.suite)
    suite.check()
    agent = build_agent(cfg, suite)
    state = Checkpoints(run_dir / "checkpoints").load()
    agent.load_state_dict(state["learner"]["agent"])
    evaluation = Evaluation(
        suite=suite,
        agent=agent,
        games=cfg.evaluation.games,
        greedy=cfg.evaluation.greedy,
        seed=cfg.seed + state["frames"],
        num_workers=cfg.evaluation.num_workers or available_cores(),
    )
    return lambda: evaluate(evaluation, frames=state["frames"], run_dir=run_dir)


def build_loggers(
    cfg: DictConfig, suite: Suite, run_dir: Path, resume_frames: int | None
) -> list[Logger]:
    run = RunInfo(
        run_dir=run_dir,
        name=run_dir.name,
        title=f"{suite.name} / {cfg.algorithm.name}",
        config=cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True)),
        total_frames=cfg.total_frames,
        task_names=tuple(task.name for task in suite.tasks),
        headline=suite.headline,
        resume_frames=resume_frames,
    )
    return [instantiate(logger)(run) for logger in cfg.loggers.values()]


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # honours taskset and containers' CPU sets
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def build_agent(cfg: DictConfig, suite: Suite) -> Any:
    torch.manual_seed(cfg.seed)
    return instantiate(
        cfg.algorithm.agent,
        frame_shape=suite.spec.frame_shape,
        num_actions=suite.spec.num_actions,
        torso=instantiate(cfg.network.torso),
        core=instantiate(cfg.network.core),
        feed_back=cfg.network.feed_back,
        _recursive_=False,
    )


def check_sizes(cfg: DictConfig, environments: int) -> None:
    for key in (
        "total_frames",
        "algorithm.unroll_length",
        "algorithm.batch_size",
        "algorithm.micro_batch",
        "algorithm.passes",
    ):
        if OmegaConf.select(cfg, key) < 1:
            raise UsageError(f"{key}={OmegaConf.select(cfg, key)}: expected at least 1")
    most = environments * (cfg.transport.slots_per_environment - 1)
    if cfg.algorithm.batch_size // cfg.algorithm.passes > most:
        raise UsageError(
            f"algorithm.batch_size={cfg.algorithm.batch_size} unrolls can never be waiting at once:"
            f" {environments} environments with transport.slots_per_environment="
            f"{cfg.transport.slots_per_environment} slots each allow {most}"
        )


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda: this machine has no CUDA device that PyTorch can use")
    return torch.device(name)


def resumed_config(cfg: DictConfig, run_dir: Path, overrides: Sequence[str]) -> DictConfig:
    """The configuration of the run in `run_dir` with what this command line may change of it."""
    saved = OmegaConf.load(run_dir / "config.yaml")
    assert isinstance(saved, DictConfig)
    refused = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group.split("@")[0].replace("/", ".")
        value = OmegaConf.select(cfg, key)
        if value == OmegaConf.select(saved, key):
            continue
        if any(key == name or key.startswith(name + ".") for name in CHANGEABLE):
            OmegaConf.update(saved, key, value, merge=False, force_add=True)
        else:
            refused.append(override.input_line or key)
    if refused:
        raise UsageError(
            f"resume={cfg.resume}: {', '.join(refused)} would make it another run."
            f" A resumed run may be given: {', '.join(CHANGEABLE)}"
        )
    return saved


def check_resume(arguments: Sequence[str]) -> None:
    """Before Hydra makes directories: a directory to resume must be one of a run."""
    for argument in arguments:
        if argument.startswith("resume=") and argument not in ("resume=null", "resume="):
            path = Path(argument.removeprefix("resume=").strip("'\""))
            if not (path / "config.yaml").is_file():
                what = "has no config.yaml" if path.is_dir() else "does not exist"
                raise UsageError(f"resume={path}: expected a run's directory, but it {what}")


def nearest_keys(arguments: Sequence[str]) -> list[str]:
    """For each overridden key that the configuration does not have: the ones most like it."""
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(overrides)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("config")
    known = _dotted_keys(cfg)
    hints = []
    for override in parsed:
        key = override.key_or_group
        if override.is_add() or key in known or (CONF / key.split("@")[0]).is_dir():
            continue
        near = difflib.get_close_matches(key, known, 3) or [
            name for name in known if name.endswith("." + key)
        ]
        near = near or difflib.get_close_matches(key.split(".")[-1], known, 3, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "see `--cfg job` for all keys"
        hints.append(f"launch.py: error: unknown key {key!r}: {hint}")
    return hints


def _dotted_keys(cfg: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for key in cfg:
        keys.append(f"{prefix}{key}")
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            keys += _dotted_keys(node, f"{prefix}{key}.")
    return keys


def command_line() -> None:
    """`main`, with its own words for a command line that Hydra refuses."""
    try:
        check_resume(sys.argv[1:])
    except UsageError as error:
        sys.exit(f"launch.py: error: {error}")
    try:
        main()
    except SystemExit as error:
        if error.code == 1 and not _entered:
            print(*nearest_keys(sys.argv[1:]), sep="\n", file=sys.stderr)
        raise


def pick_autocast(choice: bool | str, device: torch.device) -> bool:
    """auto: where the processor multiplies bfloat16 in hardware (GPUs, and CPUs with AMX)."""
    if choice == "auto":
        if device.type == "cuda":
            return torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.cpu._is_amx_tile_supported()
    return bool(choice)


if __name__ == "__main__":
    command_line()
