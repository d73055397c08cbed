"""One JSON object a line, in files that outlive the run: `metrics.jsonl` and `episodes.jsonl`.

`metrics.jsonl` is the truth about a run: whatever another service shows can be drawn again from it.
Files are strict JSON. A number that is not finite is written as `null`, so that the key still
shows when it happened.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from impala.whole_file import naming

log = logging.getLogger(__name__)


class Episode(NamedTuple):
    """A finished game, as `episodes.jsonl` keeps it."""

    frames: int  # environment frames of the whole run when the game ended
    task: str
    episode_return: float  # raw, of the whole game; the key in the file is "return"
    length: int  # in frames
    actor: int


class JsonLines:
    """A logger that appends one line for each point, flushed before `write` returns.

    path:           the file. A fresh run does not go on in a file of another one.
    resume_frames:  of the checkpoint a resumed run goes on from: later lines are cut.
    resume_points:  that there were then: if there are fewer now, the log says so.
    """

    def __init__(
        self,
        path: str | Path,
        resume_frames: int | None = None,
        resume_points: int | None = None,
    ) -> None:
        self._file = _AppendOnly(Path(path), resume_frames)
        self.points = self._file.lines  # in the file
        self._last: Mapping[str, float] = {}  # point, of those written here
        if resume_points is not None and self.points < resume_points:
            log.warning(
                "%s has %d of the %d points that were there at the checkpoint of frames=%d, up to"
                " frames=%d: the run goes on, the others are missing in every curve",
                path, self.points, resume_points, resume_frames, max(self._file.last_frames, 0),
            )  # fmt: skip

    def write(self, frames: int, metrics: Mapping[str, float]) -> None:
        """Appends a point: `frames`, `updates`, `time_s`, then the "group/name" keys by name.

        A second point of the same frames adds to the first what that has not: one point for each
        number of frames, also where the last one of a run falls together with a regular one.

        Raises: ValueError if frames went back; OSError, naming the file, if it cannot be written.
        """
        if frames < self._file.last_frames:
            raise ValueError(
                f"{self._file.path}: a point of frames={frames} came after one of "
                f"frames={self._file.last_frames}; frames must grow from call to call"
            )
        again = frames == self._file.last_frames
        if again:
            # Not to one that was there when the run was resumed: it came before the checkpoint.
            if not self._last or metrics.keys() <= self._last.keys() | {"frames"}:
                return
            metrics = {**metrics, **self._last}
        keys = [key for key in ("updates", "time_s") if key in metrics]
        keys += sorted(key for key in metrics if key not in ("frames", "updates", "time_s"))
        line = _encode({"frames": int(frames), **{key: metrics[key] for key in keys}})
        if again:
            self._file.replace_last(line)
        else:
            self._file.append(line)
            self.points += 1
        self._file.last_frames, self._last = frames, dict(metrics)

    def commit(self, frames: int) -> None:
        """Forces the lines to the disk, so that a power cut leaves no gap before a checkpoint."""
        self._file.sync()

    def finish(self, exit_code: int) -> None:
        self._file.close()


class EpisodeLog:
    """`episodes.jsonl`: one line for each finished game, many of them written at once.

    resume_frames, resume_games: of the checkpoint that a resumed run goes on from: later lines are
        cut. More than one may be of the same frames, some of them finished after it.
    """

    def __init__(
        self, path: str | Path, resume_frames: int | None = None, resume_games: int | None = None
    ) -> None:
        self._file = _AppendOnly(Path(path), resume_frames, resume_games)
        self.games = self._file.lines  # in the file
        if resume_games is not None and self.games < resume_games:
            log.warning(
                "%s has %d of the %d games that were there at the checkpoint of frames=%d: the run"
                " goes on without the others",
                path, self.games, resume_games, resume_frames,
            )  # fmt: skip

    def write(self, episodes: Iterable[Episode]) -> None:
        """Appends finished games in one write. Raises OSError, naming the file."""
        lines = [
            _encode(
                {
                    "frames": int(episode.frames),
                    "task": episode.task,
                    "return": episode.episode_return,
                    "length": int(episode.length),
                    "actor": int(episode.actor),
                }
            )
            for episode in episodes
        ]
        if lines:
            self._file.append(b"".join(lines))
            self.games += len(lines)

    def commit(self, frames: int) -> None:
        """Forces the lines to the disk."""
        self._file.sync()

    def finish(self, exit_code: int) -> None:
        self._file.close()


class Kept(NamedTuple):
    """What is left of a file that was cut."""

    lines: int
    last_frames: int  # of the last line, or -1


def truncate_after(path: str | Path, frames: int, lines: int | None = None) -> Kept:
    """Cuts every line whose `frames` are above those given, or above the number of `lines`, and a
    torn last line.

    The new file replaces the old one at once, so that a crash leaves either of them whole. A
    file that is not there has no lines to cut. Raises OSError, naming the file.
    """
    path = Path(path)
    if not path.exists():
        return Kept(0, -1)
    kept = path.with_name(path.name + ".tmp")
    last_frames, left, cut = -1, 0, False
    damaged: list[tuple[int, int]] = []  # numbers and sizes of lines
    try:
        with naming(kept), path.open("rb") as source, kept.open("wb") as target:
            for line_number, line in enumerate(source, start=1):
                point = _decode(line)
                if point is None:
                    damaged.append((line_number, len(line)))
                    cut = True
                elif point["frames"] > frames or (lines is not None and left >= lines):
                    cut = True
                else:
                    left += 1
                    target.write(line)
                    last_frames = point["frames"]
            target.flush()
            os.fsync(target.fileno())
    except BaseException:
        kept.unlink(missing_ok=True)
        raise
    if cut:
        os.replace(kept, path)
        _sync_directory(path.parent)
    else:
        kept.unlink()
    if damaged:
        (first, _), *others = damaged
        size = sum(size for _, size in damaged)
        if others:
            what = f"{len(damaged)} lines, of {size} bytes together, are torn or damaged and were"
            log.warning("%s: %s dropped, the first is line %d", path, what, first)
        else:
            what = f"line {first}, of {size} bytes, is torn or damaged and was dropped"
            log.warning("%s: %s", path, what)
    return Kept(left, last_frames)


def read_points(path: str | Path) -> Iterator[dict[str, Any]]:
    """The points of a file in order, without a torn last line. A missing file has none."""
    if not Path(path).exists():
        return
    with Path(path).open("rb") as file:
        for line in file:
            point = _decode(line)
            if point is not None:
                yield point


class _AppendOnly:
    """A file in which each `append` is either there as a whole or, after an error, not at all."""

    def __init__(
        self, path: Path, resume_frames: int | None, resume_lines: int | None = None
    ) -> None:
        self.path = path
        self.lines, self.last_frames = 0, -1  # when it was opened
        if resume_frames is not None:
            if not path.exists():
                log.warning("%s is missing: it starts again at frames=%d", path, resume_frames)
            self.lines, self.last_frames = truncate_after(path, resume_frames, resume_lines)
        elif path.exists() and path.stat().st_size:
            raise FileExistsError(
                f"{path} already has lines of another run; a new run needs a directory of its own, "
                f"or resume=<run dir> to go on with that one"
            )
        # Unbuffered: what was appended survives a kill, and nothing is tried again on close.
        self._file = path.open("ab", buffering=0)

    def append(self, lines: bytes) -> None:
        self._appended_at = size = os.fstat(self._file.fileno()).st_size
        rest = memoryview(lines)
        try:
            with naming(self.path):
                while rest:
                    rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to report
                self._file.truncate(size)
            raise

    def replace_last(self, line: bytes) -> None:
        """Puts a line in place of what was appended last."""
        os.ftruncate(self._file.fileno(), self._appended_at)
        self.append(line)

    def sync(self) -> None:
        if not self._file.closed:
            with naming(self.path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _encode(point: Mapping[str, object]) -> bytes:
    """A line of strict JSON."""
    values = {key: _plain(value) for key, value in point.items()}
    return (json.dumps(values, allow_nan=False) + "\n").encode()


def _plain(value: object) -> object:
    if isinstance(value, (str, int)) or value is None:
        return value
    number = float(value)  # type: ignore[arg-type]  # also numpy and torch scalars
    return number if math.isfinite(number) else None


def _decode(line: bytes) -> dict[str, Any] | None:
    """The point of a line, or None where the line is torn or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        point = json.loads(line)
    except ValueError:
        return None
    return point if isinstance(point, dict) and isinstance(point.get("frames"), int) else None


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
