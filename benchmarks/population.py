"""Population-based training against random search, at equal frames and from the same start.

    python -m benchmarks.population --seeds 1 2 3 4 5 6 7 8

Both train the same members, of the same seeds and starting values, for the same frames on
`suite=catch`; the learning rate's prior is wide on purpose. Random search is the same sweep in
which nobody ever evolves. Writes outputs/benchmarks/population.md, population.png and
population.csv.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.training_run import LAUNCH
from impala.cores import available_cores
from impala.loggers.json_lines import read_points
from impala.population_directory import PopulationDirectory, Record
from impala.population_report import ancestry

LR = "algorithm.optimizer.lr"
POPULATION, SEARCH = "population", "random search"
PRIOR = "tag(log, interval(1e-6, 1.0))"
GOOD = 0.9  # of a return of at most 1


@dataclass(frozen=True)
class Settings:
    size: int
    frames: int  # of each member
    round_frames: int
    burn_in_frames: int
    prior: str
    rows: int  # of the board
    columns: int


@dataclass(frozen=True)
class Swept:
    method: str
    seed: int
    frames: list[int]  # of the points below
    returns: np.ndarray  # [members, points], means of the last 100 games
    line: list[Record]  # the ancestry of the best member

    @property
    def best(self) -> np.ndarray:
        """Of the best member at each point."""
        return self.returns.max(0)

    @property
    def good_after(self) -> int | None:
        """Frames of each member until one is good."""
        good = np.flatnonzero(self.best >= GOOD)
        return self.frames[good[0]] if len(good) else None


def sweep(method: str, seed: int, settings: Settings) -> Swept:
    """Runs one sweep, all members one after the other in one process."""
    round_frames = settings.round_frames if method == POPULATION else settings.frames
    with tempfile.TemporaryDirectory(prefix="population-") as folder:
        path = Path(folder, "sweep")
        subprocess.run(
            [
                sys.executable, str(LAUNCH), "-m", "hydra/sweeper=population", "suite=catch",
                f"suite.rows={settings.rows}", f"suite.columns={settings.columns}",
                "transport=in_process", "learner.threads=1", "loggers=[]", f"seed={seed}",
                "algorithm.lr_schedule.path=impala.learner.constant", f"{LR}={settings.prior}",
                f"total_frames={settings.frames}", f"log_every_frames={settings.frames // 40}",
                f"hydra.sweeper.size={settings.size}",
                f"hydra.sweeper.round_frames={round_frames}",
                f"hydra.sweeper.burn_in_frames={settings.burn_in_frames}",
                f"hydra.sweep.dir={path}",
            ],
            cwd=report.ROOT,
            check=True,
            capture_output=True,
            text=True,
        )  # fmt: skip
        curves = [list(read_points(path / str(i) / "metrics.jsonl")) for i in range(settings.size)]
        records = PopulationDirectory(path).lineage()
    frames = [settings.frames * (i + 1) // 40 for i in range(40)]
    returns = np.array([[_at(curve, f) for f in frames] for curve in curves])
    latest = {record.member: record for record in records}
    nodes = {(record.member, record.generation): record for record in records}
    line = ancestry(nodes, latest[int(returns[:, -1].argmax())])
    result = Swept(method, seed, frames, returns, line)
    report.say(
        f"seed {seed}, {method}: best {result.best[-1]:.2f}, mean {returns[:, -1].mean():.2f}"
    )
    return result


def _at(curve: Sequence[dict[str, float]], frames: int) -> float:
    """The return at the first point of at least so many frames, or at the last one."""
    reached = [point for point in curve if point["frames"] >= frames] or curve[-1:]
    return reached[0]["return/catch"]


def by_method(sweeps: Sequence[Swept], method: str) -> list[Swept]:
    return [swept for swept in sweeps if swept.method == method]


def table_of_seeds(sweeps: Sequence[Swept]) -> str:
    rows = []
    for ours, theirs in zip(by_method(sweeps, POPULATION), by_method(sweeps, SEARCH), strict=True):
        row = [str(ours.seed)]
        for swept in (ours, theirs):
            good = "never" if swept.good_after is None else f"{swept.good_after:,}"
            row += [f"{swept.best[-1]:.2f}", f"{swept.returns[:, -1].mean():.2f}", good]
        rows.append(row)
    header = ["seed"]
    for method in (POPULATION, SEARCH):
        header += [f"{method}: best", "mean", f"frames until the best has {GOOD}"]
    return report.table(header, rows)


def verdict(sweeps: Sequence[Swept]) -> str:
    sentences = []
    for name, value in (
        ("the best member", lambda swept: swept.best[-1]),
        ("the mean of all members", lambda swept: swept.returns[:, -1].mean()),
        ("the best member, averaged over the run", lambda swept: swept.best.mean()),
    ):
        ours, theirs = (
            [float(value(swept)) for swept in by_method(sweeps, method)]
            for method in (POPULATION, SEARCH)
        )
        wins = sum(a > b for a, b in zip(ours, theirs, strict=True))
        losses = sum(a < b for a, b in zip(ours, theirs, strict=True))
        sentences.append(
            f"- {name}: {statistics.fmean(ours):.2f} against {statistics.fmean(theirs):.2f};"
            f" better with {wins} and worse with {losses} of {len(ours)} seeds"
        )
    return "\n".join(sentences)


def write_csv(sweeps: Sequence[Swept], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "seed", "member", "frames", "return"])
        for swept in sweeps:
            for member, curve in enumerate(swept.returns):
                for frames, value in zip(swept.frames, curve, strict=True):
                    writer.writerow([swept.method, swept.seed, member, frames, f"{value:.4g}"])
    print(f"wrote {path}", flush=True)


def plot(sweeps: Sequence[Swept], path: Path) -> None:
    """Best and mean member over frames, mean and range over seeds; learning rates of the best."""
    from benchmarks import plots

    figure, (best, mean, rates) = plots.panels(1, 3, width=3.6, height=3.0)
    for colour, method in zip(plots.COLOURS, (POPULATION, SEARCH), strict=False):
        these = by_method(sweeps, method)
        frames = np.array(these[0].frames) / 1e3
        for axes, curves in (
            (best, np.array([swept.best for swept in these])),
            (mean, np.array([swept.returns.mean(0) for swept in these])),
        ):
            axes.plot(frames, curves.mean(0), color=colour, label=method)
            axes.fill_between(frames, curves.min(0), curves.max(0), color=colour, alpha=0.18)
            axes.set_ylim(-1.05, 1.05)
        for swept in these:
            starts = [record.frames / 1e3 for record in swept.line] + [frames[-1]]
            values = [record.new[LR] for record in swept.line]
            rates.plot(starts, [*values, values[-1]], color=colour, drawstyle="steps-post", lw=1.0)
    best.set_title("return of the best member")
    mean.set_title("mean return of all")
    rates.set_title("learning rates of the best")
    rates.set_yscale("log")
    best.legend(loc="lower right", fontsize=8.5)
    figure.supxlabel("thousand frames of each member", fontsize=9.5)
    plots.save(figure, path)


def main() -> None:
    parser = report.parser("benchmarks.population", __doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--size", type=int, default=6, help="members")
    parser.add_argument("--frames", type=int, default=200_000, help="of each member")
    parser.add_argument("--round-frames", type=int, default=10_000)
    parser.add_argument("--burn-in-frames", type=int, default=50_000, help="nobody evolves before")
    parser.add_argument(
        "--prior", default="tag(log, interval(1e-6, 1.0))", help="of the learning rate"
    )
    parser.add_argument("--rows", type=int, default=20, help="of the board")
    parser.add_argument("--columns", type=int, default=9)
    parser.add_argument("--at-once", type=int, default=available_cores(), help="sweeps, one a core")
    parser.add_argument("--folder", type=Path, default=report.RESULTS)
    options = parser.parse_args()
    settings = Settings(
        options.size,
        options.frames,
        options.round_frames,
        options.burn_in_frames,
        options.prior,
        options.rows,
        options.columns,
    )
    jobs = [(method, seed) for seed in options.seeds for method in (POPULATION, SEARCH)]
    with ThreadPoolExecutor(options.at_once) as pool:
        sweeps = list(pool.map(lambda job: sweep(job[0], job[1], settings), jobs))
    options.folder.mkdir(parents=True, exist_ok=True)
    plot(sweeps, options.folder / "population.png")
    write_csv(sweeps, options.folder / "population.csv")
    report.write(
        options.folder / "population.md",
        "# Population-based training against random search",
        report.facts(report.made_here("benchmarks.population")),
        f"`suite=catch` on a board of {settings.rows} x {settings.columns}: {settings.size}"
        f" members, {settings.frames:,} frames each; after {settings.burn_in_frames:,} they are"
        f" compared every {settings.round_frames:,}. Adam's learning rate is swept from"
        f" `{settings.prior}` and does not decay. Both methods begin with the same learning rates"
        " and seeds, one set a seed. Returns are means of a member's last 100 games: 1 is"
        " perfect, -1 is none caught.",
        verdict(sweeps),
        table_of_seeds(sweeps),
        "![returns and learning rates](population.png)",
        "The curves: [population.csv](population.csv)",
    )


if __name__ == "__main__":
    main()
