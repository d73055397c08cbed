"""The processes that play an evaluation's games; one that dies or hangs is replaced."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from impala.children import die_with_parent, how_it_ended, kill_all, signals_held
from impala.cores import on_any_core
from impala.evaluation.evaluation import Chunk, Evaluation, EvaluationError, Game
from impala.evaluation.player import Player
from impala.patience import Patience
from impala.whole_file import DiskFull

log = logging.getLogger(__name__)

REPLACEMENTS = 2  # of workers that fail in the same games; one more is an error
STARTING_S = 60.0  # that a worker may take to start, besides its time-out
SIGN_OF_LIFE_S = 0.5


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    heard_s: float  # when it last was, or was given something to do
    chunk: Chunk | None = None
    task: int = -1  # that it played last, whose environments it has


class Workers:
    """Plays `chunks`; `receive` says which are done.

    run_dir, frames: where videos go, and of which agent they are.
    """

    def __init__(
        self, evaluation: Evaluation, chunks: Iterable[Chunk], *, run_dir: Path, frames: int
    ) -> None:
        self.steps = 0  # of agents, in all games
        self._evaluation = evaluation
        self._waiting = list(chunks)
        self._arguments = run_dir, frames
        self._patience = Patience(evaluation.timeout_s)
        self._failures: Counter[Chunk] = Counter()
        self._error: EvaluationError | None = None
        self._workers: list[_Worker] = []
        try:
            with signals_held(), on_any_core():
                for _ in range(min(evaluation.num_workers, len(self._waiting))):
                    self._workers.append(self._started())
            for worker in self._workers:
                self._occupy(worker)
        except BaseException:
            self.close()
            raise

    def receive(self, timeout_s: float) -> list[tuple[Chunk, list[Game]]]:
        """What was finished since the last call; waits for news if there are none.

        Raises EvaluationError, naming the task, if workers fail in the same games again and again,
        once all that was finished has been returned; DiskFull if there is no room for a video.
        """
        finished = []
        by_connection = {worker.connection: worker for worker in self._workers if worker.chunk}
        for connection in wait(list(by_connection), timeout_s):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                worker.process.join(5.0)
                self._replace(worker, how_it_ended(worker.process.exitcode))
                continue
            worker.heard_s = time.monotonic()
            if isinstance(message, int):
                self.steps += message
            elif isinstance(message, DiskFull):
                raise message
            elif isinstance(message, str):
                self._replace(worker, message)
            else:
                assert worker.chunk is not None
                finished.append((worker.chunk, message))
                worker.chunk = None
                self._occupy(worker)
        horizon_s = self._patience.horizon_s()
        for worker in list(self._workers):
            if worker.chunk and worker.heard_s < horizon_s and not worker.connection.poll():
                self._replace(
                    worker,
                    f"no sign of life for {self._evaluation.timeout_s:g} s (evaluation.timeout_s)",
                )
        if self._error and not finished:
            raise self._error
        return finished

    def close(self) -> None:
        for worker in self._workers:
            _end(worker)
        self._workers = []

    def _started(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(self._evaluation, *self._arguments, theirs), daemon=True
        )
        process.start()
        theirs.close()
        return _Worker(process, ours, time.monotonic() + STARTING_S)

    def _occupy(self, worker: _Worker) -> None:
        """With games of the task that it has environments of, else of one that nobody plays."""
        if not self._waiting:
            return
        others = {other.chunk.task for other in self._workers if other.chunk}

        def rank(chunk: Chunk) -> tuple[bool, bool]:
            return chunk.task != worker.task, chunk.task in others

        worker.chunk = min(self._waiting, key=rank)
        worker.task = worker.chunk.task
        worker.heard_s = max(worker.heard_s, time.monotonic())
        self._waiting.remove(worker.chunk)
        with suppress(BrokenPipeError, ConnectionResetError):  # as `receive` will find
            worker.connection.send(worker.chunk)

    def _replace(self, worker: _Worker, cause: str) -> None:
        chunk = worker.chunk
        assert chunk is not None
        _end(worker)
        self._workers.remove(worker)
        self._failures[chunk] += 1
        name = self._evaluation.suite.tasks[chunk.task].name
        last = chunk.first + chunk.games - 1
        what = f"the process that played {name} (games {chunk.first} to {last}) failed: {cause}"
        if self._failures[chunk] > REPLACEMENTS:
            self._error = EvaluationError(f"{what}\n(as did {REPLACEMENTS} processes before it)")
            return
        log.warning("%s\nanother one plays them again", what)
        self._waiting.insert(0, chunk)
        with signals_held(), on_any_core():
            self._workers.append(self._started())
        self._occupy(self._workers[-1])


def _end(worker: _Worker) -> None:
    worker.connection.close()
    kill_all([worker.process])  # it has nothing to save
    worker.process.close()


def _work(evaluation: Evaluation, run_dir: Path, frames: int, connection: Connection) -> None:
    """The life of a worker: plays the games that it is sent until nobody is there to send any."""
    die_with_parent()
    os.nice(evaluation.niceness)
    torch.set_num_threads(1)
    steps, said_s = 0, 0.0

    def alive(more: int) -> None:
        nonlocal steps, said_s
        steps += more
        if time.monotonic() - said_s > SIGN_OF_LIFE_S:
            try:
                connection.send(steps)
            except (BrokenPipeError, ConnectionResetError):  # not for an environment to report
                sys.exit(0)
            steps, said_s = 0, time.monotonic()

    player = Player(evaluation, run_dir, frames, alive)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            chunk = connection.recv()
            try:
                result: list[Game] | str | DiskFull = player.play(chunk)
            except DiskFull as error:  # another worker has no more room
                result = error
            except Exception:
                result = traceback.format_exc()
            connection.send(result)
