"""What is refused, in one line that says what was meant."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf

CONF = Path(__file__).resolve().parent / "conf"


class UsageError(ValueError):
    """Something in the command line or the configuration is wrong; the message says what to do."""


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
            override = parsed([argument])[0]
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
        elif is_group(key := override.key_or_group):
            options = sorted(path.stem for path in (CONF / key).glob("*.yaml"))
            value = override.value()
            if override.is_sweep_override():
                value = list(override.sweep_string_iterator())
            for choice in value if isinstance(value, list) else [value]:
                if choice not in options and (choice is not None or key != "experiment"):
                    choice = as_written(choice)
                    near = nearest(choice, options) or f"expected {' or '.join(options)}"
                    hints.append(f"{key}={choice}: there is no such choice, {near}")
    if hints or not overrides:
        return hints
    groups = {str(path.relative_to(CONF)) for path in CONF.rglob("*") if path.is_dir()}
    known = groups.union(dotted_keys(default_config(overrides)))
    for override in overrides:
        key = override.key_or_group
        if not (key in known or override.is_add() or key.startswith("hydra")):
            if key in set(dotted_keys(default_config([]))):
                hints.append(f"{key}: the part that has this key is not chosen here")
                continue
            if choices := _choices_with(key):
                hints.append(f"{key} is a key of {' and '.join(choices)}, which is not chosen here")
                continue
            near = nearest(key, known) or "see `--cfg job` for all keys"
            hints.append(f"unknown key {key!r}: {near}")
    return hints


def _choices_with(key: str) -> list[str]:
    """Choices of a group whose files have this key."""
    group, _, name = key.rpartition(".")
    if not group:
        return []
    paths = sorted((CONF / group.replace(".", "/")).glob("*.yaml"))
    return [f"{group}={path.stem}" for path in paths if name in OmegaConf.load(path)]


def nearest(name: str, known: Collection[str]) -> str:
    near = sorted(other for other in known if other.endswith(f".{name}"))
    near = near or difflib.get_close_matches(name, sorted(known), 1)
    return f"did you mean {' or '.join(near)}?" if near else ""


def dotted_keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in cfg:
        yield f"{prefix}{key}"
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from dotted_keys(node, f"{prefix}{key}.")


def default_config(overrides: Sequence[Override]) -> DictConfig:
    """The configuration with the groups that are chosen and without the values that are given."""
    groups = tuple(o.input_line or "" for o in overrides if is_group(o.key_or_group))
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


def parsed(overrides: Sequence[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(overrides))


def is_group(key: str) -> bool:
    return (CONF / key).is_dir()


def as_written(value: Any) -> str:
    """As it is written on the command line."""
    return "null" if value is None else str(value).lower() if value in (True, False) else str(value)
