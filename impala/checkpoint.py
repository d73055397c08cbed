"""A run at one instant: saved atomically, loaded strictly, only tensors and plain types."""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from impala.whole_file import naming
from suites.suite import Spec

log = logging.getLogger(__name__)

FORMAT = 1
_NUMBERED = re.compile(r"ckpt_(\d+)\.pt")


@contextmanager
def fitting() -> Iterator[None]:
    """While what was loaded is given to parts: ValueError if it is of other parts."""
    try:
        yield
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            "the checkpoint does not fit the network and settings of the run's config.yaml, which"
            f" may have been edited: {type(error).__name__}: {error}"
        ) from error


def vocabulary(spec: Spec) -> dict[str, int]:
    """What the meaning of an agent's word ids depends on, saved with it."""
    return {
        "instruction_length": spec.instruction_length,
        "vocabulary_size": spec.vocabulary_size,
    }


def check_vocabulary(state: Mapping[str, Any], spec: Spec) -> None:
    """ValueError unless the state's agent learned to read the words of `spec`."""
    saved, own = state["vocabulary"], vocabulary(spec)
    if saved != own:
        raise ValueError(f"its instructions are of {saved}, those of the suite are of {own}")


def read(path: Path) -> dict[str, Any]:
    """The state in a file. Raises whatever a missing, torn or foreign file makes PyTorch raise."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"it has no format {FORMAT} checkpoint in it")
    if type(state.get("frames")) is not int or "learner" not in state:
        raise ValueError("it has no frames, or nothing that was learned, in it")
    return state


class Checkpoints:
    """A run's folder `checkpoints/`: `ckpt_<frames>.pt`, the last `keep` of them, and `last.pt`.

    `last.pt` is a copy of the newest, so that damage to one of them leaves the other.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self._keep = keep

    def save(self, state: dict[str, Any]) -> Path:
        """Writes `state`, which has "frames"; the files before it stay until it is whole.

        Raises OSError, naming the file.
        """
        if not self.folder.parent.is_dir():
            raise FileNotFoundError(f"the run's directory {self.folder.parent} is gone")
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"ckpt_{state['frames']}.pt"
        temporary = self.folder / f".{path.name}.{os.getpid()}"
        buffer = io.BytesIO()  # written to a full disk, PyTorch says nothing of the disk
        torch.save({"format": FORMAT, **state}, buffer)
        try:
            with naming(path):
                with open(temporary, "wb") as file:
                    file.write(buffer.getbuffer())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
                shutil.copyfile(path, temporary)
                with open(temporary, "rb+") as file:
                    os.fsync(file.fileno())
                os.replace(temporary, self.folder / "last.pt")
        finally:
            temporary.unlink(missing_ok=True)
        for old in self.numbered()[: -self._keep]:
            old.unlink(missing_ok=True)
        for left in self.folder.glob(".ckpt_*.pt.*"):  # by one that was killed: only one may train
            left.unlink(missing_ok=True)
        return path

    def numbered(self) -> list[Path]:
        """The numbered files, oldest first."""
        found = [
            (int(match[1]), path)
            for path in self.folder.glob("ckpt_*.pt")
            if (match := _NUMBERED.fullmatch(path.name))
        ]
        return [path for _, path in sorted(found)]

    def newest_frames(self) -> int | None:
        """Of the newest numbered file; None if there is none. Nothing is read."""
        numbered = self.numbered()
        return int(numbered[-1].stem.removeprefix("ckpt_")) if numbered else None

    def load(self) -> dict[str, Any]:
        """The newest state that can be read.

        A damaged file is reported and the one before it is taken. Raises FileNotFoundError if there
        is none, ValueError if none can be read: a run never starts from scratch unasked.
        """
        candidates = [self.folder / "last.pt", *reversed(self.numbered())]
        candidates = [path for path in candidates if path.exists()]
        if not candidates:
            raise FileNotFoundError(
                f"{self.folder} has no checkpoint (last.pt or ckpt_<frames>.pt): give"
                " resume=<run directory> of a run that has written one"
            )
        for path in candidates:
            try:
                state = read(path)
            except Exception as error:
                log.warning(
                    "the checkpoint %s is damaged (%s: %s): trying the one before it",
                    path, type(error).__name__, str(error).splitlines()[0] if str(error) else "",
                )  # fmt: skip
                continue
            log.info("loaded %s (%s frames)", path, f"{state['frames']:,}")
            return state
        raise ValueError(
            f"none of the {len(candidates)} checkpoints in {self.folder} can be read: "
            + ", ".join(path.name for path in candidates)
        )
