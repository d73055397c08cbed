"""Whether training survives what goes wrong, and what it leaves behind when it is stopped.

    python -m benchmarks.faults --seconds 120

Trains `suite=catch`, whose every game is known to last nine steps and to end with 1 or -1, while it
kills actors, breaks environments in each way, fills the disk of the run, and sends each signal at
each phase. Writes outputs/benchmarks/faults.md. The disk that fills is a tmpfs, which takes root to
make.
"""

from __future__ import annotations

import getpass
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import report
from benchmarks.training_run import (
    LAUNCH,
    end,
    exit_on_sigterm,
    family,
    is_actor,
    shared_memory,
)
from impala.checkpoint import Checkpoints
from impala.loggers.json_lines import read_points
from suites.catch import Catch
from suites.suite import Task, TaskVectorEnv

EXIT_LIMIT_S = 5.0
START_LIMIT_S = 60.0
UNROLL, ENVIRONMENTS = 20, 16  # of an actor: what it loses when it dies
TRAINING = [
    "suite=catch", "num_actors=2", f"envs_per_actor={ENVIRONMENTS}", "total_frames=1_000_000_000",
    "log_every_s=0.5", "checkpoint.every_s=2", "loggers=[]",
    "restarts.per_task=1_000_000", "restarts.backoff_s=0.05",
]  # fmt: skip
ENVIRONMENT_FAULTS = ("raise", "hang", "nan", "shape", "exit", "kill", "unbuildable")
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
PYTORCH_CACHE = {f"torchinductor_{getpass.getuser()}"}  # one for each user, made on import
PHASES = ("start-up", "mid-run", "mid-checkpoint")


# A suite that breaks


class FaultyCatch(Catch):
    """Catch, of which an environment breaks about every `every` steps of its process.

    fault: one of `ENVIRONMENT_FAULTS`. "unbuildable" breaks one build in two instead.
    """

    def __init__(self, *, fault: str, every: int = 1000, rows: int = 10, columns: int = 5) -> None:
        super().__init__(rows=rows, columns=columns)
        self._fault, self._every = fault, every

    def make(
        self, task: Task, num_envs: int, seeds: Sequence[int], split: str = "train"
    ) -> TaskVectorEnv:
        draw = random.Random(seeds[0])
        if self._fault == "unbuildable" and draw.random() < 0.5:
            raise RuntimeError("made to be unbuildable")
        environment = super().make(task, num_envs, seeds, split)
        if self._fault != "unbuildable":
            _break(environment, self._fault, at_step=draw.randint(1, 2 * self._every))
        return environment


def _break(environment: TaskVectorEnv, fault: str, at_step: int) -> None:
    step, whole = 0, environment._recv

    def recv() -> Any:
        nonlocal step
        step += 1
        frames, rewards, terminated, truncated, info = whole()
        if step == at_step:
            if fault == "raise":
                raise RuntimeError("made to raise")
            if fault == "hang":
                time.sleep(3600)
            if fault == "exit":
                os._exit(3)
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            rewards = np.full_like(rewards, np.nan) if fault == "nan" else rewards[:, None]
        return frames, rewards, terminated, truncated, info

    environment._recv = recv


# A run that is watched


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    fault: str
    injected: int
    survived: int
    frames_lost: str  # an upper bound
    wrong_scores: int
    leftovers: int
    remark: str

    @property
    def passed(self) -> bool:
        return self.injected == self.survived and not (self.wrong_scores or self.leftovers)


