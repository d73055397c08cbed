"""What result files in docs/results have in common: where and how they were made, and tables."""

from __future__ import annotations

import argparse
import datetime
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil

from impala.cores import available_cores

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("outputs", "benchmarks")  # those of docs/results were made with --out or --folder
PACKAGES = ("torch", "ale-py", "gymnasium", "numpy", "hydra-core")


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=program,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column of words, the others of numbers."""
    lines = [list(header), ["---", *["---:"] * (len(header) - 1)], *map(list, rows)]
    if any(len(line) != len(header) for line in lines):
        raise ValueError(f"a row has not the {len(header)} cells of the header {list(header)}")
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def facts(pairs: dict[str, str]) -> str:
    """A Markdown list of named facts."""
    return "\n".join(f"- **{name}:** {value}" for name, value in pairs.items())


def number(value: float, digits: int = 3) -> str:
    """Rounded to `digits` significant digits, whole from 100 up, with thousands separated."""
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def module_command(module: str) -> str:
    return f"`python -m {shlex.join([module, *sys.argv[1:]])}`"


def machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    return f"{_processor()}, {available_cores()} cores, {memory:.0f} GiB, {platform.system()}"


def versions() -> str:
    own = [f"Python {platform.python_version()}"]
    return ", ".join(own + [f"{package} {metadata.version(package)}" for package in PACKAGES])


def commit() -> str:
    """Of this project's code, saying whether files that are in it have been changed since."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not in a git repository"
    return f"{head} with uncommitted changes" if changed else head


def made_here(module: str) -> dict[str, str]:
    """Where and how the result of this process is being made."""
    return {
        "command": module_command(module),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
    }


def write(path: Path, *paragraphs: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(p.strip() for p in paragraphs if p) + "\n"
    path.write_text(text)
    print(f"{text}\nwrote {path}", flush=True)


def say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", flush=True)


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _processor() -> str:
    """The processor's name; Linux has a better one than Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    name = fields.get("model name", platform.machine())
    if "family" not in name and "model" in fields:
        name += f" (family {fields.get('cpu family', '?')}, model {fields['model']})"
    extensions = [e for e in ("avx512f", "amx_bf16") if e in fields.get("flags", "").split()]
    return " with ".join([name, " and ".join(extensions)] if extensions else [name])
