"""The command line: its errors in one line, and what it may give to a new or a resumed run."""

from __future__ import annotations

import difflib
import functools
import logging
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from impala.whole_file import FULL
from run_directory import (
    as_started,
    existing_run_dir,
    is_job_of_sweep,
    remove_made,
    resume_command,
    shown,
)

log = logging.getLogger(__name__)

CONF = Path(__file__).resolve().parent / "conf"

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

LEAST = {  # of whole numbers
    "seed": 0, "total_frames": 1, "num_actors": 1, "envs_per_actor": 1, "min_environments": 1,
    "log_every_frames": 1, "checkpoint.keep": 1, "transport.slots_per_environment": 2,
    "evaluation.games": 1, "evaluation.num_workers": 1, "evaluation.every_frames": 1,
    "evaluation.at_once": 1, "videos": 0,
    "learner.threads": 1, "learner.max_skipped": 0,
    "algorithm.unroll_length": 1, "algorithm.batch_size": 1, "algorithm.micro_batch": 1,
    "algorithm.passes": 1, "algorithm.max_lag": 1, "restarts.per_task": 0,
    "inference.min_batch": 1, "inference.max_batch": 1, "stop_frames": 1,
}  # fmt: skip
MOST = {  # what no machine has, or no generator of random numbers
    "seed": 2**63 - 1, "num_actors": 1_000, "envs_per_actor": 10_000, "min_environments": 100_000,
    "transport.slots_per_environment": 1_000, "evaluation.at_once": 1_000,
    "evaluation.games": 1_000_000,
}  # fmt: skip
NULLABLE = (  # where null leaves the choice to the program
    "num_actors", "envs_per_actor", "log_every_frames", "evaluation.num_workers", "learner.threads",
    "algorithm.max_grad_norm", "algorithm.max_lag", "restarts.step_timeout_s",
    "evaluation.every_frames", "evaluation.timeout_s",
    "stop_frames",
)  # fmt: skip
POSITIVE = (
    "log_every_s", "checkpoint.every_s", "algorithm.max_grad_norm", "algorithm.optimizer.lr",
    "restarts.backoff_s", "restarts.step_timeout_s", "actors.reassign_every_s",
    "evaluation.timeout_s",
)  # fmt: skip
PARTS = ("actors", "checkpoint", "evaluation", "learner", "restarts", "sweep")  # no groups
CHOICES: dict[str, tuple[str | bool, ...]] = {
    "mode": ("train", "evaluate"),
    "device": ("auto", "cpu", "cuda"),
    "inference.device": ("auto", "cpu", "cuda"),
    "actors.outside": ("auto", "always", "never"),
    "restarts.then": ("stop", "continue"),
    "sweep.on_error": ("continue", "stop"),
    "algorithm.stale": ("drop", "down_weight"),
    "learner.autocast": (True, False, "auto"),
    "loggers.weights_and_biases.mode": ("auto", "online", "offline", "disabled"),
}


class UsageError(ValueError):
    """Something in the command line or the configuration is wrong; the message says what to do."""


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
    overrides = _parsed(HydraConfig.get().overrides.task)
    _check_parts(overrides)
    wrong = list(_wrong_types(cfg, overrides))
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


def check_values(cfg: DictConfig, wrong: Collection[str] = ()) -> None:
    """UsageError if a key has a value that it cannot have, or if something is `wrong` already."""
    if wrong := [*wrong, *_wrong_choices(cfg), *_wrong_sizes(cfg)]:
        raise UsageError("; ".join(dict.fromkeys(wrong)))


def _check_parts(overrides: Sequence[Override]) -> None:
    """Parts have to be there, and have no keys but their own where nothing else would say so."""
    for override in overrides:
        key = override.key_or_group
        if override.is_delete():
            continue
        if override.value() is None and key in PARTS:
            raise UsageError(f"{key}=null: the program needs one, leave it out for the default")
        if override.is_add() and key.split(".")[0] in (*PARTS, "choices", "inference"):
            near = _nearest(key, set(_dotted_keys(_defaults([])))) or "see `--cfg job` for all keys"
            raise UsageError(f"unknown key {key!r}: {near}")


