"""One update: micro-batches add up, schedules, and what happens when something is not finite."""

import copy

import numpy as np
import pytest
import torch

from impala.agents.actor_critic import ActorCritic
from impala.experience.experience import Batch
from impala.experience.fifo import Fifo
from impala.learner import Learner, NonFiniteError, constant, linear_decay
from impala.networks.core import LSTM, FeedForward
from impala.networks.torso import MLP
from impala.trajectory import allocate, leaves, trajectory_layout
from suites.suite import Spec
from tests.counting import CountingAgent

T, SLOTS, FRAME, ACTIONS = 6, 12, (1, 4, 3), 3


def actor_critic(core=FeedForward):
    torch.manual_seed(0)
    return ActorCritic(
        frame_shape=FRAME, num_actions=ACTIONS, torso=MLP, core=core, feed_back=False,
        discount=0.99, baseline_cost=0.5, entropy_cost=0.01, reward_transform="clamp",
    )  # fmt: skip


def random_storage(agent, seed=0):
    generator = torch.Generator().manual_seed(seed)
    storage = allocate(trajectory_layout(agent, Spec(FRAME, ACTIONS, 4), T), SLOTS)
    steps = storage.steps
    steps.frame.copy_(torch.randint(0, 256, steps.frame.shape, generator=generator))
    steps.reward.copy_(torch.randn(steps.reward.shape, generator=generator))
    steps.terminated.copy_(torch.rand(steps.reward.shape, generator=generator) < 0.1)
    storage.outputs.action.copy_(
        torch.randint(0, ACTIONS, storage.outputs.action.shape, generator=generator)
    )
    storage.task.copy_(torch.arange(SLOTS) % 3)
    storage.version.copy_(torch.arange(SLOTS))
    return storage


def learner_of(agent, lr=0.1, **options):
    return Learner(
        agent,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        **{
            "lr_schedule": constant,
            "max_grad_norm": 1e9,
            "device": torch.device("cpu"),
            **options,
        },
    )


def batch_of(storage, size=SLOTS, micro_batch=SLOTS):
    fifo = Fifo(storage, batch_size=size, micro_batch=micro_batch)
    fifo.insert(np.arange(SLOTS))
    return fifo.sample()


def test_fifo_keeps_order_and_copies_columns():
    storage = random_storage(actor_critic())
    fifo = Fifo(storage, batch_size=5, micro_batch=2)
    fifo.insert(np.array([3, 4]))
    assert not fifo.ready()
    fifo.insert(np.array([9, 1, 0, 7]))
    assert fifo.ready() and fifo.waiting == 6
    batch = fifo.sample()
    assert batch.released.tolist() == batch.version.tolist() == [3, 4, 9, 1, 0]
    assert batch.task.tolist() == [0, 1, 0, 1, 0]
    assert [len(part.task) for part in batch.parts] == [2, 2, 1]
    frames = torch.cat([part.steps.frame for part in batch.parts], 1)
    assert torch.equal(frames, storage.steps.frame[:, [3, 4, 9, 1, 0]])
    assert fifo.waiting == 1 and not fifo.ready()


def test_fifo_discards_what_older_weights_played():
    storage = random_storage(actor_critic())  # slot i has version i
    fifo = Fifo(storage, batch_size=2, micro_batch=2)
    fifo.insert(np.array([3, 7, 1, 5]))
    assert fifo.discard(5).tolist() == [3, 1]
    assert fifo.waiting == 2
    assert fifo.discard(5).tolist() == []
    assert fifo.sample().released.tolist() == [7, 5]


