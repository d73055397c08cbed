"""A stand-in for DeepMind Lab's Python module, which cannot be installed everywhere.

It behaves as a real build of the engine was measured to: types, errors, seeds, ends of episodes,
the protocol of the level cache, folders and text that it leaves, and how it crashes. What is seen
are no rooms but numbers, a function of the level, the seed, the actions and the time. What is
played, in `levels.jsonl`, was recorded from the engine under random actions: rewards, instructions
and when they change, length, and how long resets and steps take. The first episode of a fresh
instance with seed 0 is the recorded one; with other seeds the same rewards come at other times.

Variables of the environment:

DMLAB_DOUBLE_TIME_SCALE  resets and steps take so many times as long as was measured, asleep. 0, the
                         default: none; 1: as measured; 0.01: a hundredth.
DMLAB_DOUBLE_LEAK_MB     that each instance leaves allocated; default 0, measured 3.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

_RECORDED = Path(__file__).with_name("levels.jsonl")
LEVELS = {row["level"]: row for row in map(json.loads, _RECORDED.read_text().splitlines())}
FOLDER = "contributed/dmlab30/"
FPS = 60
RECORDED_REPEAT = 4  # frames of a recorded step
WARM_RESET_S = 0.6  # of a generated map that the cache has
IDLE_FRAMES = 900  # after which a psychlab level that is watched for it ends

SETTINGS = {
    "width", "height", "fps", "datasetPath", "logLevel", "mixerSeed", "episodeLengthSeconds",
    "allowHoldOutLevels",
}  # fmt: skip
ACTIONS = (
    ("LOOK_LEFT_RIGHT_PIXELS_PER_FRAME", 512), ("LOOK_DOWN_UP_PIXELS_PER_FRAME", 512),
    ("STRAFE_LEFT_RIGHT", 1), ("MOVE_BACK_FORWARD", 1), ("FIRE", 1), ("JUMP", 1), ("CROUCH", 1),
)  # fmt: skip
SIGNED = 4  # of them go from -max
GENERATED = ("explore_", "lasertag_", "skymaze_", "rooms_keys_doors_puzzle", "language_")
MAPS_IN_MID_EPISODE = ("language_execute_random_task", "language_select_located_object")
NEEDS_IMAGES = ("psychlab_arbitrary_visuomotor_mapping", "psychlab_continuous_recognition")
TALKATIVE = ("language_", "rooms_", "lasertag_")  # levels that print

_leaked: list[bytearray] = []
_folders: set[str] = set()
_playing: weakref.WeakSet[Lab] = weakref.WeakSet()  # instances that were reset and are open
_c_rand = random.Random(1)


@atexit.register
def _remove_folders() -> None:
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)


def _hang() -> None:
    while _playing:
        signal.pause()


os.register_at_fork(after_in_child=_hang)


def _sleep(seconds: float) -> None:
    scale = float(os.environ.get("DMLAB_DOUBLE_TIME_SCALE", "0"))
    if scale:
        time.sleep(scale * seconds)


def _say(text: str) -> None:
    """As the engine does: not through Python's sys.stdout."""
    os.write(1, text.encode() + b"\n")


