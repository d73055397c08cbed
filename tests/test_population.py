"""The rule as arithmetic, what members leave for each other, and the grammar of search spaces."""

import collections
import copy
import json
import math

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from hydra_plugins import search_space
from impala.checkpoint import Checkpoints
from impala.learner import linear_decay
from impala.optimizers import RMSProp
from impala.population import (
    FAILED,
    Choice,
    Interval,
    Member,
    Rule,
    best,
    evolved,
    fitness,
    member_seed,
    rank,
    starting_values,
)
from impala.population_directory import (
    PopulationDirectory,
    Record,
    space_as_json,
    space_from_json,
)
from impala.population_member import inherited
from impala.population_runs import PopulationRuns
from impala.report.populations import ancestry, followed
from suites.catch import Catch
from suites.score import Scoreboard
from tests.test_learner import actor_critic, batch_of, learner_of, random_storage

LR = Interval("lr", 1e-4, 1e-1, log=True)
NEVER = {"perturb_probability": 0.0, "burn_in_frames": 0}
ALWAYS = {"perturb_probability": 1.0, "burn_in_frames": 0}


def population(*scores, lr=1e-2):
    """Members of these scores; member i has i + 1 times the learning rate."""
    return [Member(i, score, {"lr": lr * (i + 1)}) for i, score in enumerate(scores)]


def change(index, members, generation=1, frames=0, **rule):
    return evolved(index, members, Rule(**rule), [LR], generation, frames)


# Hyperparameters


def test_an_interval_is_multiplied_and_keeps_its_ends():
    assert LR.perturbed(0.01, True, 1.2) == pytest.approx(0.012)
    assert LR.perturbed(0.01, False, 1.2) == pytest.approx(0.01 / 1.2)
    assert LR.perturbed(0.09, True, 1.2) == 0.1 and LR.perturbed(1.1e-4, False, 1.2) == 1e-4
    up_and_down = LR.perturbed(LR.perturbed(0.01, True, 1.2), False, 1.2)
    assert up_and_down == pytest.approx(0.01)  # unbiased, unlike 1.2 and 0.8


def test_a_whole_number_stays_one_and_moves():
    number = Interval("passes", 1, 10, integer=True)
    moves = {
        v: (number.perturbed(v, False, 1.2), number.perturbed(v, True, 1.2)) for v in (1, 2, 6)
    }
    assert moves == {1: (1, 2), 2: (1, 3), 6: (5, 7)}
    assert number.perturbed(10, True, 1.2) == 10
    starts = {starting_values([number], 1, member)["passes"] for member in range(200)}
    assert starts == set(range(1, 11)) and {type(value) for value in starts} == {int}


def test_a_choice_steps_to_its_neighbour_and_stops_at_the_ends():
    words = Choice("stale", ("drop", "keep", "down_weight"))
    assert words.perturbed("keep", True, 1.2) == "down_weight"
    assert words.perturbed("keep", False, 1.2) == "drop" == words.perturbed("drop", False, 1.2)


def test_starting_values_follow_the_prior():
    draws = np.array([starting_values([LR], 7, member)["lr"] for member in range(2000)])
    shares = np.histogram(np.log10(draws), bins=3, range=(-4, -1))[0] / len(draws)
    assert np.abs(shares - 1 / 3).max() < 0.05 and draws.min() >= 1e-4 and draws.max() <= 1e-1
    starts = Interval("eps", 1e-7, 1e-1, starts=(1e-1, 1e-3, 1e-5, 1e-7))
    counts = collections.Counter(starting_values([starts], 7, i)["eps"] for i in range(2000))
    assert set(counts) == set(starts.starts) and min(counts.values()) > 400
    assert starts.perturbed(1e-3, True, 1.2) == pytest.approx(1.2e-3)


def test_seeds_of_members_are_far_apart():
    seeds = sorted(member_seed(1, member) for member in range(24))
    assert seeds[0] >= 0 and seeds[-1] < 2**63 and np.diff(seeds).min() > 1e12


