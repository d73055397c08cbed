"""How fast training is, how fast it could be, and how fast another framework is on this machine.

    python -m benchmarks.throughput --games pong,all --networks shallow --against sample-factory

For each case the costs of the parts (`benchmarks.parts`) and the real loop, a whole
`python launch.py`, take turns in one run, so that a machine that speeds up or slows down does so
for both. Of each, medians over windows are taken and then the best of those medians.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.errors import HydraException
from hydra.utils import instantiate

import building
from benchmarks import report
from benchmarks.parts import Costs, Environments, Parts, compose, ideal, one_core
from benchmarks.peers import sample_factory_peer
from benchmarks.training_run import (
    Program,
    Window,
    exit_on_sigterm,
    median_window,
    our_training,
    watch,
)
from impala.cores import available_cores
from suites.suite import Suite

OURS, OURS_FLOAT32 = "this project", "this project, float32"
CORES = {"lstm": [True], "none": [False], "both": [False, True]}
PART_SHARE = 0.2  # of a window of the loop, for a window of a part: they vary less


@dataclass(frozen=True)
class Case:
    games: str  # one game, or "all"
    network: str
    recurrent: bool

    @property
    def overrides(self) -> list[str]:
        tasks = "null" if self.games == "all" else f"[{self.games}]"
        core = "lstm" if self.recurrent else "feed_forward"
        network = [f"network={self.network}", f"network/core={core}"]
        return ["suite=atari57", f"suite.tasks={tasks}", *network]

    def __str__(self) -> str:
        games = "all 57 games" if self.games == "all" else self.games
        return f"{games}, {self.network}{' + LSTM' if self.recurrent else ''}"


@dataclass
class Measured:
    """What was measured of a case so far: one entry each round."""

    case: Case
    cores: int
    costs: list[Costs] = field(default_factory=list)
    runs: dict[str, list[list[Window]]] = field(default_factory=dict)  # by the program's name

    @property
    def best_costs(self) -> Costs:
        """The lowest of each part, so that the ideal is the highest."""
        return Costs(*map(min, zip(*self.costs, strict=True)))

    @property
    def ideal(self) -> float:
        return ideal(self.cores, self.best_costs)

    def best(self, program: str) -> Window:
        return max(map(median_window, self.runs[program]))

    @property
    def ratio(self) -> float:
        """Of the real loop to the ideal one."""
        return self.best(OURS).steps_per_s / self.ideal


def programs(case: Case, overrides: Sequence[str], cores: int, against: bool) -> list[Program]:
    """What trains in this case: we, and where wanted and possible a peer, and we in float32."""
    ours = [*case.overrides, *overrides]
    found = [our_training(ours, OURS)]
    if against and case.games != "all":
        found.append(
            sample_factory_peer.program(
                case.games, network=case.network, recurrent=case.recurrent, workers=cores
            )
        )
        cfg = compose(ours)
        if building.pick_autocast(cfg.learner.autocast, building.pick_device(cfg.device)):
            found.append(our_training([*ours, "learner.autocast=false"], OURS_FLOAT32))
    return found


def measure(
    case: Case, environments: Environments, options: argparse.Namespace, cores: int
) -> Measured:
    """Parts, programs, parts, and so on: one round more of the parts than of the programs."""
    cfg = compose([*case.overrides, *options.overrides])
    measured = Measured(case, cores)
    candidates = programs(case, options.overrides, cores, options.against is not None)
    with one_core():
        parts = Parts(cfg, environments)
    for turn in range(options.rounds + 1):
        with one_core():
            costs = parts.measure(options.seconds * PART_SHARE, options.windows)
        measured.costs.append(costs)
        report.say(f"{case}: {rates_text(costs)}, ideal {ideal(cores, costs):,.0f}")
        for program in candidates if turn < options.rounds else []:
            windows = watch(
                program,
                seconds=options.seconds,
                windows=options.windows,
                warm_up_s=options.warm_up,
                frames_per_step=environments.suite.spec.frames_per_step,
            )
            measured.runs.setdefault(program.name, []).append(windows)
            report.say(f"{case}: {program.name} {windows_text(windows)} steps/s")
    report.say(f"{case}: {measured.ratio:.2f} of the ideal")
    if peers := peer_table([measured]):
        print(peers, flush=True)
    return measured


def rates_text(costs: Costs) -> str:
    rates = (f"{name} {rate:,.0f}" for name, rate in zip(Costs._fields, costs.rates, strict=True))
    return ", ".join(rates) + " steps/s per core"


def windows_text(windows: Sequence[Window]) -> str:
    return " ".join(f"{window.steps_per_s:,.0f}" for window in windows)


def loop_table(results: Sequence[Measured]) -> str:
    rows = []
    for result in results:
        loop = result.best(OURS)
        numbers = (*result.best_costs.rates, result.ideal, loop.steps_per_s)
        rows.append(
            [
                str(result.case),
                *(f"{value:,.0f}" for value in numbers),
                f"{result.ratio:.2f}",
                f"{loop.cores_busy:.2f}",
            ]
        )
    header = ["case", "environment", "inference", "learner", "ideal", "loop", "loop / ideal"]
    return report.table([*header, "cores busy"], rows)


def peer_table(results: Sequence[Measured]) -> str:
    """Empty if no case was measured against a peer."""
    rows = []
    peers = {name for result in results for name in result.runs} - {OURS, OURS_FLOAT32}
    for result, peer in itertools.product(results, sorted(peers)):
        if peer not in result.runs:
            continue
        for name in result.runs:
            best = result.best(name)
            ratio = best.steps_per_s / result.best(peer).steps_per_s
            numbers = (f"{best.steps_per_s:,.0f}", f"{best.cores_busy:.2f}", f"{ratio:.2f}")
            rows.append([f"{result.case}: {name}", *numbers])
    header = ["program", "steps/s", "cores busy", f"times {', '.join(sorted(peers))}"]
    return report.table(header, rows) if rows else ""


def window_list(results: Sequence[Measured]) -> str:
    lines = []
    for result in results:
        for name, rounds in result.runs.items():
            text = "; ".join(map(windows_text, rounds))
            lines.append(f"- {result.case}, {name}: {text}")
        ideals = ", ".join(f"{ideal(result.cores, costs):,.0f}" for costs in result.costs)
        lines.append(f"- {result.case}, ideal by each measurement of the parts: {ideals}")
    return "\n".join(lines)


def write(results: Sequence[Measured], options: argparse.Namespace) -> None:
    paragraphs = [
        "# Throughput",
        report.facts(report.made_here("benchmarks.throughput")),
        f"""\
