"""From an agent to whole games on the test levels to a score."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from impala.children import signals_deferred
from impala.evaluation.evaluation import Evaluation
from impala.evaluation.games_file import GamesFile, put_aside
from impala.evaluation.progress import Progress
from impala.evaluation.video import video_path
from impala.evaluation.workers import Workers
from impala.loggers.logger import Logger
from impala.whole_file import write_whole
from impala.words import by_magnitude
from suites.score import Scoreboard, provenance

log = logging.getLogger(__name__)


class Evaluator:
    """One evaluation under way, in `evaluation/` of the run's directory.

    Games are kept in `<frames>.games.jsonl` as they finish; an evaluation that was stopped goes on
    from there. `finish` replaces that file by `<frames>.json`.

    frames: environment frames that the agent was trained for, the files' name.
    """

    def __init__(self, evaluation: Evaluation, *, frames: int, run_dir: Path) -> None:
        self.evaluation = evaluation
        self.frames = frames
        folder = run_dir / "evaluation"
        self._path = folder / f"{frames}.json"
        self._run_dir = run_dir
        self._identity = evaluation.identity(frames)
        videos = folder / f"{frames}.videos"
        chunks = list(evaluation.chunks())
        self._file = GamesFile(folder / f"{frames}.games.jsonl", self._identity, chunks, videos)
        self._left = Counter(chunk.task for chunk in chunks)  # chunks of each task
        self._left.subtract(chunk.task for chunk in self._file.games)
        if not self._file.games and videos.exists():
            _clear(self._path, videos)
        waiting = [chunk for chunk in chunks if chunk not in self._file.games]
        try:
            self._workers = Workers(evaluation, waiting, run_dir=run_dir, frames=frames)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers; what was finished stays."""
        self._workers.close()
        self.evaluation.suite.tidy()
        self._file.close()

    @property
    def total_games(self) -> int:
        return self.evaluation.games * len(self.evaluation.suite.tasks)

    @property
    def finished_games(self) -> int:
        return sum(map(len, self._file.games.values()))

    @property
    def finished_tasks(self) -> int:
        return sum(not left for left in self._left.values())

    @property
    def frames_played(self) -> int:
        """Since this began, of unfinished games, too."""
        return self._workers.steps * self.evaluation.suite.spec.frames_per_step

    def turn(self, timeout_s: float) -> list[int]:
        """Keeps what was finished; returns the tasks of which all is. Raises EvaluationError."""
        done = []
        for chunk, games in self._workers.receive(timeout_s):
            self._file.add(chunk, games)
            self._left[chunk.task] -= 1
            if not self._left[chunk.task]:
                done.append(chunk.task)
        return done

    def games_of(self, task: int) -> dict[str, list[float]]:
        """`returns` and `lengths` of those that are finished, in order."""
        chunks = sorted(
            (chunk for chunk in self._file.games if chunk.task == task), key=lambda c: c.first
        )
        games = [game for chunk in chunks for game in self._file.games[chunk]]
        return {
            "returns": [game.raw_return for game in games],
            "lengths": [game.length for game in games],
        }

    def metrics(self) -> dict[str, float]:
        """Of the games that are finished, as `Scoreboard.metrics`."""
        scoreboard = Scoreboard(self.evaluation.suite.tasks, window=self.evaluation.games)
        for task in range(len(scoreboard.tasks)):
            for raw_return, length in zip(*self.games_of(task).values(), strict=True):
                scoreboard.add(task, raw_return, int(length))
        return scoreboard.metrics()

    def finish(self) -> dict[str, Any]:
        """Once all games are finished: writes and returns the report.

        An earlier one of the same name is kept, as `<frames>_<number>.json`.
        """
        suite, identity, metrics = self.evaluation.suite, self._identity, self.metrics()
        report = {
            "frames": self.frames,
            "suite": suite.name,
            "headline": suite.headline,
            "score": metrics[f"score/{suite.headline}"],
            "games_per_task": self.evaluation.games,
            "greedy": self.evaluation.greedy,
            "seed": self.evaluation.seed,
            "weights": identity["weights"],
            "metrics": metrics,
            "games": {task.name: self.games_of(i) for i, task in enumerate(suite.tasks)},
            "videos": self._videos(),
            "provenance": provenance(
                suite,
                frames=self.frames,
                games=f"{self.evaluation.games} whole games of each task, seed"
                f" {self.evaluation.seed}",
                levels="test",
                actions="the likeliest" if self.evaluation.greedy else "drawn from the policy",
                weights=f"checkpoint of {self.frames:,} frames",
            ),
        }
        if self._path.exists():
            log.info("the evaluation before this one is kept as %s", *put_aside(self._path))
        write_whole(self._path, json.dumps(report, indent=1) + "\n")
        self._file.remove()
        log.info("wrote %s", self._path)
        return report

    def _videos(self) -> list[str]:
        """Their paths in the run's directory."""
        paths = (
            video_path(self._run_dir, self.frames, task.name, game)
            for task in self.evaluation.suite.tasks
            for game in range(min(self.evaluation.videos, self.evaluation.games))
        )
        return [str(path.relative_to(self._run_dir)) for path in paths]


