"""Weights & Biases: what its files hold after crashes, and what happens when it fails."""

from __future__ import annotations

import json
import logging
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.errors import CommError
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from impala.loggers.json_lines import JsonLines
from impala.loggers.logger import RunInfo
from impala.loggers.weights_and_biases import WeightsAndBiases


@pytest.fixture(autouse=True)
def _no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def follower(
    run_dir: Path,
    resume_frames: int | None = None,
    mode: str = "auto",
    evaluated_frames: int | None = None,
    group: str | None = "a-group",
) -> WeightsAndBiases:
    run = RunInfo(
        run_dir=run_dir,
        name="a-name",
        title="a suite",
        config={"seed": 1, "suite": {"name": "catch"}},
        total_frames=1000,
        task_names=("pong",),
        headline="median",
        resume_frames=resume_frames,
        evaluated_frames=evaluated_frames,
    )
    return WeightsAndBiases(
        run,
        project="a-project",
        group=group,
        tags=("a-tag",),
        mode=mode,
    )


def records(path: Path) -> list[Record]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    found, record, at = [], b"", 7
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if room < 7 or kind == 0:
            at += room
            continue
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(record))
            record = b""
    return found


def all_records(run_dir: Path) -> list[Record]:
    """Those of every file that `wandb sync` would upload, in its order."""
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    return [record for file in files for record in records(file)]


