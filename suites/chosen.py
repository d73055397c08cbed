"""A suite as a command line names it, in the words of `launch.py`: suite=dmlab30 suite.tasks=[a,b].

Suites know nothing of Hydra: defaults are those of their constructors.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from suites.atari57 import Atari57
from suites.catch import Catch
from suites.dmlab30 import DmLab30
from suites.suite import Suite, select_names

SUITES = {made.name: made for made in (Atari57, Catch, DmLab30)}


def chosen(words: Sequence[str], **defaults: Any) -> Suite:
    """The suite of `suite=NAME suite.KEY=VALUE ...`. ValueError, saying what is wrong, if there is
    none.

    defaults: of keys that it has and that are not given.
    """
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key in given:
            raise ValueError(f"{word!r}: expected suite=NAME and suite.KEY=VALUE, each key once")
        given[key] = value
    if "suite" not in given:
        raise ValueError(f"no suite given: expected suite=NAME, one of {', '.join(SUITES)}")
    (name,) = select_names([given.pop("suite")], tuple(SUITES), kind="suite")
    keys = list(inspect.signature(SUITES[name]).parameters)
    if given:
        select_names(list(given), [f"suite.{key}" for key in keys], kind=f"key of suite={name}")
    options = {key: value for key, value in defaults.items() if key in keys}
    options |= {key.removeprefix("suite."): _value(value) for key, value in given.items()}
    return SUITES[name](**options)


def _value(text: str) -> Any:
    """null, true, numbers and lists of words are what they are in YAML; the rest is a string."""
    if text.startswith("[") and text.endswith("]"):
        return [_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    try:
        return json.loads(text.replace("_", "") if text[:1].isdigit() else text)
    except json.JSONDecodeError:
        return text