# The paper's rule


@pytest.mark.parametrize(
    ("own", "other", "parent"),
    [(50.0, 55.1, 1), (50.0, 55.0, 0), (50.0, 40.0, 0), (-10.0, -4.0, 1), (50.0, None, 0),
     (50.0, FAILED, 0), (FAILED, -30.0, 1), (FAILED, None, 1), (None, 90.0, 0)],
)  # fmt: skip
def test_one_copies_another_that_is_more_than_five_points_better(own, other, parent):
    members = population(own, other)
    assert change(0, members, **NEVER) == (parent, members[parent].values)


def test_the_parents_values_are_perturbed_and_not_ones_own():
    members = population(0.0, 50.0)
    moved = [change(0, members, g, **ALWAYS).values["lr"] / 2e-2 for g in range(200)]
    assert {round(ratio, 9) for ratio in moved} == {1.2, round(1 / 1.2, 9)}
    assert 60 < sum(ratio > 1 for ratio in moved) < 140


def test_whether_or_not_one_copies_a_third_of_the_values_is_perturbed():
    for members in (population(0.0, 50.0), population(50.0, 0.0)):
        parent = change(0, members, **NEVER).parent
        kept = members[parent].values
        changes = [change(0, members, g, burn_in_frames=0) for g in range(3000)]
        assert np.mean([c.values != kept for c in changes]) == pytest.approx(0.33, abs=0.03)


def test_the_opponent_is_one_random_other():
    members = population(0.0, 50.0, 60.0, 2.0)
    parents = collections.Counter(change(0, members, g, **NEVER).parent for g in range(3000))
    # 3, which is not better by enough, is drawn as often as 1 and 2.
    assert {0, 1, 2} == set(parents)
    assert np.abs(np.array([*parents.values()]) / 3000 - 1 / 3).max() < 0.03


def test_nothing_happens_in_burn_in_but_to_those_who_failed():
    members = population(0.0, 50.0, FAILED)
    rule = {"perturb_probability": 1.0, "burn_in_frames": 1000}
    assert change(0, members, frames=999, **rule) == (0, members[0].values)
    assert change(0, members, frames=1000, **rule).values != members[0].values
    assert change(2, members, frames=999, **rule).parent in (0, 1)


def test_who_failed_takes_one_that_has_a_score_and_else_one_that_waits():
    assert {change(0, population(FAILED, None, 1.0), g).parent for g in range(20)} == {2}
    assert {change(0, population(FAILED, None, FAILED), g).parent for g in range(20)} == {1}
    with pytest.raises(ValueError, match="member 0 has failed, and there is none"):
        change(0, population(FAILED, FAILED))


def test_truncation_selection():
    members = population(10.0, 50.0, 30.0, 40.0, 20.0, None)
    rule = {"selection": "truncation", "quantile": 0.4, **NEVER}  # 2 of the 5 that are ranked
    parents = [{change(i, members, g, **rule).parent for g in range(40)} for i in range(6)]
    assert parents == [{1, 3}, {1}, {2}, {3}, {1, 3}, {5}]
    members[2] = Member(2, FAILED, {"lr": 1.0})
    assert {change(2, members, g, **rule).parent for g in range(40)} == {1, 3}


def test_chance_depends_on_seed_generation_and_member_only():
    members = population(*range(0, 100, 10))
    again = [change(i, copy.deepcopy(members), 3, **ALWAYS) for i in (5, 2, 5)]
    assert again[0] == again[2] == change(5, members, 3, **ALWAYS)
    others = [change(5, members, 4, **ALWAYS), change(5, members, 3, seed=2, **ALWAYS), again[1]]
    assert all(other != again[0] for other in others)


@pytest.mark.parametrize(
    "wrong",
    [{"selection": "best"}, {"threshold": -1.0}, {"quantile": 0.6}, {"perturb_probability": 1.1},
     {"perturb_factor": 1.0}, {"burn_in_frames": -1}, {"burn_in_frames": True}, {"quantile": "x"}],
)  # fmt: skip
def test_a_rule_that_is_out_of_range_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}=.*expected"):
        Rule(**wrong)