def _resumed(cfg: DictConfig, run_dir: Path, overrides: Sequence[Override]) -> DictConfig:
    """The configuration of the run in `run_dir` with what this command line may change of it."""
    saved = _saved_config(cfg, run_dir)
    refused = []
    for override in overrides:
        group = override.key_or_group
        key = group.replace("/", ".")
        if _is_group(group) and group in saved.choices:
            if saved.choices[group] == cfg.choices[group]:
                continue
            saved.choices[group] = cfg.choices[group]
        value = OmegaConf.select(cfg, key)
        if not _is_group(group) and value == OmegaConf.select(saved, key):
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
    for key in _dotted_keys(cfg):  # a run from before there was such a key has its default
        if _is_group(key.partition(".")[0]) and key not in CHANGEABLE:
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


def _wrong_types(cfg: DictConfig, overrides: Sequence[Override]) -> Iterator[str]:
    """What is given for a key has to be of its default's type. 1e6 becomes 1000000."""
    values = [
        override.key_or_group
        for override in overrides
        if not (_is_group(override.key_or_group) or override.is_add() or override.is_delete())
    ]
    defaults = _defaults(overrides) if values else cfg
    for key in values:
        value, default = OmegaConf.select(cfg, key), OmegaConf.select(defaults, key)
        if key in LEAST or default is None or key == "actors.mix":
            continue  # see `_wrong_sizes`, or the part that it is for
        if type(default) is int and isinstance(value, float) and value.is_integer():
            OmegaConf.update(cfg, key, int(value))
        elif type(value) not in _ACCEPTED.get(type(default), (type(value),)):
            name = _NAMES[type(default)]
            yield f"{key}={_text(value)}: expected {name}, such as {_text(default)}"


_ACCEPTED: dict[type, tuple[type, ...]] = {
    bool: (bool,), int: (int,), float: (int, float),
    ListConfig: (ListConfig,), DictConfig: (DictConfig,),
}  # fmt: skip
_NAMES = {
    bool: "true or false", int: "a whole number", float: "a number",
    ListConfig: "a list", DictConfig: "keys of its own",
}  # fmt: skip


def _wrong_choices(cfg: DictConfig) -> Iterator[str]:
    for key, choices in CHOICES.items():
        value = OmegaConf.select(cfg, key, default=choices[0])  # a logger may not be there
        if (type(value), value) not in [(type(choice), choice) for choice in choices]:
            *others, last = map(_text, choices)
            yield f"{key}={_text(value)}: expected {', '.join(others)} or {last}"


def _wrong_sizes(cfg: DictConfig) -> Iterator[str]:
    for key, least in LEAST.items():
        value = OmegaConf.select(cfg, key, default=least)  # not every algorithm has every key
        if value is None and key in NULLABLE:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
            OmegaConf.update(cfg, key, value)
        if type(value) is not int or value < least:
            yield f"{key}={_text(value)}: expected a whole number, at least {least}"
        elif value > MOST.get(key, value):
            yield f"{key}={_text(value)}: expected a whole number, at most {MOST[key]}"
    for key in POSITIVE:
        value = OmegaConf.select(cfg, key, default=1.0)
        if value is None and key in NULLABLE:
            continue
        most = 1e6 if key == "algorithm.optimizer.lr" else math.inf
        if not isinstance(value, (int, float)) or not 0 < value <= most:
            at_most = "" if most == math.inf else f" and at most {most:,.0f}"
            yield f"{key}={_text(value)}: expected a number above 0{at_most}"


def _text(value: Any) -> str:
    """As it is written on the command line."""
    return "null" if value is None else str(value).lower() if value in (True, False) else str(value)


# What Hydra refuses


