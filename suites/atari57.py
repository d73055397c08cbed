"""The 57 Atari games of the Arcade Learning Environment, on its own vector environment.

Reference scores are data, in `atari57.csv`, one row a game in ALE's order:

- `gymnasium_id`, `ale_minimal_actions`: as ale-py 0.12.1 and gymnasium 1.4.0 report them.
- `random`, `human`: google-deepmind/dqn_zoo, `dqn_zoo/atari_data.py` (commit 45061f4): up to 30
  no-ops at the start, 108,000 frames at most, a professional human tester.
- `random_agent57_muzero`: the Agent57 paper (Badia et al. 2020), appendix H.4, which
  google-research/reincarnating_rl `atari_scores.py` repeats. Differs from `random` in one game:
  video_pinball 0.0, not 16256.9 (against a human 17667.9, which lets that game dominate means).
- `random_impala`: the same with double_dunk -18.55, of which the -18.6 above is the rounding.
- Published scores of each game: `impala_shallow`, `impala_deep`, `impala_deep_multitask` from the
  IMPALA paper, table C.1; `apex_noop` (Ape-X, up to 30 no-ops) from seungjaeryanlee/rldb;
  `r2d2` from the R2D2 paper, table 4; `ngu` from the NGU paper, table 10, where it is rounded to
  100 points; `r2d2_bandit` and `agent57` from the Agent57 paper, appendix H.4.

Which column of random scores a published aggregate was computed with is found by computing it
again (`python -m suites.published`). `random_impala` gives those of IMPALA (deep experts: median
191.8 %, mean 957.6 %; multi-task: 59.7 %, 176.9 %) and of Ape-X; `random_agent57_muzero` those of
R2D2 and Agent57; `random` gives no published mean. Medians of IMPALA and capped means are the same
under all three.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from importlib import metadata, resources
from typing import Any

import numpy as np

from suites.atari_camera import AtariCamera
from suites.suite import EngineMissing, Spec, Task, TaskVectorEnv, check_task, select_names

RANDOM_COLUMNS = ("random_impala", "random_agent57_muzero", "random")
FRAMES_PER_STEP = 4
FRAME_STACK = 4
FRAME_SIZE = 84


def read_scores() -> dict[str, dict[str, str]]:
    """The rows of `atari57.csv` by game; columns as in the docstring of this file."""
    text = resources.files("suites").joinpath("atari57.csv").read_text(encoding="utf-8")
    return {row["game"]: row for row in csv.DictReader(text.splitlines())}


class Atari57:
    """The suite, or some games of it.

    tasks:             names as in ALE, such as "space_invaders"; None means all 57.
    sticky_actions:    probability that the emulator repeats the action before (Machado et al.
                       2018 advise 0.25; the papers compared with here do without).
    noop_max:          up to this many no-ops are played at the start of a game.
    max_frames:        a game is cut (truncated) here; no-ops at the start are not counted.
    full_action_space: 18 actions, the same for all games, or the minimal set of the one game.
                       None means 18 for several games and the minimal set for one.
    random_column:     the column of `atari57.csv` that is 0 %, one of `RANDOM_COLUMNS`.
    """

    name = "atari57"
    headline = "median"

    def __init__(
        self,
        *,
        tasks: Sequence[str] | None = None,
        sticky_actions: float = 0.0,
        noop_max: int = 30,
        max_frames: int = 108_000,
        full_action_space: bool | None = None,
        random_column: str = "random_impala",
    ) -> None:
        if not 0.0 <= sticky_actions < 1.0:
            raise ValueError(f"sticky_actions={sticky_actions}: expected a probability below 1")
        if noop_max < 0:
            raise ValueError(f"noop_max={noop_max}: expected 0 or more")
        if max_frames < FRAMES_PER_STEP or max_frames % FRAMES_PER_STEP:
            raise ValueError(f"max_frames={max_frames}: expected a multiple of {FRAMES_PER_STEP}")
        if full_action_space not in (None, True, False):
            raise ValueError(f"full_action_space={full_action_space}: expected true, false or null")
        select_names([random_column], RANDOM_COLUMNS, kind="random_column of atari57")
        rows = read_scores()
        names = tuple(rows)
        if tasks is not None:
            names = select_names(tasks, names, kind="game of atari57")
        minimal_actions = int(rows[names[0]]["ale_minimal_actions"])
        if full_action_space is None:
            full_action_space = len(names) > 1
        if not full_action_space and len(names) > 1:
            raise ValueError(
                f"full_action_space=False with {len(names)} games: their minimal action sets "
                "differ, use the full one or a single game"
            )
        self.tasks = tuple(_task(rows[name], random_column) for name in names)
        num_actions = 18 if full_action_space else minimal_actions
        self.spec = Spec((FRAME_STACK, FRAME_SIZE, FRAME_SIZE), num_actions, FRAMES_PER_STEP)
        self.sticky_actions = sticky_actions
        self.noop_max = noop_max
        self.max_frames = max_frames
        self.full_action_space = full_action_space
        self.provenance = self._provenance(random_column)

    def make(
        self,
        task: Task,
        num_envs: int,
        seeds: Sequence[int],
        split: str = "train",
        *,
        threads: int = 1,
    ) -> TaskVectorEnv:
        """See `Suite.make`; both splits play the same game. `threads` are of the emulator."""
        check_task(task, self.tasks, split)
        return AtariTaskEnv(
            game=task.train_level if split == "train" else task.test_level,
            num_envs=num_envs,
            seeds=seeds,
            spec=self.spec,
            sticky_actions=self.sticky_actions,
            noop_max=self.noop_max,
            max_frames=self.max_frames,
            full_action_space=self.full_action_space,
            threads=threads,
        )

    def camera(self, task: Task, seed: int, frame: np.ndarray, info: dict[str, Any]) -> AtariCamera:
        """See `suites.camera.Filmed`."""
        return AtariCamera(
            game=task.test_level,
            seed=seed,
            played=int(info["episode_frame_number"][0]),
            sticky_actions=self.sticky_actions,
            full_action_space=self.full_action_space,
            frames_per_step=self.spec.frames_per_step,
            action_map=self._action_map,
        )

    def check(self) -> None:
        """Raises ValueError unless ale-py and the ROM of every game are there."""
        try:
            from ale_py import roms
        except ImportError as error:
            raise EngineMissing(
                f"atari57 is played by ale-py, which cannot be imported ({error}): "
                "pip install 'ale-py>=0.12'"
            ) from error
        problems = []
        for task in self.tasks:
            try:
                if roms.get_rom_path(task.train_level) is None:
                    problems.append(f"{task.name}: ale-py does not know this ROM")
            except OSError as error:  # no such file, no such directory, not the expected hash
                problems.append(f"{task.name}: {error}")
        if problems:
            raise ValueError(
                f"{len(problems)} of {len(self.tasks)} ROMs cannot be used; reinstall ale-py, or "
                "see to the directory that ALE_ROMS_DIR names:\n  " + "\n  ".join(problems)
            )

    def tidy(self) -> None:
        """Nothing is left behind."""

    def _action_map(self, own: Sequence[str]) -> np.ndarray:
        return shared_action_map(own) if self.full_action_space else np.arange(len(own))

    def _provenance(self, random_column: str) -> dict[str, str]:
        matching = {
            "random_impala": "reproduces the published aggregates of IMPALA and Ape-X",
            "random_agent57_muzero": "reproduces the published aggregates of R2D2 and Agent57",
            "random": "dqn_zoo's own: reproduces no published mean, because of video_pinball",
        }
        actions = "full set of 18" if self.full_action_space else "minimal set of the game"
        try:
            engine = f"ale-py {metadata.version('ale-py')}"
        except metadata.PackageNotFoundError:
            engine = "ale-py (not installed)"
        return {
            "random": f"column {random_column} of atari57.csv: {matching[random_column]}",
            "human": "column human of atari57.csv: dqn_zoo atari_data.py, professional tester",
            "cap": "mean_capped caps each game at 100 %, with no lower bound",
            "protocol": (
                f"up to {self.noop_max} no-ops at the start, {self.max_frames} frames at most, "
                f"sticky actions {self.sticky_actions}, {actions}, action repeat "
                f"{FRAMES_PER_STEP} with the maximum of the last two frames, {FRAME_STACK} frames "
                f"of {FRAME_SIZE}x{FRAME_SIZE} grey; raw returns of whole games, which a lost "
                "life does not end"
            ),
            "engine": engine,
        }


class AtariTaskEnv(TaskVectorEnv):
    """ALE's vector environment of one game; `info["lives"]` counts lives, int32 [N].

    A lost life ends nothing here: `terminated` means game over. Where a game ended, `lives` is
    already of the next game. Build it in the process that plays it: a fork of that process hangs.
    """

    def __init__(
        self,
        *,
        game: str,
        num_envs: int,
        seeds: Sequence[int],
        spec: Spec,
        sticky_actions: float,
        noop_max: int,
        max_frames: int,
        full_action_space: bool,
        threads: int,
    ) -> None:
        super().__init__(num_envs=num_envs, seeds=seeds, spec=spec)
        from ale_py.vector_env import AtariVectorEnv

        stack, height, width = spec.frame_shape
        self._engine = AtariVectorEnv(
            game,
            num_envs,
            num_threads=threads,
            max_num_frames_per_episode=max_frames,
            repeat_action_probability=sticky_actions,
            full_action_space=full_action_space,
            autoreset_mode=self.metadata["autoreset_mode"],
            img_height=height,
            img_width=width,
            stack_num=stack,
            frameskip=spec.frames_per_step,
            maxpool=True,
            noop_max=noop_max,
            episodic_life=False,
            life_loss_info=False,
            reward_clipping=False,
            use_fire_reset=False,
        )
        own = [action.name for action in self._engine.ale.get_action_set()]
        self._action_map = shared_action_map(own) if full_action_space else np.arange(len(own))
        if len(self._action_map) != spec.num_actions:
            raise ValueError(
                f"{game} has {len(own)} actions in this ale-py, expected {spec.num_actions}: "
                "atari57.csv was made with ale-py 0.12.1, install that version"
            )
        self._identity = bool((self._action_map == np.arange(len(self._action_map))).all())

    def _reset(self, seeds: np.ndarray | None) -> tuple[np.ndarray, dict[str, Any]]:
        return self._engine.reset(seed=seeds)

    def _send(self, actions: np.ndarray) -> None:
        self._engine.send(actions if self._identity else self._action_map[actions])

    def _recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        return self._engine.recv()


def shared_action_map(own: Sequence[str]) -> np.ndarray:
    """int64 [18]: for each of ALE's 18 actions, the index in `own`, a game's names of actions.

    Skiing has no fire button and keeps 9 actions in an order of its own even when asked for the
    full set: there `UPFIRE` becomes `UP`, and `FIRE` `NOOP`.
    """
    from ale_py import Action

    shared = list(Action.__members__)
    without_fire = [name.removesuffix("FIRE") or "NOOP" for name in shared]
    return np.array(
        [
            own.index(name if name in own else bare)
            for name, bare in zip(shared, without_fire, strict=True)
        ]
    )


def _task(row: Mapping[str, str], random_column: str) -> Task:
    """A row of `atari57.csv` as a task; ValueError where reference scores are missing."""
    game = row["game"]
    try:
        random_return, human_return = float(row[random_column]), float(row["human"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"atari57.csv has no reference scores for {game}: {random_column}="
            f"{row.get(random_column)!r}, human={row.get('human')!r}"
        ) from error
    return Task(game, game, game, random_return, human_return)