def test_fitness_needs_full_coverage_and_a_number():
    full = {"score/coverage": 1.0, "score/mean_capped": 3.0}
    assert fitness(full, "score/mean_capped") == 3.0
    assert fitness({**full, "score/coverage": 0.9}, "score/mean_capped") is None
    assert fitness({**full, "score/mean_capped": None}, "score/mean_capped") is None  # not finite
    assert fitness(full, "score/median") is None


def test_ranks_and_the_best():
    assert [rank(f, [5.0, None, FAILED, 7.0]) for f in (6.0, 7.0, 1.0, None)] == [2, 1, 3, None]
    assert best(population(1.0, 9.0, None, FAILED, 9.0)) == population(1.0, 9.0)[1]
    assert best(population(None, FAILED)) is None


# The grammar


def parsed(*lines):
    return search_space.split(OverridesParser.create().parse_overrides(list(lines)))


def test_search_spaces_are_in_hydras_sweep_grammar():
    space, fixed = parsed(
        "a=interval(1, 2)", "b=tag(log, interval(1e-5, 1e-2))", "c=tag(int, interval(1, 4))",
        "d=int(interval(1, 4))", "e=choice(1e-1, 1e-3)", "f=choice(1, 2, 4)", "g=drop,keep",
        "h=range(0, 3)", "i=tag(log, int, interval(1, 4))", "seed=3", "a=interval(1, 3)", "j=[1,2]",
    )  # fmt: skip
    assert space == [
        Interval("a", 1.0, 3.0),
        Interval("b", 1e-5, 1e-2, log=True),
        Interval("c", 1.0, 4.0, integer=True),
        Interval("d", 1, 4, integer=True),
        Interval("e", 1e-3, 1e-1, starts=(1e-1, 1e-3)),
        Choice("f", (1, 2, 4)),
        Choice("g", ("drop", "keep")),
        Choice("h", (0, 1, 2)),
        Interval("i", 1.0, 4.0, log=True, integer=True),
    ]
    assert fixed == ["seed=3", "j=[1,2]"]
    assert space_from_json(json.loads(json.dumps(space_as_json(space)))) == space


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lr=interval(2, 1)", "lr: interval(2, 1) has no number in it"),
        ("lr=interval(1, 1)", "has no number in it"),
        ("lr=tag(log, interval(0, 1))", "interval(0, 1) on a logarithmic scale"),
        ("lr=tag(lgo, interval(1, 2))", "tag lgo is none of log, int"),
        ("lr=choice(0.5, 0.5)", "two different values"),
        ("lr=choice(1)", "two different values"),
        ("lr=choice([1], [2])", "[1] cannot be swept"),
    ],
)
def test_a_search_space_without_sense_is_refused(line, message):
    with pytest.raises(ValueError, match="lr: ") as error:
        parsed(line)
    assert message in str(error.value)


# What is copied


def trained(lr, updates=2):
    learner = learner_of(actor_critic(), lr_schedule=linear_decay)
    learner.optimizer = RMSProp(list(learner.agent.parameters()), lr=lr, eps=lr)
    learner._base_lr = [lr]
    batch = batch_of(random_storage(learner.agent))
    for _ in range(updates):
        learner.update(batch, 0.0)
    return learner, batch


