"""Directories of runs and sweeps as their programs leave them, without any having run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import yaml

TASKS = ("pong", "breakout")
PROVENANCE = {"random": "r", "human": "h", "protocol": "sticky actions 0.0", "engine": "e"}


def write_run(
    directory: Path,
    *,
    seed: int = 1,
    lr: float | str = 0.1,
    tasks: tuple[str, ...] = TASKS,
    scores: tuple[float, ...] = (10.0, 30.0),
    points: int = 4,
    provenance: dict[str, str] | None = None,
    finished: bool = True,
    every: int = 100,
) -> Path:
    """A run that has `scores` in all tasks from its first point on, or rising to them."""
    directory.mkdir(parents=True)
    config = {"seed": seed, "algorithm": {"lr": lr}, "suite": {"x": 1}, "choices": {"suite": "s"}}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    with (directory / "metrics.jsonl").open("w") as file:
        for number in range(1, points + 1):
            point = {"frames": every * number, "time_s": 2.0 * number, "score/coverage": 1.0}
            for task, score in zip(tasks, scores, strict=True):
                point |= {f"hns/{task}": score * number / points, f"return/{task}": score / 10}
                point |= {
                    f"share/{task}": 1 / len(tasks),
                    f"lag/{task}": 2.0,
                    f"lag_p95/{task}": 3.0,
                }
            point |= {"time/learner_waiting": 0.5, "time/actor_inference": 0.4}
            file.write(json.dumps(point) + "\n")
    about = {"suite": "atari57", "headline": "median", "tasks": tasks}
    about["provenance"] = provenance or PROVENANCE
    (directory / "suite.json").write_text(json.dumps(about))
    if finished:
        games = dict.fromkeys(tasks, 7)
        summary = {
            "status": "finished",
            "frames": every * points,
            "games": games,
            "commit": "c0ffee",
        }
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def write_evaluation(run: Path, frames: int, *, greedy: bool, scores: tuple[float, ...]) -> None:
    (run / "evaluation").mkdir(exist_ok=True)
    metrics = {f"hns/{task}": score for task, score in zip(TASKS, scores, strict=True)}
    metrics |= {f"return/{task}": 1.0 for task in TASKS} | {"score/median": float(np.mean(scores))}
    report = {
        "frames": frames,
        "games_per_task": 5,
        "greedy": greedy,
        "seed": 9,
        "metrics": metrics,
    }
    report["provenance"] = {"weights": f"checkpoint of {frames} frames"}
    (run / "evaluation" / f"{frames}_{greedy}.json").write_text(json.dumps(report))


def write_job(sweep: Path, number: int, **state: object) -> None:
    (sweep / str(number)).mkdir(parents=True, exist_ok=True)
    (sweep / str(number) / "job.json").write_text(json.dumps(state))


def write_everything(folder: Path) -> None:
    for i, lr in enumerate(["0.1", "0.1", "0.2</script>"]):
        run = write_run(folder / str(i), seed=i, lr=lr, scores=(10.0 + i, -30.0))
        write_evaluation(run, 400, greedy=False, scores=(20.0, 40.0))
    (run / "evaluation" / "400.videos").mkdir()
    (run / "evaluation" / "400.videos" / "pong_0.mp4").write_bytes(b"film")
    (run / "evaluation" / "400.videos" / "pong_1.mp4").write_bytes(bytes(4_000_000))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"frames": 500, "ti')
    write_run(folder / "apart", provenance={**PROVENANCE, "protocol": "</script>sticky"})