All numbers are agent steps per second (4 environment frames each). *environment*, *inference* and
*learner* are what one core does of each part alone, by processor time: environments of all actors
with random actions, forward passes at an actor's batch, updates on batches that were played.
*ideal* is cores / (sum of core-seconds for each step). *loop* is a whole `python launch.py` after
its first {options.warm_up:g} s of learning. Each number is the best of the medians over
{options.windows} windows; windows of the loop last {options.seconds:g} s or a little more, those of
the parts a fifth of it. Parts and programs took turns in one run.""",
        loop_table(results),
    ]
    if peers := peer_table(results):
        paragraphs += [
            "## Against other frameworks",
            f"""\
{sample_factory_peer.NAME} {sample_factory_peer.VERSION}, asynchronous PPO on the same network and
emulator, one worker with 16 environments for each core, learning once from each step. Steps are
those learned from.""",
            peers,
        ]
    paragraphs += ["## All windows", window_list(results)]
    report.write(options.out, *paragraphs)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser("benchmarks.throughput", __doc__)
    parser.add_argument("--games", default="pong,breakout,all", help="games, and all for all 57")
    parser.add_argument("--networks", default="shallow,deep")
    parser.add_argument("--cores", choices=CORES, default="none", help="what follows the torso")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each window of the loop")
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds of learning before")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each program in each case")
    parser.add_argument("--against", choices=["sample-factory"])
    parser.add_argument("--out", type=Path, default=report.RESULTS / "throughput.md")
    parser.add_argument("overrides", nargs="*", help="of launch.py, in every case")
    options = parser.parse_args(arguments)
    if min(options.windows, options.rounds) < 1 or options.seconds <= 0:
        parser.error("--windows and --rounds must be at least 1, and --seconds above 0")
    return options


def plan(options: argparse.Namespace) -> dict[str, tuple[Suite, list[Case]]]:
    """The cases by their games. Everything that can be wrong with the options raises here."""
    found = {}
    for games in options.games.split(","):
        pairs = itertools.product(options.networks.split(","), CORES[options.cores])
        cases = [Case(games, network, recurrent) for network, recurrent in pairs]
        configs = [compose([*case.overrides, *options.overrides]) for case in cases]
        suite: Suite = instantiate(configs[0].suite)
        suite.check()
        found[games] = (suite, cases)
    if options.against is not None:
        sample_factory_peer.install()
    return found


def main() -> None:
    options = parse()
    exit_on_sigterm()
    try:
        cases_of = plan(options)
    except (HydraException, ValueError) as error:
        sys.exit(f"benchmarks.throughput: error: {error.__cause__ or error}")
    cores = available_cores()
    results: list[Measured] = []
    for suite, cases in cases_of.values():
        report.say(f"making the environments of {len(suite.tasks)} games")
        with one_core():
            environments = Environments(compose([*cases[0].overrides, *options.overrides]), suite)
        for case in cases:
            results.append(measure(case, environments, options, cores))
            write(results, options)  # after each, so that an interrupted run leaves what it has
        environments.close()


if __name__ == "__main__":
    main()