class Watched:
    """`launch.py` in a folder of its own, with all that it starts or leaves."""

    def __init__(self, folder: Path, overrides: Sequence[str], run_dir: Path | None = None) -> None:
        self.run_dir = run_dir or folder / "run"
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._shared_before = shared_memory()
        self._output = folder / "output.txt"
        given = [*TRAINING, *overrides, f"hydra.run.dir={self.run_dir}"]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(LAUNCH), *given],
                cwd=report.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self._temporary), "PYTHONPATH": str(report.ROOT)},
            )
        self._seen: set[psutil.Process] = set()

    def frames(self) -> int:
        points = list(read_points(self.run_dir / "metrics.jsonl"))
        return points[-1]["frames"] if points else 0

    def actors(self) -> list[psutil.Process]:
        """Its children, the tracker of multiprocessing left out; all are remembered."""
        self._seen.update(family(self.process.pid))
        return [one for one in self._seen if one.is_running() and _plays(one)]

    def wait(self, done: Callable[[], bool], limit_s: float = START_LIMIT_S) -> None:
        """Raises RuntimeError, with the program's last words, if it ends or time is up first."""
        deadline = time.monotonic() + limit_s
        while not done():
            self.actors()
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"exit code {self.process.poll()}; last words:\n{self.words()}")
            time.sleep(0.02)

    def words(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-15:])

    def stop(self, number: signal.Signals) -> tuple[float, int | None, int]:
        """Seconds until all of it was gone, exit code, and how many things were left."""
        self.actors()
        sent = time.monotonic()
        os.kill(self.process.pid, number)
        return self.ended(sent)

    def ended(self, since: float) -> tuple[float, int | None, int]:
        code, left = None, self._seen
        while time.monotonic() - since < 4 * EXIT_LIMIT_S and (code is None or left):
            code = self.process.poll()
            left = {one for one in self._seen if _alive(one)}
            time.sleep(0.01)
        seconds = time.monotonic() - since
        files = shared_memory() - self._shared_before
        files |= {path.name for path in self._temporary.iterdir()} - PYTORCH_CACHE
        return seconds, code, len(left) + len(files)

    def wrong_scores(self) -> int:
        games = read_points(self.run_dir / "episodes.jsonl")
        return sum(game["length"] != 9 or abs(game["return"]) != 1 for game in games)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())


@contextmanager
def watched(*overrides: str, run_dir: Path | None = None) -> Iterator[Watched]:
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        run = Watched(Path(name), overrides, run_dir)
        try:
            yield run
        finally:
            end(run.process, 0.0)


def _plays(process: psutil.Process) -> bool:
    try:
        return is_actor(process)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# What is done to it


def kill_actors(seconds: float, every_s: float) -> Row:
    """SIGKILL for a random actor every few seconds."""
    draw = random.Random(0)
    with watched() as run:
        run.wait(lambda: run.frames() > 0)
        killed, last = 0, time.monotonic() + seconds
        while time.monotonic() < last:
            draw.choice(sorted(run.actors(), key=lambda one: one.pid)).kill()
            killed += 1
            again = time.monotonic() + every_s
            run.wait(lambda again=again: time.monotonic() > again and len(run.actors()) == 2)
            before = run.frames()
            run.wait(lambda before=before: run.frames() > before)
        return _after_restarts(run, "actor killed (SIGKILL)", killed)


def break_environments(fault: str, times: int) -> Row:
    """The suite breaks by itself; waits until it did so some times and games are played again."""
    timeout = ["restarts.step_timeout_s=2"] if fault == "hang" else []
    target = ["suite._target_=benchmarks.faults.FaultyCatch", f"+suite.fault={fault}"]
    with watched(*target, *timeout) as run:
        log = run.run_dir / "train.log"

        def failures() -> int:
            return log.read_text().count(" failed in catch; it starts again") if log.exists() else 0

        # Once all are built, nobody builds any more: how often that fails before is up to the seed.
        least = 1 if fault == "unbuildable" else times
        run.wait(lambda: failures() >= least and run.frames() > 0, 20.0 * times)
        return _after_restarts(run, f"environment: {fault}", None)


def _after_restarts(run: Watched, fault: str, injected: int | None) -> Row:
    seconds, code, left = run.stop(signal.SIGINT)
    summary = run.summary()
    restarts = sum(summary["restarts"].values())
    lost = ENVIRONMENTS * UNROLL * restarts
    return Row(
        fault,
        restarts if injected is None else injected,
        restarts if code == 130 and seconds < EXIT_LIMIT_S else 0,
        f"{lost:,} of {summary['frames'] + lost:,}",
        run.wrong_scores(),
        left,
        f"games aborted: {sum(summary['aborted'].values()):,}",
    )


