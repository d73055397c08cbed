"""One run: starts its parts, moves trajectories, weights and numbers between them, closes them."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from impala.checkpoint import Checkpoints, check_vocabulary, fitting, vocabulary
from impala.children import StopRequests
from impala.evaluation.beside_training import BesideTraining
from impala.experience.experience import Batch, Experience
from impala.learner import Learner, NonFiniteError
from impala.loggers.json_lines import Episode, EpisodeLog, JsonLines
from impala.loggers.logger import Logger
from impala.measures import FaultCounts, Measures
from impala.population_member import PopulationMember, inherited
from impala.transport.transport import ActorError, Delivery, Transport
from impala.whole_file import write_whole
from suites.score import Scoreboard, provenance
from suites.suite import Suite

log = logging.getLogger(__name__)

QUIET_S = 60.0  # without a batch, and the log says so
FIRST_POINT_S = 3.0  # after the first batch, at the latest: what is measured in less is chance


@dataclass(frozen=True)
class Schedule:
    """When a run ends, logs and saves. Frames are environment frames, `_s` are seconds.

    stop_frames: if set, the run pauses there; schedules go over `total_frames` all the same.
    """

    total_frames: int
    log_every_s: float
    log_every_frames: int | None  # if set, points are made by frames and not by time
    checkpoint_every_s: float
    stop_frames: int | None = None

    @property
    def end_frames(self) -> int:
        return min(self.total_frames, self.stop_frames or self.total_frames)


@dataclass(frozen=True)
class Staleness:
    """What becomes of unrolls in which weights acted that are more than `max_lag` updates old.

    max_lag: None lets every unroll count in full; V-trace corrects for its age.
    drop: leave such an unroll out, uncounted. Else its loss is multiplied by max_lag / lag.
    """

    max_lag: int | None = None
    drop: bool = True

    def weights(self, lag: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Of each column, or None if all are 1."""
        if self.max_lag is None or self.drop or lag.max() <= self.max_lag:
            return None
        return (self.max_lag / np.maximum(lag, self.max_lag)).astype(np.float32)


@dataclass(frozen=True)
class Result:
    status: str  # finished, paused, interrupted or failed
    exit_code: int  # 0; 130 after SIGINT, 143 after SIGTERM; 1
    score: float | None  # the suite's headline score in per cent, once a game has finished