def test_after_a_copy_the_optimizer_has_the_new_values_and_the_donors_squares():
    donor, batch = trained(0.1)
    member, _ = trained(0.3, updates=1)
    member.load_state_dict(copy.deepcopy(donor.state_dict()))
    assert member.optimizer.param_groups[0]["lr"] == 0.3  # and not the donor's
    member.set_option("lr", 0.12)
    member.set_option("eps", 0.5)
    member.max_grad_norm = 2.0
    for mine, theirs in zip(
        member.optimizer.state.values(), donor.optimizer.state.values(), strict=True
    ):
        assert torch.equal(mine["square"], theirs["square"])
    before = [p.detach().clone() for p in member.agent.parameters()]
    gradients = [torch.zeros_like(p) for p in before]
    squares = [s["square"].clone() for s in member.optimizer.state.values()]
    member.update(batch, 0.25)
    assert member.optimizer.param_groups[0]["lr"] == pytest.approx(0.12 * 0.75)
    assert member.metrics()["lr"] == pytest.approx(0.09)
    # The step by hand: clipped gradient, decayed square, the new epsilon under the root.
    for i, parameter in enumerate(member.agent.parameters()):
        gradients[i] = parameter.grad
        square = 0.99 * squares[i] + 0.01 * gradients[i] ** 2
        wanted = before[i] - 0.09 * gradients[i] / (square + 0.5).sqrt()
        torch.testing.assert_close(parameter.detach(), wanted)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    assert norm == pytest.approx(2.0, rel=1e-3)
    with pytest.raises(ValueError, match="RMSProp has no option 'betas'"):
        member.set_option("betas", 0.9)


def test_what_a_member_inherits_and_what_stays_its_own():
    def state(name):
        return {
            "frames": f"{name} frames", "updates": f"{name} updates", "games": f"{name} lines",
            "time_s": f"{name} time", "faults": f"{name} faults", "random": f"{name} random",
            "learner": {"agent": f"{name} agent", "optimizer": f"{name} optimizer",
                        "skipped": f"{name} skipped"},
            "scoreboard": {"returns": f"{name} returns", "games": f"{name} games"},
        }  # fmt: skip

    own = inherited(state("own"), state("donor"), 7)
    assert own.pop("frames") == 7
    assert own.pop("learner") == {
        "agent": "donor agent", "optimizer": "donor optimizer", "skipped": "own skipped",
    }  # fmt: skip
    assert own.pop("scoreboard") == {"returns": "donor returns", "games": "own games"}
    assert all(value.startswith("own ") for value in own.values())
    donor = state("donor")
    donor |= {"points": 3, "games": 5}  # lines of the donor's files, of which a new run has none
    donor["scoreboard"]["games"] = [8, 9]
    new = inherited(None, donor, 7)
    assert not {"points", "games"} & new.keys()
    assert (new["frames"], new["updates"], new["learner"]["skipped"]) == (7, 0, 0)
    assert new["scoreboard"] == {"returns": "donor returns", "games": [0, 0]}


# Files


def record(member, generation, **fields):
    parent = (member, generation - 1) if generation else (None, None)
    values = (10 * generation, *parent, None, False, {}, {"lr": 0.1}, None)
    return Record(member, generation, *values)._replace(**fields)


def test_a_pinned_checkpoint_outlives_what_its_run_keeps(tmp_path):
    directory = PopulationDirectory(tmp_path)
    directory.member(3).mkdir()
    checkpoints = Checkpoints(directory.member(3) / "checkpoints", keep=1)
    path = checkpoints.save({"frames": 1, "learner": {}})
    content = path.read_bytes()
    pinned = tmp_path / directory.pin(3, 1, path)
    for frames in range(2, 5):
        checkpoints.save({"frames": frames, "learner": {}})
    assert not path.exists() and pinned.read_bytes() == content
    directory.pin(3, 2, checkpoints.folder / "last.pt")
    assert pinned.exists()
    directory.pin(3, 3, checkpoints.folder / "last.pt")
    assert not pinned.exists()  # no record in use names it any more
    assert {p.name for p in (tmp_path / "donors").iterdir()} == {"3_2.pt", "3_3.pt"}


def test_a_lineage_is_read_from_all_its_writers(tmp_path):
    directory = PopulationDirectory(tmp_path)
    assert directory.lineage() == []
    directory.write_lineage([record(0, 0), record(1, 0)])
    directory.member(1).mkdir()
    directory.write_lineage([record(1, 0), record(1, 1, fitness=4.0)], member=1)
    assert directory.lineage() == [record(0, 0), record(1, 0), record(1, 1, fitness=4.0)]
    assert directory.latest()[1].fitness == 4.0


