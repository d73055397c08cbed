"""Plays portions of an evaluation's games in the process that it is made in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from impala.agents.agent import Agent
from impala.evaluation.evaluation import Chunk, Evaluation, Game
from impala.evaluation.video import Video, video_path
from impala.inference import gumbel_
from impala.trajectory import empty_step, map_structure
from impala.worker import WorkerEnv
from suites.camera import camera
from suites.suite import Spec, TaskVectorEnv

Start = tuple[NDArray[np.uint8], dict[str, Any]]  # what a reset returns


class Player:
    """Keeps the environments of the task that it played last.

    A reset with a game's seed is the start of that game, in a new environment and in a used one,
    and every game is the first after such a reset: so short games are not preferred.

    run_dir, frames: where videos go, and of which agent they are.
    alive:           called after every reset and step, with the number of games that made a step.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        run_dir: Path,
        frames: int,
        alive: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._evaluation = evaluation
        self._run_dir = run_dir
        self._frames = frames
        self._alive = alive
        self._task = -1
        self._environments: list[TaskVectorEnv] = []

    def close(self) -> None:
        for environment in self._environments:
            environment.close()
        self._environments = []

    def play(self, chunk: Chunk) -> list[Game]:
        """The games of `chunk`, in order; writes videos of those that are to have one."""
        evaluation = self._evaluation
        numbers = range(chunk.first, chunk.first + chunk.games)
        seeds = [evaluation.seeds(chunk.task, number) for number in numbers]
        environments = self._environments_for(chunk.task, [seed for seed, _ in seeds])
        with ThreadPoolExecutor(len(seeds)) as threads:  # some take half a minute
            starts = []
            for start in threads.map(_reset, environments, [seed for seed, _ in seeds]):
                starts.append(start)
                self._alive(0)
        returns, lengths = np.zeros(chunk.games), np.zeros(chunk.games, np.int64)
        batch = _Batch(
            evaluation.agent,
            evaluation.suite.spec,
            environments,
            starts,
            None if evaluation.greedy else [noise for _, noise in seeds],
        )
        with torch.inference_mode(), self._videos(chunk, starts) as videos:
            while len(games := batch.playing):
                filmed = [row for row, game in enumerate(games) if game in videos]
                values = batch.values(filmed)
                actions, rewards, frames, arrived = batch.step()
                returns[games] += rewards
                lengths[games] += frames
                for row, value in zip(filmed, values, strict=True):
                    videos[games[row]].add(
                        int(actions[row]), float(rewards[row]), arrived[row], value
                    )
                self._alive(len(games))
            for video in videos.values():
                video.save()
        return [Game(*game) for game in zip(returns.tolist(), lengths.tolist(), strict=True)]

    def _environments_for(self, task: int, seeds: Sequence[int]) -> list[TaskVectorEnv]:
        """One for each seed, those that there are first."""
        if task != self._task:
            self.close()
        self._task = task
        suite, there = self._evaluation.suite, len(self._environments)
        for seed in seeds[there:]:
            arguments = suite, suite.tasks[task], 1, [seed], "test"
            if self._evaluation.outside:
                log_dir = self._run_dir / "engine"
                self._environments.append(WorkerEnv(*arguments, log_dir=log_dir))
            else:
                self._environments.append(suite.make(*arguments[1:]))
            self._alive(0)
        if self._evaluation.outside:  # an engine's first game differs from later ones of its seed
            for environment in self._environments[there:]:
                environment.reset()
                self._alive(0)
        return self._environments[: len(seeds)]

    @contextmanager
    def _videos(self, chunk: Chunk, starts: Sequence[Start]) -> Iterator[dict[int, Video]]:
        """Of the games of the chunk, by their place in it."""
        suite, task = self._evaluation.suite, self._evaluation.suite.tasks[chunk.task]
        videos = {}
        with ExitStack() as closing:
            for place, (frame, info) in enumerate(starts):
                number = chunk.first + place
                if number < self._evaluation.videos:
                    seed, _ = self._evaluation.seeds(chunk.task, number)
                    video = Video(
                        video_path(self._run_dir, self._frames, task.name, number),
                        camera(suite, task, seed, frame[0], info),
                        f"{task.name}, game {number}, {self._frames:,} frames",
                    )
                    videos[place] = closing.enter_context(video)
            yield videos


def _reset(environment: TaskVectorEnv, seed: int) -> Start:
    return environment.reset(seed=[seed])


class _Batch:
    """Games that are played together; whoever has ended leaves.

    The recurrent state is carried through a whole game, lost lives included.

    playing:     row i of everything is of game playing[i].
    starts:      of the games.
    noise_seeds: None for greedy actions.
    """

    def __init__(
        self,
        agent: Agent,
        spec: Spec,
        environments: Sequence[TaskVectorEnv],
        starts: Sequence[Start],
        noise_seeds: Sequence[int] | None,
    ) -> None:
        size = len(environments)
        self.playing = np.arange(size)
        self._agent = agent.eval()
        self._frames_per_step = spec.frames_per_step
        self._environments = environments
        self._generators = [torch.Generator().manual_seed(seed) for seed in noise_seeds or ()]
        self._noise = torch.zeros(size, spec.num_actions)
        self._state = agent.initial_state(size)
        frames, infos = zip(*starts, strict=True)
        step = empty_step(spec.frame_shape, size, spec.instruction_length)
        self._step = step._replace(
            frame=torch.from_numpy(np.concatenate(frames)),
            terminated=~step.terminated,
            instruction=_instructions(infos),
        )

    def values(self, rows: Sequence[int]) -> list[float]:
        """Of the states of these rows."""
        if not rows:
            return []
        step, state = map_structure(lambda leaf: leaf[list(rows)], (self._step, self._state))
        return self._agent.value(step, state).tolist()

    def step(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], list[int], NDArray[np.uint8]]:
        """The agent's actions, their rewards, frames played, and observations they led to."""
        noise = self._noise[: len(self.playing)]
        if self._generators:
            for row, game in enumerate(self.playing.tolist()):
                gumbel_(noise[row], self._generators[game])
        outputs, self._state = self._agent.act(self._step, self._state, noise)
        actions = outputs.action.numpy()
        environments = [self._environments[game] for game in self.playing.tolist()]
        for environment, action in zip(environments, actions, strict=True):
            environment.send(action[None])
        answers = [environment.recv() for environment in environments]
        frames, rewards, terminated, truncated = map(
            np.concatenate, list(zip(*answers, strict=True))[:4]
        )
        ended = terminated | truncated
        infos = [answer[-1] for answer in answers]
        played = [int(info.get("frames", [self._frames_per_step])[0]) for info in infos]
        none = torch.zeros(len(ended), dtype=torch.bool)
        self._step = self._step._replace(
            frame=torch.from_numpy(frames),
            reward=torch.from_numpy(rewards.astype(np.float32)),
            terminated=none,
            truncated=none,
            last_action=outputs.action,
            instruction=_instructions(infos),
        )
        arrived = frames
        if ended.any():
            arrived = frames.copy()
            for row in np.flatnonzero(ended):
                arrived[row] = infos[row]["final_obs"][0]
            left = torch.from_numpy(~ended)
            self._step, self._state = map_structure(
                lambda leaf: leaf[left], (self._step, self._state)
            )
            self.playing = self.playing[~ended]
        return actions, rewards.astype(np.float64), played, arrived


def _instructions(infos: Sequence[dict[str, Any]]) -> torch.Tensor | tuple[()]:
    if "instruction" not in infos[0]:
        return ()
    return torch.from_numpy(np.concatenate([info["instruction"] for info in infos]))
