"""`python -m impala.report RUN_OR_SWEEP_DIR ...`: one page about runs, also while they run.

The page is one HTML file that opens from disk and needs no network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from impala.report.workspace import save
from impala.whole_file import write_whole

NEEDS = ("plotly", "jinja2")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m impala.report", description=__doc__)
    parser.add_argument("directories", nargs="*", type=Path, metavar="RUN_OR_SWEEP_DIR")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page")
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        help="also write every figure there, as PNG, SVG and CSV (needs kaleido and Chrome or"
        " Chromium; CSV does not)",
    )
    parser.add_argument(
        "--wandb-workspace",
        metavar="ENTITY/PROJECT",
        help="save a Weights & Biases workspace with ordered panels",
    )
    options = parser.parse_args(arguments)
    if options.wandb_workspace is not None:
        entity, _, project = options.wandb_workspace.partition("/")
        if not entity or not project:
            parser.error(f"--wandb-workspace={options.wandb_workspace}: expected ENTITY/PROJECT")
        try:
            print(f"saved {save(entity, project)}")
        except ValueError as error:
            parser.error(str(error))
    if not options.directories:
        if options.wandb_workspace is not None:
            return 0
        parser.error("expected the directory of a run or of a sweep")
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        parser.error(f"{', '.join(missing)} not installed: pip install -e '.[report]'")

    from impala.report.comparison import parts
    from impala.report.export import NoBrowserError, export
    from impala.report.figures import figures
    from impala.report.page import Drawn, render
    from impala.report.runs import find_runs
    from suites.published import published

    try:
        runs, left_out = find_runs(options.directories)
    except ValueError as error:
        parser.error(str(error))
    for text in left_out:
        print(f"left out: {text}", file=sys.stderr)
    for run in runs:
        if run.damaged_lines:
            print(f"{run.directory}: {run.damaged_lines} damaged lines skipped", file=sys.stderr)
    drawn = []
    for part in parts(runs):
        results = published(part.suite)
        drawn.append(Drawn(part, results, figures(part, results)))
        for difference in part.differs:
            print(f"shown apart: {part.suite}, {difference}", file=sys.stderr)
    text = render(drawn, left_out, options.out)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, text)
    print(f"{len(runs)} runs in {options.out} ({options.out.stat().st_size / 1e6:.1f} MB)")
    if options.figures is not None:
        try:
            written = export([(each.part, each.figures) for each in drawn], options.figures)
        except NoBrowserError as error:
            parser.error(str(error))
        print(f"{written} figures in {options.figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
