"""How large the report's page is, and how fast it loads: 57 games and 10 runs.

    python -m benchmarks.page

Writes runs as training leaves them, with made-up scores: 10 seeds of one run, and 10 different
runs. Loads the page of each in headless Chromium, a new process each time, until its first three
figures are drawn. Writes outputs/benchmarks/page.md.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from benchmarks import report
from impala.report.report import make
from suites.atari57 import Atari57

RUNS, POINTS, FRAMES = 10, 300, 2_000_000
PER_TASK = {"share": 1 / 57, "lag": 2.0, "lag_p95": 3.0, "length": 4000.0, "step_s": 2e-4}
WATCHED = """<script>addEventListener("load", () => {
  const loaded = performance.now();
  [...document.querySelectorAll(".figure")].slice(0, 3).forEach(draw);
  const at = [loaded, performance.now()];
  document.body.insertAdjacentHTML("beforeend", `<pre id="at">${JSON.stringify(at)}</pre>`);
});</script>"""


class Loaded(NamedTuple):
    """Seconds since the page was asked for."""

    loaded_s: float  # its load event: all text is there
    drawn_s: float  # and the first three figures


def write_runs(folder: Path, *, different: bool) -> None:
    """`RUNS` finished runs of all 57 games: seeds of one, or of different learning rates."""
    suite = Atari57()
    tasks = [task.name for task in suite.tasks]
    random = np.random.default_rng(0)
    level = random.lognormal(4.0, 1.3, len(tasks))
    for number in range(RUNS):
        run = folder / str(number)
        run.mkdir(parents=True)
        config = {
            "seed": number,
            "algorithm": {"optimizer": {"lr": 1e-4 * (1 + number * different)}},
            "choices": {"suite": suite.name},
        }
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        about = {"suite": suite.name, "headline": suite.headline, "tasks": tasks}
        about["provenance"] = suite.provenance
        (run / "suite.json").write_text(json.dumps(about))
        last = level * random.lognormal(0.0, 0.3, len(tasks))
        rise = 1 - np.exp(-np.arange(1, POINTS + 1) / 100)[:, None]
        scores = last * rise * random.normal(1.0, 0.05, (POINTS, len(tasks)))
        with (run / "metrics.jsonl").open("w") as file:
            for index, of_point in enumerate(scores, start=1):
                point = {"frames": FRAMES * index // POINTS, "time_s": 2.0 * index}
                point |= {"score/coverage": 1.0, "time/learner_waiting": 0.5}
                point |= {"time/actor_inference": 0.4}
                for task, score in zip(tasks, of_point.tolist(), strict=True):
                    point |= {f"hns/{task}": score, f"return/{task}": 10 * score}
                    point |= {f"{key}/{task}": value for key, value in PER_TASK.items()}
                file.write(json.dumps(point) + "\n")
        summary = {"status": "finished", "frames": FRAMES, "games": dict.fromkeys(tasks, 500)}
        (run / "summary.json").write_text(json.dumps(summary))


def load(page: Path, chromium: str) -> Loaded:
    watched = page.with_name("watched.html")
    watched.write_text(page.read_text().replace("</body>", WATCHED + "</body>"))
    ran = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900",
         "--dump-dom", watched.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="at">(\[[0-9.,]+\])</pre>', ran.stdout)
    if not found:
        raise RuntimeError(f"{page} was not drawn: {ran.stderr[-2000:]}")
    return Loaded(*(milliseconds / 1000 for milliseconds in json.loads(found[1])))


def main() -> None:
    parser = report.parser("benchmarks.page", __doc__)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--loads", type=int, default=5, help="of each page in a window")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "page.md")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chrome")
    if chromium is None:
        parser.error("needs Chromium or Chrome: Debian has it as the package chromium")
    with tempfile.TemporaryDirectory() as name:
        pages: dict[str, Path] = {}
        made_s: dict[str, float] = {}
        for kind, different in (("10 seeds of one run", False), ("10 different runs", True)):
            folder = Path(name, str(different))
            write_runs(folder, different=different)
            began = time.monotonic()
            pages[kind] = folder / "page.html"
            make([folder], pages[kind])
            made_s[kind] = time.monotonic() - began
            report.say(f"{kind}: made in {made_s[kind]:.1f} s")
        windows: dict[str, list[Loaded]] = {kind: [] for kind in pages}
        for _ in range(options.windows):  # in turns: the machine's own speed changes
            for kind, page in pages.items():
                loads = [load(page, chromium) for _ in range(options.loads)]
                windows[kind].append(Loaded(*map(statistics.median, zip(*loads, strict=True))))
                report.say(f"{kind}: drawn after {windows[kind][-1].drawn_s:.2f} s")
        rows = [
            [
                kind, f"{page.stat().st_size / 1e6:.1f}", f"{made_s[kind]:.1f}",
                *(f"{min(column):.2f}" for column in zip(*windows[kind], strict=True)),
                f"{max(each.drawn_s for each in windows[kind]):.2f}",
            ]
            for kind, page in pages.items()
        ]  # fmt: skip
    version = subprocess.run([chromium, "--version"], capture_output=True, text=True, check=True)
    report.write(
        options.out,
        "# The report's page",
        report.facts(report.made_here("benchmarks.page") | {"browser": version.stdout.strip()}),
        f"57 games, {POINTS} points of each run, scores made up. Each load is of a new browser;"
        f" times are from asking for the page, the best (and in the last column the worst) of"
        f" {options.windows} medians over {options.loads} loads.",
        report.table(
            ["page of", "MB", "made in, s", "loaded, s", "3 figures drawn, s", "worst, s"], rows
        ),
    )


if __name__ == "__main__":
    main()
