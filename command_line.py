"""The command line: its errors in one line, and what it may give to a new or a resumed run."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from allowed_values import PARTS, check_values, wrong_types
from impala.whole_file import FULL
from refusals import UsageError, default_config, dotted_keys, explained, is_group, nearest, parsed
from run_directory import (
    as_started,
    existing_run_dir,
    is_job_of_sweep,
    remove_made,
    resume_command,
    shown,
)

log = logging.getLogger(__name__)


CHANGEABLE = (  # what a resumed run may be given anew; anything else would make it another run
    "mode", "resume", "total_frames", "num_actors", "envs_per_actor", "min_environments",
    "transport", "loggers", "device", "log_every_s", "log_every_frames", "checkpoint",
    "evaluation", "videos", "learner", "restarts", "algorithm.optimizer.lr",
    "algorithm.agent.entropy_cost", "algorithm.max_grad_norm", "algorithm.micro_batch",
    "algorithm.passes", "algorithm.max_lag", "algorithm.stale", "actors", "inference",
    "algorithm.optimizer.eps", "stop_frames", "population", "sweep",
)  # fmt: skip
IN_PLACE = (  # of these, what can be changed without starting the run again
    "algorithm.optimizer.lr", "algorithm.optimizer.eps", "algorithm.agent.entropy_cost",
    "algorithm.max_grad_norm",
)  # fmt: skip


class RunFailed(RuntimeError):
    """A run failed and its log says how."""


def run(main: Callable[[], Any]) -> None:
    """Calls a function decorated by `hydra.main`; what Hydra refuses becomes one line as well."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise what went wrong, do not print it
    hook, threading.excepthook = threading.excepthook, _thread_failed
    try:
        sys.argv[1:] = as_started(sys.argv[1:])
        main()
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:  # of Hydra
        print(f"launch.py: error: {explained(error, sys.argv[1:])}", file=sys.stderr)
        sys.exit(2)
    except RunFailed as error:
        print(f"launch.py: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        threading.excepthook = hook


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Its traceback; none of a full disk, which TensorBoard's thread tells the main one, too."""
    error = failure.exc_value
    if not (isinstance(error, OSError) and error.errno in FULL):
        threading.__excepthook__(failure)


@contextmanager
def refusing(output_dir: str) -> Iterator[None]:
    """While a run is built: wrong input ends it with one line, and leaves no directory behind."""
    logging.getLogger("hydra.utils").disabled = True  # it logs what it also raises
    try:
        yield
    except (ValueError, OSError, MemoryError, HydraException, OmegaConfBaseException) as error:
        log.debug("refused", exc_info=True)
        message = explained(error)
        if is_job_of_sweep():  # which says so, and the jobs after this one still run
            raise UsageError(message) from error
        _remove_unused(Path(output_dir))
        print(f"launch.py: error: {message}", file=sys.stderr)
        sys.exit(2)
    except SystemExit:  # by a signal
        _remove_unused(Path(output_dir))
        raise


def _remove_unused(run_dir: Path) -> None:
    """A run's directory in which no run has begun; not if it has anything in it."""
    if (run_dir / "config.yaml").exists():
        return
    for path in (run_dir / "metrics.jsonl", run_dir / "episodes.jsonl"):
        if path.is_file() and not path.stat().st_size:
            path.unlink()
    with suppress(OSError):  # it has something in it
        run_dir.rmdir()
    remove_made()


@contextmanager
def reporting(run_dir: Path, mode: str) -> Iterator[None]:
    """While a run runs: its log says how it failed, and how to go on."""
    try:
        yield
    except UsageError as error:
        if is_job_of_sweep():
            raise
        print(f"launch.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            log.debug("stopped", exc_info=True)
            log.error("the run stopped: %s", error)
        else:
            log.exception("the run failed")
        if mode == "train" and (run_dir / "checkpoints" / "last.pt").exists():
            log.info("it can go on from its last checkpoint: %s", resume_command(run_dir))
        if is_job_of_sweep():
            raise RunFailed(f"the run in {shown(run_dir)} failed, see its log") from error
        sys.exit(1)


# What a run is given


def configured(cfg: DictConfig) -> tuple[DictConfig, Path]:
    """The configuration of this run, checked, and the run's directory."""
    overrides = parsed(HydraConfig.get().overrides.task)
    _check_parts(overrides)
    wrong = list(wrong_types(cfg, overrides))
    choices = {
        group: choice
        for group, choice in HydraConfig.get().runtime.choices.items()
        if not group.startswith("hydra/")
    }
    OmegaConf.update(cfg, "choices", choices, force_add=True)
    if cfg.sweep.resume is not None and not is_job_of_sweep():
        raise UsageError(f"sweep.resume={cfg.sweep.resume} goes on with a sweep: add -m")
    if cfg.resume is None:
        if cfg.mode == "evaluate":
            raise UsageError("mode=evaluate needs resume=<run directory>, whose agent is to play")
        run_dir = Path(HydraConfig.get().runtime.output_dir)
    else:
        run_dir = existing_run_dir(cfg.resume)
        cfg = _resumed(cfg, run_dir, overrides)
    check_values(cfg, wrong)
    return cfg, run_dir


def _check_parts(overrides: Sequence[Override]) -> None:
    """Parts have to be there, and have no keys but their own where nothing else would say so."""
    for override in overrides:
        key = override.key_or_group
        if override.is_delete():
            continue
        if override.value() is None and key in PARTS:
            raise UsageError(f"{key}=null: the program needs one, leave it out for the default")
        if override.is_add() and key.split(".")[0] in (*PARTS, "choices", "inference"):
            near = (
                nearest(key, set(dotted_keys(default_config([])))) or "see `--cfg job` for all keys"
            )
            raise UsageError(f"unknown key {key!r}: {near}")


def _resumed(cfg: DictConfig, run_dir: Path, overrides: Sequence[Override]) -> DictConfig:
    """The configuration of the run in `run_dir` with what this command line may change of it."""
    saved = _saved_config(cfg, run_dir)
    refused = []
    for override in overrides:
        group = override.key_or_group
        key = group.replace("/", ".")
        if is_group(group) and group in saved.choices:
            if saved.choices[group] == cfg.choices[group]:
                continue
            saved.choices[group] = cfg.choices[group]
        value = OmegaConf.select(cfg, key)
        if not is_group(group) and value == OmegaConf.select(saved, key):
            continue
        if changeable(key):
            OmegaConf.update(saved, key, value, merge=False, force_add=True)
        else:
            refused.append(override.input_line or key)
    if refused:
        raise UsageError(
            f"{', '.join(refused)} would make another run of {shown(run_dir)}."
            " Leave out resume= for a new run. A resumed one may be given:"
            f" {', '.join(sorted(CHANGEABLE))}"
        )
    experience = cfg.algorithm.experience
    unresolved = cast(dict[str, Any], OmegaConf.to_container(experience))
    for key, value in unresolved.items():
        if OmegaConf.is_interpolation(experience, key):  # was saved resolved; may have changed
            saved.algorithm.experience[key] = value
    return saved


def changeable(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE)


def _saved_config(cfg: DictConfig, run_dir: Path) -> DictConfig:
    path = run_dir / "config.yaml"
    try:
        saved = OmegaConf.load(path)
    except Exception as error:  # of the YAML reader, of decoding, of OmegaConf
        reason = str(error).replace("\n", " ")
        raise UsageError(f"{shown(path)} is damaged and cannot be read: {reason}") from error
    if not isinstance(saved, DictConfig):
        raise UsageError(f"{shown(path)} is damaged: it has no keys")
    part = saved.get("inference")
    if isinstance(part, DictConfig) and part.get("device") == saved.get("device"):
        part.device = "${device}"  # was saved resolved; the device may change
    for key in dotted_keys(cfg):  # a run from before there was such a key has its default
        if is_group(key.partition(".")[0]) and key not in CHANGEABLE:
            continue  # of a choice, which may be another in the saved run
        parent, _, name = key.rpartition(".")
        above = OmegaConf.select(saved, parent) if parent else saved
        if changeable(key) and isinstance(above, DictConfig) and name not in above:
            above[name] = OmegaConf.select(cfg, key)
    if wrong := [
        str(key) for key in cfg
        if isinstance(cfg[key], DictConfig) and not isinstance(saved.get(key, cfg[key]), DictConfig)
    ]:  # fmt: skip
        raise UsageError(f"{shown(path)} is damaged: {', '.join(wrong)} should have keys")
    if missing := [str(key) for key in cfg if key not in saved]:
        raise UsageError(
            f"{shown(path)} is damaged or of another version: it lacks {', '.join(missing)}"
        )
    return saved
