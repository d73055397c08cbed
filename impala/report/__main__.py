"""`python -m impala.report RUN_OR_SWEEP_DIR ...`: one page about runs, also while they run.

The page is one HTML file that opens from disk and needs no network.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn

from impala.report.workspace import save

NEEDS = ("plotly", "jinja2")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In one line, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m impala.report", description=__doc__)
    parser.add_argument("directories", nargs="*", type=Path, metavar="RUN_OR_SWEEP_DIR")
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)"
    )
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
        if not re.fullmatch(r"[^/]+/[^/]+", options.wandb_workspace):
            parser.error(f"--wandb-workspace={options.wandb_workspace}: expected ENTITY/PROJECT")
        if not options.directories:
            return _save_workspace(parser, options.wandb_workspace)
    if not options.directories:
        parser.error("expected the directory of a run or of a sweep")
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        parser.error(f"{', '.join(missing)} not installed: pip install -e '.[report]'")

    for option, path, is_folder in (
        ("--out", options.out, False),
        ("--figures", options.figures, True),
    ):
        if path is not None and (fault := unwritable(path, is_folder=is_folder)):
            parser.error(f"{option}={path}: {fault}")

    from impala.report.export import NoBrowserError, export
    from impala.report.report import make
    from impala.words import counted

    try:
        runs, left_out, drawn = make(options.directories, options.out)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out={options.out}: cannot be written: {error}")
    for text in left_out:
        print(f"left out: {text}", file=sys.stderr)
    for each in drawn:
        for difference in each.part.differs:
            print(f"shown apart: {each.part.suite}, {difference}", file=sys.stderr)
    size = options.out.stat().st_size / 1e6
    print(f"{counted(len(runs), 'run')} in {options.out} ({size:.1f} MB)")
    if options.figures is not None:
        try:
            written = export([(each.part, each.all_figures) for each in drawn], options.figures)
        except NoBrowserError as error:
            parser.error(str(error))
        except OSError as error:
            parser.error(f"--figures={options.figures}: cannot be written: {error}")
        print(f"{counted(written, 'figure')} in {options.figures}")
    if options.wandb_workspace is not None:
        return _save_workspace(parser, options.wandb_workspace)
    return 0


def _save_workspace(parser: Parser, name: str) -> int:
    entity, _, project = name.partition("/")
    try:
        print(f"saved {save(entity, project)}")
    except Exception as error:  # W&B's, and its network's, are of many kinds
        reason = " ".join(str(error).split())
        parser.error(f"--wandb-workspace={name} was not saved: {reason}")
    return 0


def unwritable(path: Path, *, is_folder: bool) -> str | None:
    """Why a file, or files in a folder, cannot be written there; None if they can."""
    folder = path if is_folder else path.parent
    try:
        if path.exists() and not (path.is_dir() if is_folder else path.is_file()):
            return f"expected a {'directory' if is_folder else 'file'}, and it is none"
        while not folder.exists():
            folder = folder.parent
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"cannot write in {folder}: {error.strerror}"


if __name__ == "__main__":
    sys.exit(main())
