"""What a game looks like to people: pictures in colour, at its true speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from suites.suite import Suite, Task

ENGINE_FRAMES_PER_S = 60.0


class Camera(Protocol):
    """Looks at one game that somebody else plays. Pictures are uint8 [height, width, 3]."""

    pictures_per_s: float

    def first(self) -> np.ndarray:
        """The start of the game."""
        ...

    def step(
        self, action: int, reward: float, frame: np.ndarray
    ) -> Sequence[tuple[np.ndarray, float]]:
        """What a step showed: each picture, and the reward that came with it.

        action, reward: of the step. frame: the observation it arrived at, the true last one of the
        game where that has ended. RuntimeError if the camera saw another game than was played.
        """
        ...


@runtime_checkable
class Filmed(Protocol):
    """What a suite may have besides, if its observations are not what people want to see."""

    def camera(self, task: Task, seed: int, frame: np.ndarray, info: dict[str, Any]) -> Camera:
        """For a game on the test level that `seed` began; `frame`, `info`: of its reset."""
        ...


def camera(suite: Suite, task: Task, seed: int, frame: np.ndarray, info: dict[str, Any]) -> Camera:
    """The suite's own, or one that shows the observations of an engine of 60 frames a second."""
    if isinstance(suite, Filmed):
        return suite.camera(task, seed, frame, info)
    return ObservationCamera(frame, ENGINE_FRAMES_PER_S / suite.spec.frames_per_step)


def check_filmable(suite: Suite) -> None:
    """Raises ValueError if there is no camera for it."""
    if not isinstance(suite, Filmed) and len(suite.spec.frame_shape) != 3:
        raise ValueError(
            f"the suite {suite.name} cannot be filmed: its observations, of shape"
            f" {suite.spec.frame_shape}, are no pictures, and it has no camera of its own. Leave"
            " out videos="
        )


class ObservationCamera:
    """Observations [channels, height, width]: three channels are red, green and blue; of any other
    number the last is shown in grey.
    """

    def __init__(self, frame: np.ndarray, pictures_per_s: float) -> None:
        self._first = frame
        self.pictures_per_s = pictures_per_s

    def first(self) -> np.ndarray:
        return _picture(self._first)

    def step(self, action: int, reward: float, frame: np.ndarray) -> list[tuple[np.ndarray, float]]:
        return [(_picture(frame), reward)]


def _picture(frame: np.ndarray) -> np.ndarray:
    channels = frame if len(frame) == 3 else np.repeat(frame[-1:], 3, axis=0)
    return np.ascontiguousarray(channels.transpose(1, 2, 0))
