"""The report's page and its figures, also in a real browser."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from plotly.offline import get_plotlyjs_version

from benchmarks.page import load, write_runs
from impala.report import task_table
from impala.report.__main__ import main
from impala.report.comparison import TRAINING, parts, scored, shown_first
from impala.report.export import write_csv
from impala.report.figures import bars_name, figures, profiles, scores_of_tasks, symlog
from impala.report.report import make
from impala.report.running_figures import shares_lag_time
from impala.report.runs import find_runs
from impala.words import by_magnitude
from suites.published import published
from tests.report_runs import (
    CHROMIUM,
    write_evaluation,
    write_everything,
    write_job,
    write_population,
    write_run,
)


def test_a_profile_falls_at_the_scores(tmp_path):
    for seed, scores in enumerate([(100.0, 80.0), (100.0, 33.0)]):
        write_run(tmp_path / str(seed), seed=seed, scores=scores)
    (part,) = parts(find_runs([tmp_path])[0])
    line = profiles(part).data[-1]  # after its band
    at = {round(float(x), 3): y for x, y in zip(line.x, line.y, strict=True)}
    for score, above in ((33.0, 75.0), (80.0, 50.0), (100.0, 0.0)):
        assert at[round(float(symlog(np.array(score))), 3)] == above


def test_bars_show_the_evaluation_that_all_have_and_say_so(tmp_path):
    runs = [write_run(tmp_path / str(i), lr=i) for i in range(2)]
    evaluation = "evaluation, 5 games a task, sampled actions"
    for evaluated, kind in enumerate((TRAINING, TRAINING, evaluation)):
        for run in runs[:evaluated]:
            write_evaluation(run, 400, greedy=False, scores=(70.0, 80.0))
        (part,) = parts(find_runs([tmp_path])[0])
        of_kinds = scored(part, [])
        assert shown_first(of_kinds) == kind
        figure = scores_of_tasks(part, kind, of_kinds[kind], [])
        assert figure.layout.xaxis.title.text.endswith(f"<br>{kind}")
        names = [trace.name for trace in figure.data]
        after = "" if kind == TRAINING else ", after 400 frames"
        assert names == [f"lr=0{after}", f"lr=1{after}"]
    write_evaluation(runs[0], 500, greedy=True, scores=(70.0, 80.0))
    page = tmp_path / "page.html"
    make([tmp_path], page)
    (shown,) = re.findall(r'id="part0-bars"[^>]*data-figure="([^"]*)"', page.read_text())
    assert shown == bars_name(evaluation)
    (first, *rest) = re.findall(r'<option value="scores_of_tasks[^"]*">([^<]*)<', page.read_text())
    assert first == evaluation
    greedy = "evaluation, 5 games a task, greedy actions (not of every run)"
    assert sorted(rest) == [greedy, TRAINING]


def test_nothing_finished_is_no_score_and_coverage_0(tmp_path):
    run = write_run(tmp_path / "run", finished=False)
    point = {"frames": 100, "time_s": 2.0, "score/coverage": 0.0, "share/pong": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(point) + "\n")
    assert main([str(run), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "no score yet" in page
    assert "over 0 of 2 tasks (0 %)" in page
    assert not re.search("[-\N{EN DASH}] %", page.partition("<script")[0])


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0.000"), (-0.0421, "-0.042"), (-6.1, "-6.10"), (20.44, "20.4"), (2031.4, "2,031")],
)
def test_returns_have_sensible_decimals(value, said):
    assert by_magnitude(value) == said


def test_one_is_no_plural(tmp_path, capsys):
    main([str(write_run(tmp_path / "run")), "--out", str(tmp_path / "page.html")])
    assert capsys.readouterr().out.startswith("1 run in ")


def test_the_time_of_a_step_is_shown_where_it_was_measured(tmp_path):
    older = write_run(tmp_path / "older")
    run = write_run(tmp_path / "run", lr=0.2)
    points = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, point in enumerate(points, start=1):
        point |= {"step_s/pong": 0.002 * number, "step_s/breakout": 0.0004}
    (run / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    (part,) = parts(find_runs([tmp_path])[0])
    names = [name for name, _ in task_table.head(part)]
    assert "step, ms" in names
    column = names.index("step, ms")
    cells = {
        (group.label, row[0][1]): row[column]
        for group in part.groups
        for row in task_table.rows(part, group)
    }
    assert cells["lr=0.2", "pong"] == (pytest.approx(5.0), "5.00")
    assert cells["lr=0.2", "breakout"] == (pytest.approx(0.4), "0.400")
    assert cells["lr=0.1", "pong"][0] is None
    figure = shares_lag_time(part)
    assert figure.layout.xaxis3.title.text == "an environment's step,<br>milliseconds"
    drawn = [trace for trace in figure.data if trace.xaxis == "x3" and trace.name == "lr=0.2"]
    np.testing.assert_allclose(drawn[0].x, [5.0, 0.4])

    (part,) = parts(find_runs([older])[0])
    assert "step, ms" not in [name for name, _ in task_table.head(part)]
    assert "xaxis3" not in shares_lag_time(part).to_plotly_json()["layout"]


def test_the_page_needs_no_other_file_and_has_everything(tmp_path, capsys):
    write_everything(tmp_path / "runs")
    out, figures = tmp_path / "out" / "page.html", tmp_path / "figures"
    assert main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "2/metrics.jsonl: 1 line is damaged (line 5: half written or no JSON)" in said
    assert "shown apart: atari57, protocol: </script>sticky, there sticky actions 0.0" in said
    page = out.read_text()
    assert re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?!data:)', page) == []
    assert page.count('class="part"') == 2
    assert "</script>sticky" not in page
    assert "0.2</script>" not in page
    for text in (
        "95 % interval over 2 seeds", "one seed: no interval", "IMPALA deep, multi-task",
        "evaluation, 5 games a task, sampled actions", "1 line is damaged",
        'src="data:video/mp4;base64,ZmlsbQ=="', "too large to be in the page", "c0ffee",
        "checkpoint of 400 frames",
    ):  # fmt: skip
        assert text in page, text
    assert page.count("data:video/mp4") == 1
    embedded = re.findall(
        r'<script type="application/json" id="([^"]*)">(.*?)</script>', page, re.S
    )
    names = {name for name, text in embedded if json.loads(text)}
    for name in ("scores_of_tasks", "curve_iqm_over_hours", "task_breakout_over_frames"):
        assert {f"part0-data-{name}", f"part1-data-{name}"} <= names
    assert not figures.exists()


def test_the_bundle_in_the_page_draws_what_figures_have(tmp_path):
    """It is Plotly's basic one, a quarter of the whole, of the version whose JSON figures are."""
    write_everything(tmp_path / "runs")
    write_population(tmp_path / "population")
    main([str(tmp_path / "runs"), str(tmp_path / "population"), "--out", str(tmp_path / "p.html")])
    text = (tmp_path / "p.html").read_text()
    figures = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    kinds = {trace["type"] for figure in figures for trace in json.loads(figure)["data"]}
    assert kinds == {"bar", "scatter"}
    bundled = re.search(r"plotly\.js \(basic - minified\) v(\d+)\.", text)
    assert bundled
    assert bundled[1] == get_plotlyjs_version().split(".")[0]