class Experiment:
    """See the module.

    staleness: None is no limit.
    evaluations: None: there are none while the run trains.
    about: what else `summary.json` says of the run: the code it is of, the machine.
    resume: a state from `Checkpoints.load`, or None for a new run.
    population: the run's place in one, if it has one.
    """

    def __init__(
        self,
        *,
        suite: Suite,
        learner: Learner,
        transport: Transport,
        experience: Experience,
        checkpoints: Checkpoints,
        metrics_file: JsonLines,
        episodes_file: EpisodeLog,
        loggers: Sequence[Logger],
        scoreboard: Scoreboard,
        schedule: Schedule,
        run_dir: Path,
        seed: int,
        about: Mapping[str, Any],
        staleness: Staleness | None = None,
        evaluations: BesideTraining | None = None,
        resume: dict[str, Any] | None = None,
        population: PopulationMember | None = None,
    ) -> None:
        self._suite = suite
        self._learner = learner
        self._transport = transport
        self._experience = experience
        self._checkpoints = checkpoints
        self._metrics_file = metrics_file
        self._episodes_file = episodes_file
        self._loggers = [metrics_file, *loggers]
        self._scoreboard = scoreboard
        self._schedule = schedule
        self._run_dir = run_dir
        self._seed = seed
        self._staleness = staleness or Staleness()
        self._evaluations = evaluations
        self._about = dict(about)
        self._population = population
        self._faults = FaultCounts([task.name for task in suite.tasks])
        self._frames = 0
        self._updates = 0
        self._time_s = 0.0
        if resume is not None:
            self._restore(resume)
        self._measures = Measures([task.name for task in suite.tasks])
        self._signal = 0
        self._started = self._logged = self._saved = self._learned = time.monotonic()
        self._ended = 0.0
        self._quiet_s = QUIET_S
        self._logged_frames = self._saved_frames = self._frames

    @property
    def actors_seed(self) -> int:
        """What `run` starts the actors with: a resumed run does not replay its first games."""
        return self._seed + self._frames

    def run(self) -> Result:
        """Trains until the schedule's end, a signal or an error. Everything is closed."""
        status, exit_code = "failed", 1
        with self._signals(), ExitStack() as closing:  # closed in reverse order, whatever fails
            for file in (*reversed(self._loggers), self._episodes_file):
                closing.callback(lambda file=file: file.finish(exit_code))
            closing.callback(lambda: self._close_summary(status))
            closing.callback(self._learner.close)
            closing.callback(self._suite.tidy)
            closing.callback(self._transport.close)
            if self._evaluations is not None:
                closing.callback(self._evaluations.close)
            try:
                self._measures.published(self._updates)
                self._transport.start(self._learner.agent, self._updates, self.actors_seed)
                while self._frames < self._schedule.end_frames and not self._signal:
                    self._iterate()
                self._end()
            except (NonFiniteError, OSError):
                raise  # the last checkpoint is the last good one, or cannot be written
            except Exception:
                self._save()  # the weights are whole: they change only within an update
                raise
            except SystemExit:  # by a second signal
                status, exit_code = "interrupted", 128 + self._signal
                raise
            status, exit_code = self._status_at_end, 0
            if self._signal:
                exit_code = 128 + self._signal
                status = "interrupted" if status == "paused" else status
                log.info("stopped by %s", signal.Signals(self._signal).name)
        return Result(status, exit_code, self._score())

    @property
    def _status_at_end(self) -> str:
        return "finished" if self._frames >= self._schedule.total_frames else "paused"

    def _end(self) -> None:
        """The last checkpoint and the last point, which has the last evaluation with it."""
        self._ended = time.monotonic()
        metrics = self._measured()
        self._save()
        if self._evaluations is not None and not self._signal:
            if metrics:  # whoever is killed while it waits has all of the training
                self._metrics_file.write(self._frames, metrics)
            self._write_summary(self._status_at_end)
            self._evaluations.finish(given_up=lambda: bool(self._signal))
        if metrics:
            self._write(metrics)
            self._commit()

    # One turn of the loop

    def _iterate(self) -> None:
        """Learns from a batch if there is one, else waits a little for one."""
        measures = self._measures
        self._drop_stale()
        if not self._experience.ready():
            with measures.time("learner_waiting"):
                deliveries = self._transport.receive(0.25)
            self._accept(deliveries)
            if not deliveries and not self._experience.ready() and self._transport.exhausted():
                raise ActorError(
                    f"{self._experience.waiting} unrolls are waiting, which is less than a batch,"
                    " and the actors that are left have no slots for more: set a smaller"
                    " algorithm.batch_size or more transport.slots_per_environment, or do without"
                    " restarts.then=continue"
                )
            self._say_if_quiet()
        else:
            self._learn()
            self._accept(self._transport.receive(0.0))
        self._log_and_save_if_due()

    def _learn(self) -> None:
        measures = self._measures
        with measures.time("learner_loading"):
            batch = self._experience.sample()
            self._transport.release(batch.released)
        weights = self._staleness.weights(self._updates - batch.version)
        if weights is not None:
            measures.down_weighted(batch.task[weights < 1.0])
        with measures.time("learner_computing"):
            skipped = self._learner.update(
                batch,
                self._frames / self._schedule.total_frames,
                interrupted=lambda: bool(self._signal),
                backlog=self._experience.ready(),
                weights=weights,
            )
        if skipped is None:
            return  # a signal came: the weights are as they were
        if skipped:
            names = ", ".join(self._suite.tasks[task].name for task in skipped)
            log.warning(
                "update %d skipped: non-finite loss or gradient in %s", self._updates, names
            )
        if self._learned == self._started:  # this is the first batch: what was before is start-up
            delay_s = max(self._schedule.log_every_s - FIRST_POINT_S, 0.0)
            self._logged = time.monotonic() - delay_s
        self._learned, self._quiet_s = time.monotonic(), QUIET_S
        measures.batch(batch, self._updates)
        self._frames += self._frames_in(batch)
        self._updates += 1
        with measures.time("learner_publishing"):
            self._transport.publish(self._learner.agent, self._updates)
            measures.published(self._updates)

    def _say_if_quiet(self) -> None:
        """At ever longer intervals, while there is nothing to learn from."""
        quiet_s = time.monotonic() - self._learned
        if quiet_s > self._quiet_s:
            self._quiet_s *= 2
            waiting = self._experience.waiting
            log.info(
                "nothing to learn from for %.0f s: %d unrolls wait for a batch to be full",
                quiet_s, waiting,
            )  # fmt: skip

    def _drop_stale(self) -> None:
        max_lag = self._staleness.max_lag
        if max_lag is None or not self._staleness.drop:
            return
        slots = self._experience.discard(self._updates - max_lag)
        if len(slots):
            self._measures.dropped(self._transport.storage.task[torch.from_numpy(slots)].numpy())
            self._transport.release(slots)

    def _accept(self, deliveries: list[Delivery]) -> None:
        for fault in self._transport.faults():
            self._faults.add(fault)
        episodes = []
        for delivery in deliveries:
            self._experience.insert(delivery.slots)
            self._measures.delivery(delivery)
            for task, raw_return, length in delivery.games.tolist():
                self._scoreboard.add(task, raw_return, length)
                name = self._suite.tasks[task].name
                episodes.append(Episode(self._frames, name, raw_return, length, delivery.actor))
        self._episodes_file.write(episodes)

    def _frames_in(self, batch: Batch) -> int:
        rows = len(batch.parts[0].steps.reward) - 1
        return rows * batch.fresh * self._suite.spec.frames_per_step

    # Numbers

    def _log_and_save_if_due(self) -> None:
        if self._evaluations is not None:
            if self._evaluations.due(self._frames):
                self._save()
                self._evaluations.start(self._frames, self._learner.agent)
            self._evaluations.poll()
        if self._frames >= self._schedule.end_frames:
            return  # `_end` does
        now = time.monotonic()
        every_frames = self._schedule.log_every_frames
        if (
            self._frames - self._logged_frames >= every_frames
            if every_frames
            else now - self._logged >= self._schedule.log_every_s
        ):
            self._log()
        if now - self._saved >= self._schedule.checkpoint_every_s:
            self._save()
        self._compare_if_due()

    def _log(self) -> None:
        if metrics := self._measured():
            self._write(metrics)

    def _measured(self) -> dict[str, float]:
        """The numbers of the period that ends now; none if nothing was learned in it."""
        if self._frames == self._logged_frames:
            return {}
        metrics = {
            "updates": float(self._updates),
            "time_s": self._elapsed_s(),
            **self._scoreboard.metrics(),
            **self._learner.metrics(),
            **self._measures.take(self._frames - self._logged_frames),
            **self._faults.metrics(),
            **self._transport.metrics(),
            "queue/fill": self._experience.waiting / self._transport.total_slots,
        }
        if self._population:
            metrics |= self._population.metrics(metrics)
        self._logged, self._logged_frames = time.monotonic(), self._frames
        return metrics

    def _write(self, metrics: dict[str, float]) -> None:
        """With an evaluation's, if one was finished."""
        if self._evaluations is not None:
            metrics |= self._evaluations.results()
        for logger in self._loggers:
            logger.write(self._frames, metrics)

    def _compare_if_due(self) -> None:
        """With the other members of the population, one of which this one may copy."""
        games = sum(self._scoreboard.games(task) for task in range(len(self._suite.tasks)))
        if not self._population or not self._population.due(games):
            return
        self._log()
        self._save()
        newest = self._checkpoints.folder / "last.pt"
        donor = self._population.compared(
            self._frames, games, self._scoreboard.metrics(), newest
        )  # fmt: skip
        if donor is not None:  # the next update publishes the weights
            own = {
                "learner": self._learner.state_dict(),
                "scoreboard": self._scoreboard.state_dict(),
            }
            state = inherited(own, donor, self._frames)
            with fitting():
                self._learner.load_state_dict(state["learner"])
                self._scoreboard.load_state_dict(state["scoreboard"])
        self._population.apply()
        self._save(again=True)

    def _elapsed_s(self) -> float:
        """Of training, without what the last evaluation takes after it."""
        return self._time_s + (self._ended or time.monotonic()) - self._started

    def _score(self) -> float | None:
        return self._scoreboard.metrics().get(f"score/{self._suite.headline}")

    def _close_summary(self, status: str) -> None:
        try:
            self._write_summary(status)
        except OSError as error:
            if status != "failed":
                raise
            log.error("summary.json could not be written: %s", error)  # the first error is raised

    def _write_summary(self, status: str) -> None:
        summary = {
            "status": status,
            "suite": self._suite.name,
            "headline": self._suite.headline,
            "score": self._score(),
            "frames": self._frames,
            "updates": self._updates,
            "time_s": self._elapsed_s(),
            "seed": self._seed,
            "games": {t.name: self._scoreboard.games(i) for i, t in enumerate(self._suite.tasks)},
            "metrics": self._scoreboard.metrics(),
            "updates_skipped": self._learner.skipped,
            **self._faults.summary(),
            "provenance": provenance(
                self._suite,
                frames=self._frames,
                games=f"each task's last {self._scoreboard.window} whole games in training",
                levels="train",
                actions="drawn from the policy",
                weights="those that acted while training, not one checkpoint's",
            ),
            **self._about,
        }
        write_whole(self._run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")

    # State

    def _save(self, again: bool = False) -> None:
        """again: even if no frames were learned from since the last checkpoint."""
        self._saved = time.monotonic()
        if self._frames == self._saved_frames and self._checkpoints.numbered() and not again:
            return
        self._checkpoints.save(
            {
                "frames": self._frames,
                "updates": self._updates,
                "games": self._episodes_file.games,
                "points": self._metrics_file.points,
                "time_s": self._elapsed_s(),
                "learner": self._learner.state_dict(),
                "vocabulary": vocabulary(self._suite.spec),
                "scoreboard": self._scoreboard.state_dict(),
                "faults": self._faults.summary(),
                "random": {"torch": torch.get_rng_state()},
                **({"population": self._population.state_dict()} if self._population else {}),
            }
        )
        self._saved_frames = self._frames
        self._commit()

    def _commit(self) -> None:
        for file in (self._episodes_file, *self._loggers):
            file.commit(self._frames)
        if self._population:
            self._population.commit()

    def _restore(self, state: dict[str, Any]) -> None:
        with fitting():
            check_vocabulary(state, self._suite.spec)
            self._frames = state["frames"]
            self._updates = state["updates"]
            self._time_s = state["time_s"]
            self._learner.load_state_dict(state["learner"])
            self._scoreboard.load_state_dict(state["scoreboard"])
            self._faults.load(state.get("faults", {}))  # which older checkpoints do not have
            torch.set_rng_state(state["random"]["torch"])
            if self._population and "population" in state:
                self._population.load_state_dict(state["population"])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the loop where the weights are whole; a second one at once."""
        requests = StopRequests()

        def handle(number: int, frame: object) -> None:
            if not requests.is_new():
                return
            if self._signal:
                sys.exit(128 + number)
            self._signal = number

        previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
