"""The texts say what the program does: commands compose, and every key is described as it is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig

import run_directory  # noqa: F401  (what conf/ calls by name)

ROOT = Path(__file__).parent.parent
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = {"suite=cartpole", "algorithm=reinforce"}  # of files that the texts ask to make
EXAMPLES |= {f"hydra/launcher={name}" for name in ("submitit_slurm", "submitit_local", "ray")}
UNDESCRIBED = re.compile(r".*(_target_|_partial_|foreach)|algorithm\.(name|experience\..*)")


def commands() -> list[str]:
    """The `python launch.py` lines of all texts, without comments and Hydra's own options."""
    found = []
    for text in TEXTS:
        for block in re.findall(r"```bash\n(.*?)```", text.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.replace("--cfg job", ""), comments=True)
                if words[:2] == ["python", "launch.py"] and not EXAMPLES & set(words):
                    found.append(" ".join(word for word in words[2:] if word != "--help"))
    return list(dict.fromkeys(found))


def compose(overrides: list[str]) -> DictConfig:
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra.compose("config", overrides)


@pytest.mark.parametrize("command", commands())
def test_commands_in_the_texts_compose(command: str) -> None:
    words = command.replace("$RUN", "run").split()
    parsed = OverridesParser.create().parse_overrides([word for word in words if word != "-m"])
    for override in parsed:
        assert override.is_sweep_override() <= ("-m" in words), f"{override.input_line} needs -m"
    # Of a sweep the first: key=a of key=a,b.
    compose(
        [
            f"{override.key_or_group}={first(override)}"
            if override.is_sweep_override()
            else str(override.input_line)
            for override in parsed
        ]
    )


def first(override: Override) -> object:
    value = override.value()
    if isinstance(value, IntervalSweep):
        return value.start
    return next(override.sweep_string_iterator())


def leaves(cfg: DictConfig, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in cfg.items():
        nested = isinstance(value, DictConfig)
        found |= leaves(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def described(name: str = "configuration.md") -> dict[str, str]:
    """Key -> default as written in the tables of a text in `docs/`."""
    text = (ROOT / "docs" / name).read_text()
    found: dict[str, str] = {}
    for keys, defaults in re.findall(r"^\| (`.*?`) \| (`.*?`) \|", text, re.MULTILINE):
        names, values = re.findall(r"`(.*?)`", keys), re.findall(r"`(.*?)`", defaults)
        for i, name in enumerate(names):
            full = names[0].rpartition(".")[0] + name if name.startswith(".") else name
            found.setdefault(full, values[min(i, len(values) - 1)])
    return found


@pytest.mark.parametrize("suite", ["atari57", "catch", "dmlab30"])
def test_every_key_is_described_with_its_default(suite: str) -> None:
    defaults = leaves(compose(["network/core=lstm"]))
    described_keys = described()
    for key, value in leaves(compose([f"suite={suite}", "network/core=lstm"])).items():
        if UNDESCRIBED.fullmatch(key):
            continue
        assert key in described_keys, f"docs/configuration.md does not describe {key}"
        if key.startswith("suite.") or defaults.get(key) == value:
            assert yaml.safe_load(described_keys[key]) == value, key


def test_every_key_of_a_population_is_described_with_its_default() -> None:
    keys = yaml.safe_load((ROOT / "conf/hydra/sweeper/population.yaml").read_text())
    del keys["_target_"]
    found = {key: yaml.safe_load(text) for key, text in described("population.md").items()}
    assert found == {f"hydra.sweeper.{key}": value for key, value in keys.items()}


def test_nothing_is_described_that_is_no_key() -> None:
    known = {
        "experiment",
        "inference",
        "network",
        "network/core",
        "algorithm.experience",
    }  # groups and nodes
    for suite in ("atari57", "catch", "dmlab30"):
        for optimizer in ("rmsprop", "adam"):
            choices = [f"suite={suite}", f"algorithm/optimizer={optimizer}", "network/core=lstm"]
            choices += ["inference=server"]
            known |= set(leaves(compose(choices)))
    assert not {key for key in described() if not key.startswith("+")} - known


def test_constraints_pin_every_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = (ROOT / "pyproject.toml").read_text()
    wanted = re.findall(r'^ {4}"([a-z0-9-]+)[\[>=]', project, re.MULTILINE)
    assert {"torch", "pytest"} <= set(wanted) <= set(pins)
    assert pins["torch"] == "2.13.0"  # no +cpu: the same pin gives CUDA where that is at hand
