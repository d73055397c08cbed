"""`python launch.py ...`, as its user sees it: printed, written, refused, resumed, stopped."""

import fcntl
import gc
import importlib.util
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from omegaconf import OmegaConf

import command_line
import launch
import run_directory
from impala.children import StopRequests
from impala.evaluation.progress import Progress
from impala.whole_file import write_whole
from run_directory import claimed
from tests.playing_here import PlayingHere
from tests.test_tensorboard import scalars
from tests.test_weights_and_biases import history, summary

LAUNCH = Path(launch.__file__).resolve()
TINY = (
    "suite=catch", "transport=in_process", "loggers=[]", "num_actors=1", "envs_per_actor=4",
    "algorithm.batch_size=4", "algorithm.micro_batch=4", "algorithm.unroll_length=5",
    "learner.threads=1",
)  # fmt: skip
UPDATE = 20  # frames of one


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def error(self):
        """The only line on standard error."""
        (line,) = self.err.splitlines()
        assert line.startswith("launch.py: error: ")
        return line.removeprefix("launch.py: error: ")


def run(*arguments):
    """`python launch.py <arguments>`, but in this process."""
    before = sys.argv, list(logging.root.handlers), logging.root.level
    out, err = io.StringIO(), io.StringIO()
    code = 0
    sys.argv = ["launch.py", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            command_line.run(launch.main)
    except SystemExit as end:
        code = end.code
    finally:
        for handler in set(logging.root.handlers) - set(before[1]):
            handler.close()
        sys.argv, logging.root.handlers, level = before
        logging.root.setLevel(level)
    return Ran(code, out.getvalue(), err.getvalue())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where it is run. Nothing goes online."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tmp_path


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run of two updates: what it printed, and its directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("original"))
        ran = run(*TINY, f"total_frames={2 * UPDATE}")
        assert (ran.code, ran.err) == (0, "")
        return ran, Path("outputs").absolute()


@pytest.fixture
def finished(original, folder):
    """The directory of a copy of that run."""
    shutil.copytree(original[1], folder / "outputs", symlinks=True)
    return next((folder / "outputs/catch/impala").glob("2*"))


