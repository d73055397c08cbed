"""What an actor writes, row for row, with environments and an agent that count."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from impala.actor_pool import ActorPool, actor_seeds, assign_tasks
from impala.messages import Free
from impala.trajectory import allocate, gather, leaves
from tests.counting import CountingAgent, CountingSuite

UNROLL = 7


class FixedWeights:
    def load(self, agent, version):
        return 0


def play(suite, tasks, unrolls, life_loss=False):
    """The unrolls of one actor, each a copy of its columns of the storage, and its games."""
    agent = CountingAgent()
    pool = ActorPool(suite, agent, [tasks], UNROLL, life_loss)
    size = len(tasks)
    storage = allocate(pool.layout, 2 * size)
    orders = [Free(0, slice(0, size)), Free(0, slice(size, 2 * size))]

    def ordered():
        taken, orders[:] = orders.copy(), []
        return taken

    actor = pool.build(0, storage, 1, weights=FixedWeights())
    result, games = [], []
    for _, unroll in zip(range(unrolls), actor.play(ordered), strict=False):
        columns = allocate(pool.layout, size)
        gather(storage, torch.arange(unroll.slots.start, unroll.slots.stop), columns)
        result.append(columns)
        games += unroll.games.tolist()
        orders.append(Free(0, unroll.slots))
    return result, games


def rows(unrolls, field, column):
    """All rows of a column in order, each once: step T of an unroll is step 0 of the next."""
    parts = [getattr(unroll.steps, field)[:-1, column] for unroll in unrolls]
    return torch.cat(parts)


def test_no_transition_joins_two_episodes_and_no_reset_step_exists():
    unrolls, games = play(CountingSuite(["three"]), [0, 0], 6)
    frames = rows(unrolls, "frame", 1)[:, 0, 0, 0].tolist()
    assert frames == [0, 1, 2] * (6 * UNROLL // 3)
    rewards = rows(unrolls, "reward", 1).tolist()
    assert rewards == ([0, 1, 2] + [3, 1, 2] * (6 * UNROLL // 3))[: 6 * UNROLL]
    terminated = rows(unrolls, "terminated", 1)[1:].tolist()
    assert terminated == ([False, False, True] * 20)[: 6 * UNROLL - 1]
    assert [game[2] for game in games] == [12] * 28  # lengths in frames: 42 steps of 2 environments
    assert {game[1] for game in games} == {1 + 2 + 3}


def test_last_row_is_the_next_first():
    unrolls, _ = play(CountingSuite(["three", "five"]), [0, 1], 4)
    for before, after in pairwise(unrolls):
        for last, first in zip(leaves(before.steps), leaves(after.steps), strict=True):
            assert torch.equal(last[-1], first[0])


def test_truncation_bootstraps_from_the_true_last_observation():
    unrolls, games = play(CountingSuite(["five"]), [0], 5)
    truncated = torch.cat([u.steps.truncated[1:, 0] for u in unrolls])
    values = torch.cat([u.steps.truncation_value[1:, 0] for u in unrolls])
    assert truncated.tolist() == [(t + 1) % 5 == 0 for t in range(5 * UNROLL)]
    # 100 x the frame that nobody acts on, plus the state after the five rows before it.
    assert values.tolist() == [505.0 if cut else 0.0 for cut in truncated.tolist()]
    assert not any(u.steps.terminated[1:].any() for u in unrolls)
    assert [game[2] for game in games] == [20] * 7


def test_instructions_are_those_of_the_observations_and_frames_those_played():
    suite = CountingSuite(["three", "five"], instructions=True)
    unrolls, games = play(suite, [0, 1], 5)
    for unroll in unrolls:
        count = unroll.steps.frame[:, :, 0, 0, 0]
        assert torch.equal(unroll.steps.instruction, torch.stack([count + 1, count + 2], -1).int())
    values = torch.cat([u.steps.truncation_value[1:, 1] for u in unrolls])
    assert set(values.tolist()) == {0.0, 1000.0 * 6 + 505.0}
    assert set(games) == {(0, 6.0, 4 + 4 + 1), (1, 15.0, 4 * 4 + 1)}


def test_core_state_is_the_actors_and_zeroed_where_an_episode_ended():
    unrolls, _ = play(CountingSuite(["three", "five"]), [0, 1, 1], 6)
    for unroll in unrolls:
        (state,) = unroll.core_state
        for t in range(UNROLL):
            state = state.masked_fill(unroll.steps.first[t][:, None], 0.0) + 1
            assert torch.equal(state[:, 0], unroll.outputs.seen[t])
            # Rows of an episode are numbered by their frame.
            assert torch.equal(state[:, 0], unroll.steps.frame[t, :, 0, 0, 0] + 1.0)


def test_lost_lives_end_episodes_of_learning_only():
    suite = CountingSuite(["five"], lives=True)
    unrolls, games = play(suite, [0], 5, life_loss=True)
    terminated = torch.cat([u.steps.terminated[1:, 0] for u in unrolls]).tolist()
    truncated = torch.cat([u.steps.truncated[1:, 0] for u in unrolls]).tolist()
    assert terminated == [(t + 1) % 5 in (2, 4) for t in range(5 * UNROLL)]
    assert truncated == [(t + 1) % 5 == 0 for t in range(5 * UNROLL)]
    assert games == [(0, 15.0, 20)] * 7
    unrolls, _ = play(suite, [0], 5, life_loss=False)
    assert not any(u.steps.terminated[1:].any() for u in unrolls)


def test_columns_know_their_task():
    unrolls, games = play(CountingSuite(["three", "five"]), [0, 0, 1], 3)
    assert unrolls[0].task.tolist() == [0, 0, 1]
    assert {(task, frames) for task, _, frames in games} == {(0, 12), (1, 20)}


def test_last_action_is_the_action_that_led_here():
    unrolls, _ = play(CountingSuite(["three"]), [0], 2)
    assert unrolls[0].steps.last_action[:, 0].tolist() == [0] + [1] * UNROLL
    assert unrolls[1].steps.last_action[0, 0] == 1


@pytest.mark.parametrize("num_actors", [1, 2, 3, 8])
def test_assignment_is_even_and_contiguous(num_actors):
    actors = assign_tasks(57, num_actors, None, 64)
    everything = [task for actor in actors for task in actor]
    assert everything == sorted(everything)
    assert np.bincount(everything, minlength=57).tolist() == [2] * 57
    sizes = [len(actor) for actor in actors]
    assert max(sizes) - min(sizes) <= 1
    uneven = [task for actor in assign_tasks(57, 3, 30) for task in actor]
    counts = np.bincount(uneven, minlength=57)
    assert len(uneven) == 90 and counts.min() == 1 and counts.max() == 2


def test_assignment_refuses_tasks_without_environment():
    with pytest.raises(ValueError, match=r"56 environments for 57 tasks.*envs_per_actor=29"):
        assign_tasks(57, 2, 28)
    with pytest.raises(ValueError, match="at least 1"):
        assign_tasks(1, 0, None)


def test_every_actor_and_environment_has_its_own_seed():
    seeds = [seed for actor in range(50) for seed in actor_seeds(7, actor, 40)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0 and max(seeds) < 2**31
    assert actor_seeds(7, 3, 4) == actor_seeds(7, 3, 4) != actor_seeds(8, 3, 4)
