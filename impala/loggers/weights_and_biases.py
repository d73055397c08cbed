"""Weights & Biases, as a follower of `metrics.jsonl`.

Points are sent once a checkpoint guards them, so that nothing which a resume would take back is
ever sent. At a resume the metrics file is read again and whatever the W&B run lacks is sent:
there is no gap and no doubled point, whichever of the two processes died, and when. A point with
an evaluation's numbers takes with it what that evaluation wrote into its own files.
"""

from __future__ import annotations

import json
import logging
import math
import netrc
import os
import secrets
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from impala.loggers.json_lines import read_points
from impala.loggers.logger import RunInfo
from impala.whole_file import write_whole

log = logging.getLogger(__name__)

MODES = ("auto", "online", "offline", "disabled")


class WeightsAndBiases:
    """A logger. One run directory is one W&B run, online or offline, however often it resumes.

    W&B's files go to `wandb/` in the run directory and the run's id to `wandb_run.json`. At a
    resume `metrics.jsonl` must already be cut at the checkpoint.

    An evaluation after training is a W&B run of its own, of job type "evaluate", beside the one of
    the training in its group, or in one that has its name; its files are in `evaluation/wandb/`. It
    begins with its first point, so that one which was stopped has none.

    mode:              "online", "offline", "disabled", or "auto": $WANDB_MODE if that is set, else
                       online with a login ($WANDB_API_KEY or netrc) and offline without one.
    init_timeout_s:    how long a server may take to answer before the run goes offline.
    finish_timeout_s:  how long `finish` waits for an upload. What is late is sent at a resume, or
                       by `wandb sync --include-online`.

    W&B never ends a run: its first failure is logged with the reason, and from there on points are
    in the metrics file alone until the run is resumed. Raises ValueError on an unknown mode.
    """

    def __init__(
        self,
        run: RunInfo,
        *,
        project: str,
        mode: str = "auto",
        entity: str | None = None,
        group: str | None = None,
        job_type: str = "train",
        tags: Sequence[str] = (),
        init_timeout_s: float = 8.0,
        finish_timeout_s: float = 4.0,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} of Weights & Biases, expected one of {MODES}")
        self._run_dir = self._folder = Path(run.run_dir)
        self._evaluated_frames = run.evaluated_frames
        name = run.name
        if run.evaluated_frames is not None:
            self._folder = self._run_dir / "evaluation"
            group, job_type = group or name, "evaluate"
            name = f"{name}, {run.evaluated_frames:,} frames"
        self._headline = run.headline
        self._arguments = {
            "dir": str(self._folder),
            "project": project,
            "entity": entity,
            "group": group,
            "job_type": job_type,
            "name": name,
            "tags": list(tags),
            "config": dict(run.config),
        }
        self._init_timeout_s = init_timeout_s
        self._finish_timeout_s = finish_timeout_s
        self._pending: deque[tuple[int, dict[str, float]]] = deque()
        self._sent_frames = -1
        self._run: Any = None
        self.mode = _decide(mode)
        self._is_to_start = self.mode != "disabled"
        if run.evaluated_frames is None:
            self._start_if_due(run.resume_frames)

    def write(self, frames: int, metrics: Mapping[str, float]) -> None:
        self._start_if_due(None)
        if self._run is not None:
            self._pending.append((frames, dict(metrics)))

    def commit(self, frames: int) -> None:
        """Sends the points up to `frames`."""
        while self._pending and self._pending[0][0] <= frames:
            self._send(*self._pending.popleft())

    def finish(self, exit_code: int) -> None:
        """Ends the W&B run with that exit code. Points that were not committed are not sent."""
        if self._run is None:
            return
        import wandb

        run, self._run = self._run, None
        try:
            run.finish(exit_code=exit_code)
            wandb.teardown(exit_code)  # only this waits until an offline run's file is complete
        except Exception as error:
            self._give_up(error)

    def _start_if_due(self, resume_frames: int | None) -> None:
        if self._is_to_start:
            self._is_to_start = False
            is_training = self._evaluated_frames is None
            self._arguments["id"] = _run_id(self._run_dir) if is_training else _new_id()
            self._start(resume_frames)

    def _start(self, resume_frames: int | None) -> None:
        try:
            self._run = self._init()
        except Exception as error:
            if self.mode == "online":
                log.warning("Weights & Biases cannot go online and goes offline: %s", error)
                self.mode = "offline"
                self._start(resume_frames)
            else:
                self._give_up(error)
            return
        log.info("Weights & Biases is %s, its run is %s", self.mode, self._arguments["id"])
        self._sent_frames = int(self._run.summary.get("frames", -1))
        if resume_frames is None:
            return
        if self._sent_frames > resume_frames:
            log.warning(
                "The W&B run already has points up to frames=%d, this run resumes at frames=%d: "
                "points in between are not sent again",
                self._sent_frames,
                resume_frames,
            )
        for point in read_points(self._run_dir / "metrics.jsonl"):
            metrics = {key: value for key, value in point.items() if value is not None}
            frames = int(metrics.pop("frames"))
            if frames <= resume_frames:
                self._send(frames, metrics)

    def _init(self) -> Any:
        """The W&B run, whose summary says what its server has: for an offline run, nothing."""
        offline = self.mode == "offline"
        # A file that W&B would upload holds the whole run or is no use: one left by a run that was
        # killed is torn, which stops `wandb sync`, and lacks what W&B had not written yet. The new
        # one is filled from the metrics file, so uploading it replaces what was uploaded before.
        for stale in self._folder.glob(f"wandb/offline-run-*-{self._arguments['id']}"):
            shutil.rmtree(stale)
        _need_a_cache(self._run_dir)
        with _temporary_folders_in(self._folder / "wandb"):
            import wandb

            hooks = sys.exit, sys.excepthook
            logging.getLogger("wandb").propagate = False  # it has a debug.log of its own
            wandb.setup(wandb.Settings(silent=True))  # before it tells whose key it loads
        try:
            run = wandb.init(
                **self._arguments,
                mode="offline" if offline else "online",
                resume=None if offline else "allow",
                settings=wandb.Settings(
                    silent=True,
                    reinit="create_new",
                    console="off",
                    disable_code=True,
                    disable_git=True,
                    disable_job_creation=True,
                    x_disable_stats=True,
                    x_save_requirements=False,
                    x_transaction_log_flush_interval=1.0,
                    init_timeout=self._init_timeout_s,
                    finish_timeout=self._finish_timeout_s,
                ),
            )
        except Exception:
            wandb.teardown()  # W&B's own process, for which the run's id is still in use
            raise
        finally:
            # W&B replaces these to guess an exit code and never puts them back; `finish` is told.
            sys.exit, sys.excepthook = hooks
        run.define_metric("frames")
        run.define_metric("*", step_metric="frames")
        return run

    def _send(self, frames: int, metrics: Mapping[str, float]) -> None:
        if self._run is None or frames <= self._sent_frames:
            return
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        try:
            self._run.log({"frames": frames, **finite, **_evaluated(self._run_dir, finite)})
            for name in ("score", "evaluation"):
                if (score := finite.get(f"{name}/{self._headline}")) is not None:
                    self._run.summary[f"headline/{name}"] = score
        except Exception as error:
            self._give_up(error)
        else:
            self._sent_frames = frames

    def _give_up(self, error: Exception) -> None:
        self._run = None
        self._pending.clear()
        instead = (
            f"the run goes on: every point is in {self._run_dir / 'metrics.jsonl'}; resuming the"
            " run sends what is missing"
        )
        if self._evaluated_frames is not None:
            path = _report_path(self._run_dir, self._evaluated_frames)
            instead = f"this evaluation is in {path}"
        log.warning(
            "Weights & Biases failed (%s: %s) and is off from here on, %s",
            type(error).__name__, error, instead,
        )  # fmt: skip


