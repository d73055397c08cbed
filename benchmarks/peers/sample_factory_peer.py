"""Sample Factory 2.1.1 (asynchronous PPO) as a peer: its set-up, and its training throughput.

`python -m benchmarks.peers.sample_factory_peer pong` measures it alone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.training_run import Count, Program, exit_on_sigterm, watch
from impala.loggers.json_lines import read_points

NAME = "Sample Factory"
VERSION = "2.1.1"
VENV = Path(__file__).resolve().parents[2] / ".venv-sample-factory"
PROGRAM = Path(__file__).with_name("sample_factory_train.py")
NETWORKS = ("shallow", "deep")
PROGRESS = "progress.jsonl"

# The newest that work together: it wants gymnasium below 1.0 and numpy below 2, and ale-py is the
# release that this project plays with, so that both run the same emulator.
PACKAGES = (
    "torch==2.13.0",
    "numpy==1.26.4",
    "gymnasium==0.29.1",
    "ale-py==0.12.1",
    "opencv-python-headless==4.11.0.86",
    "signal-slot-mp==1.0.5",
    "faster-fifo==1.5.2",
    "tensorboardX==2.6.5",
    "protobuf==7.36.2",
    "threadpoolctl==3.8.0",
    "psutil==7.2.2",
    "colorlog==6.12.0",
    "filelock==4.3.1",
)
# Without its own list of requirements, which has the OpenCV that needs a graphical system, and
# packages for rendering and for sharing models that training never imports.
PACKAGES_ALONE = (f"sample-factory=={VERSION}",)
PYTHONS = ((3, 11), (3, 12))  # those that numpy 1.26.4 has builds for


def install(venv: Path = VENV) -> Path:
    """Makes the peer's virtual environment unless it is there, and returns its interpreter.

    A finished one is known by a file of its packages, so that an interrupted installation, or one
    of other versions, is made anew. Raises ValueError for a path that is something else,
    RuntimeError where the installation fails or no suitable Python is found.
    """
    interpreter, packages_file = venv / "bin" / "python", venv / "packages.txt"
    packages = "\n".join((*PACKAGES, *PACKAGES_ALONE)) + "\n"
    if packages_file.exists() and packages_file.read_text() == packages:
        return interpreter
    if venv.exists() and not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
        raise ValueError(f"{venv} is no virtual environment: give another path, or remove it")
    print(f"Installing {NAME} {VERSION} in {venv}", file=sys.stderr)
    _run(_python(), "-m", "venv", "--clear", str(venv))
    (venv / ".gitignore").write_text("*\n")
    pip = (str(interpreter), "-m", "pip", "install", "--quiet")
    _run(*pip, *PACKAGES)
    _run(*pip, "--no-deps", *PACKAGES_ALONE)
    packages_file.write_text(packages)
    return interpreter


def _python() -> str:
    """This interpreter if the peer can use it, else another on the search path."""
    if sys.version_info[:2] in PYTHONS:
        return sys.executable
    names = [f"python{major}.{minor}" for major, minor in PYTHONS]
    for name in names:
        if found := shutil.which(name):
            return found
    raise RuntimeError(
        f"{NAME} {VERSION} needs {' or '.join(names)}; this is Python {sys.version.split()[0]}"
        " and none of them is on PATH: install one"
    )


def _run(*command: str) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` failed with exit code {done.returncode}:\n{done.stdout[-3000:]}"
        )


def program(
    game: str,
    *,
    network: str = "shallow",
    recurrent: bool = False,
    venv: Path = VENV,
    workers: int = 2,
    envs_per_worker: int = 16,
) -> Program:
    """Training on one game, set up first where that is needed.

    game:     as in this project: "pong", "space_invaders".
    network:  "shallow" or "deep", IMPALA's, with a fully connected layer of 256.
    recurrent: an LSTM of 256 behind it.
    workers:  processes that play; one for each core serves it best.

    Raises ValueError for an unknown network, RuntimeError where it cannot be set up.
    """
    if network not in NETWORKS:
        raise ValueError(f"network is {network!r}, expected one of {', '.join(NETWORKS)}")
    interpreter = install(venv)

    def command(folder: Path) -> list[str]:
        line = [str(interpreter), str(PROGRAM), game, network]
        line += [f"--workers={workers}", f"--envs_per_worker={envs_per_worker}"]
        return [*line, *(["--recurrent"] if recurrent else []), str(folder / PROGRESS), str(folder)]

    def read(folder: Path) -> list[Count]:
        points = read_points(folder / PROGRESS)
        return [Count(point["time_s"], point["frames"]) for point in points]

    # One thread in each process: it has as many processes as the machine has cores.
    return Program(f"{NAME} {VERSION}", command, read, {"OMP_NUM_THREADS": "1"})


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Training throughput of {NAME} {VERSION}.")
    parser.add_argument("game")
    parser.add_argument("--network", choices=NETWORKS, default="shallow")
    parser.add_argument("--recurrent", action="store_true", help="an LSTM behind the network")
    parser.add_argument("--seconds", type=float, default=60, help="of each window")
    parser.add_argument("--windows", type=int, default=3)
    options = parser.parse_args()
    exit_on_sigterm()
    peer = program(options.game, network=options.network, recurrent=options.recurrent)
    for window in watch(peer, seconds=options.seconds, windows=options.windows):
        print(f"{window.steps_per_s:.0f} agent steps/s, {window.cores_busy:.2f} cores busy")


if __name__ == "__main__":
    main()