class Lab:
    def __init__(
        self,
        level: str,
        observations: list,
        config: dict | None = None,
        renderer: str = "software",
        level_cache: Any = None,
        temp_folder: str = "",
    ) -> None:
        if not isinstance(observations, list):
            raise TypeError("'observations' must be a list")
        config = {} if config is None else config
        for key, value in config.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(f"config must have str keys and values, {key!r}: {value!r}")
        if unknown := sorted(config.keys() - SETTINGS):
            raise RuntimeError(f"Invalid setting {unknown[0]}")
        if renderer != "software":
            raise RuntimeError(f"renderer {renderer!r} was not built")
        name = level.removeprefix(FOLDER)
        if not level.startswith(FOLDER) or name not in LEVELS:
            raise RuntimeError(f"Failed to find level {level}")
        self._hold_out = config.get("allowHoldOutLevels") == "true"
        if name.endswith("_test") and not self._hold_out:
            raise RuntimeError(f"{level}: levels held out need allowHoldOutLevels")
        width, height = int(config.get("width", "320")), int(config.get("height", "240"))
        if width % 4 or height % 4:
            raise RuntimeError(f"width {width} and height {height} must be multiples of 4")
        self._mixer = int(config.get("mixerSeed", "0"), 0)
        if not 0 <= self._mixer < 2**32:
            raise RuntimeError(f"mixerSeed {self._mixer} is not in 0..2^32-1")
        specs = {
            "RGB_INTERLEAVED": ((height, width, 3), np.uint8),
            "INSTR": ((), str),
            "FRAMES_REMAINING_AT_60": ((1,), np.float64),
        }
        for observation in observations:
            if observation not in specs:
                raise ValueError(f"Unknown observation '{observation}'.")
        self._name, self._recorded = name, LEVELS[name]
        self._observations = list(observations)
        self._specs = {key: specs[key] for key in observations}
        self._shape = (height, width, 3)
        self._images = config.get("datasetPath", "")
        seconds = config.get("episodeLengthSeconds")
        recorded_frames = self._recorded["steps"] * RECORDED_REPEAT
        self._length = int(float(seconds) * FPS) if seconds else recorded_frames
        self._cache = level_cache
        folder = temp_folder or tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(prefix="dmlab_temp_folder_", dir=folder)
        _folders.add(self._folder)
        self._open, self._running, self._fresh = True, False, True
        self._frames_asked = 0
        _leaked.append(bytearray(int(float(os.environ.get("DMLAB_DOUBLE_LEAK_MB", "0")) * 2**20)))

    # What there is

    def action_spec(self) -> list[dict[str, Any]]:
        return [
            {"min": -most if i < SIGNED else 0, "max": most, "name": name}
            for i, (name, most) in enumerate(ACTIONS)
        ]

    def observation_spec(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "shape": shape, "dtype": dtype}
            for name, (shape, dtype) in self._specs.items()
        ]

    def fps(self) -> int:
        return FPS

    def is_running(self) -> bool:
        return self._running

    def num_steps(self) -> int:
        """All that were asked for, also those after the end."""
        return self._frames_asked

    def events(self) -> list:
        self._check_running()
        return []

    # Episodes

    def reset(self, episode: int = -1, seed: int | None = None) -> bool:
        if not self._open:
            os.kill(os.getpid(), signal.SIGSEGV)
        if seed is None:
            seed = _c_rand.randrange(2**31)
        if not isinstance(seed, int):
            raise ValueError("'seed' must be int or None")
        self._running = False
        images = self._images == "dummy" or (self._images and os.path.isdir(self._images))
        if self._name in NEEDS_IMAGES and not images:
            raise RuntimeError(f"{self._name}: no images at datasetPath '{self._images}'")
        self._seed = (seed & 0xFFFFFFFF, self._mixer)
        self._maps = 0
        first = "first" if self._fresh else "later"
        self._random = random.Random(f"{self._name} {self._seed}")
        self._make_map(self._recorded[f"{first}_reset_s"])
        self._script(shifted=self._fresh is False)
        self._state = int.from_bytes(self._digest(f"{self._seed} {first}")[:8], "little")
        self._frame = self._idle = self._frames_asked = 0
        self._fresh, self._running = False, True
        _playing.add(self)
        if self._name.startswith(TALKATIVE):
            _say(f"level script of {self._name}: a new episode, seed {self._seed[0]}")
        return True

    def step(self, action: np.ndarray, num_steps: int = 1) -> float:
        self._check_running()
        if not isinstance(action, np.ndarray):
            raise TypeError("'action' must be a numpy array")
        if action.dtype != np.intc:
            raise ValueError(f"action must have dtype int32, not {action.dtype}")
        if action.shape != (len(ACTIONS),):
            raise ValueError(f"action must have shape ({len(ACTIONS)},), not {action.shape}")
        pointer = ctypes.cast(action.ctypes.data, ctypes.POINTER(ctypes.c_int))  # strides are lost
        taken = pointer[: len(ACTIONS)]
        self._frames_asked += num_steps
        seconds = num_steps / RECORDED_REPEAT / self._recorded["steps_per_s"]
        before, self._frame = self._frame, min(self._frame + num_steps, self._end)
        self._idle = 0 if any(taken) else self._idle + self._frame - before
        for value in taken:
            self._state = (self._state * 6364136223846793005 + value + 1) % 2**64
        if self._instruction(self._frame) != self._instruction(before):
            seconds = self._random.uniform(0.1, 1.0) * self._recorded["slowest_step_s"]
            if self._name in MAPS_IN_MID_EPISODE:
                self._make_map(seconds)
                seconds = 0.0
        _sleep(seconds)
        watched = self._name.startswith("psychlab_") and self._hold_out
        if self._frame == self._end or (watched and self._idle >= IDLE_FRAMES):
            self._running = False
        return float(sum(r for frame, r in self._rewards if before < frame <= self._frame))

    def observations(self) -> dict[str, Any]:
        """RGB_INTERLEAVED shows the number of the frame in its first pixel, lowest byte first."""
        self._check_running()
        made: dict[str, Any] = {}
        for name in self._observations:
            if name == "INSTR":
                made[name] = self._instruction(self._frame)
            elif name == "FRAMES_REMAINING_AT_60":
                made[name] = np.array([float(self._length - self._frame)])
            else:
                noise = np.random.PCG64(self._state).random_raw(-(-np.prod(self._shape) // 8))
                image = noise.view(np.uint8)[: np.prod(self._shape)].reshape(self._shape)
                image[0, 0] = np.frombuffer(self._frame.to_bytes(3, "little"), np.uint8)
                made[name] = image
        return made

    def close(self) -> bool:
        if not self._open:
            return False
        self._open = self._running = False
        _playing.discard(self)
        shutil.rmtree(self._folder, ignore_errors=True)
        _folders.discard(self._folder)
        return True

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()

    # Inside

    def _check_running(self) -> None:
        if not self._running:
            raise RuntimeError("Environment in wrong status for call: not running, call reset()")

    def _digest(self, text: str) -> bytes:
        return hashlib.md5(f"{self._name} {text}".encode()).digest()

    def _script(self, shifted: bool) -> None:
        """When what happens, in frames. Later resets are a frame off."""
        repeat, steps = RECORDED_REPEAT, self._recorded["steps"]
        displaced = 0 if self._seed == (0, 0) else self._random.randrange(steps)
        self._rewards = [
            (1 + (displaced + step) % steps * repeat + (repeat - 1 + shifted) % repeat, reward)
            for step, reward in self._recorded["rewards"]
        ]
        texts = self._recorded["instructions"]
        order = list(range(len(texts)))
        if self._seed != (0, 0):
            self._random.shuffle(order)
        self._instructions = [
            (step * repeat, texts[i][1]) for (step, _), i in zip(texts, order, strict=True)
        ]
        self._end = self._length
        if self._name == "rooms_exploit_deferred_effects_train" and self._seed != (0, 0):
            early = self._random.randrange(800, 900) * repeat
            self._end = min(self._end, early) if self._random.random() < 0.5 else self._end

    def _instruction(self, frame: int) -> str:
        return next(text for since, text in reversed(self._instructions) if since <= frame)

    def _make_map(self, seconds: float) -> None:
        """A generated one is asked for from the cache, or else put there."""
        if self._cache is None or not self._name.startswith(GENERATED):
            _sleep(seconds)
            return
        digest = self._digest(f"{self._seed} {self._maps}")
        self._maps += 1
        content = np.random.PCG64(digest[0] + 256 * digest[1]).random_raw(1500 + 32 * digest[2])
        key = f"{self._name[:12]}_aas_{digest.hex()}"
        path = os.path.join(self._folder, "baselab", f"{key}.pk3")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if self._cache.fetch(key, path):
            try:
                whole = Path(path).read_bytes() == content.tobytes()
            except OSError:
                whole = False
            if not whole:
                print(f"Couldn't load map {path}", file=sys.stderr, flush=True)
                os._exit(1)
            _sleep(min(seconds, WARM_RESET_S))
            return
        _sleep(seconds)
        Path(path).write_bytes(content.tobytes())
        self._cache.write(key, path)
