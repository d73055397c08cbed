"""DMLab-30: the 30 tasks of the IMPALA paper on DeepMind Lab.

Levels and reference scores are data, in `dmlab30.csv`, one row a task in the official order (that
of google-deepmind/lab `game_scripts/levels/contributed/dmlab30/README.md`):

- `train_level`, `test_level`: they differ in two tasks, whose test levels hold things out.
- `random`, `human`: google-deepmind/scalable_agent, `dmlab30.py` (commit 6c0c8a7), which
  google-research/seed_rl and alex-petrenko/sample-factory repeat. They are of the test levels, and
  returns of training levels are scored with them as well.
- Published scores of each task: `impala_experts`, `impala_deep_pbt` from the IMPALA paper, table
  B.1; `r2d2`, `r2d2_plus`, `impala_shallow_r2d2`, `impala_deep_r2d2` from the R2D2 paper, table 3,
  whose agents have fifteen actions.

Published sources disagree about which scores belong to which laser-tag level: table B.1 has small
and large exchanged. Its columns are here in the row that has its random and human scores;
`table_b1_label` is the name it gives them. Only so do they give the paper's aggregates again (49.4
% and, experts, 44.5 %; by name 50.1 % and 45.7 %). The R2D2 paper's columns are in the row of the
name they are given; its aggregates come out with table B.1's names (R2D2 78.3 %; with the other
names 77.4 %).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path

from suites import scratch
from suites.lab import ACTION_SETS, FPS, HEIGHT, WIDTH, Cache, LabEnv
from suites.level_cache import default_folder
from suites.suite import (
    MAX_SEED,
    EngineMissing,
    Spec,
    Task,
    TaskVectorEnv,
    check_task,
    select_names,
)

FRAMES_PER_STEP = 4
LEVEL_FOLDER = "contributed/dmlab30/"
TEST_MIXER_SEED = 0x600D5EED  # with it no test map has the seed of one trained on
NEEDS_IMAGES = ("psychlab_arbitrary_visuomotor_mapping", "psychlab_continuous_recognition")
DUMMY_IMAGES = "dummy"  # that the engine has itself


def read_scores() -> dict[str, dict[str, str]]:
    """The rows of `dmlab30.csv` by task; columns as in the docstring of this file."""
    text = resources.files("suites").joinpath("dmlab30.csv").read_text(encoding="utf-8")
    return {row["task"]: row for row in csv.DictReader(text.splitlines())}


class DmLab30:
    """The suite, or some tasks of it.

    tasks:              names as in `dmlab30.csv`, such as "rooms_watermaze"; None means all 30.
    action_set:         "nine", the paper's, or "fifteen". Scores of the two cannot be compared.
    time_limit:         what running out of time is: "terminated", as in the paper, or "truncated".
    dataset_path:       folder of the images that two psychlab levels show, or "dummy": colours.
    level_cache:        folder for generated maps; "auto" is one of this user, None is none.
    level_cache_gb:     that it may take.
    seeds_per_task:     games in training draw from so many seeds, so that their maps can be in the
                        cache before; None: from all.
    renderer:           "software" or "hardware", whichever the engine was built with.
    instruction_length: words of an instruction that are read.
    vocabulary_size:    ids of words, the padding included.
    """

    name = "dmlab30"
    headline = "mean_capped"

    def __init__(
        self,
        *,
        tasks: Sequence[str] | None = None,
        action_set: str = "nine",
        time_limit: str = "terminated",
        dataset_path: str | None = None,
        level_cache: str | None = "auto",
        level_cache_gb: float = 10.0,
        seeds_per_task: int | None = None,
        renderer: str = "software",
        instruction_length: int = 16,
        vocabulary_size: int = 1000,
    ) -> None:
        for value, known, key in (
            (action_set, tuple(ACTION_SETS), "action_set"),
            (time_limit, ("terminated", "truncated"), "time_limit"),
            (renderer, ("software", "hardware"), "renderer"),
        ):
            if value not in known:
                raise ValueError(f"{key}={value}: expected {' or '.join(known)}")
        if not 0 < level_cache_gb < math.inf:
            raise ValueError(f"level_cache_gb={level_cache_gb}: expected a number above 0")
        most = MAX_SEED + 1
        if seeds_per_task is not None and (
            type(seeds_per_task) is not int or not 1 <= seeds_per_task <= most
        ):
            raise ValueError(f"seeds_per_task={seeds_per_task}: expected null or 1 to {most}")
        rows = read_scores()
        names = tuple(rows)
        if tasks is not None:
            names = select_names(tasks, names, kind="task of dmlab30")
        self.tasks = tuple(_task(rows[name]) for name in names)
        self.spec = Spec(
            frame_shape=(3, HEIGHT, WIDTH),
            num_actions=len(ACTION_SETS[action_set]),
            frames_per_step=FRAMES_PER_STEP,
            instruction_length=instruction_length,
            vocabulary_size=vocabulary_size,
            outside=True,
        )
        self.action_set = action_set
        self.time_limit = time_limit
        self.dataset_path = dataset_path
        self.cache: Cache | None = None
        if level_cache is not None:
            folder = default_folder() if level_cache == "auto" else Path(level_cache).expanduser()
            self.cache = Cache(folder.absolute(), int(level_cache_gb * 2**30))
        self.seeds_per_task = seeds_per_task
        self.renderer = renderer
        self.provenance = self._provenance()

    def make(
        self, task: Task, num_envs: int, seeds: Sequence[int], split: str = "train"
    ) -> TaskVectorEnv:
        """See `Suite.make`. Build it in the process that plays it: a fork of that process hangs."""
        check_task(task, self.tasks, split)
        settings = {"logLevel": "WARN"}
        if split == "test":
            settings["mixerSeed"] = str(TEST_MIXER_SEED)
            if task.test_level != task.train_level:  # others behave differently with it
                settings["allowHoldOutLevels"] = "true"
        if task.name in NEEDS_IMAGES and self.dataset_path is not None:
            settings["datasetPath"] = self.dataset_path
        return LabEnv(
            LEVEL_FOLDER + (task.train_level if split == "train" else task.test_level),
            num_envs=num_envs,
            seeds=seeds,
            spec=self.spec,
            action_set=self.action_set,
            settings=settings,
            renderer=self.renderer,
            seeds_per_task=self.seeds_per_task if split == "train" else None,
            cut_is_truncation=self.time_limit == "truncated",
            cache=self.cache,
        )

    def check(self) -> None:
        """Raises ValueError unless the engine, images and a folder for the cache are there."""
        if find_spec("deepmind_lab") is None:
            raise EngineMissing(
                "dmlab30 is played by DeepMind Lab, and there is no module deepmind_lab: with"
                " Python 3.13 `pip install dmlab-gym && dmlab-gym build`, or see docs/dmlab30.md"
            )
        shown = [task.name for task in self.tasks if task.name in NEEDS_IMAGES]
        images = self.dataset_path
        if shown and not images:
            raise ValueError(
                f"{' and '.join(shown)}: set suite.dataset_path to the folder of the images that"
                " are shown there (docs/dmlab30.md says how to get them), or to"
                f" {DUMMY_IMAGES} for trying out, or choose suite.tasks without"
            )
        if shown and images and images != DUMMY_IMAGES and not Path(images).is_dir():
            raise ValueError(
                f"dataset_path={images}: there is no such folder; expected that of the images, or"
                f" {DUMMY_IMAGES}"
            )
        if self.cache is not None:
            try:
                self.cache.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"level_cache={self.cache.folder} cannot be made ({error}): choose another"
                    " folder, or null for none"
                ) from error

    def tidy(self) -> None:
        """Engines that were killed leave temporary folders behind."""
        scratch.sweep()

    def _provenance(self) -> dict[str, str]:
        engine = "DeepMind Lab"
        with suppress(metadata.PackageNotFoundError):  # built without, or not installed
            engine += f" {metadata.version('deepmind_lab')}"
        images = "dummy images" if self.dataset_path == DUMMY_IMAGES else "their own images"
        seeds = "all" if self.seeds_per_task is None else f"{self.seeds_per_task:,}"
        return {
            "random": "column random of dmlab30.csv: scalable_agent dmlab30.py, of test levels",
            "human": "column human of dmlab30.csv: scalable_agent dmlab30.py, of test levels",
            "cap": "mean_capped caps each task at 100 %, with no lower bound",
            "protocol": (
                f"{self.spec.num_actions} actions, action repeat {FRAMES_PER_STEP} at {FPS} frames"
                f" a second, {WIDTH}x{HEIGHT} RGB, {self.spec.instruction_length} words of an"
                f" instruction; running out of time is {self.time_limit}; psychlab shows {images};"
                f" training draws from {seeds} seeds; test levels with mixer seed"
                f" {TEST_MIXER_SEED:#x}; raw returns of whole games"
            ),
            "engine": engine,
        }


def _task(row: Mapping[str, str]) -> Task:
    levels = row["train_level"], row["test_level"]
    return Task(row["task"], *levels, float(row["random"]), float(row["human"]))
