"""Every choice in conf/ composes and builds, and the command line wins."""

import hydra
import pytest
import torch
from hydra.utils import instantiate

import building
import refusals
from impala.loggers.logger import RunInfo

CONF = refusals.CONF


def compose(*overrides):
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def choices(group):
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("suite", choices("suite"))
def test_each_suite_builds_an_agent_that_fits_it(suite):
    cfg = compose(f"suite={suite}")
    built = instantiate(cfg.suite)
    agent = building.build_agent(cfg, built)
    assert sum(p.numel() for p in agent.parameters()) > 1000


@pytest.mark.parametrize("network", choices("network"))
@pytest.mark.parametrize("core", choices("network/core"))
def test_each_network_builds_with_each_core(network, core):
    cfg = compose(
        "suite=catch", f"network={network}", f"network/core={core}", "network.feed_back=true",
        "suite.rows=20", "suite.columns=20",
    )  # fmt: skip
    agent = building.build_agent(cfg, instantiate(cfg.suite))
    assert bool(agent.initial_state(3)) == (core == "lstm")


@pytest.mark.parametrize("optimizer", choices("algorithm/optimizer"))
def test_each_optimizer_builds(optimizer):
    cfg = compose(f"algorithm/optimizer={optimizer}")
    parameter = torch.nn.Parameter(torch.zeros(2))
    built = instantiate(cfg.algorithm.optimizer)([parameter])
    assert built.param_groups[0]["lr"] == cfg.algorithm.optimizer.lr


@pytest.mark.parametrize("recipe", choices("experiment"))
def test_each_recipe_builds(recipe):
    cfg = compose(f"experiment={recipe}")
    suite = instantiate(cfg.suite)
    assert cfg.suite.tasks is None or len(suite.tasks) == len(cfg.suite.tasks)
    building.build_agent(cfg, suite)
    assert cfg.algorithm.batch_size % cfg.algorithm.passes == 0


def test_catch_chooses_its_network_and_the_command_line_wins():
    assert compose("suite=catch").network.torso._target_.endswith(".MLP")
    assert compose("suite=catch", "network=deep").network.torso._target_.endswith(".Deep")
    assert compose("network=deep", "suite=catch").network.torso._target_.endswith(".Deep")
    assert compose("suite=catch", "total_frames=7").total_frames == 7


@pytest.mark.parametrize(
    "names", [[], ["console"], ["weights_and_biases"], ["console", "weights_and_biases"]]
)
def test_any_loggers(names, tmp_path):
    cfg = compose(
        f"loggers=[{','.join(names)}]",
        *["loggers.weights_and_biases.mode=disabled"] * ("weights_and_biases" in names),
    )
    run = RunInfo(tmp_path, "name", "title", {}, 10, ("pong",), "median", None)
    assert [type(instantiate(logger)(run)).__name__ for logger in cfg.loggers.values()] == [
        {"console": "Console", "weights_and_biases": "WeightsAndBiases"}[name] for name in names
    ]


def test_settings_of_transports_and_games():
    cfg = compose("transport=in_process", "suite.tasks=[pong,breakout]", "suite.max_frames=400")
    assert cfg.transport._target_.endswith(".InProcess")
    assert [task.name for task in instantiate(cfg.suite).tasks] == ["pong", "breakout"]