def explained(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """One line. `arguments`: of the command line, if that is what could not be composed."""
    if arguments and (isinstance(error, HydraException) or type(error) is ValueError):
        overrides = [a for a in arguments if "=" in a and not a.startswith("-")]
        if hints := _hints(overrides, sweep=bool({"-m", "--multirun"} & {*arguments})):
            return "; ".join(hints)
    if isinstance(error, InstantiationException) and error.__cause__:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    noise = "full_key:", "object_type=", "reference_type=", "See https://hydra.cc"
    line = " ".join(line for line in lines if not line.startswith(noise))
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", line)


def _hints(arguments: Sequence[str], sweep: bool) -> list[str]:
    """For each argument that cannot be read, and else for each choice or key that there is not."""
    overrides, hints = [], []
    for argument in arguments:
        try:
            override = _parsed([argument])[0]
        except HydraException:
            hints.append(
                f"{argument!r} cannot be read as key=value: a value with spaces, commas, brackets"
                " or equals signs needs two pairs of quotes, as in 'resume=\"a=b\"'"
            )
            continue
        overrides.append(override)
        if override.is_sweep_override() and not sweep:
            key, _, value = argument.partition("=")
            hints.append(f"{argument}: write {key}=[{value}] for a list, add -m for a sweep")
        elif _is_group(key := override.key_or_group):
            options = sorted(path.stem for path in (CONF / key).glob("*.yaml"))
            value = override.value()
            if override.is_sweep_override():
                value = list(override.sweep_string_iterator())
            for choice in value if isinstance(value, list) else [value]:
                if choice not in options and (choice is not None or key != "experiment"):
                    choice = _text(choice)
                    near = _nearest(choice, options) or f"expected {' or '.join(options)}"
                    hints.append(f"{key}={choice}: there is no such choice, {near}")
    if hints or not overrides:
        return hints
    groups = {str(path.relative_to(CONF)) for path in CONF.rglob("*") if path.is_dir()}
    known = groups.union(_dotted_keys(_defaults(overrides)))
    for override in overrides:
        key = override.key_or_group
        if not (key in known or override.is_add() or key.startswith("hydra")):
            if key in set(_dotted_keys(_defaults([]))):
                hints.append(f"{key}: the part that has this key is not chosen here")
                continue
            if choices := _choices_with(key):
                hints.append(f"{key} is a key of {' and '.join(choices)}, which is not chosen here")
                continue
            near = _nearest(key, known) or "see `--cfg job` for all keys"
            hints.append(f"unknown key {key!r}: {near}")
    return hints


def _choices_with(key: str) -> list[str]:
    """Choices of a group whose files have this key."""
    group, _, name = key.rpartition(".")
    if not group:
        return []
    paths = sorted((CONF / group.replace(".", "/")).glob("*.yaml"))
    return [f"{group}={path.stem}" for path in paths if name in OmegaConf.load(path)]


def _nearest(name: str, known: Collection[str]) -> str:
    near = sorted(other for other in known if other.endswith(f".{name}"))
    near = near or difflib.get_close_matches(name, sorted(known), 1)
    return f"did you mean {' or '.join(near)}?" if near else ""


def _dotted_keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in cfg:
        yield f"{prefix}{key}"
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from _dotted_keys(node, f"{prefix}{key}.")


def _defaults(overrides: Sequence[Override]) -> DictConfig:
    """The configuration with the groups that are chosen and without the values that are given."""
    groups = tuple(o.input_line or "" for o in overrides if _is_group(o.key_or_group))
    if GlobalHydra.instance().is_initialized():
        path = GlobalHydra.instance().config_loader().get_search_path()
        return _composed(groups, tuple(str(element) for element in path.get_path()))
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(groups))


@functools.lru_cache
def _composed(groups: tuple[str, ...], search_path: tuple[str, ...]) -> DictConfig:
    """Kept, as the jobs of a sweep are checked against the same one; Hydra takes long to compose.

    search_path: where Hydra looks now, so that nothing is kept for another place.
    """
    return hydra.compose("config", list(groups))


def _parsed(overrides: Sequence[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(overrides))


def _is_group(key: str) -> bool:
    return (CONF / key).is_dir()
