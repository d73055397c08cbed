"""Directories of runs and sweeps as their programs leave them, without any having run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import yaml

from impala.population import Choice, Interval, Values
from impala.population_directory import PopulationDirectory, Record, space_as_json

# Draws PNG and SVG; None where there is none.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")

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
    copies = run / "evaluation" / "wandb" / "media" / "videos"  # which W&B makes of them
    copies.mkdir(parents=True)
    (copies / "pong_0.mp4").write_bytes(b"film")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"frames": 500, "ti')
    write_run(folder / "apart", provenance={**PROVENANCE, "protocol": "</script>sticky"})


def write_population(directory: Path, *, every: int = 100) -> Path:
    """Three members, two rounds of `every` frames: 1 copies 0, then the run of 2 fails."""
    lr = "algorithm.optimizer.lr"
    for member in range(3):
        scores = (10.0 * (3 - member),) * len(TASKS)
        run = write_run(directory / str(member), seed=7 + member, scores=scores, points=3)
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["population"] = {"directory": str(directory), "member": member}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        points = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines = [json.dumps(p | {"score/mean_capped": p["hns/pong"]}) + "\n" for p in points]
        (run / "metrics.jsonl").write_text("".join(lines))
    write_run(directory / "best", seed=7)
    write_evaluation(directory / "best", 300, greedy=False, scores=(25.0, 35.0))
    files = PopulationDirectory(directory)
    rule = {"selection": "tournament", "threshold": 5.0, "quantile": 0.2, "seed": 1,
            "perturb_probability": 0.33, "perturb_factor": 1.2, "burn_in_frames": 0}  # fmt: skip
    space = [
        Interval(lr, 1e-5, 0.1, log=True),
        Interval("algorithm.micro_batch", 4, 64, integer=True, starts=(8.0, 16.0)),
        Choice("algorithm.stale", ("drop", "keep")),
    ]
    files.write_settings(
        {"overrides": ["suite=s"], "space": space_as_json(space), "size": 3, "total_frames": 300,
         "round_frames": every, "games": None, "fitness": "score/mean_capped", "rule": rule}
    )  # fmt: skip
    records = []
    for generation in range(3):
        for member in range(3):
            values: Values = {lr: 0.01 * (member + 1), "algorithm.micro_batch": 8,
                              "algorithm.stale": "drop"}  # fmt: skip
            parent = 0 if (member, generation) == (1, 1) else member
            first = generation == 0
            records.append(
                Record(
                    member=member,
                    generation=generation,
                    frames=every * generation,
                    parent=None if first else parent,
                    parent_generation=None if first else generation - 1,
                    fitness=None if first else 10.0 * (3 - member) * generation / 3,
                    failed=(member, generation) == (2, 2),
                    old={} if first else values,
                    new=values,
                    checkpoint=None,
                )
            )
    files.write_lineage(records)
    return directory
