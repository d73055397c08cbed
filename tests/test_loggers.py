"""Loggers: what is in the files after crashes, and what a person sees."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console

from impala.loggers.console import Console
from impala.loggers.json_lines import Episode, EpisodeLog, JsonLines, truncate_after
from impala.loggers.latest import Latest, duration, number
from impala.loggers.log_file import LogFile
from impala.loggers.logger import RunInfo
from impala.loggers.screen import task_table

TASKS = ("montezuma_revenge", *(f"game_{i}" for i in range(56)))
RUN = RunInfo(
    run_dir=Path(),
    name="a-name",
    title="a suite",
    config={},
    total_frames=1000,
    task_names=("pong", "boxing"),
    headline="median",
    resume_frames=None,
)


def read(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


# metrics.jsonl and episodes.jsonl


def test_a_point_is_one_flat_line_of_strict_json_in_order(tmp_path: Path) -> None:
    logger = JsonLines(tmp_path / "metrics.jsonl")
    metrics = {
        "score/median": math.nan,
        "loss/total": np.float32(0.5),
        "time_s": 2.0,
        "updates": 7,
        "grad/norm": math.inf,
    }
    logger.write(80, metrics)  # not finished: a line is there as soon as write returns
    (point,) = read(tmp_path / "metrics.jsonl")
    assert list(point) == ["frames", "updates", "time_s", "grad/norm", "loss/total", "score/median"]
    assert point == {
        "frames": 80,
        "updates": 7,
        "time_s": 2.0,
        "grad/norm": None,
        "loss/total": 0.5,
        "score/median": None,
    }


def test_resume_cuts_what_came_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    for frames in (10, 20, 30, 40):
        first.write(frames, {"updates": 0})
    with path.open("a") as file:
        file.write('{"frames": 50, "upda')  # killed in the middle of a write

    resumed = JsonLines(path, resume_frames=20)
    for frames in (20, 30, 40):  # the point of the checkpoint itself is there already
        resumed.write(frames, {"updates": 1})
    resumed.finish(0)
    assert [(point["frames"], point["updates"]) for point in read(path)] == [
        (10, 0),
        (20, 0),
        (30, 1),
        (40, 1),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_torn_line_is_repaired_where_nothing_else_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"frames": 10}\n{"frames": 2')
    assert truncate_after(path, frames=100) == (1, 10)
    assert path.read_text() == '{"frames": 10}\n'
    path.write_text('{"frames": 10}\n{"frames": 20}')  # as good as whole, but the next line?
    assert truncate_after(path, frames=100) == (1, 10)
    assert truncate_after(path, frames=100) == (1, 10)
    assert path.read_text() == '{"frames": 10}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_frames_that_go_back_are_refused(tmp_path: Path) -> None:
    logger = JsonLines(tmp_path / "metrics.jsonl")
    logger.write(20, {})
    with pytest.raises(ValueError, match=r"frames=10 came after one of frames=20"):
        logger.write(10, {})


def test_a_second_point_of_the_same_frames_adds_to_the_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonLines(path)
    logger.write(10, {"updates": 1.0})
    logger.write(20, {"updates": 2.0, "loss/total": 3.0})
    before = path.read_bytes()
    logger.write(20, {"updates": 9.0})
    assert path.read_bytes() == before
    logger.write(20, {"evaluation/mean": 4.0, "updates": 9.0})
    logger.write(30, {"updates": 3.0})
    logger.finish(0)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"frames": 10, "updates": 1.0},
        {"frames": 20, "updates": 2.0, "evaluation/mean": 4.0, "loss/total": 3.0},
        {"frames": 30, "updates": 3.0},
    ]
    assert logger.points == 3
    resumed = JsonLines(path, resume_frames=30)
    resumed.write(30, {"updates": 9.0, "evaluation/mean": 5.0})
    assert path.read_text().count("\n") == 3 and "5.0" not in path.read_text()


def test_a_new_run_does_not_go_on_in_the_file_of_another(tmp_path: Path) -> None:
    JsonLines(tmp_path / "metrics.jsonl").write(10, {})
    with pytest.raises(FileExistsError, match="resume="):
        JsonLines(tmp_path / "metrics.jsonl")


def test_a_write_that_fails_names_the_file_and_leaves_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonLines(path)
    logger.write(10, {"updates": 1})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))  # room for five bytes
    try:
        with pytest.raises(OSError, match=re.escape(f"cannot write to {path}")) as error:
            logger.write(20, {"updates": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG
    assert path.read_bytes() == before
    logger.write(20, {"updates": 2})
    assert [point["frames"] for point in read(path)] == [10, 20]


def test_finished_games_are_kept_and_cut_like_points(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    games = EpisodeLog(path)
    games.write([])
    games.write([Episode(100, "pong", -21.0, 3000, 1), Episode(100, "boxing", 4.0, 7000, 0)])
    games.write([Episode(250, "pong", -20.0, 4000, 1)])
    games.finish(0)
    assert games.games == 3
    EpisodeLog(path, resume_frames=100).finish(0)
    assert read(path) == [
        {"frames": 100, "task": "pong", "return": -21.0, "length": 3000, "actor": 1},
        {"frames": 100, "task": "boxing", "return": 4.0, "length": 7000, "actor": 0},
    ]
    resumed = EpisodeLog(path, resume_frames=100, resume_games=1)  # the other ended after it
    resumed.write([Episode(100, "boxing", 5.0, 7000, 0)])
    resumed.finish(0)
    assert [game["return"] for game in read(path)] == [-21.0, 5.0]
    assert resumed.games == 2


def test_a_log_on_a_full_disk_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    handler = LogFile("/dev/full", delay=True)
    for word in ("one", "two"):
        handler.emit(logging.LogRecord("a", logging.INFO, "", 0, word, None, None))
    handler.close()
    assert capsys.readouterr().err == (
        "the log /dev/full cannot be written (No space left on device): lines of it will be"
        " missing\n"
    )


def test_what_is_dropped_at_a_resume_is_said_and_a_file_is_read_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "episodes.jsonl", []
    lines = [json.dumps({"frames": frames, "task": "pong"}) for frames in range(10, 60, 10)]
    path.write_text("\n".join([*lines[:2], "", lines[2], '{"frames": 35, "ta', lines[3]]) + "\n")
    open_file = Path.open

    def watched(self: Path, *arguments: Any, **options: Any) -> Any:
        opened.append((self.name, *arguments))
        return open_file(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", watched)
    games = EpisodeLog(path, resume_frames=40, resume_games=6)
    assert games.games == 4
    assert "2 lines, of 20 bytes together, are torn or damaged and were dropped" in caplog.text
    assert "the first is line 3" in caplog.text
    assert f"{path} has 4 of the 6 games that were there at the checkpoint" in caplog.text
    assert opened.count(("episodes.jsonl", "rb")) == 1
    caplog.clear()
    assert EpisodeLog(path, resume_frames=40, resume_games=3).games == 3
    assert caplog.text == ""  # a game that ended after the checkpoint is no damage


# The console


def test_plain_lines_tell_progress_and_where_the_time_goes() -> None:
    out = io.StringIO()
    console = Console(RUN, stream=out)
    console.write(0, {"time_s": 1.0})
    assert out.getvalue() == (
        "frames 0 (0.0 %) | - frames/s | median - % (coverage -/2) | left - | "
        "lag - max - | loss -\n"
    )
    metrics = {
        "rate/frames_per_s": 10.0,
        "score/median": 12.34,
        "score/coverage": 0.5,
        "lag/pong": 1.0,
        "lag/boxing": 2.0,
        "lag/max": 4.0,
        "loss/total": 123.456,
        "time/learner_waiting": 0.25,
        "time/learner_computing": 0.75,
        "time/actor_environments": 0.9,
        "queue/fill": 0.5,
        "memory/rss_mb": 1500.0,
    }
    console.write(400, {"time_s": 41.0, **metrics})
    console.write(600, {"time_s": 61.0, **metrics})
    console.finish(0)
    assert out.getvalue().splitlines()[1:] == [
        "frames 400 (40.0 %) | 10.0 frames/s | median 12.3 % (coverage 1/2) | left 0:01:00 | "
        "lag 1.5 max 4.0 | loss 123",
        "frames 600 (60.0 %) | 10.0 frames/s | median 12.3 % (coverage 1/2) | left 0:00:40 | "
        "lag 1.5 max 4.0 | loss 123",
        "time: learner waiting 25 %, computing 75 % | actor environments 90 % | "
        "queue 50 % full | memory 1.5 GB",
        "paused at 600 of 1,000 frames (stop_frames) after 0:01:01, median 12.3 % (coverage 1/2)",
    ]


@pytest.mark.parametrize(
    ("exit_code", "word"),
    [(0, "finished"), (130, "stopped before anything was"), (1, r"failed \(exit code 1\)")],
)
def test_the_closing_line_says_how_it_ended(exit_code: int, word: str) -> None:
    out = io.StringIO()
    Console(RUN, stream=out).finish(exit_code)
    assert re.match(word, out.getvalue().splitlines()[-1])


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (-20.25, "-20.2"), (999.94, "999.9"), (999.96, "1,000"), (1234567.0, "1.23M")],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (59.6, "0:01:00"), (3 * 86400 + 61, "3d 00:01:01")]
)
def test_durations_read_as_clocks(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def rendered_table(tasks: tuple[str, ...], width: int, rows: int) -> list[str]:
    latest = Latest(1000, tasks, "median")
    latest.update(10, {f"hns/{name}": 10.0 + i for i, name in enumerate(tasks)})
    console = rich.console.Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(task_table(latest, width, rows))
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "rows"), [(120, 29), (200, 20)])
def test_all_57_tasks_fit_the_screen(width: int, rows: int) -> None:
    lines = rendered_table(TASKS, width, rows)
    assert len(lines) <= rows + 1 and max(map(len, lines)) <= width
    for i, name in enumerate(TASKS):
        assert any(re.search(rf"\b{name} +{10.0 + i}", line) for line in lines), name
    for header in ("return", "hns %", "length", "share %", "lag"):
        assert header in lines[0]


def test_a_small_screen_says_how_many_tasks_it_leaves_out() -> None:
    lines = rendered_table(TASKS, 80, 10)
    shown = sum(name in " ".join(lines).split() for name in TASKS)
    assert len(lines) == 11 and shown == 19 and "and 38 more" in lines[-1]


def test_few_tasks_have_room_for_a_bar() -> None:
    assert "human" in rendered_table(("pong",), 120, 29)[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_log_records_go_above_the_live_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    handler = logging.StreamHandler(terminal)
    logging.getLogger().addHandler(handler)
    try:
        console = Console(RUN, stream=terminal)
        assert terminal.getvalue() == ""  # until there is something to show
        console.write(5, {"return/pong": 1.5})
        assert "pong" in terminal.getvalue()
        drawn = terminal.getvalue().count("a suite")
        logging.getLogger("somewhere").warning("look out")
        console.finish(0)
        assert handler.stream is terminal
    finally:
        logging.getLogger().removeHandler(handler)
    above, below = terminal.getvalue().split("look out")
    assert above.count("a suite") == drawn  # the screen was wiped before the record, and drawn
    assert above.endswith("\x1b[2K") and "a suite" in below  # again below it
    assert "paused at 5 of 1,000 frames" in terminal.getvalue().splitlines()[-1]


def test_a_resumed_run_that_stops_at_once_says_where_it_is(tmp_path: Path) -> None:
    point = {"frames": 400, "time_s": 41.0, "score/median": 12.34, "score/coverage": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(point | {"rate/frames_per_s": 9.0}) + "\n")
    out = io.StringIO()
    Console(replace(RUN, run_dir=tmp_path, resume_frames=400), stream=out).finish(130)
    assert out.getvalue() == (
        "stopped at 400 of 1,000 frames after 0:00:41, median 12.3 % (coverage 1/2)\n"
    )


def test_no_number_is_minus_zero() -> None:
    assert [number(value) for value in (-0.04, -0.06, -10.04)] == ["0.0", "-0.1", "-10.0"]
