"""Numbers as the page writes them."""

from __future__ import annotations

import math

UNKNOWN = "\N{EN DASH}"


def per_cent(value: float) -> str:
    """With one digit."""
    return f"{round(value, 1) + 0.0:,.1f}"  # + 0.0: no -0.0


def by_magnitude(value: float) -> str:
    """With four digits that count, three of them after the point at most."""
    if not math.isfinite(value):
        return UNKNOWN
    digits = 3 if abs(value) < 1 else max(0, 3 - int(math.log10(abs(value))))
    return f"{round(value, digits) + 0.0:,.{digits}f}"


def counted(number: int, noun: str) -> str:
    """1 run, 2 runs."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
