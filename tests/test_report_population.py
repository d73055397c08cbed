"""What the report's page says of a population, also of one whose files are damaged."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from impala.report.comparison import parts
from impala.report.population_figures import HALO_NAME, fitness_figure, schedules_figure
from impala.report.population_section import section
from impala.report.populations import Population, find_populations
from impala.report.report import make
from impala.report.runs import find_runs
from tests.report_runs import TASKS, write_population


def read(directory: Path) -> tuple[Population, dict]:
    ((population,), damaged) = find_populations(find_runs([directory])[0])
    assert damaged == []
    return population, section(population, "median", TASKS)


def text_of(page: str) -> str:
    """As somebody would read it, without scripts."""
    body = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", body.replace("><", "> <"))).split())


def test_the_page_has_everything_of_a_population(tmp_path):
    population = write_population(tmp_path / "sweep")
    page = tmp_path / "page.html"
    made = make([population], page)
    assert made.left_out == []
    text = page.read_text()
    said = text_of(text)
    for expected in (
        "Best: member 0", "30.0 % fitness (mean capped), the highest of 3 members",
        "30.0 % median, evaluation, 5 games a task, sampled actions after 300 frames",
        "after 100 frames member 1, with a fitness of 6.7, copies member 0 and goes on",
        "1 (best) 0 30.0 300 2 nobody 0.01 8 drop 7",
        "algorithm.optimizer.lr 1e-05 to 0.1 evenly on a logarithmic scale 0.01",
        "algorithm.micro_batch 4 to 64, whole numbers 8 or 16 8",
        "algorithm.stale drop, keep any of them; later the one before or after it drop",
        "rounds: all are compared after every 100 frames",
    ):  # fmt: skip
        assert expected in said, expected
    places = re.findall(r'<a href="#(run\d+)" title="[^"]*sweep/(\d)">', text)
    assert [member for _, member in places] == ["0", "0", "1", "2"]  # first that of the best
    for place, member in places:
        assert re.search(rf'<tr id="{place}"><th [^>]*title="[^"]*sweep/{member}"', text)


def test_rounds_say_who_was_best_who_copied_and_who_failed(tmp_path):
    population, of_it = read(write_population(tmp_path / "sweep"))
    assert of_it["rounds_title"] == "Rounds"
    assert of_it["rounds"] == [
        ["1", "100", "0", "10.0", "6.7", "1 copies 0", "none"],
        ["2", "200", "0", "20.0", "16.7", "nobody", "2"],
    ]
    fitness = fitness_figure(population)
    members = [f"member {member}" for member in range(3)]
    assert [trace.name for trace in fitness.data] == [HALO_NAME, *members]
    shown = [t.name for t in schedules_figure(population).data if t.showlegend is not False]
    assert shown == [HALO_NAME, *members]


def test_before_the_first_round_there_is_no_row(tmp_path):
    directory = write_population(tmp_path / "sweep")
    lines = (directory / "lineage.jsonl").read_text().splitlines(keepends=True)
    (directory / "lineage.jsonl").write_text("".join(lines[:3]))
    assert read(directory)[1]["rounds"] == []


def test_members_stand_alone_under_their_populations_name_and_its_best_is_none(tmp_path):
    (part,) = parts(find_runs([write_population(tmp_path / "sweep")])[0])
    assert [group.label for group in part.groups] == [f"sweep, member {i}" for i in range(3)]


def change(path: Path, **values: object) -> str:
    return json.dumps(json.loads(path.read_text()) | values)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("population.json", '{"size": 3, "spa', "population.json cannot be read"),
        ("population.json", "[]", "population.json holds a list, expected an object"),
        ("population.json", {"size": "3"}, "size is a text, expected a whole number"),
        (
            "population.json",
            {"space": [{"key": "lr"}]},
            "space is a list, expected a list of hyper",
        ),
        ("population.json", {"space": "lr"}, "space is a text, expected a list of hyper"),
        (
            "population.json",
            {"rule": {}},
            "rule is other things, expected an object with selection",
        ),
        ("population.json", {"fitness": 1}, "fitness is 1, expected a text"),
        ("lineage.jsonl", "", "lacks generation 0 of member 0"),
        ("lineage.jsonl", "[1]\n", "lineage"),
        ("lineage.jsonl", '{"member": 1}\n', "lineage.jsonl, line 1 is damaged"),
        ("lineage.jsonl", '{"frames": 1}\n', "lineage cannot be read"),
        ("lineage.jsonl", "[" * 100_000 + "\n", "lineage cannot be read"),
        ("lineage.jsonl", b"\xff\xfe\n", "lineage"),
    ],
)
def test_a_damaged_population_is_single_runs_with_the_reason(tmp_path, name, content, reason):
    directory = write_population(tmp_path / "sweep")
    path = directory / name
    if isinstance(content, dict):
        content = change(path, **content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    runs, _ = find_runs([directory])
    assert len(runs) == 3
    populations, (said,) = find_populations(runs)
    assert populations == []
    assert said.startswith(f"{directory}: shown as single runs, for its ")
    assert reason in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "values",
    [{"frames": -1}, {"new": {}}, {"new": [1]}, {"member": "0"}, {"fitness": "high"},
     {"generation": -1}, {"parent": "0"}, {"parent_generation": 5}, {"old": None},
     {"failed": True}, {"parent": 2}],
    ids=repr,
)  # fmt: skip
def test_a_generation_that_is_none_is_said(tmp_path, values):
    directory = write_population(tmp_path / "sweep")
    first, *others = (directory / "lineage.jsonl").read_text().splitlines(keepends=True)
    changed = json.dumps(json.loads(first) | values) + "\n"
    (directory / "lineage.jsonl").write_text("".join([changed, *others]))
    populations, (said,) = find_populations(find_runs([directory])[0])
    assert populations == []
    assert "lineage" in said