def _clear(report: Path, videos: Path) -> None:
    """Makes room for videos: those of a finished evaluation are kept with its report, which says
    where they are; those of games that nobody finished are removed.
    """
    try:
        told = json.loads(report.read_text()) if report.exists() else {}
        if not told.get("videos"):
            shutil.rmtree(videos)
            return
    except (ValueError, AttributeError):  # it is damaged, and is kept as it is
        log.info("the evaluation before this one is kept as %s and %s", *put_aside(report, videos))
        return
    kept_report, kept_videos = put_aside(report, videos)
    told["videos"] = [
        path.replace(f"/{videos.name}/", f"/{kept_videos.name}/") for path in told["videos"]
    ]
    write_whole(kept_report, json.dumps(told, indent=1) + "\n")
    log.info("the evaluation before this one is kept as %s, with its videos", kept_report)


def evaluate(
    evaluation: Evaluation,
    *,
    frames: int,
    run_dir: Path,
    loggers: Sequence[Logger] = (),
    again: str | None = None,
) -> float:
    """Plays, shows progress, prints a table, writes the report; returns the headline score.

    Raises EvaluationError if games cannot be played, EvaluationBusy while another program plays
    them. Whatever ends it, finished games are kept; if all are finished the report is written.

    loggers: are sent what was found, at `frames`.
    again: the command that goes on with it, for the log.
    """
    exit_code = 1
    report: dict[str, Any] = {}
    with ExitStack() as closing:
        for logger in loggers:
            closing.callback(lambda logger=logger: logger.finish(exit_code))
        with Evaluator(evaluation, frames=frames, run_dir=run_dir) as evaluator:
            try:
                try:
                    _play(evaluator)
                finally:
                    if evaluator.finished_games == evaluator.total_games:
                        with signals_deferred():
                            report = evaluator.finish()
                            Console().print(_table(evaluator, report))
            except BaseException:
                if not report:
                    log.info(
                        "stopped: %d of %d games are finished and kept",
                        evaluator.finished_games, evaluator.total_games,
                    )  # fmt: skip
                    if again:
                        log.info("go on with: %s", again)
                raise
        for logger in loggers:
            logger.write(frames, logged(report))
            logger.commit(frames)
        exit_code = 0
    return report["score"]


def logged(report: dict[str, Any]) -> dict[str, float]:
    """What loggers have of a report: `evaluation/median`, `evaluation/hns/<task>` and so on."""
    return {
        "evaluation/frames": float(report["frames"]),
        **{f"evaluation/{k.removeprefix('score/')}": v for k, v in report["metrics"].items()},
    }


def _play(evaluator: Evaluator) -> None:
    with Progress(evaluator.total_games, evaluator.finished_games) as progress:
        while evaluator.finished_games < evaluator.total_games:
            for task in evaluator.turn(timeout_s=0.5):
                _log_task(evaluator, task)
            progress.show(evaluator.finished_games, evaluator.frames_played)


def _log_task(evaluator: Evaluator, task: int) -> None:
    suite = evaluator.evaluation.suite
    name, metrics = suite.tasks[task].name, evaluator.metrics()
    log.info(
        "%d/%d %s: return %s, human-normalised %.1f %%",
        evaluator.finished_tasks, len(suite.tasks),
        name, by_magnitude(metrics[f"return/{name}"]), metrics[f"hns/{name}"],
    )  # fmt: skip


def _table(evaluator: Evaluator, report: dict[str, Any]) -> Table:
    suite, metrics = evaluator.evaluation.suite, report["metrics"]
    how = "greedy" if report["greedy"] else "sampled"
    table = Table(title=f"{suite.name} after {report['frames']:,} frames, {how} actions")
    table.add_column("game", no_wrap=True)
    for name in ("return", "human-normalised", "games"):
        table.add_column(name, justify="right", no_wrap=True)
    for task in suite.tasks:
        table.add_row(
            task.name,
            by_magnitude(metrics[f"return/{task.name}"]),
            f"{metrics[f'hns/{task.name}']:,.1f} %",
            str(len(report["games"][task.name]["returns"])),
        )
    table.add_section()
    for name, value in metrics.items():
        if name.startswith("score/") and name != "score/coverage":
            aggregate = name.removeprefix("score/")
            style = "bold" if aggregate == suite.headline else ""
            table.add_row(aggregate, "", f"{value:,.1f} %", "", style=style)
    return table
