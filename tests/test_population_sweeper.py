"""`hydra/sweeper=population` as its user sees it: what it writes, refuses, survives and resumes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from omegaconf import OmegaConf

import command_line
import launch
from hydra_plugins.launchers import jobs_at_once
from impala.checkpoint import read
from impala.loggers.json_lines import read_points
from impala.population import Interval, Rule
from impala.population_directory import PopulationDirectory, Record, space_as_json
from tests.report_runs import CHROMIUM
from tests.test_launch import LAUNCH, TINY, run

LR, ENTROPY = "algorithm.optimizer.lr", "algorithm.agent.entropy_cost"
SWEPT = (f"{LR}=tag(log, interval(1e-4, 1e-1))", f"{ENTROPY}=choice(1e-1, 1e-3)")
ROUNDS = (
    "-m", "hydra/sweeper=population", *TINY, "total_frames=900", "log_every_frames=100",
    "checkpoint.keep=100", "hydra.sweeper.size=3", "hydra.sweeper.round_frames=300",
    "hydra.sweeper.burn_in_frames=300", "hydra.sweeper.threshold=1",
    "hydra.sweeper.perturb_probability=0.8", *SWEPT,
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where nothing is drawn, which takes seconds; `sweep` is older, and has its page."""
    monkeypatch.setattr("impala.report.report.make_of_population", lambda path: path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    return tmp_path


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The directory of a finished population, and what it printed."""
    directory = tmp_path_factory.mktemp("population") / "sweep"
    ran = run(*ROUNDS, f"hydra.sweep.dir={directory}")
    assert ran.code == 0, ran.err
    return directory, ran.out


def points(directory, member):
    return list(read_points(directory / str(member) / "metrics.jsonl"))


# Rounds


def test_all_generations_of_all_members_are_told(sweep):
    directory, out = sweep
    records = PopulationDirectory(directory).lineage()
    assert [(r.generation, r.member) for r in records] == [
        (g, m) for g in range(3) for m in range(3)
    ]
    assert {r.frames for r in records} == {0, 300, 600}
    assert any(r.copied for r in records), "the test shows nothing: choose another seed"
    for earlier, later in zip(records, records[3:], strict=False):
        assert later.old == earlier.new
        (point,) = [p for p in points(directory, later.member) if p["frames"] == later.frames]
        assert later.fitness == point["score/mean_capped"]
        parents = records[3 * (later.generation - 1) + later.parent].new
        assert set(parents) == {LR, ENTROPY}
        ratios = [later.new[key] / parents[key] for key in parents]
        assert all(round(ratio, 6) in (1.0, 1.2, round(1 / 1.2, 6)) for ratio in ratios) or (
            later.new[LR] in (1e-4, 1e-1) or later.new[ENTROPY] in (1e-1, 1e-3)
        )
    assert "round 3 of 3" in out and "evaluate it with: python launch.py mode=evaluate" in out


def test_what_is_logged_is_what_the_generation_was_given(sweep):
    directory, _ = sweep
    latest = {}
    for record in PopulationDirectory(directory).lineage():
        latest.setdefault(record.member, []).append(record)
    for member, records in latest.items():
        for point in points(directory, member):
            record = [r for r in records if r.frames < point["frames"]][-1]
            decay = 1 - (point["frames"] - 20) / 900  # of the whole run, round after round
            assert point["lr"] == pytest.approx(record.new[LR] * decay)
            entropy = -record.new[ENTROPY] * point["policy/entropy"] * 5  # steps of an unroll
            assert point["loss/entropy"] / 4 == pytest.approx(entropy, rel=1e-4)
            assert point["population/lr"] == record.new[LR]
            assert point["population/entropy_cost"] == record.new[ENTROPY]
            assert point["population/generation"] == record.generation
            assert point.get("population/parent") == record.parent
            assert point.get("population/fitness") == point.get("score/mean_capped")


def test_who_copies_begins_with_the_donors_weights_and_games(sweep):
    directory, _ = sweep
    records = PopulationDirectory(directory).lineage()
    for record in records:
        if record.copied and record.generation == 2:  # whose donor is still pinned
            own = read(directory / str(record.member) / f"checkpoints/ckpt_{record.frames}.pt")
            donors = next(r for r in records if r[:2] == (record.parent, 2))
            donor = read(directory / donors.checkpoint)
            for name, weights in donor["learner"]["agent"].items():
                assert torch.equal(weights, own["learner"]["agent"][name])
            assert own["scoreboard"]["returns"] == donor["scoreboard"]["returns"]
            assert own["scoreboard"]["games"] != donor["scoreboard"]["games"] or (
                own["games"] == sum(own["scoreboard"]["games"])
            )


def test_the_best_is_a_run_that_can_be_evaluated(sweep, folder):
    directory, _ = sweep
    rows = (directory / "members.csv").read_text().splitlines()
    assert rows[0] == f"member,fitness,generation,frames,{LR},{ENTROPY},directory"
    fitness = [float(row.split(",")[1]) for row in rows[1:]]
    assert fitness == sorted(fitness, reverse=True)
    best = rows[1].split(",")
    assert fitness[0] == points(directory, best[0])[-1]["score/mean_capped"]
    config = OmegaConf.load(directory / "best" / "config.yaml")
    assert (config.population, config.stop_frames) == (None, None)
    assert config.algorithm.optimizer.lr == float(best[4])
    ran = run(f"resume={directory / 'best'}", "mode=evaluate", "evaluation.games=2",
              "evaluation.num_workers=1")  # fmt: skip
    assert ran.code == 0, ran.err
    assert (directory / "best/evaluation/900.json").exists()


def test_a_page_shows_it(sweep):
    directory, _ = sweep
    page = (directory / "population.html").read_text()
    for name in ("fitness", "schedules", "tree"):
        assert f'data-figure="population_{name}"' in page
        picture = directory / f"population_{name}.png"
        assert picture.exists() is (CHROMIUM is not None)  # who draws it
        assert CHROMIUM is None or picture.stat().st_size > 5_000


@pytest.mark.slow
def test_a_finished_sweep_has_nothing_to_do_and_another_is_refused(sweep, folder):
    directory = shutil.copytree(sweep[0], folder / "copy")
    before = {m: points(directory, m) for m in range(3)}
    assert run(*ROUNDS, f"hydra.sweep.dir={directory}").code == 0
    assert {m: points(directory, m) for m in range(3)} == before
    ran = run(*ROUNDS, f"hydra.sweep.dir={directory}", "total_frames=2400")
    assert ran.code == 2
    assert "copy has another population" in ran.error and "total_frames is 900" in ran.error
    (folder / "grid").mkdir()
    (folder / "grid" / "sweep.json").write_text("{}")
    for command in (ROUNDS, ("-m", "suite=catch", "seed=1,2")):
        ran = run(*command, f"hydra.sweep.dir={folder / 'grid'}")
        assert ran.code == 2 and "grid" in ran.error
    assert [path.name for path in (folder / "grid").iterdir()] == ["sweep.json"]
    ran = run("-m", f"sweep.resume={directory}", "hydra/sweeper=grid")
    command = "go on with python launch.py -m sweep.resume=copy"
    assert ran.code == 2 and ran.error == f"copy is a population: {command}"
    ran = run("-m", "sweep.resume=copy", "total_frames=2400")
    assert ran.code == 2 and "total_frames is 900" in ran.error
    ran = run("-m", "sweep.resume=copy", f"{ENTROPY}=0.1", "hydra.sweeper.threshold=2", "seed=3",
              "network=deep")  # fmt: skip
    assert ran.code == 2 and "its threshold is 1, its seed is 1" in ran.error
    assert "its network is " in ran.error and f"its {ENTROPY} is swept as " in ran.error
    assert run("-m", "sweep.resume=copy", "hydra.sweeper.max_failures=7", "log_every_s=3").code == 0
    assert run("-m", "sweep.resume=copy", "hydra/sweeper=population").code == 0
    ran = run("-m", "sweep.resume=copy", "hydra.sweep.dir=new")
    assert ran.code == 2 and "hydra.sweep.dir=new is another directory than" in ran.error
    ran = run(*ROUNDS, f"hydra.sweep.dir={directory / '1'}")
    assert ran.code == 2 and "this is one of a run (config.yaml)" in ran.error
    shutil.copytree(directory, folder / "lost")
    shutil.rmtree(folder / "lost/0/checkpoints")
    ran = run("-m", "sweep.resume=lost")
    assert ran.code == 2
    assert "lost/0/checkpoints has no checkpoint left, and by lineage.jsonl member 0" in ran.error
    assert points(folder / "lost", 0) == before[0]
    (directory / "multirun.yaml").write_text("hydra: {}")
    ran = run("-m", "sweep.resume=copy")
    assert ran.code == 2 and "copy/multirun.yaml does not say what" in ran.error
    (directory / "population.json").unlink()
    for command in (ROUNDS, ("-m", f"sweep.resume={directory}")):
        ran = run(*command, f"hydra.sweep.dir={directory}")
        assert ran.code == 2 and "population.json is missing" in ran.error
    assert {m: points(directory, m) for m in range(3)} == before


# Failures


def failing_at(monkeypatch, failures):
    """`failures`: (member, stop_frames) whose jobs fail, each as often as it is there."""
    build = launch.build_training

    def build_training(cfg, run_dir):
        train = build(cfg, run_dir)
        if (where := (cfg.population.member, cfg.stop_frames)) not in failures:
            return train
        failures.remove(where)

        def fail():
            raise RuntimeError("boom")

        return fail

    monkeypatch.setattr(launch, "build_training", build_training)


def test_a_member_that_fails_goes_on_from_a_good_one(monkeypatch, folder):
    failing_at(monkeypatch, [(1, 300), (2, 600)])  # the first before it has a checkpoint
    ran = run(*ROUNDS, f"hydra.sweep.dir={folder / 'sweep'}", "hydra.sweeper.max_failures=2")
    assert ran.code == 0, ran.err
    assert "member 1 failed: " in ran.out and "RuntimeError: boom" in ran.out
    records = {(r.member, r.generation): r for r in PopulationDirectory(folder / "sweep").lineage()}
    assert [key for key, r in records.items() if r.failed] == [(1, 1), (2, 2)]
    for key in ((1, 1), (2, 2)):
        assert records[key].copied and records[key].fitness is None
    assert [points(folder / "sweep", m)[-1]["frames"] for m in range(3)] == [900] * 3
    assert points(folder / "sweep", 1)[0]["frames"] > 300


def test_too_many_failures_stop_the_sweep(monkeypatch, folder):
    failing_at(monkeypatch, [(1, 300), (2, 300)])
    ran = run(*ROUNDS, f"hydra.sweep.dir={folder / 'sweep'}", "hydra.sweeper.max_failures=1")
    assert ran.code == 1
    assert "members have failed 2 times, and hydra.sweeper.max_failures=1" in ran.err


# Bad input


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "nothing is swept"),
        (("algorithm.optimizer.lrr=interval(1,2)",), "did you mean algorithm.optimizer.lr?"),
        ((f"{LR}=interval(2,1)",), f"{LR}: interval(2, 1) has no number in it"),
        ((f"{LR}=tag(log,interval(0,1))",), "expected both ends above 0"),
        ((f"{LR}=interval(-1,1)",), f"{LR}=-1.0: expected a number above 0"),
        (("network=deep,shallow",), "network cannot change while a member trains"),
        ((*SWEPT, "hydra.sweeper.size=1"), "size=1: expected a whole number, at least 2"),
        ((*SWEPT, "hydra.sweeper.schedule=asynchronous", "hydra.sweeper.size=2"),
         "runs all 2 members at once, and hydra/launcher=basic at most 1"),
        ((*SWEPT, "hydra.sweeper.schedule=sometimes"), "expected rounds or asynchronous"),
        (("algorithm.passes=interval(1.0,2.0)",), "expected a whole number"),
        (("algorithm.passes=tag(int,interval(1.2,1.8))",), "has no whole number in it"),
        ((*SWEPT, "hydra.sweeper.threshold=abc"), "hydra.sweeper.threshold=abc: expected a number"),
        ((*SWEPT, "+hydra.sweeper.seed=1"), "hydra.sweeper.seed: there is no such key"),
        ((*SWEPT, "hydra/launcher=joblib", "hydra.launcher.n_jobs=0"),
         "hydra/launcher=joblib has room for no job: expected more in hydra.launcher.n_jobs"),
        ((*SWEPT, "hydra.sweeper.fitness=score/mode"), "no run writes such a metric"),
        ((*SWEPT, "hydra.sweeper.selection=best"), "hydra.sweeper.selection=best: expected tour"),
        ((*SWEPT, "total_frames=x"), "total_frames=x: expected a whole number"),
        ((*SWEPT, "stop_frames=5"), "stop_frames=5: that is up to the population"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_the_first_job(arguments, expected, folder):
    ran = run("-m", "hydra/sweeper=population", "suite=catch", *arguments)
    assert ran.code == 2 and expected in ran.error
    assert not (folder / "multirun").exists()


@pytest.mark.parametrize(
    ("name", "launcher", "expected"),
    [
        ("basic", {}, 1),
        ("joblib", {"n_jobs": 3}, 3),
        ("joblib", {"n_jobs": -2}, 7),
        ("joblib", {"n_jobs": -9}, 1),
        ("joblib", {"n_jobs": None}, 1),
        ("submitit_slurm", {"array_parallelism": 256}, 256),
        ("submitit_local", {"cpus_per_task": 1}, None),
        ("ray", {"ray": {"init": {"address": None}, "remote": {}}}, 8),
        ("ray", {"ray": {"init": {"num_cpus": 6}, "remote": {"num_cpus": 2}}}, 3),
        ("ray", {"ray": {"init": {"address": "auto"}, "remote": {"num_cpus": 2}}}, None),
    ],
)
def test_jobs_that_a_launcher_runs_at_once(name, launcher, expected, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert jobs_at_once(name, OmegaConf.create(launcher)) == expected


# Asynchronous


@pytest.fixture
def asynchronous(folder):
    """A population of two, of which member 1 has played, and is said to be very good."""
    directory = PopulationDirectory(folder / "sweep")
    directory.path.mkdir()
    space = [Interval(LR, 1e-4, 1e-1, log=True), Interval(ENTROPY, 1e-3, 1e-1)]
    space.append(Interval("algorithm.optimizer.eps", 1e-8, 1e-2, log=True))
    space.append(Interval("algorithm.max_grad_norm", 1.0, 100.0))
    values = dict(zip([h.key for h in space], (0.02, 0.01, 1e-5, 10.0), strict=True))
    rule = Rule(perturb_probability=1.0, burn_in_frames=0)
    directory.write_settings(
        {"size": 2, "fitness": "score/mean_capped", "games": 40, "rule": rule.__dict__,
         "space": space_as_json(space)}
    )  # fmt: skip
    first = {**values, LR: 0.001}
    directory.write_lineage(
        Record(m, 0, 0, None, None, None, False, {}, new, None)
        for m, new in enumerate((first, values))
    )
    arguments = [*TINY, "log_every_frames=20", "checkpoint.keep=1000"]
    assert (
        run(*arguments, "total_frames=200", "seed=5", f"hydra.run.dir={directory.path}/1").code == 0
    )
    checkpoint = directory.pin(1, 1, directory.path / "1/checkpoints/last.pt")
    directory.write_lineage([Record(1, 1, 200, 1, 0, 99.0, False, values, values, checkpoint)], 1)
    return directory, values, [
        *arguments, *(f"{key}={value}" for key, value in first.items()), "population="
        f"{{directory:{directory.path},member:0}}",
    ]  # fmt: skip


def test_a_running_member_copies_and_perturbs(asynchronous):
    directory, values, arguments = asynchronous
    ran = run(*arguments, "total_frames=800", f"hydra.run.dir={directory.path}/0")
    assert ran.code == 0, ran.err
    generations = [r for r in directory.lineage() if r.member == 0]
    record = generations[1]
    assert (record.parent, record.parent_generation, record.generation) == (1, 0, 1)
    for key, value in values.items():
        assert round(record.new[key] / value, 9) in (1.2, round(1 / 1.2, 9))
    donor = read(directory.path / "donors/1_1.pt")
    own = read(directory.path / f"0/checkpoints/ckpt_{record.frames}.pt")
    for name, weights in donor["learner"]["agent"].items():
        assert torch.equal(weights, own["learner"]["agent"][name])
    assert own["frames"] == own["updates"] * 20 != donor["frames"]
    (group,) = own["learner"]["optimizer"]["param_groups"]
    assert group["eps"] == record.new["algorithm.optimizer.eps"]
    for point in points(directory.path, 0):
        generation = [r for r in generations if r.frames < point["frames"]][-1]
        decay = 1 - (point["frames"] - 20) / 800
        assert point["lr"] == pytest.approx(generation.new[LR] * decay)
        assert point["loss/entropy"] / 4 == pytest.approx(
            -generation.new[ENTROPY] * point["policy/entropy"] * 5, rel=1e-4
        )
        assert point["population/generation"] == generation.generation

    # Resumed, it goes on with what it had, not with what the command line gave it at the start.
    before = directory.lineage()
    assert run(f"resume={directory.path}/0", "total_frames=900").code == 0
    assert [r for r in directory.lineage() if r in before] == before
    last = points(directory.path, 0)[-1]
    assert last["lr"] == pytest.approx(directory.latest()[0].new[LR] * (1 - 880 / 900))
    assert set(values) == set(command_line.IN_PLACE)  # all of which can be changed in place


def test_a_donor_that_cannot_be_read_is_not_copied(asynchronous):
    directory, _, arguments = asynchronous
    (directory.path / "donors/1_1.pt").write_bytes(b"torn")
    ran = run(*arguments, "total_frames=600", f"hydra.run.dir={directory.path}/0")
    assert ran.code == 0
    assert "donors/1_1.pt of member 1 cannot be read" in ran.out
    assert "no other member is copied this time" in ran.out
    assert all(r.parent == 0 for r in directory.lineage() if r.member == 0 and r.generation)


# Kills


def start(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(LAUNCH.parent)}
    return subprocess.Popen(
        [sys.executable, str(LAUNCH), *arguments], env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def killed_when(process, condition, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def same_history(one, other):
    assert (one / "lineage.jsonl").read_text() == (other / "lineage.jsonl").read_text()
    for member in range(3):
        games = [(d / str(member) / "episodes.jsonl").read_bytes() for d in (one, other)]
        assert games[0] == games[1]


@pytest.mark.slow
def test_a_killed_sweep_goes_on_with_the_same_numbers(sweep, folder):
    path = folder / "killed"
    killed_when(
        start(*ROUNDS, f"hydra.sweep.dir={path}"),
        lambda: (path / "1" / "checkpoints" / "ckpt_300.pt").exists(),
    )
    assert not (path / "members.csv").exists()
    ran = run("-m", f"sweep.resume={path}")
    assert ran.code == 0, ran.err
    assert "going on with the population" in ran.out
    same_history(path, sweep[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2, 0.4, 0.8, 1.2, 1.7])
@pytest.mark.parametrize("file", ["population.json", "0/checkpoints/ckpt_300.pt"])
def test_a_sweep_may_be_killed_whenever(file, seconds, sweep, folder):
    path = folder / "killed"
    for _ in range(2):  # the second time while it resumes
        process = start(*ROUNDS, f"hydra.sweep.dir={path}")
        started = time.monotonic()

        def ready(started=started):
            return (path / file).exists() and time.monotonic() > started + 4 + seconds

        if process.poll() is None and not (path / "members.csv").exists():
            killed_when(process, lambda r=ready, p=process: r() or (path / "members.csv").exists())
        else:
            process.wait()
    ran = run(*ROUNDS, f"hydra.sweep.dir={path}")
    assert ran.code == 0, ran.err
    same_history(path, sweep[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_members_run_at_once_and_outlive_kills(folder):
    """With processes of joblib: a member is killed, then the sweeper, then all of them."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    path = folder / "sweep"
    arguments = [
        "-m", "hydra/sweeper=population", *TINY, "total_frames=40000", "log_every_frames=500",
        "hydra.sweeper.size=3", "hydra.sweeper.schedule=asynchronous", "hydra.sweeper.games=100",
        "hydra.sweeper.burn_in_frames=0", "hydra/launcher=joblib", "hydra.launcher.n_jobs=3",
        "checkpoint.every_s=0.5", f"hydra.sweep.dir={path}", *SWEPT,
    ]  # fmt: skip

    def evolved(generation):
        return all(r.generation >= generation for r in PopulationDirectory(path).latest().values())

    def kill_member(member):
        with suppress(psutil.NoSuchProcess):  # they end with the sweeper
            psutil.Process(int((path / str(member) / ".lock").read_text().split()[1])).kill()

    process = start(*arguments)
    deadline = time.monotonic() + 120
    while not (path / "population.json").exists() or not evolved(1):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    kill_member(1)
    killed_when(process, lambda: evolved(4))
    before = PopulationDirectory(path).lineage()
    for member in range(3):
        kill_member(member)
    environment = {**os.environ, "PYTHONPATH": str(LAUNCH.parent)}
    ended = subprocess.run([sys.executable, str(LAUNCH), *arguments], env=environment)
    assert ended.returncode == 0
    records = PopulationDirectory(path).lineage()
    checkpointed = [r for r in before if r in records]
    assert checkpointed == before, "what was decided has been forgotten"
    assert json.loads((path / "0/summary.json").read_text())["status"] == "finished"
    assert {points(path, m)[-1]["frames"] for m in range(3)} == {40000}
    assert Path(path, "best", "checkpoints", "last.pt").exists()
