"""What the report reads, and what it says of files and directories that it cannot."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from impala.report.__main__ import main
from impala.report.runs import MAX_POINTS, find_runs, read_metrics, read_run
from tests.report_runs import (
    TASKS,
    write_evaluation,
    write_job,
    write_run,
)


def test_half_written_lines_are_skipped_and_counted(tmp_path):
    run = write_run(tmp_path / "run", finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"no frames": 1}\n[1]\n{"frames": 500, "time_s": 9.0, "hns/pong": nul')
    found = read_run(run)
    assert found.damaged_lines == 3
    assert (len(found.points), found.last["frames"]) == (4, 400)
    assert found.status == "running or killed"
    write_run(tmp_path / "done")
    assert read_run(tmp_path / "done").status == "finished"


def test_a_long_run_is_thinned_out_and_keeps_its_last_point(tmp_path):
    run = write_run(tmp_path / "run", points=5 * MAX_POINTS + 3)
    points, damaged, _ = read_metrics(run / "metrics.jsonl")
    assert damaged == 0
    assert MAX_POINTS <= len(points) <= 2 * MAX_POINTS
    frames = [point["frames"] for point in points]
    assert frames[-1] == 100 * (5 * MAX_POINTS + 3)
    assert len(set(np.diff(frames[:-1]))) == 1


def test_a_directory_without_runs_says_so(tmp_path, capsys):
    (tmp_path / "sweep" / "0").mkdir(parents=True)
    for path, message in [
        (tmp_path / "sweep", "no directory in it has a config.yaml"),
        (tmp_path / "nowhere", "expected the directory of a run"),
    ]:
        with pytest.raises(SystemExit) as end:
            main([str(path)])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
    for arguments in ([], ["--wandb-workspace", "entity"], ["--wandb-workspace", "a/b/c"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "expected" in capsys.readouterr().err
    (tmp_path / "sweep" / "0" / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ValueError, match=r"sweep/0: metrics\.jsonl has no point"):
        find_runs([tmp_path / "sweep"])


def test_runs_are_found_once_and_the_broken_are_named(tmp_path):
    run = write_run(tmp_path / "a")
    (run / ".hydra").mkdir()
    (run / ".hydra" / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "latest").symlink_to(run)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.yaml").write_text("seed: 1\n")
    runs, left_out = find_runs([tmp_path, run, tmp_path / "latest"])
    assert [found.directory for found in runs] == [run]
    assert len(left_out) == 1
    assert "no point" in left_out[0]
    (run / "summary.json").write_text('{"status": ')
    assert "summary.json" in read_run(run).damaged_files[0]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("metrics.jsonl", '"text"', "line 5: a text, expected an object"),
        ("metrics.jsonl", "[]", "line 5: a list, expected an object"),
        ("metrics.jsonl", "null", "line 5: nothing, expected an object"),
        ("metrics.jsonl", "[" * 100_000, "line 5: half written or no JSON"),
        ("metrics.jsonl", b"\xff\xfe", "line 5: half written or no JSON"),
        ("metrics.jsonl", '{"frames": 500}', "line 5: has no time_s"),
        ("metrics.jsonl", '{"frames": "500", "time_s": 9}', "line 5: frames is a text"),
        ("metrics.jsonl", '{"frames": NaN, "time_s": 9}', "line 5: frames is nan"),
        ("metrics.jsonl", '{"frames": true, "time_s": 9}', "line 5: frames is True"),
        ("metrics.jsonl", '{"frames": 50, "time_s": 9}', "line 5: frames went back"),
        (
            "metrics.jsonl",
            '{"frames": 500, "time_s": 9, "hns/pong": "12"}',
            "line 5: hns/pong is a text, expected a finite number",
        ),
        ("summary.json", "[]", "holds a list, expected an object"),
        ("summary.json", '{"status": "finished", "frames": "400"}', "frames is a text"),
        (
            "summary.json",
            '{"status": "finished", "frames": 400, "games": {"pong": "7"}}',
            "games is other things, expected finite numbers by name",
        ),
        ("suite.json", '{"tasks": ["pong", 7]}', "tasks is a list, expected a list of different"),
        ("suite.json", '{"headline": "best"}', "headline is a text, expected the name of an"),
        ("suite.json", "7", "holds 7, expected an object"),
        ("evaluation/500.json", '{"frames": 500, "games_per_', "cannot be read"),
        ("evaluation/500.json", "[1]", "holds a list, expected an object"),
        ("evaluation/500.json", '{"frames": 500}', "has no games_per_task"),
    ],
)
def test_a_damaged_file_is_left_out_with_the_reason(tmp_path, name, content, reason):
    run = write_run(tmp_path / "run")
    write_evaluation(run, 400, greedy=False, scores=(20.0, 40.0))
    path = run / name
    before = path.read_bytes() if name == "metrics.jsonl" else b""
    path.write_bytes(before + (content if isinstance(content, bytes) else content.encode()))
    found = read_run(run)
    (said,) = found.damaged_files
    assert said.startswith(f"{path}: ")
    assert reason in said
    assert (len(found.points), sorted(found.tasks), len(found.evaluations)) == (4, sorted(TASKS), 1)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.yaml", "[1, 2]", "config.yaml holds a list, expected keys and values"),
        ("config.yaml", "a: &x [*x]", "config.yaml cannot be read: Circular"),
        ("config.yaml", "{a: [", "config.yaml cannot be read"),
        (
            "metrics.jsonl",
            '{"frames": 1e30, "time_s": 1}\n',
            "frames is 1e+30, expected a whole num",
        ),
        ("config.yaml", b"\xff", "config.yaml cannot be read"),
        ("metrics.jsonl", "[]\n1\n", "nothing of 2 lines can be read (line 1: a list, expected an"),
        ("metrics.jsonl", "", "metrics.jsonl has no point"),
    ],
)
def test_a_run_that_cannot_be_read_is_named_in_one_line(tmp_path, capsys, name, content, reason):
    run = write_run(tmp_path / "run")
    (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as end:
        main([str(run), "--out", str(tmp_path / "page.html")])
    assert end.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert str(run) in said
    assert reason in said


def test_a_page_that_cannot_be_written_is_an_error_before_the_work(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    for option, path, reason in (
        ("--out", tmp_path, "expected a file, and it is none"),
        ("--out", tmp_path / "file" / "page.html", "Not a directory"),
        ("--figures", tmp_path / "file", "expected a directory, and it is none"),
        ("--out", Path("/proc/nowhere/page.html"), "cannot write in /proc"),
    ):
        with pytest.raises(SystemExit) as end:
            main([str(run), option, str(path)])
        assert end.value.code == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert f"{option}={path}: " in said
        assert reason in said
    assert (tmp_path / "file").read_text() == "mine"


def test_a_sweep_says_why_a_job_failed(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    write_run(sweep / "0")
    write_job(sweep, 0, state="finished", score=20.0, error=None)
    write_job(sweep, 1, state="failed", score=None, error="ValueError: num_actors=0:\nnone plays")
    jobs = [{"name": f"seed={i}", "overrides": [f"seed={i}"]} for i in range(3)]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    arguments = [str(sweep), "--out", str(tmp_path / "page.html")]
    assert main(arguments) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Jobs of the sweep sweep: 1 finished, 1 failed, 1 not run" in page
    assert "ValueError: num_actors=0:\nnone plays" in page
    assert "<details open><summary>Jobs" in page
    capsys.readouterr()

    shutil.rmtree(sweep / "0")
    write_job(sweep, 0, state=3)
    with pytest.raises(SystemExit):
        main(arguments)
    (said,) = capsys.readouterr().err.splitlines()
    assert "no directory in it has a config.yaml" in said
    assert "job 1 of sweep (seed=1) failed: ValueError: num_actors=0: none plays" in said


def test_a_name_may_be_any_bytes(tmp_path):
    write_run(tmp_path / os.fsdecode(b"odd\xff"))
    out = tmp_path / "page.html"
    assert main([str(tmp_path), "--out", str(out)]) == 0
    assert "odd\\udcff" in out.read_text()


def test_a_workspace_that_cannot_be_saved_costs_no_page(tmp_path, monkeypatch, capsys):
    def save(entity, project):
        raise RuntimeError(f"no key\n for {entity}/{project}")

    monkeypatch.setattr("impala.report.__main__.save", save)
    write_run(tmp_path / "run")
    out = tmp_path / "page.html"
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--out", str(out), "--wandb-workspace", "me/games"])
    assert out.exists()
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert said.endswith("--wandb-workspace=me/games was not saved: no key for me/games")
