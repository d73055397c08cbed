"""A game as an MP4 file: its pictures at true speed, above them the score and what was expected."""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from impala.whole_file import naming
from suites.camera import Camera

LEAST_WIDTH = 320  # pixels; smaller pictures are magnified by a whole number
CAPTION = 40  # pixels above the picture
TEXT = 15


def check_encoder() -> None:
    """Raises ValueError, saying what to do, unless videos can be written."""
    lacking = [name for name in ("av", "PIL") if importlib.util.find_spec(name) is None]
    if lacking:
        raise ValueError(
            f"videos need {' and '.join(lacking)}, which cannot be imported: pip install"
            " 'impala[videos]' (PyAV, Pillow), or leave out videos="
        )


def video_path(run_dir: Path, frames: int, task: str, game: int) -> Path:
    """frames: the agent was trained for."""
    return run_dir / "evaluation" / f"{frames}.videos" / f"{task}_{game}.mp4"


class Video:
    """Films one game. The file is there once `save` has returned, and then whole."""

    def __init__(self, path: Path, camera: Camera, title: str) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._camera = camera
        self._title = title
        self._score = 0.0
        self._container: Any = None

    def __enter__(self) -> Video:
        import av

        picture = self._camera.first()
        self._scale = -(-LEAST_WIDTH // picture.shape[1])
        width, height = picture.shape[1] * self._scale, picture.shape[0] * self._scale + CAPTION
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for left in self._path.parent.glob(f".{self._path.name}.*"):  # by one that was killed
            left.unlink(missing_ok=True)
        self._container = av.open(str(self._temporary), "w", format="mp4")
        rate = Fraction(self._camera.pictures_per_s).limit_denominator(1000)
        self._stream = self._container.add_stream(
            "libx264", rate=rate, options={"crf": "18", "preset": "veryfast"}
        )
        # Colours are stored for blocks of two by two.
        self._stream.width, self._stream.height = width + width % 2, height + height % 2
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.thread_count = 1  # a worker has one core
        self._canvas = np.zeros((self._stream.height, self._stream.width, 3), np.uint8)
        self._text: tuple[str, str] | None = None  # that is drawn on it
        self._held: np.ndarray | None = picture  # the first, until its value is known
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):  # of a file that is thrown away, unless `save` has closed it
            self._container.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, action: int, reward: float, frame: np.ndarray, value: float) -> None:
        """A step. frame: that it arrived at. value: of the state that it left."""
        if self._held is not None:
            self._write(self._held, value)
            self._held = None
        for picture, gained in self._camera.step(action, reward, frame):
            self._score += gained
            self._write(picture, value)

    def save(self) -> None:
        with naming(self._path):
            for packet in self._stream.encode():
                self._container.mux(packet)
            self._container.close()
            with open(self._temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(self._temporary, self._path)

    def _write(self, picture: np.ndarray, value: float) -> None:
        import av

        frame = av.VideoFrame.from_ndarray(self._drawn(picture, value), format="rgb24")
        with naming(self._path):
            for packet in self._stream.encode(frame):
                self._container.mux(packet)

    def _drawn(self, picture: np.ndarray, value: float) -> np.ndarray:
        text = f"score {self._score:,g}", f"value {value:.2f}"
        if text != self._text:
            self._text = text
            self._canvas[:CAPTION] = _caption(self._stream.width, (self._title, *text))
        height, width = picture.shape[0] * self._scale, picture.shape[1] * self._scale
        large = picture.repeat(self._scale, axis=0).repeat(self._scale, axis=1)
        self._canvas[CAPTION : CAPTION + height, :width] = large
        return self._canvas


def _caption(width: int, text: tuple[str, str, str]) -> np.ndarray:
    """The first line, and below it the other two side by side: uint8 [CAPTION, width, 3]."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, CAPTION))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(TEXT)
    for place, line in zip(((4, 2), (4, 20), (width // 2, 20)), text, strict=True):
        draw.text(place, line, "white", font)
    return np.asarray(image)