def _evaluated(run_dir: Path, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Table, chart and videos of the evaluation that these metrics have, if they have one."""
    frames = metrics.get("evaluation/frames")
    if frames is None:
        return {}
    report = _report_of(run_dir, int(frames), metrics)
    if report is None:
        return {}
    import wandb

    scores = report["metrics"]
    rows = [
        [
            task, scores[f"hns/{task}"], scores[f"return/{task}"], scores[f"length/{task}"],
            len(games["returns"]),
        ] for task, games in report["games"].items()
    ]  # fmt: skip
    table = wandb.Table(["task", "human-normalised %", "return", "length", "games"], rows)
    title = f"Human-normalised scores in % after {int(frames):,} frames"
    media = {
        "evaluation/table": table,
        "evaluation/chart": wandb.plot.bar(table, "task", "human-normalised %", title),
    }
    paths = [run_dir / video for video in report.get("videos", ())]
    videos = [wandb.Video(str(p), caption=p.stem, format="mp4") for p in paths if p.exists()]
    return {**media, "evaluation/videos": videos} if videos else media


def _report_of(run_dir: Path, frames: int, metrics: Mapping[str, float]) -> dict[str, Any] | None:
    """The report with these numbers: another evaluation of these frames may have its name now."""
    path = _report_path(run_dir, frames)
    damaged = []
    for each in (path, *sorted(path.parent.glob(f"{frames}_*.json"))):
        try:
            report = json.loads(each.read_text())
            scores = {
                f"evaluation/{k.removeprefix('score/')}": v for k, v in report["metrics"].items()
            }
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            damaged.append(f"{each} ({error})")
            continue
        shared = scores.keys() & metrics.keys()
        if shared and all(scores[key] == metrics[key] for key in shared):
            return report
    log.warning(
        "%s: W&B has this evaluation's numbers without a table",
        f"damaged: {', '.join(damaged)}" if damaged else f"{path} is missing, or of another",
    )
    return None


def _report_path(run_dir: Path, frames: int) -> Path:
    return run_dir / "evaluation" / f"{frames}.json"


@contextmanager
def _temporary_folders_in(folder: Path) -> Iterator[None]:
    """W&B makes some when it is imported and set up, which stay when the program is killed."""
    folder.mkdir(exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _decide(mode: str) -> str:
    """One of "online", "offline", "disabled"."""
    if mode == "auto":
        wanted = os.environ.get("WANDB_MODE", "")
        return wanted if wanted in MODES[1:] else "online" if _logged_in() else "offline"
    if mode == "online" and not _logged_in():
        log.warning("Weights & Biases goes offline: no login found. Run `wandb login` first")
        return "offline"
    return mode


def _logged_in() -> bool:
    """Whether W&B would find a key without asking for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        if path and Path(path).expanduser().is_file():
            try:
                return netrc.netrc(Path(path).expanduser()).authenticators(host) is not None
            except netrc.NetrcParseError as error:
                log.warning("No W&B login was read from %s: %s", path, error)
                return False
    return False


def _need_a_cache(run_dir: Path) -> None:
    """W&B logs to its cache; where there can be none (a read-only home), to the terminal."""
    if "WANDB_CACHE_DIR" in os.environ:
        return
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        (cache / "wandb").mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        os.environ["WANDB_CACHE_DIR"] = str(run_dir)


def _run_id(run_dir: Path) -> str:
    """The id of this directory's W&B run, made up the first time."""
    path = run_dir / "wandb_run.json"
    if path.exists():
        try:
            return str(json.loads(path.read_text())["id"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            log.warning("%s is damaged (%r): this will be another W&B run", path, error)
    run_id = _new_id()
    write_whole(path, json.dumps({"id": run_id}) + "\n")
    return run_id


def _new_id() -> str:
    return secrets.token_hex(4)
