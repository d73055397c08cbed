"""DeepMind Lab's engine as a vector environment. Only this file imports it, and only to play."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from suites.instructions import word_ids
from suites.level_cache import LevelCache
from suites.scratch import Scratch
from suites.suite import Spec, TaskVectorEnv

WIDTH, HEIGHT, FPS = 96, 72, 60
OBSERVATIONS = ["RGB_INTERLEAVED", "INSTR", "FRAMES_REMAINING_AT_60"]
ROUNDING_FRAMES = 1.0  # that the time which is left may be off

# Look left or right and down or up (pixels a frame), strafe, move, fire, jump, crouch.
ACTION_SETS: Mapping[str, Sequence[tuple[int, ...]]] = {
    "nine": (  # Espeholt et al. 2018, table D.2
        (0, 0, 0, 1, 0, 0, 0),  # forward
        (0, 0, 0, -1, 0, 0, 0),  # backward
        (0, 0, -1, 0, 0, 0, 0),  # strafe left
        (0, 0, 1, 0, 0, 0, 0),  # strafe right
        (-20, 0, 0, 0, 0, 0, 0),  # look left
        (20, 0, 0, 0, 0, 0, 0),  # look right
        (-20, 0, 0, 1, 0, 0, 0),  # look left, forward
        (20, 0, 0, 1, 0, 0, 0),  # look right, forward
        (0, 0, 0, 0, 1, 0, 0),  # fire
    ),
    "fifteen": (  # the set of Hessel et al. 2018 (PopArt), in sample-factory's order
        (0, 0, 0, 1, 0, 0, 0),  # forward
        (0, 0, 0, -1, 0, 0, 0),  # backward
        (0, 0, -1, 0, 0, 0, 0),  # strafe left
        (0, 0, 1, 0, 0, 0, 0),  # strafe right
        (-10, 0, 0, 0, 0, 0, 0),  # look a little left
        (10, 0, 0, 0, 0, 0, 0),  # and right
        (-60, 0, 0, 0, 0, 0, 0),  # look far left
        (60, 0, 0, 0, 0, 0, 0),  # and right
        (0, 10, 0, 0, 0, 0, 0),  # look down
        (0, -10, 0, 0, 0, 0, 0),  # look up
        (-10, 0, 0, 1, 0, 0, 0),  # look a little left, forward
        (10, 0, 0, 1, 0, 0, 0),  # and right
        (-60, 0, 0, 1, 0, 0, 0),  # look far left, forward
        (60, 0, 0, 1, 0, 0, 0),  # and right
        (0, 0, 0, 0, 1, 0, 0),  # fire
    ),
}


class Cache(NamedTuple):
    """Of levels: see `LevelCache`."""

    folder: Path
    most_bytes: int


class LabEnv(TaskVectorEnv):
    """N instances of the engine on one level; see `TaskVectorEnv`.

    Frames are uint8 [3, 72, 96]. `info` has instruction, frames and, with a cache, level_cache. An
    instance is used for all games of its environment: each one made leaks 3 MB. Game k of an
    environment has the seed `game_seed(s, k)`, where s is the environment's. The engine plays the
    first episode of an instance a little differently from later ones with the same seed, so a new
    environment repeats what another new one did, and one that is reset with a seed does not.

    settings: of the engine, besides size and frame rate.
    seeds_per_task: see `game_seed`.
    cut_is_truncation: whether an episode that ran out of time is truncated; else every end is a
        termination. The engine does not say why an episode ended. One whose time was up by the
        next step has ended for that.
    """

    def __init__(
        self,
        level: str,
        *,
        num_envs: int,
        seeds: Sequence[int],
        spec: Spec,
        action_set: str,
        settings: Mapping[str, str],
        renderer: str,
        seeds_per_task: int | None,
        cut_is_truncation: bool,
        cache: Cache | None,
    ) -> None:
        super().__init__(num_envs=num_envs, seeds=seeds, spec=spec)
        import deepmind_lab  # pyright: ignore[reportMissingImports]  (see docs/dmlab30.md)

        self._spec = spec
        self._actions = np.zeros(num_envs, np.int64)
        self._table = np.array(ACTION_SETS[action_set], np.intc)
        self._cut_is_truncation = cut_is_truncation
        self._games: list[_Game] = []
        self._scratch = Scratch()
        config = {"width": str(WIDTH), "height": str(HEIGHT), "fps": str(FPS), **settings}
        try:
            for _ in range(num_envs):
                level_cache = None if cache is None else LevelCache(*cache)
                lab = deepmind_lab.Lab(
                    level, OBSERVATIONS, config, renderer=renderer, level_cache=level_cache,
                    temp_folder=str(self._scratch.path),
                )  # fmt: skip
                self._games.append(_Game(lab, level_cache, spec, seeds_per_task))
        except BaseException:
            self._scratch.close()
            raise

    def close_extras(self, **kwargs: Any) -> None:
        for game in self._games:
            game.lab.close()
        self._scratch.close()

    def generate(self, seed: int) -> np.ndarray:
        """Begins a game with this seed of the engine, for its map to be in the cache then.

        Returns int32 [3], what the cache counted. Only the first instance does this.
        """
        game = self._games[0]
        game.lab.reset(seed=seed)
        return np.zeros(3, np.int32) if game.cache is None else game.cache.take_counts()

    def _reset(self, seeds: np.ndarray | None) -> tuple[np.ndarray, dict[str, Any]]:
        if self.closed:  # the engine would crash
            raise RuntimeError("reset() called after close(): make another environment")
        for i, game in enumerate(self._games):
            if seeds is not None:
                game.seed, game.number = int(seeds[i]), 0
            game.begin()
        shown = [game.shown for game in self._games]
        return _stacked([each.frame for each in shown]), self._info(shown)

    def _send(self, actions: np.ndarray) -> None:
        if self.closed:
            raise RuntimeError("send() called after close(): make another environment")
        self._actions = actions

    def _recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        steps = [
            game.step(self._table[action])
            for game, action in zip(self._games, self._actions, strict=True)
        ]
        rewards, ended, time_was_up, frames = map(np.array, zip(*steps, strict=True))
        last = [game.shown for game in self._games]
        for game in compress(self._games, ended):
            game.begin()
        shown = [game.shown for game in self._games]
        info = self._info(shown)
        info["frames"] = frames
        if ended.any():
            info["final_obs"] = _stacked([each.frame for each in last])
            info["final_instruction"] = self._word_ids(last)
        truncated = ended & time_was_up & self._cut_is_truncation
        seen = _stacked([each.frame for each in shown])
        return seen, rewards, ended & ~truncated, truncated, info

    def _info(self, shown: Sequence[_Shown]) -> dict[str, Any]:
        info: dict[str, Any] = {"instruction": self._word_ids(shown)}
        caches = [game.cache for game in self._games if game.cache is not None]
        if caches:
            info["level_cache"] = np.stack([cache.take_counts() for cache in caches])
        return info

    def _word_ids(self, shown: Sequence[_Shown]) -> np.ndarray:
        length, size = self._spec.instruction_length, self._spec.vocabulary_size
        return np.stack([word_ids(each.instruction, length, size) for each in shown])


class _Shown(NamedTuple):
    """What the engine showed last. After the end of an episode it shows nothing more."""

    frame: np.ndarray
    instruction: str
    frames_left: float


class _Game:
    """An instance of the engine, and the game that is played on it."""

    def __init__(
        self, lab: Any, cache: LevelCache | None, spec: Spec, seeds_per_task: int | None
    ) -> None:
        self.lab = lab
        self.cache = cache
        self.seed = self.number = 0
        self.shown: _Shown
        self._frames_per_step = spec.frames_per_step
        self._seeds_per_task = seeds_per_task

    def begin(self) -> None:
        """The next game, or the first with this seed."""
        self.lab.reset(seed=game_seed(self.seed, self.number, self._seeds_per_task))
        self.number += 1
        self._look()

    def step(self, action: np.ndarray) -> tuple[float, bool, bool, int]:
        """The reward, whether the game ended, whether its time was up, and the frames played.

        Where it ended early, how many frames of the step it took is not known: all are counted.
        """
        frames = self._frames_per_step
        reward = self.lab.step(action, num_steps=frames)
        if self.lab.is_running():
            self._look()
            return reward, False, False, frames
        left = self.shown.frames_left
        if left > frames + ROUNDING_FRAMES:
            return reward, True, False, frames
        return reward, True, True, max(1, min(frames, round(left)))

    def _look(self) -> None:
        seen = self.lab.observations()  # arrays of its own
        frame = seen["RGB_INTERLEAVED"].transpose(2, 0, 1)
        self.shown = _Shown(frame, seen["INSTR"], float(seen["FRAMES_REMAINING_AT_60"][0]))


def _stacked(frames: Sequence[np.ndarray]) -> np.ndarray:
    """[N, *frame]; of a single one a view, for whoever copies it to turn it on the way."""
    return frames[0][None] if len(frames) == 1 else np.stack(frames)


def game_seed(seed: int, game: int, seeds_per_task: int | None = None) -> int:
    """The engine's seed for a game of the environment with this seed, a Python int below 2**31.

    seeds_per_task: games draw from 0 to seeds_per_task - 1; None: from all.
    """
    drawn = int(np.random.SeedSequence((seed, game)).generate_state(1, np.uint64)[0])
    return drawn >> 33 if seeds_per_task is None else drawn % seeds_per_task
