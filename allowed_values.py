"""What values keys may have, whatever part they are of."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf

from refusals import UsageError, as_written, default_config, is_group

LEAST = {  # of whole numbers
    "seed": 0, "total_frames": 1, "num_actors": 1, "envs_per_actor": 1, "min_environments": 1,
    "log_every_frames": 1, "checkpoint.keep": 1, "transport.slots_per_environment": 2,
    "evaluation.games": 1, "evaluation.seed": 0, "evaluation.num_workers": 1,
    "evaluation.every_frames": 1, "evaluation.at_once": 1, "videos": 0,
    "learner.threads": 1, "learner.max_skipped": 0,
    "algorithm.unroll_length": 1, "algorithm.batch_size": 1, "algorithm.micro_batch": 1,
    "algorithm.passes": 1, "algorithm.max_lag": 1, "restarts.per_task": 0,
    "inference.min_batch": 1, "inference.max_batch": 1, "stop_frames": 1,
}  # fmt: skip

MOST = {  # what no machine has, or no generator of random numbers
    "seed": 2**63 - 1, "evaluation.seed": 2**63 - 1, "num_actors": 1_000,
    "envs_per_actor": 10_000, "min_environments": 100_000,
    "transport.slots_per_environment": 1_000, "evaluation.at_once": 1_000,
    "evaluation.games": 1_000_000,
}  # fmt: skip

NULLABLE = (  # where null leaves the choice to the program
    "num_actors", "envs_per_actor", "log_every_frames", "evaluation.num_workers", "learner.threads",
    "algorithm.max_grad_norm", "algorithm.max_lag", "restarts.step_timeout_s",
    "evaluation.every_frames", "evaluation.timeout_s", "evaluation.seed", "stop_frames",
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


def check_values(cfg: DictConfig, wrong: Collection[str] = ()) -> None:
    """UsageError if a key has a value that it cannot have, or if something is `wrong` already."""
    if wrong := [*wrong, *_wrong_choices(cfg), *_wrong_sizes(cfg)]:
        raise UsageError("; ".join(dict.fromkeys(wrong)))


def wrong_types(cfg: DictConfig, overrides: Sequence[Override]) -> Iterator[str]:
    """What is given for a key has to be of its default's type. 1e6 becomes 1000000."""
    values = [
        override.key_or_group
        for override in overrides
        if not (is_group(override.key_or_group) or override.is_add() or override.is_delete())
    ]
    defaults = default_config(overrides) if values else cfg
    for key in values:
        value, default = OmegaConf.select(cfg, key), OmegaConf.select(defaults, key)
        if key in LEAST or default is None or key == "actors.mix":
            continue  # see `_wrong_sizes`, or the part that it is for
        if type(default) is int and isinstance(value, float) and value.is_integer():
            OmegaConf.update(cfg, key, int(value))
        elif type(value) not in _ACCEPTED.get(type(default), (type(value),)):
            name = _NAMES[type(default)]
            yield f"{key}={as_written(value)}: expected {name}, such as {as_written(default)}"


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
            *others, last = map(as_written, choices)
            yield f"{key}={as_written(value)}: expected {', '.join(others)} or {last}"


def _wrong_sizes(cfg: DictConfig) -> Iterator[str]:
    for key, least in LEAST.items():
        value = OmegaConf.select(cfg, key, default=least)  # not every algorithm has every key
        if value is None and key in NULLABLE:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
            OmegaConf.update(cfg, key, value)
        if type(value) is not int or value < least:
            yield f"{key}={as_written(value)}: expected a whole number, at least {least}"
        elif value > MOST.get(key, value):
            yield f"{key}={as_written(value)}: expected a whole number, at most {MOST[key]}"
    for key in POSITIVE:
        value = OmegaConf.select(cfg, key, default=1.0)
        if value is None and key in NULLABLE:
            continue
        most = 1e6 if key == "algorithm.optimizer.lr" else math.inf
        if not isinstance(value, (int, float)) or not 0 < value <= most:
            at_most = "" if most == math.inf else f" and at most {most:,.0f}"
            yield f"{key}={as_written(value)}: expected a number above 0{at_most}"
