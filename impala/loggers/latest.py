"""The latest point of a run as people read it: what it says, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

LEARNER_TIME = ("waiting", "loading", "computing", "publishing")
ACTOR_TIME = ("environments", "inference", "waiting")
RATE_SMOOTHING = 0.8  # weight of the past in the speed behind the time left


class Latest:
    """The latest point of a run, and what a person wants to know from it."""

    def __init__(self, total_frames: int, task_names: tuple[str, ...], headline: str) -> None:
        self.total_frames = total_frames
        self.task_names = task_names
        self.headline = headline
        self.frames = 0
        self.metrics: dict[str, float] = {}
        self._frames_per_s: float | None = None  # smoothed

    def update(self, frames: int, metrics: Mapping[str, float]) -> None:
        self.frames = frames
        self.metrics = dict(metrics)
        rate = self.get("rate/frames_per_s")
        if rate is not None:
            past = rate if self._frames_per_s is None else self._frames_per_s
            self._frames_per_s = RATE_SMOOTHING * past + (1 - RATE_SMOOTHING) * rate

    def resume(self, frames: int, metrics: Mapping[str, float]) -> None:
        """What is known of a resumed run before its first point."""
        self.frames = frames
        kept = ("time_s", "score", "hns", "return", "length")
        self.metrics = {k: v for k, v in metrics.items() if k.split("/")[0] in kept}

    def get(self, key: str) -> float | None:
        """A metric, or None where it is missing or not a number."""
        value = self.metrics.get(key)
        return None if value is None or math.isnan(value) else float(value)

    @property
    def progress(self) -> float:
        return min(self.frames / self.total_frames, 1.0) if self.total_frames else 1.0

    @property
    def time_left_s(self) -> float | None:
        if not self._frames_per_s:
            return None
        return max(self.total_frames - self.frames, 0) / self._frames_per_s

    @property
    def mean_lag(self) -> float | None:
        lags = [self.get(f"lag/{name}") for name in self.task_names]
        known = [lag for lag in lags if lag is not None]
        mean = self.get("lag/mean")
        return sum(known) / len(known) if mean is None and known else mean

    @property
    def coverage(self) -> str:
        """Tasks with a finished game, of all: "54/57"."""
        share = self.get("score/coverage")
        tasks = len(self.task_names)
        return f"{'-' if share is None else round(share * tasks)}/{tasks}"

    @property
    def score(self) -> str:
        return f"{self.headline} {number(self.get(f'score/{self.headline}'))} %"

    def times(self, parts: Sequence[str], prefix: str) -> list[tuple[str, float]]:
        """The shares of time that are known, as (part, 0 to 1)."""
        shares = [(part, self.get(f"time/{prefix}_{part}")) for part in parts]
        return [(part, share) for part, share in shares if share is not None]


def number(value: float | None) -> str:
    """At most 7 characters up to a billion; "-" for None."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 999_999.5:
        return f"{value / 1e6:,.2f}M" if size < 1e9 else f"{value:.1e}"
    return f"{value:,.0f}" if size >= 999.95 else f"{value:.1f}".replace("-0.0", "0.0")


def small(value: float | None) -> str:
    """Three significant digits, for losses and learning rates; "-" for None."""
    return "-" if value is None else f"{value:.3g}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    """Such as "2d 03:04:05" or "0:04:05"; "-" for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{minutes:02}:{seconds_left:02}"
    return f"{days}d {hours:02}:{clock}" if days else f"{hours}:{clock}"


def memory(megabytes: float | None) -> str:
    if megabytes is None:
        return "-"
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1000:.1f} GB"