def damaged(path, change):
    path.write_text(change(path.read_text()))


@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        ("lineage.jsonl", lambda text: text[:-9], "lineage.jsonl, line 2 is damaged"),
        ("lineage.jsonl", lambda text: text.replace("member", "m"), "line 1 is damaged: expected"),
        ("lineage.jsonl", lambda text: text[text.index("\n") + 1 :],
         "lacks generation 0 of member 0"),
        ("lineage.jsonl", None, "lineage.jsonl is missing, and with it generation 0 of member 0"),
        ("1/lineage.jsonl", lambda text: text + "[]\n", "line 4 is damaged.*Remove it"),
        ("1/lineage.jsonl", lambda text: text.replace('"generation": 1', '"generation": 9'),
         "lacks generation 1 of member 1"),
        ("population.json", lambda text: text[:20], "population.json is damaged: expected JSON"),
        ("population.json", lambda text: "{}", "damaged: wrong or missing: size, fitness"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_and_what_to_do(file, change, expected, tmp_path):
    directory = PopulationDirectory(tmp_path)
    directory.member(1).mkdir()
    directory.write_lineage([record(0, 0), record(1, 0)])
    directory.write_lineage([record(1, 0), record(1, 1), record(1, 2)], member=1)
    directory.write_settings({"fitness": "score/mean", "rule": {}, "space": [], "size": 2})
    assert len(directory.lineage()) == 4
    if change:
        damaged(tmp_path / file, change)
    else:
        (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=expected) as error:
        directory.lineage()
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_curves_follow_the_ancestry_of_copies():
    records = [record(0, 0), record(1, 0), record(0, 1, parent=1, parent_generation=0),
               record(1, 1), record(0, 2), record(1, 2)]  # fmt: skip
    nodes = {(r.member, r.generation): r for r in records}
    line = ancestry(nodes, nodes[0, 2])
    assert [(r.member, r.generation) for r in line] == [(1, 0), (0, 1), (0, 2)]
    curves = {m: [(frames, float(m)) for frames in range(0, 31, 5)] for m in (0, 1)}
    assert followed(line, curves) == [
        (5, 1.0),
        (10, 1.0),
        (15, 0.0),
        (20, 0.0),
        (25, 0.0),
        (30, 0.0),
    ]


def test_a_copy_is_placed_until_the_member_has_gone_on_from_it(tmp_path):
    directory = PopulationDirectory(tmp_path)
    runs = PopulationRuns(directory, "score/mean_capped", Scoreboard(Catch().tasks))
    folders = [Checkpoints(directory.member(m) / "checkpoints") for m in (0, 1)]

    def save(member, frames, name):
        directory.member(member).mkdir(exist_ok=True)
        folders[member].save(
            {"frames": frames, "learner": {"agent": name, "skipped": 0},
             "scoreboard": {"returns": name, "games": 1}}
        )  # fmt: skip

    save(0, 10, "own")
    save(1, 11, "donor")
    donor = record(1, 1, frames=11, checkpoint=runs.pin(1, 1))
    copy_of_it = record(0, 1, frames=10, parent=1)
    save(1, 20, "donor, later")
    for _ in range(2):  # a sweep that is killed may place it again
        runs.place(copy_of_it, donor)
        state = folders[0].load()
        assert (state["frames"], state["learner"]["agent"]) == (10, "donor")
    save(0, 12, "gone on")
    runs.place(copy_of_it, donor)
    assert folders[0].load()["learner"]["agent"] == "gone on"
    # Who failed early goes on at the end of the round.
    runs.place(copy_of_it._replace(frames=15, failed=True), donor)
    assert (folders[0].load()["frames"], runs.frames(0)) == (15, 15)
