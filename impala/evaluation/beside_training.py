"""Evaluation while a run trains: on copies of its weights, in processes that give way to it."""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from impala.agents.agent import Agent
from impala.evaluation.evaluation import Evaluation, EvaluationBusy, EvaluationError
from impala.evaluation.evaluator import Evaluator, logged
from impala.evaluation.progress import LINE_EVERY_S
from impala.loggers.json_lines import read_points
from impala.words import per_cent

log = logging.getLogger(__name__)


class BesideTraining:
    """Evaluates the agent whenever training has come through another `every_frames`.

    Nothing here waits, but for `finish`. While an evaluation is under way the newest agent that is
    due waits for its turn, and takes the place of one that waited before. One that fails is
    reported, and training goes on.

    evaluation:    its agent is a copy of the learner's, which this may change.
    same_seed:     each has the seed of `evaluation`; else that and its frames.
    resume_frames: of the checkpoint that a resumed run goes on from. That is evaluated if the
                   evaluation which was due before it is not in `metrics.jsonl`.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        *,
        every_frames: int,
        same_seed: bool = False,
        run_dir: Path,
        resume_frames: int | None = None,
    ) -> None:
        self._evaluation = evaluation
        self._every_frames = every_frames
        self._same_seed = same_seed
        self._run_dir = run_dir
        self._running: Evaluator | None = None
        self._waiting: tuple[int, Agent] | None = None  # its frames
        self._results: deque[dict[str, float]] = deque()
        self._due_frames = every_frames
        if resume_frames is not None:
            last_due = resume_frames - resume_frames % every_frames
            points = read_points(run_dir / "metrics.jsonl")
            frames = (point.get("evaluation/frames") for point in points)
            logged = max((each for each in frames if isinstance(each, float | int)), default=0)
            self._due_frames = last_due if logged < last_due else last_due + every_frames

    def due(self, frames: int) -> bool:
        return frames >= self._due_frames

    def start(self, frames: int, agent: Agent) -> None:
        """Takes a copy of the agent, which was trained for so many frames."""
        self._due_frames = frames - frames % self._every_frames + self._every_frames
        if self._waiting:
            log.warning(
                "no evaluation of %s frames: the one before it is not finished and a newer agent"
                " is there. Set a greater evaluation.every_frames or fewer evaluation.games",
                f"{self._waiting[0]:,}",
            )
        newest = copy.deepcopy(self._evaluation.agent)
        newest.load_state_dict(agent.state_dict())
        self._waiting = frames, newest
        self._begin()

    def poll(self, timeout_s: float = 0.0) -> None:
        """Takes what the workers have finished; begins what waits."""
        if self._running is None:
            return
        try:
            self._running.turn(timeout_s)
            if self._running.finished_games < self._running.total_games:
                return
            report = self._running.finish()
            _log(report)
            self._results.append(logged(report))
        except Exception:
            self._failed(self._running.frames)
        self._running.close()
        self._running = None
        self._begin()

    def results(self) -> dict[str, float]:
        """The oldest `evaluation/` metrics that were not asked for yet, or none."""
        return self._results.popleft() if self._results else {}

    def finish(self, given_up: Callable[[], bool]) -> None:
        """Waits for what is under way or due, until `given_up`; only the newest result is left."""
        told, told_s = None, 0.0
        while self._running and not given_up():
            if self._running is not told or time.monotonic() - told_s > LINE_EVERY_S:
                told, told_s = self._running, time.monotonic()
                log.info(
                    "training is done; waiting for the evaluation of %s frames, %d of %d games are"
                    " finished%s. Ctrl-C gives it up",
                    f"{told.frames:,}", told.finished_games, told.total_games,
                    f", and for that of {self._waiting[0]:,} frames" if self._waiting else "",
                )  # fmt: skip
            self.poll(0.5)
        self._leave_unlogged(len(self._results) - 1)

    def close(self) -> None:
        """Gives up what is not finished; its finished games are kept."""
        self._leave_unlogged(len(self._results))
        if self._waiting:
            log.info("there will be no evaluation of %s frames", f"{self._waiting[0]:,}")
        if self._running is None:
            return
        log.info(
            "the evaluation of %s frames is given up with %d of %d games; if the run goes on from"
            " there, so does the evaluation",
            f"{self._running.frames:,}", self._running.finished_games, self._running.total_games,
        )  # fmt: skip
        self._running.close()
        self._running = None

    def _leave_unlogged(self, count: int) -> None:
        """The oldest results: a point has room for one, and there are no more points."""
        for _ in range(count):
            frames = self._results.popleft()["evaluation/frames"]
            log.info("the evaluation of %s frames is in its own file only", f"{frames:,.0f}")

    def _begin(self) -> None:
        if self._running or not self._waiting:
            return
        (frames, agent), self._waiting = self._waiting, None
        seed = self._evaluation.seed + (0 if self._same_seed else frames)
        evaluation = replace(self._evaluation, agent=agent, seed=seed)
        try:
            self._running = Evaluator(evaluation, frames=frames, run_dir=self._run_dir)
        except Exception:
            self._failed(frames)

    def _failed(self, frames: int) -> None:
        error = sys.exc_info()[1]
        # These say all there is to say; one of a worker's has the worker's own traceback.
        if isinstance(error, (OSError, EvaluationBusy, EvaluationError)):
            log.error("no evaluation of %s frames, training goes on: %s", f"{frames:,}", error)
        else:
            log.exception("the evaluation of %s frames failed, training goes on", f"{frames:,}")


def _log(report: dict[str, Any]) -> None:
    headline = report["headline"]
    log.info(
        "evaluation of %s frames: %s %s %%, tasks %d, games of each %d",
        f"{report['frames']:,}", headline, per_cent(report["score"]), len(report["games"]),
        report["games_per_task"],
    )  # fmt: skip