def test_figures_are_exported_as_csv_where_there_is_no_browser(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    arguments = [str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--figures", str(tmp_path / "figures")])
    assert end.value.code == 2
    assert "PNG and SVG are drawn by Chrome or Chromium" in capsys.readouterr().err
    lines = (tmp_path / "figures" / "task_pong_over_frames.csv").read_text().splitlines()
    assert lines[:2] == ["panel,trace,x,y,x_low,x_high,y_low,y_high", ",atari57,100,2.5,,,,"]


def test_a_figures_csv_has_what_the_axes_say(tmp_path):
    for seed, scores in enumerate([(100.0, -20.0), (60.0, -40.0)]):
        write_run(tmp_path / str(seed), seed=seed, scores=scores)
    (part,) = parts(find_runs([tmp_path])[0])
    drawn = figures(part, [], [])
    rows = {}
    for name in ("scores_of_tasks", "performance_profile", "task_pong_over_frames"):
        write_csv(drawn[name], tmp_path / "a.csv")
        rows[name] = list(csv.DictReader((tmp_path / "a.csv").open()))
    (pong,) = (row for row in rows["scores_of_tasks"] if row["y"] == "pong")
    assert [float(pong[key]) for key in ("x", "x_low", "x_high")] == pytest.approx([80, 60, 100])
    shares = {float(row["x"]): row for row in rows["performance_profile"]}
    assert (shares[-40.0]["y"], shares[60.0]["y"], shares[100.0]["y"]) == ("75", "25", "0")
    assert (float(shares[60.0]["y_low"]), float(shares[60.0]["y_high"])) == (0, 50)
    last = rows["task_pong_over_frames"][-1]
    assert [float(last[key]) for key in ("x", "y", "y_low", "y_high")] == [400, 80, 60, 100]
    write_csv(drawn["shares_lag_time"], tmp_path / "a.csv")
    panels = {row["panel"] for row in csv.DictReader((tmp_path / "a.csv").open())}
    assert "share of the learner's frames, %" in panels and len(panels) == 2


def test_published_results_are_over_the_tasks_of_the_page(tmp_path):
    write_run(tmp_path / "run")
    write_evaluation(tmp_path / "run", 400, greedy=False, scores=(20.0, 40.0))
    write_run(tmp_path / "other", seed=2)
    page = tmp_path / "page.html"
    main([str(tmp_path), "--out", str(page)])
    text = " ".join(page.read_text().split())
    assert "Published results, too, are here over these 2 of the suite's 57 tasks" in text
    row = re.search(r"IMPALA deep, multi-task</th>.*?</tr>", text)
    assert row and "2 of 2 tasks" in row[0]
    scores = next(e for e in published("atari57") if e.label == "IMPALA deep, multi-task").scores
    assert f">{np.median([scores['pong'], scores['breakout']]):,.1f}<" in row[0]
    assert "evaluation, 5 games a task, sampled actions: of 1 of 2 seeds only" in text
    assert "no evaluation is of all seeds of a run" in text
    assert "of so few seeds it is too narrow" in text


# In a real browser

DRIVER = f"<script>{Path(__file__).with_name('report_driver.js').read_text()}</script>"


def in_browser(page: Path, *options: str) -> dict:
    driven = page.with_name("driven.html")
    driven.write_text(page.read_text().replace("<body>", "<body>" + DRIVER, 1))
    assert CHROMIUM is not None
    ran = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900",
         "--enable-logging=stderr", "--virtual-time-budget=20000", *options, "--dump-dom",
         driven.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert [line for line in ran.stderr.splitlines() if ":CONSOLE" in line] == []
    found = re.search(r'<pre id="found">(.*?)</pre>', ran.stdout, re.S)
    assert found, ran.stdout[-2000:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@pytest.mark.slow
@needs_browser
def test_the_page_works_in_a_browser_in_light_and_dark(tmp_path):
    write_everything(tmp_path / "runs")
    page = tmp_path / "page.html"
    main([str(tmp_path / "runs"), "--out", str(page)])
    light = in_browser(page)
    assert light["errors"] == []
    assert light["aria"] == "descending"
    numbers = [float(text) for text in light["descending"]]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[-1]
    assert light["ascending"] == light["descending"][::-1] or sorted(numbers) == [
        float(text) for text in light["ascending"]
    ]
    assert light["names"] == ["breakout", "breakout", "pong", "pong"]
    assert light["filtered"] == ["breakout", "lr=0.2</script>"]
    assert light["count"] == "1 of 4 rows"
    lines = light["csv"].splitlines()
    assert len(lines) == 2
    assert lines[0].startswith('"task","run","return","score, %"')
    assert lines[1].startswith('"breakout","lr=0.2</script>",-3.0,-30.0,,,40.0,7')
    assert (light["before"], light["after"]) == (
        "environment frames", "hours since the start of the run",
    )  # fmt: skip
    assert light["empty"] == light["unlabelled"] == 0
    assert (light["wider"], light["page_width"], light["dead"]) == ([], 0, [])
    dark = in_browser(page, "--blink-settings=preferredColorScheme=0")
    assert (light["paper"], light["ink"]) == ("rgb(255, 255, 255)", "#1d2330")
    assert (dark["paper"], dark["ink"]) == ("rgb(20, 23, 29)", "#e4e8f0")


@pytest.mark.slow
@needs_browser
def test_a_page_with_much_to_say_is_no_wider_than_the_window(tmp_path):
    for i in range(6):
        run = write_run(tmp_path / "runs" / str(i), lr=f"a_long_name_of_a_setting_{i}" * 3, seed=i)
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["algorithm"] |= {f"key_{j}": "x" * 30 + f" {i}" for j in range(8)}
        config["algorithm"]["longest"] = "y" * 400
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    write_job(tmp_path / "runs", 0, state="failed", error="RuntimeError: " + "z" * 400)
    jobs = [{"name": "x" * 200, "overrides": []}]
    (tmp_path / "runs" / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    write_population(tmp_path / "population")
    page = tmp_path / "page.html"
    main([str(tmp_path / "runs"), str(tmp_path / "population"), "--out", str(page)])
    found = in_browser(page)
    assert (found["errors"], found["wider"], found["page_width"], found["dead"]) == ([], [], 0, [])
    assert found["empty"] == found["unlabelled"] == 0


@pytest.mark.slow
@needs_browser
def test_figures_are_exported(tmp_path):
    write_run(tmp_path / "run")
    folder = tmp_path / "figures"
    main([str(tmp_path / "run"), "--out", str(tmp_path / "page.html"), "--figures", str(folder)])
    names = {path.stem for path in folder.iterdir()}
    assert {"scores_of_tasks", "shares_lag_time", "task_pong_over_hours"} <= names
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
        assert "<svg" in (folder / f"{name}.svg").read_text()[:200], name
        assert (folder / f"{name}.csv").read_text().count("\n") > 1, name


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("different", [False, True], ids=["seeds", "runs"])
def test_57_tasks_and_10_runs_load_within_3_s_in_10_mb(tmp_path, different):
    write_runs(tmp_path / "runs", different=different)
    page = tmp_path / "page.html"
    main([str(tmp_path / "runs"), "--out", str(page)])
    assert page.stat().st_size < 10_000_000
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip("others keep the machine busy: it would be they who are measured")
    assert CHROMIUM is not None
    assert min(load(page, CHROMIUM).drawn_s for _ in range(3)) < 3.0  # it may be busy once