def points(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_run_writes_and_says_what_it_should(original):
    ran, outputs = original
    run_dir = next(outputs.glob("catch/impala/2*"))
    assert {path.name for path in run_dir.iterdir()} == {
        ".lock",
        "config.yaml", "train.log", "metrics.jsonl", "episodes.jsonl", "summary.json",
        "checkpoints", "suite.json",
    }  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{3}_seed1", run_dir.name)
    assert (run_dir.parent / "latest").resolve() == run_dir
    assert "seed 1\n" in ran.out and re.search(r"actor 0: .*seeds \d+ \(policy\)", ran.out)
    shown = run_dir.relative_to(outputs.parent)
    assert ran.out.endswith(f"evaluate with: python launch.py mode=evaluate resume={shown}\n")
    assert (run_dir / "train.log").read_text() == ran.out
    suite = json.loads((run_dir / "suite.json").read_text())
    provenance = json.loads((run_dir / "summary.json").read_text())["provenance"]
    assert (suite["suite"], suite["headline"], suite["tasks"]) == ("catch", "mean", ["catch"])
    assert suite["provenance"].items() <= provenance.items()
    assert (provenance["frames"], provenance["levels"]) == (str(2 * UPDATE), "train")
    text = (run_dir / "config.yaml").read_text()
    config = OmegaConf.create(text)
    assert "${" not in text and "???" not in text
    assert (config.mode, config.resume, config.total_frames) == ("train", None, 2 * UPDATE)
    assert config.choices.network == "mlp" and config.choices["network/core"] == "feed_forward"


def test_whole_numbers_may_be_written_as_floats():
    ran = run(*TINY, "total_frames=4e1", "suite.rows=9.0")
    assert ran.code == 0
    config = OmegaConf.load("outputs/catch/impala/latest/config.yaml")
    assert [type(n) for n in (config.total_frames, config.suite.rows)] == [int, int]


WHOLE = "expected a whole number, at least"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("suite.tasks=[pnog]", ["'pnog' is no game of atari57; did you mean pong?"]),
        ("suite.tasks=pong", ["got 'pong' where a list"]),
        ("suite.tasks=pong,breakout seed=1,2", [
            "write suite.tasks=[pong,breakout] for a list", "seed=1,2: ", "add -m for a sweep",
        ]),
        ("suite=catch totl_frames=5 algorithm.optimizer.learning_rate=1 lr=1 rows=5 x=1 netwrk=a", [
            "unknown key 'totl_frames': did you mean total_frames?",
            "unknown key 'algorithm.optimizer.learning_rate': did you mean algorithm.optimizer.lr?",
            "unknown key 'lr': did you mean algorithm.optimizer.lr?",
            "unknown key 'rows': did you mean suite.rows?",
            "unknown key 'x': see `--cfg job` for all keys",
            "unknown key 'netwrk': did you mean network?",
        ]),
        ("suite=atari algorithm=x loggers=[consle] network/core=lsmt", [
            "suite=atari: there is no such choice, did you mean atari57?",
            "algorithm=x: there is no such choice, expected impala",
            "loggers=consle: there is no such choice, did you mean console?",
            "network/core=lsmt: there is no such choice, did you mean lstm?",
        ]),
        ("num_actors=two envs_per_actor=0 seed=-1 total_frames=null log_every_s=0 checkpoint.keep=0"
         " checkpoint.every_s=-1 algorithm.micro_batch=0 algorithm.unroll_length=1.5"
         " transport.slots_per_environment=1 algorithm.optimizer.lr=nan evaluation.games=true", [
            f"num_actors=two: {WHOLE} 1", f"envs_per_actor=0: {WHOLE} 1", f"seed=-1: {WHOLE} 0",
            f"total_frames=null: {WHOLE} 1", "log_every_s=0: expected a number above 0",
            f"checkpoint.keep=0: {WHOLE} 1", "checkpoint.every_s=-1: expected a number above 0",
            f"algorithm.micro_batch=0: {WHOLE} 1", f"algorithm.unroll_length=1.5: {WHOLE} 1",
            f"transport.slots_per_environment=1: {WHOLE} 2", f"evaluation.games=true: {WHOLE} 1",
            "algorithm.optimizer.lr=nan: expected a number above 0",
        ]),
        ("seed=a total_frames=-5 checkpoint=5 algorithm.agent.discount=x network.feed_back=5", [
            f"seed=a: {WHOLE} 0", f"total_frames=-5: {WHOLE} 1",
            "checkpoint=5: expected keys of its own",
            "algorithm.agent.discount=x: expected a number, such as 0.99",
            "network.feed_back=5: expected true or false, such as false",
        ]),
        ("algorithm.agent.reward_transform=x", ["no reward transform 'x'"]),
        ("+algorithm.agent.x=1", ["unexpected keyword argument 'x'"]),
        ("suite=catch learner.autocast=x", ["learner.autocast=x: expected true, false or auto"]),
        ("suite=catch algorithm.batch_size=1000", ["takes 1000 unrolls", "32 environments"]),
        ("num_actors=2 envs_per_actor=4", ["8 environments for 57 tasks", "envs_per_actor=29"]),
        ("suite=catch network=shallow", ["choose another one, such as mlp"]),
        ("mode=foo", ["mode=foo: expected train or evaluate"]),
        ("loggers.weights_and_biases.mode=foo", ["expected auto, online, offline or disabled"]),
        ("learner.autocast=1", ["learner.autocast=1: expected true, false or auto"]),
        ("loggers=[console] loggers.weights_and_biases.mode=disabled", [
            "loggers.weights_and_biases.mode: the part that has this key is not chosen here",
        ]),
        ("suite.tasks=5", ["got 5 where a list with at least one game of atari57 is expected"]),
        ("suite.full_action_space=abc", ["full_action_space=abc: expected true, false or null"]),
        ("algorithm.lr_schedule.path=a.b", ["a.b"]),
        ("suite=catch actors.mix=equal", [
            "actors.mix=equal: expected equal_actors, equal_frames, or a weight for each task",
        ]),
        ("actors.mix={ping:2}", ["actors.mix: ping is no task that is played; did you mean pong"]),
        ("suite=catch actors.mix={catch:-1}", ["catch has weight -1, expected a number above 0"]),
        ("actors.outside=x actors.reassign_every_s=0", [
            "actors.outside=x: expected auto, always or never",
            "actors.reassign_every_s=0: expected a number above 0",
        ]),
        ("suite=catch inference=server transport=in_process", ["transport=in_process has none"]),
        ("suite=catch inference=server inference.min_batch=9 inference.max_batch=3", [
            "inference.min_batch=9, inference.max_batch=3: expected 1 <= min_batch <= max_batch",
        ]),
        ("actors.mix={pong:inf}", ["pong has weight inf, expected a number above 0"]),
        ("suite=catch actors.mix=[catch]", ["actors.mix=['catch']: expected equal_actors"]),
        ("suite=catch actors.mix=null", ["actors.mix=None: expected equal_actors"]),
        ("suite=catch actors.outside=always transport=in_process", ["in_process has none"]),
        ("+actors.foo=3", ["unknown key 'actors.foo'"]),
        ("restarts=null", ["restarts=null: the program needs one"]),
        ("inference=null", ["inference=null: there is no such choice, expected actor or server"]),
        ("inference.min_batch=4", ["is a key of inference=server, which is not chosen here"]),
        ("num_actors=1000000000", ["num_actors=1000000000: expected a whole number, at most"]),
        ("seed=1e30", ["expected a whole number, at most 9223372036854775807"]),
        ("algorithm.optimizer.lr=inf", ["algorithm.optimizer.lr=inf: expected a number above 0"]),
        ("algorithm.agent.discount=nan", ["discount=nan: expected a number of at least 0"]),
        ("network.torso.motion_gain=abc", ["motion_gain=abc: expected null or a number above 0"]),
        ("hydra.run.dir=/dev/null/x", ["Not a directory"]),
        ("inference=x", ["inference=x: there is no such choice, expected actor or server"]),
        ("suite=catch videos=-1 evaluation.timeout_s=0 evaluation.at_once=0", [
            f"videos=-1: {WHOLE} 0", f"evaluation.at_once=0: {WHOLE} 1",
            "evaluation.timeout_s=0: expected a number above 0",
        ]),
        ("suite=catch total_frames=100 evaluation.every_frames=101 loggers=[]", [
            "evaluation.every_frames=101 with total_frames=100: there would be no evaluation",
        ]),
        ("mode=evaluate", ["mode=evaluate needs resume=<run directory>"]),
        ("device=foo", ["device=foo: expected auto, cpu or cuda"]),
        ("resume=none", ["resume=none: expected the directory of a run, but it does not exist"]),
        (f"resume={LAUNCH}", ["but it is a file"]),
        (f"resume={LAUNCH.parent} mode=evaluate", ["but it has no config.yaml"]),
        ("resume=a=b total_frames=", ["'resume=a=b' cannot be read", "needs two pairs of quotes"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(arguments, expected, folder):
    ran = run(*arguments.split())
    assert ran.code == 2
    assert [part for part in expected if part not in ran.error] == []
    assert ran.out == ""
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(["inference=server"], marks=pytest.mark.slow),
        pytest.param(["actors.outside=always"], marks=pytest.mark.slow),
        ["actors.mix=equal_frames", "inference=server", "actors.outside=always"],
        ["transport=in_process", "actors.mix={catch:2}"],
    ],
)
def test_actors_of_every_kind_finish_a_run(choices, folder):
    ran = run(*TINY, "transport=shared_memory", "num_actors=2", "total_frames=400", *choices)
    assert ran.code == 0, ran.error
    summary = folder / "outputs/catch/impala/latest/summary.json"
    assert json.loads(summary.read_text())["status"] == "finished"


def test_cuda_has_to_be_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no CUDA device" in run(*TINY, "device=cuda").error


def test_help_tells_groups_choices_and_keys():
    ran = run("--help")
    assert ran.code == 0
    for expected in ("suite: atari57, catch", "network/core: feed_forward, lstm", "total_frames "):
        assert f"\n{expected}" in ran.out
    examples = re.findall(r"^python launch.py (.*?)(?:   .*)?$", ran.out, re.MULTILINE)
    assert len(examples) >= 5
    for line in examples:
        given = shlex.split(line.replace("-m ", "").replace("1,2,3", "1").replace("--cfg job", ""))
        assert run(*given, "--cfg", "job").code == 0


def test_a_folder_of_ones_own_may_hold_recipes(folder):
    (folder / "mine" / "experiment").mkdir(parents=True)
    (folder / "mine" / "experiment" / "short.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /suite: catch\nseed: 17\n"
    )
    ran = run("--config-dir", "mine", "experiment=short", "--cfg", "job")
    config = OmegaConf.create(ran.out)
    assert (config.seed, config.suite._target_) == (17, "suites.catch.Catch")


# Directories


def test_no_two_runs_share_a_directory(folder):
    with ThreadPoolExecutor(16) as threads:
        made = list(threads.map(lambda _: run_directory.new_run_dir(None, "runs", 1), range(200)))
    assert len(set(made)) == 200 == len(list((folder / "runs").iterdir()))


def test_a_directory_that_is_there_is_not_taken(monkeypatch):
    times = iter(datetime(2030, 1, 2, 3, 4, 5, ms * 1000) for ms in (6, 6, 6, 7))
    fake = SimpleNamespace(datetime=SimpleNamespace(now=lambda: next(times)))
    monkeypatch.setattr(run_directory, "datetime", fake)
    assert run_directory.new_run_dir(None, "a", 3) == "a/2030-01-02_03-04-05_006_seed3"
    assert run_directory.new_run_dir(None, "a", 3) == "a/2030-01-02_03-04-05_007_seed3"


def test_the_command_to_resume_is_what_the_shell_and_hydra_need(folder):
    ran = run(*TINY, f"total_frames={UPDATE}", 'hydra.run.dir="a =(b), [c]"')
    assert ran.code == 0
    line = ran.out.splitlines()[-1].partition("evaluate with: ")[2]
    python, script, mode, *resume = shlex.split(line)
    assert (python, script, mode) == ("python", "launch.py", "mode=evaluate")
    ran = run(*resume, f"total_frames={2 * UPDATE}")
    assert ran.code == 0
    assert points(folder / "a =(b), [c]")[-1]["frames"] == 2 * UPDATE


# Resuming


def test_a_run_resumes_with_what_may_change(finished):
    run_dir = finished
    ran = run(
        f"resume={run_dir.parent}/latest/", "suite=catch", "seed=1", "network=mlp",
        f"total_frames={4 * UPDATE}", "algorithm.micro_batch=2", "loggers=[console]",
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    assert f"finished at {4 * UPDATE} of {4 * UPDATE} frames" in ran.out
    frames = [point["frames"] for point in points(run_dir)]
    assert frames == sorted(set(frames)) and frames[-1] == 4 * UPDATE
    config = OmegaConf.load(run_dir / "config.yaml")
    assert (config.resume, config.total_frames) == (None, 4 * UPDATE)
    assert config.algorithm.micro_batch == config.algorithm.experience.micro_batch == 2
    assert list(config.loggers) == ["console"]
    assert (config.envs_per_actor, config.algorithm.unroll_length) == (4, 5)


def test_lines_that_were_cut_away_are_said(finished):
    more = f"total_frames={4 * UPDATE}", f"log_every_frames={UPDATE}"
    assert run(f"resume={finished}", *more).code == 0
    for name, bytes_left in (("metrics.jsonl", 100), ("episodes.jsonl", 100)):
        path = finished / name
        path.write_bytes(path.read_bytes()[:bytes_left])
    ran = run(f"resume={finished}", f"total_frames={5 * UPDATE}")
    assert (ran.code, ran.err) == (0, "")
    assert "metrics.jsonl: line 1, of 100 bytes, is torn or damaged and was dropped" in ran.out
    assert re.search(r"episodes.jsonl: line 2, of \d+ bytes, is torn or damaged", ran.out)
    assert re.search(r"metrics.jsonl has 0 of the 2 points that were there .* frames=80", ran.out)
    assert re.search(r"episodes.jsonl has 1 of the \d+ games that were there", ran.out)
    assert [point["frames"] for point in points(finished)] == [5 * UPDATE]
    ran = run(f"resume={finished}", f"total_frames={6 * UPDATE}")
    assert "torn" not in ran.out and "that were there" not in ran.out


def test_what_would_be_another_run_is_refused_by_name(finished):
    run_dir = finished
    before = contents(run_dir)
    ran = run(
        f"resume={run_dir}", "seed=2", "suite=atari57", "network=deep", "network/core=lstm",
        "algorithm.batch_size=8", "total_frames=1000", "experiment=pong",
    )  # fmt: skip
    assert ran.code == 2
    refused, _, may = ran.error.partition(" would make another run ")
    assert refused == (
        "seed=2, suite=atari57, network=deep, network/core=lstm, algorithm.batch_size=8,"
        " experiment=pong"
    )
    assert "A resumed one may be given: " in may and "total_frames" in may
    assert contents(run_dir) == before


def test_a_finished_run_says_so(finished):
    run_dir = finished
    before = contents(run_dir)
    ran = run(f"resume={run_dir}")
    assert ran.code == 0
    assert "the run has 40 frames already and total_frames=40" in ran.out
    assert "Give a greater total_frames" in ran.out
    del before[run_dir / "train.log"], before[run_dir / ".lock"]
    assert before.items() <= contents(run_dir).items()


def test_a_run_that_is_being_trained_is_left_alone(finished):
    run_dir = finished
    with claimed(run_dir):
        before = contents(run_dir)
        ran = run(f"resume={run_dir}", "total_frames=1000")
        assert ran.code == 2
        assert f"is being trained by process {os.getpid()} of " in ran.error
        assert contents(run_dir) == before
    assert run(f"resume={run_dir}").code == 0


def test_keys_that_a_run_is_too_old_to_have_get_their_defaults(finished):
    saved = OmegaConf.load(finished / "config.yaml")
    del saved["restarts"], saved["actors"]["mix"], saved["algorithm"]["max_lag"]
    OmegaConf.save(saved, finished / "config.yaml")
    assert run(f"resume={finished}", "total_frames=1000").code == 0
    saved = OmegaConf.load(finished / "config.yaml")
    assert (saved.actors.mix, saved.algorithm.max_lag) == ("equal_actors", None)
    assert saved.restarts.per_task == 5


def test_a_checkpoint_of_another_network_is_refused(finished):
    saved = OmegaConf.load(finished / "config.yaml")
    saved.suite.rows += 1
    OmegaConf.save(saved, finished / "config.yaml")
    for mode in ("train", "evaluate"):
        ran = run(f"resume={finished}", f"mode={mode}", "total_frames=1000")
        assert ran.code == 2 and "the checkpoint does not fit" in ran.error


@pytest.mark.parametrize(
    "text", ["", "a: [", "mode: train\nseed: 1\n", "\x00\x01", "- 1\n", "actors: 3\n"]
)
def test_a_damaged_config_is_refused(finished, text):
    run_dir = finished
    (run_dir / "config.yaml").write_text(text)
    before = contents(run_dir)
    ran = run(f"resume={run_dir}")
    assert ran.code == 2
    assert re.search(r"outputs/catch/impala/\S+/config.yaml is damaged", ran.error)
    assert contents(run_dir) == before


def test_a_run_without_a_checkpoint_never_starts_from_scratch(finished):
    run_dir = finished
    for path in (run_dir / "checkpoints").iterdir():
        path.unlink()
    ran = run(f"resume={run_dir}", "total_frames=100")
    assert ran.code == 2
    assert "has no checkpoint" in ran.error


def test_evaluation_prints_writes_and_touches_nothing_else(finished):
    run_dir = finished
    before = contents(run_dir)
    ran = run(
        "mode=evaluate", f"resume={run_dir}", "evaluation.games=3", "evaluation.num_workers=1",
        "evaluation.greedy=true",
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    assert f"catch after {2 * UPDATE} frames" in ran.out and "human-normalised" in ran.out
    report = json.loads((run_dir / "evaluation" / f"{2 * UPDATE}.json").read_text())
    assert (report["greedy"], len(report["games"]["catch"]["returns"])) == (True, 3)
    after = contents(run_dir)
    assert before.items() <= after.items()
    assert {path.name for path in after.keys() - before.keys()} == {
        ".lock", "40.json", "evaluate.log",
    }  # fmt: skip


@pytest.fixture
def playing_here(monkeypatch):
    monkeypatch.setattr("impala.evaluation.evaluator.Workers", PlayingHere)
    monkeypatch.setattr(PlayingHere, "fails", None)
    return PlayingHere


def test_evaluation_beside_training_gives_the_numbers_of_one_afterwards(playing_here):
    ran = run(
        *TINY, f"total_frames={6 * UPDATE}", f"evaluation.every_frames={2 * UPDATE}",
        "evaluation.games=5", f"log_every_frames={UPDATE}", "checkpoint.keep=9", "videos=1",
        "loggers=[tensorboard]",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    run_dir = Path("outputs/catch/impala/latest").resolve()
    lines = points(run_dir)
    assert [line["frames"] for line in lines] == [UPDATE * (i + 1) for i in range(6)]
    logged = {
        line["frames"]: line["evaluation/frames"] for line in lines if "evaluation/frames" in line
    }
    # One portion is played in a turn; the last evaluation is waited for.
    assert logged == {40: 40.0, 80: 80.0, 120: 120.0}
    assert {f"ckpt_{frames}.pt" for frames in (40, 80, 120)} <= {
        path.name for path in (run_dir / "checkpoints").iterdir()
    }
    report = json.loads((run_dir / "evaluation" / "120.json").read_text())
    assert lines[-1]["evaluation/mean"] == report["score"]
    assert [(run_dir / video).exists() for video in report["videos"]] == [True]
    assert run("mode=evaluate", f"resume={run_dir}").code == 0
    again = json.loads((run_dir / "evaluation" / "120.json").read_text())
    assert (again["games"], again["weights"]) == (report["games"], report["weights"])


def test_an_evaluation_is_logged_as_a_run_of_its_own(finished, playing_here):
    ran = run("mode=evaluate", f"resume={finished}", "videos=1", "evaluation.games=2",
              "loggers=[console,weights_and_biases,tensorboard]")  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    assert "finished at" not in ran.out  # the console's words are of training
    report = json.loads((finished / "evaluation" / "40.json").read_text())
    (file,) = finished.glob("evaluation/wandb/offline-run-*/*.wandb")
    (point,) = history(finished, [file])
    assert (point["frames"], point["evaluation/mean"]) == (40, report["score"])
    assert summary([file])["headline/evaluation"] == report["score"]
    assert scalars(finished / "evaluation")["evaluation/mean"] == [(40, report["score"])]
    assert not (finished / "wandb").exists() and not (finished / "tensorboard").exists()


def test_a_run_that_is_being_evaluated_is_left_alone(finished, playing_here):
    with claimed(finished, "evaluated"):
        before = contents(finished)
        ran = run(f"resume={finished}", "mode=evaluate")
        assert ran.code == 2
        assert f"is being evaluated by process {os.getpid()} of " in ran.error
        assert contents(finished) == before
    (finished / "evaluation").mkdir(exist_ok=True)
    with open(finished / "evaluation" / "40.games.jsonl", "a") as file:  # as beside training
        fcntl.flock(file, fcntl.LOCK_EX)
        ran = run(f"resume={finished}", "mode=evaluate")
        assert ran.code == 2 and "another program is at the evaluation" in ran.error
    assert run(f"resume={finished}", "mode=evaluate", "evaluation.games=1").code == 0


@pytest.mark.parametrize("when", ["impala.evaluation.evaluator.write_whole", "between"])
def test_a_signal_after_the_last_game_leaves_the_report(finished, playing_here, monkeypatch, when):
    """While it is written, or before that begins."""

    def interrupted(call):
        def wrapped(*arguments):
            result = call(*arguments)
            signal.raise_signal(signal.SIGINT)
            return result

        return wrapped

    if when == "between":
        when, call = "impala.evaluation.evaluator.Progress.show", Progress.show
    else:
        call = write_whole
    monkeypatch.setattr(when, interrupted(call))
    before = signal.signal(signal.SIGINT, lambda number, _: sys.exit(128 + number))
    try:
        ran = run(f"resume={finished}", "mode=evaluate", "evaluation.games=2")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ran.code == 130
    assert "human-normalised" in ran.out and "go on with" not in ran.out
    assert len(json.loads((finished / "evaluation" / "40.json").read_text())["games"]["catch"]) == 2
    assert {path.name for path in (finished / "evaluation").iterdir()} == {".lock", "40.json"}


def test_an_evaluation_that_is_stopped_says_how_to_go_on(finished, playing_here, monkeypatch):
    command = ["mode=evaluate", f"resume={finished}", "evaluation.games=3", "evaluation.at_once=1"]
    receive = PlayingHere.receive

    def stopped(self, timeout_s):  # as by Ctrl-C: see the end of launch.py
        if len(self._waiting) == 1:
            sys.exit(130)
        return receive(self, timeout_s)

    monkeypatch.setattr(PlayingHere, "receive", stopped)
    ran = run(*command)
    assert ran.code == 130
    assert "stopped: 2 of 3 games are finished and kept" in ran.out
    assert f"go on with: python launch.py {shlex.join(command)}" in ran.out
    monkeypatch.setattr(PlayingHere, "receive", receive)
    ran = run(*command)
    assert ran.code == 0 and "going on with" in ran.out


def test_what_videos_and_tensorboard_need_is_looked_for_first(finished, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *_: None if name in ("av", "tensorboard") else find_spec(name),
    )
    for arguments in (("mode=evaluate", "videos=2"), ("total_frames=900", "loggers=[tensorboard]")):
        ran = run(f"resume={finished}", *arguments)
        assert ran.code == 2 and "pip install 'impala[" in ran.error


# Failing


def test_a_failure_is_logged_with_its_traceback_and_the_way_to_go_on(monkeypatch):
    monkeypatch.setattr(
        "impala.learner.Learner.metrics", lambda _: (_ for _ in ()).throw(KeyError("broken"))
    )
    ran = run(*TINY, f"total_frames={2 * UPDATE}")
    assert ran.code == 1
    log = Path("outputs/catch/impala/latest/train.log").read_text()
    assert "Traceback" in log and "KeyError: 'broken'" in log
    assert "it can go on from its last checkpoint: python launch.py resume=outputs/catch" in log
    assert json.loads(Path("outputs/catch/impala/latest/summary.json").read_text())["status"] == (
        "failed"
    )


@pytest.fixture
def small_disk(folder):
    """One of eight megabytes."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("it takes root to mount one")
    yield disk
    gc.collect()  # what still has a file of it open
    subprocess.run(["umount", "-l", str(disk)], check=True)


def filled(disk, but):
    """All but so many bytes of it."""
    left = shutil.disk_usage(disk).free - but
    (disk / "filling").write_bytes(bytes(left))


@pytest.mark.parametrize("loggers", ["[]", pytest.param("[tensorboard]", marks=pytest.mark.slow)])
def test_a_full_disk_ends_a_run_with_a_line_that_says_what_to_do(small_disk, loggers):
    where = f"hydra.run.dir={small_disk}/run"
    assert run(*TINY, where, "total_frames=40", f"loggers={loggers}").code == 0
    filled(small_disk, but=12_000)
    before = {path.name for path in (small_disk / "run" / "checkpoints").iterdir()}
    resume = f"resume={small_disk}/run"
    ran = run(resume, "total_frames=100_000", f"log_every_frames={UPDATE}")
    assert ran.code == 1 and "Traceback" not in ran.out + ran.err
    stopped = r"the run stopped: cannot write to \S+/run/\S+: No space left on device. Make room"
    assert len(re.findall(stopped, ran.out)) == 1
    assert f"it can go on from its last checkpoint: python launch.py {resume[:7]}" in ran.out
    assert before == {path.name for path in (small_disk / "run" / "checkpoints").iterdir()}
    (small_disk / "filling").unlink()
    assert run(resume, "total_frames=80").code == 0
    assert [point["frames"] for point in points(small_disk / "run")][-1] == 80


@pytest.mark.slow
def test_an_evaluation_on_a_full_disk_goes_on_once_there_is_room(small_disk, playing_here):
    assert run(*TINY, f"hydra.run.dir={small_disk}/run", "total_frames=40").code == 0
    filled(small_disk, but=13_000)  # lock, log and the first games take a page each
    command = f"resume={small_disk}/run", "mode=evaluate", "evaluation.games=400"
    ran = run(*command)
    assert ran.code == 1 and "Traceback" not in ran.out + ran.err
    assert re.search(r"the run stopped: cannot write to \S+/40\.\S+: No space left", ran.out)
    assert "games are finished and kept" in ran.out and "go on with: python launch.py" in ran.out
    (small_disk / "filling").unlink()
    ran = run(*command)
    assert ran.code == 0 and "going on with" in ran.out
    assert {path.name for path in (small_disk / "run/evaluation").iterdir()} == {".lock", "40.json"}


# Signals, to all processes at once, as a terminal and `timeout` send them


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_run_that_can_be_resumed(number, folder):
    small = ("num_actors=1", "learner.threads=1", "algorithm/optimizer=rmsprop")
    process = subprocess.Popen(
        [sys.executable, LAUNCH, "suite=catch", "loggers=[console]", "log_every_s=0.1", *small],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr.readline() == "launch.py: loading\n"
    lines = []
    while not any("loss" in line for line in lines):
        lines.append(process.stdout.readline())
        assert lines[-1], process.stderr.read()
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.killpg(process.pid, number)
    out, error = process.communicate()
    assert (process.returncode, error) == (128 + number, "")
    assert not psutil.wait_procs(children, timeout=60)[1]
    command = out.splitlines()[-1].partition("go on with: ")[2]
    assert re.fullmatch(r"python launch.py resume=outputs/catch/impala/\S+", command)

    run_dir = folder / command.partition("resume=")[2]
    stopped = json.loads((run_dir / "summary.json").read_text())
    assert stopped["status"] == "interrupted"
    ran = run(
        *shlex.split(command)[2:], f"total_frames={stopped['frames'] + 1}", "transport=in_process"
    )
    assert (ran.code, ran.err) == (0, "")
    assert points(run_dir)[-1]["frames"] > stopped["frames"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("pause_s", [0.0, 1.1])  # the same one twice; another one
@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_a_signal_that_is_sent_twice_leaves_nothing_half_done(finished, mode, pause_s, number):
    given = ["total_frames=100_000_000", "transport=shared_memory", "checkpoint.every_s=0.01"]
    began = finished / "checkpoints" / "ckpt_40.pt"
    if mode == "evaluate":
        given = ["mode=evaluate", "evaluation.games=100_000", "evaluation.num_workers=2"]
        began = finished / "evaluation" / "40.games.jsonl"
    process = subprocess.Popen(
        [sys.executable, LAUNCH, f"resume={finished}", *given], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr.readline() == "launch.py: loading\n"
    while began.exists() == (mode == "train") or (began.exists() and began.stat().st_size < 2_000):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.killpg(process.pid, number)
    time.sleep(pause_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    _, error = process.communicate()
    assert error == ""
    # Python has no handlers any more in its last moments, when all of this is done.
    assert process.returncode in (128 + number, -number)
    assert not psutil.wait_procs(children, timeout=60)[1]
    kept = [path for path in finished.rglob(".*") if path.name != ".lock"]
    assert kept == [], "of files that were being written"
    arguments = ["total_frames=40"] if mode == "train" else ["mode=evaluate", "evaluation.games=1"]
    assert run(f"resume={finished}", *arguments, "transport=in_process").code == 0


def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch):
    now = iter((10.0, 10.1, 11.05, 11.06, 20.0))
    monkeypatch.setattr("impala.children.time.monotonic", lambda: next(now))
    requests = StopRequests()
    assert [requests.is_new() for _ in range(5)] == [True, False, True, False, True]


@pytest.mark.parametrize("wait_s", [0.0, 0.7])  # at once; amid the imports of large libraries
def test_a_signal_before_anything_runs_is_no_traceback(wait_s, folder):
    process = subprocess.Popen(
        [sys.executable, LAUNCH, "suite=catch"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr.readline() == "launch.py: loading\n"
    time.sleep(wait_s)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert (process.returncode, error) == (130, "")
