"""Files of JSON, read if they are what they should be; if not, it is said why.

A check takes a value and says whether it is what it should be; its docstring is what was expected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Check = Callable[[Any], bool]


def number(value: Any) -> bool:
    """a finite number"""
    return type(value) in (int, float) and -1e300 < value < 1e300


def whole(value: Any) -> bool:
    """a whole number from 0"""
    return type(value) is int and 0 <= value < 2**63


def text(value: Any) -> bool:
    """a text"""
    return isinstance(value, str)


def flag(value: Any) -> bool:
    """true or false"""
    return isinstance(value, bool)


def numbers(value: Any) -> bool:
    """finite numbers by name"""
    return isinstance(value, dict) and all(map(number, value.values()))


def texts(value: Any) -> bool:
    """texts by name"""
    return isinstance(value, dict) and all(map(text, value.values()))


def names(value: Any) -> bool:
    """a list of different names"""
    return isinstance(value, list) and all(map(text, value)) and len(set(value)) == len(value) > 0


def read_object(
    path: Path, required: Mapping[str, Check], optional: Mapping[str, Check] | None = None
) -> dict[str, Any]:
    """The object in a file, with values as the checks say; others are not looked at.

    ValueError, saying why, for any other content, and where the file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"holds {named(content)}, expected an object")
    for key, check in required.items():
        if key not in content:
            raise ValueError(f"has no {key}")
        _check(key, content[key], check)
    for key, check in (optional or {}).items():
        if content.get(key) is not None:
            _check(key, content[key], check)
    return content


def read_or_name(
    path: Path,
    damaged: list[str],
    required: Mapping[str, Check],
    optional: Mapping[str, Check] | None = None,
) -> dict[str, Any] | None:
    """`read_object`; None where there is no file, and where it is damaged, which `damaged` says."""
    if not path.exists():
        return None
    try:
        return read_object(path, required, optional)
    except ValueError as error:
        damaged.append(f"{path}: {error}")
        return None


def named(value: Any) -> str:
    """What a value is, in words."""
    kinds = {dict: "an object", list: "a list", str: "a text", type(None): "nothing"}
    return kinds.get(type(value), f"{value}"[:40])


def _check(key: str, value: Any, check: Check) -> None:
    if not check(value):
        what = named(value)
        if what == "an object":
            what = "other things"
        raise ValueError(f"{key} is {what}, expected {check.__doc__}")
