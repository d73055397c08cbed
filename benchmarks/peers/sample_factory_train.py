"""Runs inside the virtual environment of Sample Factory: trains, and reports after each update.

Started by `sample_factory_peer`; nothing here is imported by this project.
"""
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cv2
from ale_py.registration import register_v0_v4_envs
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from sf_examples.atari.atari_params import atari_override_defaults
from sf_examples.atari.atari_utils import ATARI_ENVS, make_atari_env

ROLLOUT = 32
NEVER = 10**9

# Its own encoders have IMPALA's two networks; only the layer behind them differs by default.
ENCODERS = {"shallow": "convnet_impala", "deep": "resnet_impala"}


def make_env(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """An Atari game with Sample Factory's own wrappers, in whichever process wants one."""
    cv2.setNumThreads(1)  # its threads would only get in the way of the other processes
    register_v0_v4_envs()  # which importing ale_py only does with newer releases of gymnasium
    return make_atari_env(name, cfg, env_config, render_mode)


class Report(AlgoObserver):
    """Appends a line of progress after each update, and ends the run when told to.

    It is told by SIGTERM, or by the death of the process that started it.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.parent = os.getppid()
        self.ending = False
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: Any) -> None:
        self.ending = True

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        # The frames are those up to the update before: the learner's next message counts this one.
        frames = runner.total_env_steps_since_resume or 0
        line = {"time_s": time.monotonic(), "frames": frames}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.ending or os.getppid() != self.parent:
            runner.cfg.train_for_env_steps = 0  # it looks after each update


def arguments(options: argparse.Namespace, name: str) -> list[str]:
    """Sample Factory's command line: asynchronous, on the processor, sampling double-buffered."""
    settings = {
        "env": name,
        "experiment": "throughput",
        "train_dir": options.scratch,
        "device": "cpu",
        "serial_mode": False,
        "async_rl": True,
        "num_workers": options.workers,
        "num_envs_per_worker": options.envs_per_worker,
        "worker_num_splits": 2,
        "rollout": ROLLOUT,
        "batch_size": ROLLOUT * options.workers * options.envs_per_worker,
        "num_batches_per_epoch": 1,
        "num_epochs": 1,
        "encoder_conv_architecture": ENCODERS[options.network],
        "encoder_conv_mlp_layers": 256,
        "nonlinearity": "relu",
        "use_rnn": options.recurrent,
        "rnn_type": "lstm",
        "rnn_size": 256,
        "recurrence": ROLLOUT if options.recurrent else 1,
        # Running statistics of observations and returns are work that IMPALA does not have.
        "normalize_input": False,
        "normalize_returns": False,
        "train_for_env_steps": NEVER,
        "save_every_sec": NEVER,
        "save_best_every_sec": NEVER,
        "log_to_file": False,
        "with_wandb": False,
        "seed": 1,
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def env_name(game: str) -> str:
    """Sample Factory's name of a game: "pong" -> "atari_pong"."""
    wanted = game.title().replace("_", "") + "NoFrameskip-v4"
    names = {spec.env_id: spec.name for spec in ATARI_ENVS}
    if wanted not in names:
        sys.exit(f"unknown game {game!r}: expected one such as pong or space_invaders")
    return names[wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("game")
    parser.add_argument("network", choices=ENCODERS)
    parser.add_argument("progress", type=Path)
    parser.add_argument("scratch")
    parser.add_argument("--recurrent", action="store_true")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--envs_per_worker", type=int, required=True)
    options = parser.parse_args()

    name = env_name(options.game)
    register_env(name, make_env)
    argv = arguments(options, name)
    sf_parser, partial = parse_sf_args(argv)
    atari_override_defaults(partial.env, sf_parser)
    _, runner = make_runner(parse_full_cfg(sf_parser, argv))
    runner.register_observer(Report(options.progress))
    status = runner.init()
    if status == ExperimentStatus.SUCCESS:
        status = runner.run()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
