"""Stands for an evaluation's worker processes: plays here, one portion for each `receive`."""

from __future__ import annotations

from impala.evaluation.player import Player


class PlayingHere:
    """In place of `impala.evaluation.workers.Workers`. `fails`: at this portion, from 0."""

    fails: int | None = None

    def __init__(self, evaluation, chunks, *, run_dir, frames):
        self.steps = 0
        self._waiting = list(chunks)
        self._player = Player(evaluation, run_dir, frames, self._alive)

    def receive(self, timeout_s):
        if PlayingHere.fails is not None:
            PlayingHere.fails -= 1
            if PlayingHere.fails < 0:
                raise RuntimeError("this worker is a fake that fails")
        if not self._waiting:
            return []
        chunk = self._waiting.pop(0)
        return [(chunk, self._player.play(chunk))]

    def close(self):
        self._player.close()

    def _alive(self, steps):
        self.steps += steps
