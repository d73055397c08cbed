"""TensorBoard: the same names, over frames, in `tensorboard/` of the run's directory.

Evaluations after training are in `evaluation/tensorboard/`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from impala.loggers.json_lines import read_points
from impala.loggers.logger import RunInfo
from impala.whole_file import naming


class TensorBoard:
    """A logger. Everything up to a checkpoint is in the files when that is there.

    A resumed run begins another file, which tells TensorBoard to forget points after the
    checkpoint. If there is no file yet, it begins with what `metrics.jsonl` has. ValueError where
    TensorBoard is not installed.
    """

    def __init__(self, run: RunInfo) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                "loggers=[tensorboard] needs TensorBoard, which cannot be imported: pip install"
                " 'impala[tensorboard]', or choose other loggers"
            )
        self._run = run
        is_training = run.evaluated_frames is None
        parent = run.run_dir if is_training else run.run_dir / "evaluation"
        self._folder = parent / "tensorboard"
        self._writer: Any = None  # until the first point: a run that is refused leaves no file

    def write(self, frames: int, metrics: Mapping[str, float]) -> None:
        with naming(self._folder):
            if self._writer is None:
                self._open()
            self._add(frames, metrics)

    def commit(self, frames: int) -> None:
        """Writes out what was held back, so that no resume finds a gap before the checkpoint."""
        if self._writer:
            with naming(self._folder):
                self._writer.flush()

    def finish(self, exit_code: int) -> None:
        if self._writer:
            with naming(self._folder):
                self._writer.close()

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        resume_frames = self._run.resume_frames
        is_new = not self._folder.exists()
        self._writer = SummaryWriter(
            str(self._folder), purge_step=None if resume_frames is None else resume_frames + 1
        )
        if is_new and resume_frames is not None:
            for point in read_points(self._run.run_dir / "metrics.jsonl"):
                frames = int(point.pop("frames"))
                if frames <= resume_frames:
                    self._add(frames, {k: v for k, v in point.items() if v is not None})

    def _add(self, frames: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, frames)
