"""One job of a sweep, in whichever process a launcher runs it: as good as a command of its own."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from command_line import RunFailed
from refusals import UsageError
from run_directory import shown
from sweep import (
    JobState,
    Sweep,
    accelerator_for,
    accelerators,
    check_not_stopped,
    read_states,
    read_sweep,
    stop,
    write_state,
    writing,
)

log = logging.getLogger("sweep")


def as_job(cfg: DictConfig, run: Callable[[DictConfig], float | None]) -> float | None:
    """Calls `run` as a job of the sweep that Hydra's configuration names; returns its score.

    What becomes of it is written to `job.json` and `summary.csv`, and how it fails to its log. It
    leaves the process as it found it. Raises RunFailed if the run fails or may not begin, and lets
    through the SystemExit of a run that a signal stopped in the program of the sweep itself.
    """
    hydra = HydraConfig.get()
    job_dir, sweep_dir = Path(hydra.runtime.output_dir), Path(hydra.sweep.dir)
    # A sweeper that is not this project's may keep no list of its jobs.
    sweep = read_sweep(sweep_dir) if (sweep_dir / "sweep.json").exists() else None
    name = sweep.jobs[int(job_dir.name)].name if sweep else job_dir.name
    state = JobState(
        "running",
        name=name,
        run_dir=None if cfg.resume is None else str(Path(str(cfg.resume)).expanduser().resolve()),
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    if state.run_dir == str(job_dir.resolve()):
        state = replace(state, run_dir=None)
    elsewhere = sweep is not None and (sweep.host, sweep.pid) != (state.host, state.pid)
    process = _process_of_its_own(job_dir.name) if elsewhere else nullcontext()
    with _unchanged(), process:
        state = _begun(sweep, job_dir, state, elsewhere and cfg.device != "cpu")
        score, end, interruption = _run(cfg, run, state)
        with writing(sweep) if sweep else nullcontext():
            write_state(job_dir, end)
            if end.state == "failed" and sweep and sweep.on_error == "stop":
                stop(sweep_dir, f"job {job_dir.name} failed and sweep.on_error=stop")
    gc.collect()  # what the run has left: a failure's own frames, memory that processes share
    if interruption and not elsewhere:
        raise interruption
    if end.state != "finished":  # with no cause: that would keep all that the run had
        raise RunFailed(f"job {job_dir.name} {end.state}: {end.error}")
    return score


def _begun(sweep: Sweep | None, job_dir: Path, state: JobState, wants_device: bool) -> JobState:
    """Says that the job runs, unless the sweep was stopped."""
    with writing(sweep) if sweep else nullcontext():
        if sweep:
            check_not_stopped(sweep.directory, job_dir)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if sweep and wants_device and (names := accelerators(visible, torch.cuda.device_count())):
            own = accelerator_for(os.getpid(), names, read_states(sweep))
            os.environ["CUDA_VISIBLE_DEVICES"] = own
            state = replace(state, accelerator=own)
        write_state(job_dir, state)
    of = f" of {len(sweep.jobs)}" if sweep else ""
    log.info("job %s%s: %s", job_dir.name, of, state.name)
    if state.accelerator:
        log.info("job %s has accelerator %s", job_dir.name, state.accelerator)
    return state


def _run(
    cfg: DictConfig, run: Callable[[DictConfig], float | None], state: JobState
) -> tuple[float | None, JobState, BaseException | None]:
    """The score, what became of the job, and the signal's exception if one ended it."""
    try:
        score = run(cfg)
    except Exception as error:
        if not isinstance(error, (RunFailed, UsageError)):  # which have been logged
            log.exception("the run failed")
        cause = error.__cause__ if isinstance(error, RunFailed) and error.__cause__ else error
        text = str(cause).strip().splitlines() or [""]
        kind = "" if isinstance(cause, UsageError) else f"{type(cause).__name__}: "
        failed = replace(state, state="failed", error=f"{kind}{text[0]}")
        job_dir = Path(HydraConfig.get().runtime.output_dir)
        log.error(
            "job %s (%s) failed: %s; its log is %s",
            job_dir.name, state.name, failed.error, shown(job_dir / f"{cfg.mode}.log"),
        )  # fmt: skip
        return None, failed, None
    except (SystemExit, KeyboardInterrupt) as error:
        code = error.code if isinstance(error, SystemExit) else 128 + signal.SIGINT
        number = code - 128 if isinstance(code, int) else 0
        name = signal.Signals(number).name if number in set(signal.Signals) else f"exit {code}"
        return None, replace(state, state="interrupted", error=f"stopped by {name}"), error
    return score, replace(state, state="finished", score=score), None


@contextmanager
def _unchanged() -> Iterator[None]:
    """What a run sets for its whole process is as before afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads, environment = torch.get_num_threads(), dict(os.environ)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads(threads)
        for key in set(os.environ) - set(environment):
            del os.environ[key]
        os.environ.update(environment)


@contextmanager
def _process_of_its_own(job: str) -> Iterator[None]:
    """In a process that `supervisor` started: signals end the run, lines say whose they are."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, _: sys.exit(128 + number)) for n in numbers}
    output = sys.stdout
    marked: Any = _Marked(output, f"job {job}: ")
    consoles = [h for h in logging.root.handlers if getattr(h, "stream", None) is output]
    sys.stdout = marked
    for handler in consoles:
        handler.setStream(marked)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        sys.stdout = output
        for handler in consoles:
            handler.setStream(output)  # type: ignore[attr-defined]
        for number, handler in before.items():
            signal.signal(number, handler)


class _Marked:
    """A stream of lines that begin with a mark; no terminal, which only one job could draw on."""

    def __init__(self, stream: Any, mark: str) -> None:
        self._stream, self._mark, self._line = stream, mark, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        if lines:  # in one piece, as other jobs write here too
            self._stream.write("".join(f"{self._mark}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