def test_weights_multiply_the_loss_of_their_columns():
    agents = [actor_critic(), actor_critic()]
    storage = random_storage(agents[0])
    order, weights = np.arange(6), np.array([2.0, 1.0, 0.0, 0.0, 0.0, 0.0], np.float32)
    for agent, columns, weight in (
        (agents[0], [0, 0, 1, 2], None), (agents[1], order, weights)
    ):  # fmt: skip
        fifo = Fifo(storage, batch_size=len(columns), micro_batch=4)
        fifo.insert(np.array(columns))
        if weight is None:  # column 2 has none
            weight = np.array([1.0, 1.0, 1.0, 0.0], np.float32)
        assert learner_of(agent).update(fifo.sample(), 0.0, weights=weight) == []
    for one, other in zip(agents[0].parameters(), agents[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("core", [FeedForward, LSTM])
def test_micro_batches_make_the_same_update(core):
    agents = [actor_critic(core), actor_critic(core)]
    storage = random_storage(agents[0])
    for agent, micro_batch in zip(agents, (SLOTS, 5), strict=True):
        assert learner_of(agent).update(batch_of(storage, micro_batch=micro_batch), 0.0) == []
    for one, other in zip(agents[0].parameters(), agents[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [0.25, None])
def test_gradients_are_clipped_by_their_global_norm(most):
    agent = actor_critic()
    before = copy.deepcopy(agent.state_dict())
    learner = learner_of(agent, lr=1.0, max_grad_norm=most)
    learner.update(batch_of(random_storage(agent)), 0.0)
    change = [agent.state_dict()[name] - value for name, value in before.items()]
    norm = learner.metrics()["grad/norm"]
    assert norm > 0.25  # as it was before clipping
    assert torch.stack([c.norm() for c in change]).norm() == pytest.approx(most or norm, rel=1e-3)


def test_learning_rate_falls_linearly():
    assert [linear_decay(p) for p in (0.0, 0.25, 1.0, 1.1)] == [1.0, 0.75, 0.0, 0.0]
    learner = learner_of(actor_critic(), lr_schedule=linear_decay)
    learner.update(batch_of(random_storage(learner.agent)), 0.75)
    assert learner.metrics()["lr"] == pytest.approx(0.025)


def test_losses_are_reported_as_batch_sums_and_others_as_means():
    agent = actor_critic()
    learner = learner_of(agent, lr=0.0)
    batch = batch_of(random_storage(agent), micro_batch=5)
    expected = sum(float(agent.loss(part).columns.detach().sum()) for part in batch.parts)
    learner.update(batch, 0.0)
    learner.update(batch, 0.0)
    metrics = learner.metrics()
    assert metrics["loss/total"] == pytest.approx(expected, rel=1e-4)
    assert 0.9 < metrics["policy/entropy"] <= np.log(3) + 1e-5


def counting_batch(tasks):
    agent = CountingAgent()
    storage = allocate(trajectory_layout(agent, Spec((1, 2, 2), 2, 4), T), len(tasks))
    storage.task.copy_(torch.tensor(tasks))
    return Batch([storage], np.array(tasks), np.zeros(len(tasks), np.int64), np.arange(len(tasks)))


def test_a_non_finite_loss_skips_the_update_and_names_its_task():
    agent = CountingAgent(bad_task=2)
    learner = learner_of(agent, max_skipped=3)
    assert learner.update(counting_batch([0, 2, 1, 2]), 0.0) == [2]
    assert agent.weight.item() == 0.0
    assert learner.update(counting_batch([0, 1]), 0.0) == []
    assert agent.weight.item() == pytest.approx(-0.2)
    for _ in range(3):
        assert learner.update(counting_batch([2]), 0.0) == [2]
    with pytest.raises(NonFiniteError, match="non-finite loss or gradient: 4"):
        learner.update(counting_batch([2]), 0.0)
    assert learner.skipped == learner.metrics()["updates/skipped"] == 5
    assert agent.weight.item() == pytest.approx(-0.2)


def test_a_non_finite_gradient_is_found_too():
    agent = actor_critic()
    storage = random_storage(agent)
    storage.task.fill_(1)
    storage.task[4] = 0
    storage.steps.reward[3, 4] = torch.inf
    storage.steps.truncation_value[2, 4] = torch.nan
    storage.steps.truncated[2, 4] = True
    before = copy.deepcopy(agent.state_dict())
    assert learner_of(agent).update(batch_of(storage), 0.0) == [0]
    assert all(torch.equal(value, before[name]) for name, value in agent.state_dict().items())


def test_an_interrupted_update_changes_nothing():
    agent = actor_critic()
    before = copy.deepcopy(agent.state_dict())
    answers = iter([False, True])
    learner = learner_of(agent)
    batch = batch_of(random_storage(agent), micro_batch=4)
    assert learner.update(batch, 0.0, lambda: next(answers)) is None
    assert all(torch.equal(value, before[name]) for name, value in agent.state_dict().items())


def test_state_goes_on_with_the_same_numbers():
    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.01)

    one = learner_of(actor_critic())
    one.optimizer = adam(one.agent.parameters())
    one.update(batch_of(random_storage(one.agent, 1)), 0.0)
    other = learner_of(actor_critic())
    other.optimizer = adam(other.agent.parameters())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for learner in (one, other):
        learner.update(batch_of(random_storage(learner.agent, 2)), 0.5)
    for a, b in zip(leaves(tuple(one.agent.parameters())), other.agent.parameters(), strict=True):
        assert torch.equal(a, b)
