"""The games of an evaluation that is not finished, so that one that was stopped goes on.

JSON lines: first what the games depend on, then one line for each portion of them. A line is there
as a whole or, torn, not at all.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from impala.evaluation.evaluation import Chunk, EvaluationBusy, Game
from impala.whole_file import naming

log = logging.getLogger(__name__)


class GamesFile:
    """Goes on with the file if it is of this very evaluation, else begins a new one.

    One of another evaluation is kept under another name, and `videos` of its games, too.
    chunks: all portions of this one.
    EvaluationBusy while another program writes to it. `games`: those that were there, and those
    that were added since.
    """

    def __init__(
        self, path: Path, identity: Mapping[str, Any], chunks: Iterable[Chunk], videos: Path
    ) -> None:
        self.path = path
        self.games: dict[Chunk, list[Game]] = {}
        self._identity = json.loads(json.dumps(identity))
        self._chunks = set(chunks)
        path.parent.mkdir(exist_ok=True)
        self._file = self._locked()
        lines = self._whole_lines()
        if lines and lines[0] != self._identity:
            kept, *_ = put_aside(path, videos)
            log.info(
                "an unfinished evaluation of %s differs in %s and is kept as %s: this one starts"
                " anew", path.name, _differences(lines[0], self._identity), kept.name,
            )  # fmt: skip
            self._file.close()
            self._file = self._locked()
            lines = []
        if not lines:
            self._append(self._identity)
        self.games.update(map(self._portion, lines[1:]))
        if self.games:
            log.info("going on with %s", path)

    def add(self, chunk: Chunk, games: Sequence[Game]) -> None:
        self.games[chunk] = list(games)
        returns, lengths = zip(*games, strict=True)
        self._append(
            {"task": chunk.task, "first": chunk.first, "returns": returns, "lengths": lengths}
        )

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """The games are elsewhere now."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _locked(self) -> Any:
        file = self.path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise EvaluationBusy(
                f"another program is at the evaluation of {self.path}: wait for it, or stop it"
            ) from None
        return file

    def _whole_lines(self) -> list[dict[str, Any]]:
        """All there are; a torn last one is cut off."""
        self._file.seek(0)
        lines, size = [], 0
        for line in self._file.read().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise ValueError("expected an object")
                if lines and lines[0] == self._identity:
                    self._portion(value)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                log.warning("%s is damaged at line %d, the rest is lost", self.path, len(lines) + 1)
                break
            lines.append(value)
            size += len(line)
        self._file.truncate(size)
        return lines

    def _portion(self, line: Mapping[str, Any]) -> tuple[Chunk, list[Game]]:
        """Raises one of several errors where the line is of no portion of this evaluation."""
        returns, lengths = line["returns"], line["lengths"]
        games = [Game(float(r), int(n)) for r, n in zip(returns, lengths, strict=True)]
        chunk = Chunk(line["task"], line["first"], len(games))
        if chunk not in self._chunks:
            raise ValueError(f"{chunk} is no portion of this evaluation")
        if not all(math.isfinite(game.raw_return) and game.length > 0 for game in games):
            raise ValueError("returns and lengths: expected finite and positive numbers")
        return chunk, games

    def _append(self, line: Mapping[str, Any]) -> None:
        size = self._file.seek(0, os.SEEK_END)
        data = memoryview((json.dumps(line) + "\n").encode())
        try:
            with naming(self.path):
                while data:
                    data = data[self._file.write(data) :]
                os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):  # the first error is the one to report
                self._file.truncate(size)
            raise


def put_aside(*paths: Path) -> list[Path]:
    """Renames files of one evaluation, such as 700.json and 700.videos, to 700_1.json and
    700_1.videos or the next number that no other evaluation has; returns the new names.

    One that is not there is left out.
    """
    folder, stem = paths[0].parent, paths[0].name.partition(".")[0]
    free = next(n for n in count(1) if not any(folder.glob(f"{stem}_{n}.*")))
    return [
        path.rename(path.with_name(path.name.replace(stem, f"{stem}_{free}", 1)))
        for path in paths
        if path.exists()
    ]


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return ", ".join(key for key in other if one.get(key) != other[key])