def history(run_dir: Path, files: Iterable[Path] = ()) -> list[dict[str, Any]]:
    """Of the run in the directory, or of these files."""
    found = [record for file in files for record in records(file)] or all_records(run_dir)
    return [
        {".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]


def summary(files: Iterable[Path]) -> dict[str, Any]:
    return {
        item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
        for file in files
        for record in records(file)
        if record.HasField("summary")
        for item in record.summary.update
    }


CRASH = """
import os, signal, sys
from pathlib import Path
from impala.loggers.json_lines import JsonLines
from impala.loggers.logger import RunInfo
from impala.loggers.weights_and_biases import WeightsAndBiases
assert "wandb" not in sys.modules  # imported only where it is used
hooks = sys.exit, sys.excepthook, signal.getsignal(signal.SIGINT)
lines = JsonLines(sys.argv[1] + "/metrics.jsonl")
run = RunInfo(Path(sys.argv[1]), "a-name", "", {}, 1000, (), "median", None)
follower = WeightsAndBiases(run, project="a-project")
assert hooks == (sys.exit, sys.excepthook, signal.getsignal(signal.SIGINT))
for frames in (10, 20, 30, 40):
    for logger in (lines, follower):
        logger.write(frames, {"updates": 0, "loss/total": 0.5})
    if frames == 30:
        for logger in (lines, follower):
            logger.commit(frames)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_and_resumed_offline_run_has_every_point_once(tmp_path: Path) -> None:
    crashed = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], capture_output=True)
    assert crashed.returncode == -9, crashed.stderr
    run_id = json.loads((tmp_path / "wandb_run.json").read_text())["id"]

    loggers = [
        JsonLines(tmp_path / "metrics.jsonl", resume_frames=30),
        follower(tmp_path, resume_frames=30),
    ]
    for frames in (40, 50, 60):
        for logger in loggers:
            logger.write(frames, {"updates": 1, "loss/total": 0.25, "grad/norm": math.nan})
    for logger in loggers:
        logger.commit(50)
        logger.finish(3)

    points = history(tmp_path)
    assert [(p["frames"], p["updates"], p["loss/total"]) for p in points] == [
        (10, 0, 0.5),
        (20, 0, 0.5),
        (30, 0, 0.5),
        (40, 1, 0.25),
        (50, 1, 0.25),  # 60 was not committed: a resume would take it back
    ]
    assert "grad/norm" not in points[-1]  # it was not finite
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1  # all that there is to upload
    of_kind = {record.WhichOneof("record_type"): record for record in all_records(tmp_path)}
    run = of_kind["run"].run
    assert (run.run_id, run.project, run.run_group, run.job_type, run.display_name, *run.tags) == (
        run_id,
        "a-project",
        "a-group",
        "train",
        "a-name",
        "a-tag",
    )
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["seed"] == 1 and config["suite"] == {"name": "catch"}
    assert of_kind["exit"].exit.exit_code == 3
    axes = [record.metric for record in all_records(tmp_path) if record.HasField("metric")]
    assert {axis.glob_name or axis.name: axis.step_metric for axis in axes} == {
        "frames": "",
        "*": "frames",
    }


def test_an_offline_run_holds_evaluations_tables_charts_videos_and_the_headline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "evaluation"
    (folder / "10.videos").mkdir(parents=True)
    (folder / "10.videos" / "pong_0.mp4").write_bytes(b"a video")
    scores = {"score/median": 50.0, "hns/pong": 50.0, "return/pong": -3.0, "length/pong": 400.0}
    report = {
        "metrics": scores,
        "games": {"pong": {"returns": [-2.0, -4.0], "lengths": [400, 400]}},
        "videos": ["evaluation/10.videos/pong_0.mp4"],
    }
    (folder / "10_1.json").write_text(json.dumps(report))  # which another has put aside
    other = {"metrics": scores | {"score/median": 60.0}, "games": {}}
    (folder / "10.json").write_text(json.dumps(other))
    (folder / "30.json").write_text('{"metr')
    logger = follower(tmp_path)
    logger.write(20, {"score/median": 40.0, "evaluation/frames": 10.0, "evaluation/median": 50.0})
    logger.write(30, {"score/median": 45.0})
    logger.write(40, {"evaluation/frames": 30.0, "evaluation/median": 55.0})
    logger.commit(40)
    logger.finish(0)

    first, second, third = history(tmp_path)
    (run_files,) = tmp_path.glob("wandb/offline-run-*/files")
    assert first["evaluation/table._type"] == "table-file"
    table = json.loads((run_files / first["evaluation/table.path"]).read_text())
    assert table["data"] == [["pong", 50.0, -3.0, 400.0, 2]]
    (video,) = run_files.rglob("*.mp4")
    assert video.read_bytes() == b"a video"
    config = {
        tuple(item.nested_key) or item.key: item.value_json
        for record in all_records(tmp_path)
        if record.HasField("config")
        for item in record.config.update
    }
    assert "wandb/bar/v0" in "".join(map(str, config.values()))  # the chart is drawn from the table
    assert first["evaluation/chart_table.nrows"] == 1
    assert not any(key.startswith("evaluation") for key in second)
    assert third["evaluation/median"] == 55.0 and "damaged: " in caplog.text
    assert "30.json" in caplog.text
    said = summary(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert said["headline/score"] == 45.0 and said["headline/evaluation"] == 55.0


@pytest.mark.parametrize("content", ["", "{}", "[]", "null"])
def test_a_damaged_id_is_named_and_another_made(tmp_path, caplog, content) -> None:
    path = tmp_path / "wandb_run.json"
    path.write_text(content)
    logger = follower(tmp_path)
    logger.finish(0)
    assert f"{path} is damaged" in caplog.text
    assert json.loads(path.read_text())["id"]


def test_an_evaluation_after_training_is_a_run_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    training = follower(tmp_path)
    training.write(10, {"updates": 1.0})
    training.commit(10)
    training.finish(0)
    of_training = [(path, path.read_bytes()) for path in tmp_path.glob("wandb/*/*.wandb")]
    video = tmp_path / "evaluation" / "10.videos" / "pong_0.mp4"
    video.parent.mkdir(parents=True)
    video.write_bytes(b"a video")
    report = {
        "metrics": {
            "score/median": 50.0,
            "hns/pong": 50.0,
            "return/pong": -3.0,
            "length/pong": 400.0,
        },
        "games": {"pong": {"returns": [-2.0, -4.0], "lengths": [400, 400]}},
        "videos": ["evaluation/10.videos/pong_0.mp4"],
    }
    (tmp_path / "evaluation" / "10.json").write_text(json.dumps(report))
    loggers = [follower(tmp_path, evaluated_frames=10, group=group) for group in ("a-group", None)]
    stopped = follower(tmp_path, evaluated_frames=10)
    for logger in loggers:
        logger.write(10, {"evaluation/frames": 10.0, "evaluation/median": 50.0})
        logger.commit(10)
        logger.finish(0)
    stopped.finish(130)

    runs = {}
    for file in tmp_path.glob("evaluation/wandb/offline-run-*/*.wandb"):
        of_kind = {record.WhichOneof("record_type"): record for record in records(file)}
        runs[of_kind["run"].run.run_group] = file, of_kind["run"].run
    assert set(runs) == {"a-group", "a-name"}  # the one that was stopped has none
    ids = {run.run_id for _, run in runs.values()}
    assert len(ids | {json.loads((tmp_path / "wandb_run.json").read_text())["id"]}) == 3
    assert {(run.job_type, run.display_name) for _, run in runs.values()} == {
        ("evaluate", "a-name, 10 frames")
    }
    for file, _ in runs.values():
        (point,) = history(tmp_path, [file])
        assert (point["frames"], point["evaluation/median"]) == (10, 50.0)
        table = json.loads((file.parent / "files" / point["evaluation/table.path"]).read_text())
        assert table["data"] == [["pong", 50.0, -3.0, 400.0, 2]]
        assert [path.read_bytes() for path in file.parent.rglob("*.mp4")] == [b"a video"]
        assert summary([file])["headline/evaluation"] == 50.0
    assert of_training == [(path, path.read_bytes()) for path in tmp_path.glob("wandb/*/*.wandb")]


def test_an_evaluation_says_where_it_is_when_the_service_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_):
        raise BrokenPipeError("the service died")

    monkeypatch.setattr(wandb, "init", fail)
    follower(tmp_path, evaluated_frames=10).write(10, {"evaluation/median": 50.0})
    assert f"this evaluation is in {tmp_path / 'evaluation' / '10.json'}" in caplog.text


class FakeRun:
    """A W&B run whose server already has points up to `frames`."""

    def __init__(self, frames: int | None = None) -> None:
        self.summary = {} if frames is None else {"frames": frames}
        self.points: list[dict[str, float]] = []
        self.exit_codes: list[int] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, point: dict[str, float]) -> None:
        self.points.append(point)

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


def test_an_online_run_is_sent_what_its_server_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for frames in (10, 20, 30, 40, 50):
        lines.write(frames, {"updates": frames / 10})
    run, arguments = FakeRun(frames=20), {}

    def init(**given):
        arguments.update(given)
        return run

    monkeypatch.setattr(wandb, "init", init)
    logger = follower(tmp_path, resume_frames=40)
    logger.write(60, {"updates": 6.0})
    logger.commit(60)
    logger.finish(0)
    assert (arguments["mode"], arguments["resume"]) == ("online", "allow")
    assert [point["frames"] for point in run.points] == [30, 40, 60]
    assert run.exit_codes == [0]


def test_without_a_network_a_run_goes_offline_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    run = FakeRun()

    def init(mode: str, **_):
        if mode == "online":
            raise CommError("no route to host")
        return run

    monkeypatch.setattr(wandb, "init", init)
    logger = follower(tmp_path)
    logger.write(10, {})
    logger.commit(10)
    assert logger.mode == "offline" and run.points == [{"frames": 10}]
    assert "no route to host" in caplog.text


def test_a_failure_of_the_service_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    logger = follower(tmp_path)

    def fail(point: dict[str, float]) -> None:
        raise BrokenPipeError("the service died")

    run.log = fail  # type: ignore[method-assign]
    for frames in (10, 20, 30):
        logger.write(frames, {})
        logger.commit(frames)
    logger.finish(0)
    assert [record.message.count("the service died") for record in caplog.records] == [1]
    assert "metrics.jsonl" in caplog.text


@pytest.mark.parametrize(
    ("mode", "environment", "decided"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("auto", {"WANDB_API_KEY": "k" * 40}, "online"),
        ("auto", {"NETRC": "netrc"}, "online"),
        ("online", {}, "offline"),  # nobody is there to answer a question about a login
        ("offline", {"WANDB_API_KEY": "k" * 40}, "offline"),
        ("disabled", {"WANDB_API_KEY": "k" * 40}, "disabled"),
    ],
)
def test_auto_is_online_with_a_login(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    environment: dict[str, str],
    decided: str,
) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "k" * 40)
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(wandb, "init", lambda **_: FakeRun())
    logger = follower(tmp_path, mode=mode)
    logger.finish(0)
    assert logger.mode == decided
    assert (tmp_path / "wandb_run.json").exists() == (decided != "disabled")


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mode='on' .*'auto'"):
        follower(tmp_path, mode="on")


def test_a_killed_program_leaves_no_folder_of_wandb_elsewhere(tmp_path):
    code = (
        "import os, pathlib, sys; from impala.loggers import weights_and_biases as logger\n"
        "with logger._temporary_folders_in(pathlib.Path(sys.argv[1])):\n"
        "    import wandb\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    folder, elsewhere = tmp_path / "wandb", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], env={**os.environ, "TMPDIR": str(elsewhere)},
        check=False,
    )  # fmt: skip
    assert list(folder.iterdir()), "what is tested: they are somewhere"
    assert list(elsewhere.iterdir()) == []