def fill_the_disk() -> Row:
    """The run's directory is on a disk of three megabytes, and a checkpoint takes almost one."""
    disk = Path(tempfile.mkdtemp(prefix="faults-disk-"))
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True).returncode:
            return Row("disk full", 0, 0, "", 0, 0, "not tried: a tmpfs takes root to make")
        with watched("checkpoint.every_s=0.5", run_dir=disk / "run") as run:
            deadline = time.monotonic() + 60
            while run.process.poll() is None and time.monotonic() < deadline:
                run.actors()
                time.sleep(0.05)
            _, code, left = run.ended(time.monotonic())
            said = "No space left on device" in run.words()
            loads = _loads(run.run_dir)
            good = code == 1 and said and loads
            words = [f"exit code {code}", "says so" if said else "does not say so"]
            words.append("last checkpoint loads" if loads else "no checkpoint loads")
            return Row("disk full", 1, int(good), "", run.wrong_scores(), left, ", ".join(words))
    finally:
        subprocess.run(["umount", str(disk)], capture_output=True)
        shutil.rmtree(disk, ignore_errors=True)


def send(number: signal.Signals, phase: str) -> Row:
    """A signal to the main process while it starts, trains, or writes a checkpoint."""
    often = ["checkpoint.every_s=0.01"] if phase == "mid-checkpoint" else []
    with watched(*often) as run:
        if phase == "start-up":
            run.wait(lambda: bool(run.actors()))  # they are starting: nobody has played yet
        else:
            run.wait(lambda: any(path.name != "ckpt_0.pt" for path in _saved(run.run_dir)))
        if phase == "mid-checkpoint":
            temporary = run.run_dir / "checkpoints"
            run.wait(lambda: any(name.startswith(".ckpt") for name in os.listdir(temporary)))
        seconds, code, left = run.stop(number)
        loads = phase == "start-up" or _loads(run.run_dir)
        good = code == SIGNALS[number] and seconds < EXIT_LIMIT_S and loads
        remark = f"exit code {code} after {seconds:.1f} s"
        remark += "" if phase == "start-up" else ", last checkpoint loads" if loads else ", NONE"
        name = f"{number.name}, {phase}"
        return Row(name, 1, int(good), "", run.wrong_scores(), left, remark)


def _saved(run_dir: Path) -> list[Path]:
    return Checkpoints(run_dir / "checkpoints").numbered()


def _loads(run_dir: Path) -> bool:
    """Whether the run could go on from its newest checkpoint."""
    try:
        Checkpoints(run_dir / "checkpoints").load()
        return True
    except (OSError, ValueError) as error:
        report.say(f"no checkpoint loads: {error}")
        return False


def write(rows: Sequence[Row], out: Path) -> bool:
    """Returns whether all rows passed."""
    passed = all(row.passed for row in rows)
    header = [
        "fault", "injected", "survived", "frames lost, at most", "wrong scores", "leftovers", "",
    ]  # fmt: skip
    cells = [
        [
            row.fault, f"{row.injected}", f"{row.survived}", row.frames_lost,
            f"{row.wrong_scores}", f"{row.leftovers}", row.remark,
        ]
        for row in rows
    ]  # fmt: skip
    report.write(
        out,
        "# Faults",
        report.facts(
            {
                **report.made_here("benchmarks.faults"),
                "training": f"`python launch.py {' '.join(TRAINING)}`",
                "verdict": "passed" if passed else "**failed**",
            }
        ),
        "*survived*: the actor was started again and training went on, or the run ended as it"
        f" should: with the right exit code, within {EXIT_LIMIT_S:g} s, and with a checkpoint that"
        " loads. *wrong scores*: games that did not last nine steps or did not end with 1 or -1."
        " *leftovers*: processes, entries in /dev/shm and temporary files after the end.",
        report.table(header, cells),
    )
    return passed


def main() -> None:
    parser = report.parser("benchmarks.faults", __doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of killing actors")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two kills")
    parser.add_argument("--breaks", type=int, default=3, help="of environments, for each way")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "faults.md")
    options = parser.parse_args()
    exit_on_sigterm()
    tries: list[Callable[[], Row]] = [lambda: kill_actors(options.seconds, options.every)]
    tries += [lambda f=fault: break_environments(f, options.breaks) for fault in ENVIRONMENT_FAULTS]
    tries += [fill_the_disk]
    tries += [lambda n=n, p=phase: send(n, p) for n in SIGNALS for phase in PHASES]
    rows = []
    for attempt in tries:
        row = attempt()
        report.say(f"{row.fault}: {row.survived} of {row.injected} survived; {row.remark}")
        rows.append(row)
    sys.exit(0 if write(rows, options.out) else 1)


if __name__ == "__main__":
    main()
