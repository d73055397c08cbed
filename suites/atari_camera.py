"""An Atari game in the emulator's own colours, every frame of it.

`ale_py`'s vector environment shows neither, so the same game is played again beside it, step by
step, in a single emulator: the same seed, as many no-ops at the start, the same actions. Rewards
prove that it is the same game.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from suites.camera import ENGINE_FRAMES_PER_S


class AtariCamera:
    """See `suites.camera.Camera`.

    action_map: from the names of the emulator's actions to the index among them of each of the
                suite's actions.
    played:     frames of the game before the agent's first one: those of the emulator's own start,
                which a few games have, and no-ops.
    """

    pictures_per_s = ENGINE_FRAMES_PER_S

    def __init__(
        self,
        *,
        game: str,
        seed: int,
        played: int,
        sticky_actions: float,
        full_action_space: bool,
        frames_per_step: int,
        action_map: Callable[[Sequence[str]], np.ndarray],
    ) -> None:
        from ale_py import ALEInterface, LoggerMode, roms

        ALEInterface.setLoggerMode(LoggerMode.Error)  # it greets
        ale = ALEInterface()
        ale.setInt("random_seed", seed)
        ale.setFloat("repeat_action_probability", sticky_actions)
        ale.loadROM(str(roms.get_rom_path(game)))
        ale.reset_game()
        while ale.getEpisodeFrameNumber() < played:
            ale.act(0)
        own = ale.getLegalActionSet() if full_action_space else ale.getMinimalActionSet()
        self._actions = [own[i] for i in action_map([action.name for action in own])]
        self._ale = ale
        self._game = game
        self._frames_per_step = frames_per_step

    def first(self) -> np.ndarray:
        return self._ale.getScreenRGB()

    def step(self, action: int, reward: float, frame: np.ndarray) -> list[tuple[np.ndarray, float]]:
        shots = []
        for _ in range(self._frames_per_step):
            if self._ale.game_over():
                break
            gained = float(self._ale.act(self._actions[action]))
            shots.append((self._ale.getScreenRGB(), gained))
        if sum(gained for _, gained in shots) != reward:
            raise RuntimeError(
                f"a game of {self._game} that was played again for its pictures gave"
                f" {sum(gained for _, gained in shots)} where the game itself gave {reward}: with"
                " this version of ale-py the two emulators differ, evaluate with videos=0"
            )
        return shots
