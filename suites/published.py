"""Published results of single tasks, and the aggregates printed with them.

`python -m suites.published` computes the aggregates again from the scores of single tasks and
prints them beside the printed ones. Exit code 1 if any is not what is expected.

Data: `published.csv` says of each result which column of the suite's CSV has its scores (`scores`),
which the random returns (`random`) that its authors used, and which names the task that a score
belongs to (`labels`); `published_aggregates.csv` what was printed (`printed`), and where sources
contradict each other what comes out instead (`expected`), and why.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

from suites.statistics import AGGREGATES


@dataclass(frozen=True)
class Published:
    """One agent's published results on one suite; scores human-normalised in per cent by task."""

    suite: str
    result: str
    label: str
    scores: dict[str, float]
    random: str  # column of the suite's CSV
    protocol: str
    source: str
    note: str

    def aggregate(self, name: str, tasks: Collection[str] | None = None) -> float:
        """Of `suites.statistics.AGGREGATES`, over all tasks of the suite, or over some of them."""
        scores = [score for task, score in self.scores.items() if tasks is None or task in tasks]
        return float(AGGREGATES[name](np.array([scores])))


@dataclass(frozen=True)
class Comparison:
    """An aggregate as printed, and computed again; in per cent, `above_human` in tasks."""

    published: Published
    aggregate: str
    printed: str
    expected: str
    why: str

    @property
    def computed(self) -> float:
        return self.published.aggregate(self.aggregate)

    @property
    def as_expected(self) -> bool:
        """To the last digit printed, where another rounding may have taken place before."""
        digits = len(self.expected.partition(".")[2])
        return abs(self.computed - float(self.expected)) <= 0.6 * 10**-digits


def published(suite: str) -> list[Published]:
    """What was published for the suite of this name; empty where nothing was."""
    return [_result(row) for row in _rows("published.csv") if row["suite"] == suite]


def comparisons() -> Iterator[Comparison]:
    """All printed aggregates, in the order of `published_aggregates.csv`."""
    results = {(row["suite"], row["result"]): _result(row) for row in _rows("published.csv")}
    for row in _rows("published_aggregates.csv"):
        result = results[row["suite"], row["result"]]
        yield Comparison(result, row["aggregate"], row["printed"], row["expected"], row["why"])


def _result(row: dict[str, str]) -> Published:
    tasks = _rows(f"{row['suite']}.csv")
    name = next(iter(tasks[0]))  # the first column
    reference = {task[row["labels"]]: task for task in tasks}
    scores = {}
    for task in tasks:
        # The test level is what papers call a task where it differs from the name.
        own = task[name] if row["labels"] == name else task["test_level"]
        low, high = float(reference[own][row["random"]]), float(reference[own]["human"])
        scores[task[name]] = 100.0 * (float(task[row["scores"]]) - low) / (high - low)
    return Published(
        suite=row["suite"],
        result=row["result"],
        label=row["label"],
        scores=scores,
        random=row["random"],
        protocol=row["protocol"],
        source=row["source"],
        note=row["note"],
    )


def _rows(name: str) -> list[dict[str, str]]:
    text = resources.files("suites").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(
        prog="python -m suites.published",
        description="Computes published aggregates again and prints what differs.",
    ).parse_args(arguments)
    line = "{:9}{:36}{:21}{:>9}{:>11}{:>12}  {}"
    print(line.format("suite", "result", "aggregate", "printed", "computed", "difference", ""))
    unexpected = 0
    for each in comparisons():
        result, computed = each.published, each.computed
        verdict = each.why if each.as_expected else f"UNEXPECTED: {each.expected} was expected"
        unexpected += not each.as_expected
        print(
            line.format(
                result.suite, result.label, each.aggregate, each.printed, f"{computed:.2f}",
                f"{computed - float(each.printed):+.2f}", verdict,
            ).rstrip()
        )  # fmt: skip
    print("\nHuman-normalised scores in per cent; above_human in tasks.")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
