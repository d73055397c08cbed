"""Numbers as people read them."""

from __future__ import annotations

import math

UNKNOWN = "\N{EN DASH}"


def per_cent(value: float) -> str:
    """With one digit."""
    return f"{round(value, 1) + 0.0:,.1f}"  # + 0.0: no -0.0


def by_magnitude(value: float) -> str:
    """-20.7, 0.042, 2,031: with as many digits as tell one return, or length, from another."""
    if not math.isfinite(value):
        return UNKNOWN
    digits = next((d for d, below in ((3, 1), (2, 10), (1, 1000)) if abs(value) < below), 0)
    return f"{round(value, digits) + 0.0:,.{digits}f}"


def counted(number: int, noun: str) -> str:
    """1 run, 2 runs."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
