"""What an actor says, and what it is told."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impala.crew import Crew

NO_TASK = -1
GAME = np.dtype([("task", "<i4"), ("raw_return", "<f8"), ("frames", "<i4")])
"""A finished whole game: index of its task, sum of raw rewards, length in environment frames."""


@dataclass(frozen=True)
class Unroll:
    """Columns of the storage that it has filled. A group need not fill all slots it was given."""

    slots: slice
    games: NDArray[np.void]  # of dtype GAME: those that ended during this unroll
    environments_s: float  # seconds spent in the environments,
    inference_s: float  # in the network,
    waiting_s: float  # and waiting for free slots, or for others, since the unroll before
    level_cache: tuple[int, int, int] = (0, 0, 0)  # its hits, misses and failures
    step_times: tuple[tuple[int, float, int], ...] = ()  # see impala.step_times, of all its groups

    @property
    def seconds(self) -> tuple[float, float, float]:
        return self.environments_s, self.inference_s, self.waiting_s


@dataclass(frozen=True)
class Broken:
    """An environment that has a process of its own failed. Its group waits for `Restart`."""

    group: int
    task: int
    aborted: bool  # whether it was in a game
    cause: str


@dataclass(frozen=True)
class Slow:
    """Environments of this task keep the others of the first group waiting."""

    task: int


@dataclass(frozen=True)
class Reformed:
    """It plays as `Reform` said, and has no slots."""

    aborted: Sequence[int]  # the task of each game that nobody will finish


@dataclass(frozen=True)
class Free:
    """Slots that may be filled."""

    group: int  # that is to; any of those outside stands for them all
    slots: slice


@dataclass(frozen=True)
class Restart:
    """A broken group is to be built again."""

    group: int


@dataclass(frozen=True)
class Reform:
    """Play this crew from now on; slots given before are taken back."""

    crew: Crew


@dataclass(frozen=True)
class Failed:
    """The actor ends."""

    cause: str  # its traceback


Order = Free | Restart | Reform
Said = Unroll | Broken | Slow | Reformed | Failed


# Through a pipe: what is said once an unroll is packed by hand, the rest is pickled.

_UNROLL, _FREE, _OTHER = b"u", b"f", b"o"  # the first byte
_UNROLL_HEAD = struct.Struct("<qqdddqqqq")
_STEP_TIME = struct.Struct("<qdq")
_FREE_HEAD = struct.Struct("<qqq")


def packed(message: Order | Said) -> bytes:
    if isinstance(message, Unroll):
        slots = message.slots
        times = message.step_times
        head = _UNROLL_HEAD.pack(
            slots.start, slots.stop, *message.seconds, *message.level_cache, len(times)
        )
        packed_times = b"".join(_STEP_TIME.pack(*time) for time in times)
        return _UNROLL + head + packed_times + message.games.tobytes()
    if isinstance(message, Free):
        slots = message.slots
        return _FREE + _FREE_HEAD.pack(message.group, slots.start, slots.stop)
    return _OTHER + pickle.dumps(message)


def unpacked(message: bytes) -> Any:
    if message[:1] == _UNROLL:
        start, stop, *seconds, hits, misses, failures, count = _UNROLL_HEAD.unpack_from(message, 1)
        times_at = 1 + _UNROLL_HEAD.size
        games_at = times_at + count * _STEP_TIME.size
        step_times = tuple(_STEP_TIME.iter_unpack(message[times_at:games_at]))
        games = np.frombuffer(message, GAME, offset=games_at)
        cache = hits, misses, failures
        slots = slice(start, stop)
        return Unroll(slots, games, *seconds, level_cache=cache, step_times=step_times)
    if message[:1] == _FREE:
        group, start, stop = _FREE_HEAD.unpack_from(message, 1)
        return Free(group, slice(start, stop))
    return pickle.loads(message[1:])
