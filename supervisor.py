"""A process of a parallel launcher: it watches over a job, which runs in a child of it.

A run may be killed, by the kernel for its memory for one. If that were a process of the launcher's,
joblib would end all others with it. So the launcher has this one, which imports little and computes
nothing: it says how the job ended, whatever ended it, and is there for the next. A member of a
population with `schedule=asynchronous` is started again from here at once; the others play on.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import signal
import socket
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, cast

from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log
from omegaconf import DictConfig, OmegaConf, open_dict

from command_line import RunFailed
from impala.children import SIGNALS, die_with_parent, how_it_ended, signals_held
from impala.population_directory import PopulationDirectory
from impala.whole_file import write_whole
from sweep import (
    Sweep,
    check_not_stopped,
    read_state,
    read_sweep,
    stop,
    write_state,
    writing,
)

log = logging.getLogger("sweep")

LOOK_S = 1.0  # how often a member looks whether its population has failed


def supervised(cfg: DictConfig) -> float | None:
    """What launchers are given to run: the job that Hydra's configuration names, in a process of
    its own. Returns its score; RunFailed if it does not finish.
    """
    hydra = HydraConfig.get()
    job_dir, sweep = Path(hydra.runtime.output_dir), read_sweep(Path(hydra.sweep.dir))
    if (socket.gethostname(), os.getpid()) == (sweep.host, sweep.pid):
        return _job_here(cfg)
    try:
        with _Watch(sweep, job_dir, cfg.population) as watch:
            while True:
                check_not_stopped(sweep.directory, job_dir)
                score, error = watch.run(cfg)
                if error is None:
                    return score
                if not watch.may_go_on():
                    raise RunFailed(error)
    except RunFailed:
        raise
    except Exception:
        log.exception("job %s could not be run", job_dir.name)
        raise


def _job_here(cfg: DictConfig) -> float | None:
    """In the sweep's own process, as with Hydra's own launcher, or joblib's n_jobs=1."""
    import launch  # with PyTorch
    from sweep_job import as_job

    return as_job(cfg, launch.run_alone)


class _Watch:
    """While it is entered, signals to this process are for the job's.

    A terminal's Ctrl-C is for the sweep's program alone, which passes it on; where that program is
    the parent, this process ends with it.
    """

    def __init__(self, sweep: Sweep, job_dir: Path, population: DictConfig | None) -> None:
        self._sweep, self._job_dir = sweep, job_dir
        self._process: BaseProcess | None = None
        self._caught: list[int] = []
        self._failures = 0  # here
        # Only with schedule=asynchronous a member is started again before the sweep has come back.
        self._max_failures: int | None = (
            None if population is None else population.get("max_failures")
        )
        self._failures_before = self._failed_records(own=True)

    def __enter__(self) -> _Watch:
        if os.getppid() == self._sweep.pid and socket.gethostname() == self._sweep.host:
            os.setpgid(0, 0)
            die_with_parent(self._sweep.pid)
        self._handlers = {n: signal.signal(n, self._handle) for n in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._caught.append(number)
        self._send(number)

    def _send(self, number: int) -> None:
        if self._process is not None and self._process.is_alive():
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def run(self, cfg: DictConfig) -> tuple[float | None, str | None]:
        """The score, or why there is none."""
        self._process = None
        process, receiver = _started(cfg, again=self._failures > 0)
        self._process, ending = process, False
        for number in self._caught[:1]:  # while it was started
            self._send(number)
        while process.exitcode is None:
            process.join(LOOK_S)
            if not ending and (self._sweep.directory / ".failed").exists():
                self._send(signal.SIGTERM)
                ending = True
        with receiver:
            try:
                return receiver.recv()
            except EOFError:
                return None, self._lost(process.exitcode)

    def _lost(self, exit_code: int) -> str:
        """Says how a job ended that could not say so itself."""
        number, how = self._job_dir.name, how_it_ended(exit_code)
        name, end = self._sweep.jobs[int(number)].name, "killed" if exit_code < 0 else "failed"
        with writing(self._sweep):
            state = replace(read_state(self._job_dir), state=end, error=how, name=name, score=None)
            write_state(self._job_dir, state)
            if self._sweep.on_error == "stop":
                stop(self._sweep.directory, f"job {number} was {end} and sweep.on_error=stop")
        log.error("job %s (%s) %s: %s", number, name, end, how)
        return f"job {number} {end}: {how}"

    def may_go_on(self) -> bool:
        """Whether the job, which has failed, is a member that is started again.

        If too many of all members have failed by now, it ends the population.
        """
        directory = self._sweep.directory
        ended = any((directory / name).exists() for name in (".stop", ".failed"))
        if self._max_failures is None or self._caught or ended:
            return False
        self._failures += 1
        # One whose seeding anew fails as well has no record in the lineage.
        own = self._failures_before + self._failures
        failures = own + self._failed_records(own=False)
        if failures > self._max_failures:
            write_whole(
                directory / ".failed",
                f"members have failed {failures} times, and"
                f" hydra.sweeper.max_failures={self._max_failures}",
            )
            return False
        log.warning(
            "member %s is started again: failure %d of %d that may be",
            self._job_dir.name, failures, self._max_failures,
        )  # fmt: skip
        return True

    def _failed_records(self, own: bool) -> int:
        if self._max_failures is None:
            return 0
        records = PopulationDirectory(self._sweep.directory).lineage()
        return sum(r.failed for r in records if (str(r.member) == self._job_dir.name) is own)


def _started(cfg: DictConfig, again: bool) -> tuple[BaseProcess, Connection]:
    """The job's process, and what it will say at its end: see `_Watch.run`."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)  # a launcher's own would reach the child
    try:
        # As plain values: classes of Hydra's plugins cannot be pickled, which it loads itself.
        hydra_cfg = OmegaConf.to_container(cast(Any, HydraConfig.instance().cfg).hydra)
        process = multiprocessing.Process(target=_job, args=(sender, cfg, hydra_cfg, again))
        with signals_held():
            process.start()
    finally:
        multiprocessing.set_start_method(method, force=True)
        sender.close()
    return process, receiver


def _job(outcome: Connection, cfg: DictConfig, hydra_cfg: dict[str, Any], again: bool) -> None:
    """The life of the job's process. Signals wait until the run can end in order."""
    die_with_parent()
    os.setpgid(0, 0)  # what a cluster sends to the group comes from the parent, and once
    whole, hydra_node = copy.deepcopy(cfg), OmegaConf.structured(HydraConf)
    with open_dict(whole), open_dict(hydra_node):
        whole.hydra = OmegaConf.merge(hydra_node, hydra_cfg)
    HydraConfig.instance().set_config(whole)
    hydra = HydraConfig.get()
    Plugins.instance()  # which find sources of configuration
    search_path = ConfigSearchPathImpl()
    for source in hydra.runtime.config_sources:
        search_path.append(source.provider, f"{source.schema}://{source.path}")
    Hydra.create_main_hydra2(hydra.job.name, search_path)
    configure_log(whole.hydra.job_logging, hydra.verbose)
    import launch
    from sweep_job import as_job

    def run(cfg: DictConfig) -> float | None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return launch.run_alone(launch.seeded_again(cfg) if again else cfg)

    try:
        outcome.send((as_job(cfg, run), None))
    except RunFailed as error:
        outcome.send((None, str(error)))
