"""The actor-critic: how it acts, and its loss against a slow one."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from impala.agents.actor_critic import ActorCritic, ActorCriticOutput
from impala.networks.core import LSTM, FeedForward
from impala.networks.language import Language
from impala.networks.torso import MLP, Deep, Shallow
from impala.returns.vtrace import vtrace
from impala.trajectory import Step, Trajectory, map_structure

FRAME_SHAPE, NUM_ACTIONS = (1, 3, 2), 4
T, B = 6, 3
DISCOUNT, BASELINE_COST, ENTROPY_COST = 0.9, 0.5, 0.01


@pytest.fixture(autouse=True)
def _seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make_agent(memory: bool = False, **options: Any) -> ActorCritic:
    """A small agent with a policy that is far from uniform."""
    agent = ActorCritic(
        **{
            "frame_shape": FRAME_SHAPE,
            "num_actions": NUM_ACTIONS,
            "torso": lambda shape: MLP(shape, hidden_size=8),
            "core": (lambda size: LSTM(size, hidden_size=7)) if memory else FeedForward,
            "feed_back": memory,
            "discount": DISCOUNT,
            "baseline_cost": BASELINE_COST,
            "entropy_cost": ENTROPY_COST,
            "reward_transform": "clamp",
        }
        | options
    )
    torch.nn.init.normal_(agent.policy.weight)
    return agent


def random_steps(*shape: int, ends: bool = True) -> Step:
    terminated = (torch.rand(shape) < 0.2) & ends
    truncated = (torch.rand(shape) < 0.2) & ends & ~terminated
    return Step(
        frame=torch.randint(0, 256, (*shape, *FRAME_SHAPE), dtype=torch.uint8),
        reward=2 * torch.randn(shape),
        terminated=terminated,
        truncated=truncated,
        truncation_value=torch.randn(shape) * truncated,
        last_action=torch.randint(0, NUM_ACTIONS, shape),
    )


def random_trajectory(agent: ActorCritic, ends: bool = True) -> Trajectory:
    """Off-policy: the behaviour has nothing to do with the agent."""
    steps = random_steps(T + 1, B, ends=ends)
    if ends:  # at the edges of the unroll too
        steps.terminated[0, 0] = steps.terminated[-1, 1] = True
        steps.truncated[0, 1] = steps.truncated[-1, 2] = True
        steps.terminated[steps.truncated] = False
        steps.truncation_value[-1, 2] = 0.7
    outputs = ActorCriticOutput(
        action=steps.last_action[1:].clone(),
        policy_logits=torch.randn(T, B, NUM_ACTIONS),
        baseline=torch.randn(T, B),
    )
    state = tuple(torch.randn_like(s) for s in agent.initial_state(B))
    return Trajectory(steps, outputs, state, torch.arange(B), torch.zeros(B, dtype=torch.int64))


def played_trajectory(agent: ActorCritic, steps: Step) -> Trajectory:
    """The agent's own answers to T+1 rows, one act after the other, as an actor records them."""
    rows, columns = steps.reward.shape
    state = tuple(torch.randn_like(s) for s in agent.initial_state(columns))
    initial, answers = state, []
    for t in range(rows - 1):
        row = map_structure(lambda x, t=t: x[t], steps)
        noise = -torch.empty(columns, NUM_ACTIONS).exponential_().log()
        output, state = agent.act(row, state, noise)
        steps.last_action[t + 1] = output.action
        answers.append(output)
    outputs = map_structure(lambda *x: torch.stack(x), *answers)
    index = torch.zeros(columns, dtype=torch.int64)
    return Trajectory(steps, outputs, initial, index, index)


def gradients(agent: ActorCritic, trajectory: Trajectory) -> list[torch.Tensor]:
    total = agent.loss(trajectory).columns.sum()
    return list(torch.autograd.grad(total, list(agent.parameters())))


def slow_columns(agent: ActorCritic, trajectory: Trajectory) -> list[torch.Tensor]:
    """Section 4.2 of the paper with one forward pass a row and torch.distributions."""
    steps, outputs = trajectory.steps, trajectory.outputs
    losses = []
    for b in range(B):
        state = tuple(s[b : b + 1] for s in trajectory.core_state)
        policies, values = [], []
        for t in range(T + 1):
            row = map_structure(lambda x, t=t, b=b: x[t : t + 1, b : b + 1], steps)
            features = agent.torso(row.frame[0])[None]
            if agent.feed_back:
                first = float(row.terminated | row.truncated)
                reward = (1 - first) * row.reward.clamp(-1, 1)[..., None]
                action = int(row.last_action) if not first else 0
                fed_back = F.one_hot(torch.tensor([[action]]), NUM_ACTIONS).float()
                features = torch.cat([features, reward, fed_back], dim=-1)
            output, state = agent.core(features, row.terminated | row.truncated, state)
            policies.append(torch.distributions.Categorical(logits=agent.policy(output[0, 0])))
            values.append(agent.baseline(output[0, 0])[0])
        actions = outputs.action[:, b]
        log_probs = [policies[t].log_prob(actions[t]) for t in range(T)]
        behaviour = torch.distributions.Categorical(logits=outputs.policy_logits[:, b])
        targets = vtrace(
            log_rhos=(torch.stack(log_probs) - behaviour.log_prob(actions)).detach()[:, None],
            rewards=steps.reward[1:, b : b + 1].clamp(-1, 1),
            discounts=DISCOUNT * (1 - steps.terminated[1:, b : b + 1].float()),
            values=torch.stack(values[:-1]).detach()[:, None],
            bootstrap_value=values[-1].detach()[None],
            truncated=steps.truncated[1:, b : b + 1],
            truncation_values=steps.truncation_value[1:, b : b + 1],
        )
        loss = torch.zeros(())
        for t in range(T):
            loss = loss - log_probs[t] * float(targets.pg_advantages[t])
            loss = loss + BASELINE_COST * 0.5 * (float(targets.vs[t]) - values[t]) ** 2
            loss = loss - ENTROPY_COST * policies[t].entropy()
        losses.append(loss)
    return losses


@pytest.mark.parametrize("memory", [False, True])
def test_loss_is_the_papers_in_value_and_gradient(memory):
    agent = make_agent(memory)
    trajectory = random_trajectory(agent)
    columns = agent.loss(trajectory).columns
    expected = torch.stack(slow_columns(agent, trajectory))
    assert columns.shape == (B,)
    torch.testing.assert_close(columns, expected, rtol=1e-4, atol=1e-5)
    parameters = list(agent.parameters())
    wanted = torch.autograd.grad(expected.sum(), parameters)
    for gradient, other in zip(gradients(agent, trajectory), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("memory", [False, True])
def test_columns_do_not_see_each_other(memory):
    """So that gradients of micro-batches add up to those of the batch."""
    agent = make_agent(memory)
    trajectory = random_trajectory(agent)
    together, whole = agent.loss(trajectory), gradients(agent, trajectory)
    added = [torch.zeros_like(g) for g in whole]
    metrics = dict.fromkeys(together.metrics, 0.0)
    for b in range(B):
        part = Trajectory(
            steps=map_structure(lambda x, b=b: x[:, b : b + 1], trajectory.steps),
            outputs=map_structure(lambda x, b=b: x[:, b : b + 1], trajectory.outputs),
            core_state=tuple(s[b : b + 1] for s in trajectory.core_state),
            task=trajectory.task[b : b + 1],
            version=trajectory.version[b : b + 1],
        )
        loss = agent.loss(part)
        torch.testing.assert_close(loss.columns[0], together.columns[b])
        for name, value in loss.metrics.items():
            metrics[name] += float(value)
        for total, gradient in zip(added, gradients(agent, part), strict=True):
            total += gradient
    for total, gradient in zip(added, whole, strict=True):
        torch.testing.assert_close(total, gradient, rtol=1e-4, atol=1e-5)
    for name, value in metrics.items():
        assert float(together.metrics[name]) == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_metrics_are_sums_over_columns():
    agent = make_agent()
    trajectory = random_trajectory(agent)
    loss = agent.loss(trajectory)
    metrics = {name: float(value) for name, value in loss.metrics.items()}
    assert not any(value.requires_grad for value in loss.metrics.values())
    parts = metrics["loss/policy"] + metrics["loss/baseline"] + metrics["loss/entropy"]
    assert metrics["loss/total"] == pytest.approx(parts, rel=1e-5)
    assert metrics["loss/total"] == pytest.approx(loss.columns.sum().item(), rel=1e-5)
    assert metrics["loss/entropy"] == pytest.approx(
        -ENTROPY_COST * T * metrics["policy/entropy"], rel=1e-5
    )
    assert 0 < metrics["policy/entropy"] <= B * np.log(NUM_ACTIONS)

    outputs = trajectory.outputs
    logits = agent.policy(agent.torso(trajectory.steps.frame[:-1].flatten(0, 1))).detach()
    log_ratio = torch.log_softmax(logits.view(T, B, -1), -1) - outputs.policy_logits.log_softmax(-1)
    rhos = log_ratio.gather(-1, outputs.action[..., None]).exp()
    assert metrics["vtrace/rho_mean"] / B == pytest.approx(float(rhos.mean()), rel=1e-4)
    clipped = float((rhos > 1).float().mean())
    assert metrics["vtrace/rho_clipped"] / B == pytest.approx(clipped)
    assert 0 < clipped < 1


def test_rho_bar_reaches_vtrace_and_the_share_of_clipped_rows():
    torch.manual_seed(0)
    trajectory = random_trajectory(make_agent())
    losses = []
    for clips in ({}, {"rho_bar": 3.2}, {"rho_bar": None}, {"pg_rho_bar": 3.0}, {"lambda_": 0.5}):
        torch.manual_seed(0)
        losses.append(make_agent(**clips).loss(trajectory))
    assert len({round(float(loss.columns.sum().detach()), 4) for loss in losses}) == len(losses)
    clipped = [float(loss.metrics["vtrace/rho_clipped"]) for loss in losses]
    assert clipped[0] > clipped[1] > clipped[2] == 0


def test_without_correction_every_unroll_is_taken_for_on_policy():
    agent, plain = make_agent(), make_agent(correct_lag=False)
    plain.load_state_dict(agent.state_dict())
    trajectory = random_trajectory(agent)
    outputs = trajectory.outputs
    assert not torch.allclose(agent.loss(trajectory).columns, plain.loss(trajectory).columns)
    logits, _, _ = agent._unroll(trajectory.steps, trajectory.core_state)
    on_policy = trajectory._replace(outputs=outputs._replace(policy_logits=logits[:-1].detach()))
    torch.testing.assert_close(agent.loss(on_policy).columns, plain.loss(trajectory).columns)


def test_rows_that_belong_to_the_unroll():
    """Row t of the loss reads the reward that arrived at row t + 1: the last, not the first."""
    agent = make_agent()
    trajectory = random_trajectory(agent, ends=False)
    before = gradients(agent, trajectory)
    trajectory.steps.reward[0] += 0.5
    for gradient, old in zip(gradients(agent, trajectory), before, strict=True):
        assert torch.equal(gradient, old)
    trajectory.steps.reward[-1] = torch.where(trajectory.steps.reward[-1] > 0, -1.0, 1.0)
    changed = [
        not torch.allclose(gradient, old, atol=1e-4)
        for gradient, old in zip(gradients(agent, trajectory), before, strict=True)
    ]
    assert all(changed)


def changed_columns(agent: ActorCritic, old: Trajectory, **fields: torch.Tensor) -> list[bool]:
    new = old._replace(steps=old.steps._replace(**fields))
    change = (agent.loss(new).columns - agent.loss(old).columns).abs()
    return (change > 1e-5).tolist()


def test_what_follows_an_end_counts_only_if_time_ran_out():
    agent = make_agent()
    trajectory = random_trajectory(agent, ends=False)
    steps = trajectory.steps
    steps.terminated[-1, 0] = steps.truncated[-1, 1] = True  # and column 2 goes on
    frame = steps.frame.clone()
    frame[-1] = 255 - frame[-1]
    assert changed_columns(agent, trajectory, frame=frame) == [False, False, True]
    value = steps.truncation_value + 1.0
    assert changed_columns(agent, trajectory, truncation_value=value) == [False, True, False]


def test_both_ends_cut_the_memory_and_the_returns():
    """What happens after an end within the unroll changes nothing before it, nor the reverse."""
    agent = make_agent(memory=True)
    trajectory = random_trajectory(agent, ends=False)
    steps = trajectory.steps
    steps.terminated[3, 0] = steps.truncated[3, 1] = True
    loss = agent.loss(trajectory).columns

    def part(rows: slice, answers: slice) -> torch.Tensor:
        piece = trajectory._replace(
            steps=map_structure(lambda x: x[rows], steps),
            outputs=map_structure(lambda x: x[answers], trajectory.outputs),
        )
        return agent.loss(piece).columns

    separate = part(slice(0, 4), slice(0, 3)) + part(slice(3, None), slice(3, None))
    torch.testing.assert_close(loss[:2], separate[:2])
    assert (loss[2] - separate[2]).abs().item() > 1e-3


@pytest.mark.parametrize("memory", [False, True])
def test_the_learner_computes_what_the_actor_did_row_for_row(memory):
    """With the state at row 0 and the ends, the learner's policy is the actor's: all rho are 1."""
    agent = make_agent(memory)
    trajectory = played_trajectory(agent, random_steps(T + 1, B))
    assert trajectory.steps.first[1:-1].any()
    metrics = agent.loss(trajectory).metrics
    assert float(metrics["vtrace/rho_mean"]) == pytest.approx(B, rel=1e-5)
    assert float(metrics["vtrace/rho_clipped"]) == 0
    logits, baseline, _ = agent._unroll(trajectory.steps, trajectory.core_state)
    torch.testing.assert_close(logits[:-1], trajectory.outputs.policy_logits)
    torch.testing.assert_close(baseline[:-1], trajectory.outputs.baseline)


def test_recurrent_state_is_zeroed_exactly_where_an_episode_ended():
    agent = make_agent(memory=True)
    step = random_steps(B, ends=False)
    step.terminated[0] = step.truncated[1] = True
    state = tuple(torch.randn_like(s) for s in agent.initial_state(B))
    noise = torch.zeros(B, NUM_ACTIONS)
    output, after = agent.act(step, state, noise)
    fresh, fresh_after = agent.act(step, agent.initial_state(B), noise)
    for x, y in (
        (output.policy_logits, fresh.policy_logits),
        *zip(after, fresh_after, strict=True),
    ):
        assert torch.equal(x[:2], y[:2])
        assert not torch.allclose(x[2], y[2])


def test_value_continues_the_episode_that_was_cut():
    """The true last observation, given the state after the row before: as if acting went on."""
    agent = make_agent(memory=True)
    state = tuple(torch.randn_like(s) for s in agent.initial_state(B))
    noise = torch.zeros(B, NUM_ACTIONS)
    _, state = agent.act(random_steps(B), state, noise)
    last = random_steps(B, ends=False)
    before = tuple(s.clone() for s in state)
    value = agent.value(last, state)
    assert value.shape == (B,)
    torch.testing.assert_close(value, agent.act(last, state, noise)[0].baseline)
    assert all(torch.equal(s, old) for s, old in zip(state, before, strict=True))
    assert not torch.allclose(value, agent.value(last, agent.initial_state(B)))


def test_act_answers_as_the_contract_says():
    agent = make_agent(memory=True)
    output, state = agent.act(random_steps(5), agent.initial_state(5), torch.zeros(5, NUM_ACTIONS))
    assert output.action.shape == output.baseline.shape == (5,)
    assert output.policy_logits.shape == (5, NUM_ACTIONS)
    assert output.action.dtype == torch.int64
    assert output.policy_logits.dtype == output.baseline.dtype == torch.float32
    assert torch.equal(output.action, output.policy_logits.argmax(-1))  # zeros: greedy
    assert [s.shape for s in state] == [(5, 7), (5, 7)]
    assert not any(x.requires_grad for x in (*output, *state))


def test_noise_samples_the_policy():
    agent = make_agent()
    count = 20_000
    step = map_structure(lambda x: x.expand(count, *x.shape[1:]), random_steps(1))
    noise = -torch.empty(count, NUM_ACTIONS).exponential_().log()
    output, _ = agent.act(step, (), noise)
    shares = torch.bincount(output.action, minlength=NUM_ACTIONS) / count
    torch.testing.assert_close(shares, output.policy_logits[0].softmax(-1), rtol=0, atol=0.02)


@pytest.mark.parametrize("memory", [False, True])
def test_last_reward_and_action_are_fed_back_only_if_wanted_and_never_across_an_end(memory):
    agent = make_agent(memory)
    step = random_steps(3, ends=False)
    step = step._replace(reward=torch.zeros(3), terminated=torch.tensor([False, False, True]))

    def differs(**fields: torch.Tensor) -> list[bool]:
        state = agent.initial_state(3)
        difference = agent.value(step._replace(**fields), state) - agent.value(step, state)
        return (difference != 0).tolist()

    seen = [memory, memory, False]
    assert differs(reward=torch.ones(3)) == seen
    assert differs(last_action=(step.last_action + 1) % NUM_ACTIONS) == seen
    large, clipped = (step._replace(reward=torch.full((3,), r)) for r in (50.0, 1.0))
    state = agent.initial_state(3)
    assert torch.equal(agent.value(large, state), agent.value(clipped, state))


def test_the_first_policy_is_nearly_uniform():
    agent = ActorCritic(
        frame_shape=(4, 84, 84),
        num_actions=18,
        torso=Shallow,
        core=FeedForward,
        feed_back=False,
        discount=0.99,
        baseline_cost=0.5,
        entropy_cost=0.01,
        reward_transform="clamp",
    )
    frame = torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8)
    step = random_steps(8)._replace(frame=frame)
    output, _ = agent.act(step, (), torch.zeros(8, 18))
    policy = output.policy_logits.softmax(-1)
    assert 0.99 / 18 < float(policy.min()) < float(policy.max()) < 1.01 / 18


@pytest.mark.parametrize(("torso", "count"), [(Deep, 1_628_010), (Shallow, 1_230_426)])
def test_number_of_parameters_is_the_papers(torso, count):
    """On DeepMind Lab: 1.6 and 1.2 million, of which the language branch has 107,296."""
    sizes = {"frame_shape": (3, 72, 96), "num_actions": 9, "torso": torso, "core": LSTM}
    for language, expected in ((lambda: Language(1000), count), (None, count - 107_296)):
        agent = make_agent(**sizes, feed_back=True, language=language)
        assert sum(p.numel() for p in agent.parameters()) == expected


def test_instructions_are_read_alike_by_actor_and_learner():
    agent = make_agent(memory=True, language=lambda: Language(9))
    words = torch.randint(0, 9, (T + 1, B, 4), dtype=torch.int32)
    words[:2] = 0
    trajectory = played_trajectory(agent, random_steps(T + 1, B)._replace(instruction=words))
    logits, baseline, _ = agent._unroll(trajectory.steps, trajectory.core_state)
    torch.testing.assert_close(logits[:-1], trajectory.outputs.policy_logits)
    torch.testing.assert_close(baseline[:-1], trajectory.outputs.baseline)
    other = trajectory.steps._replace(instruction=words.flip(0))
    assert not torch.allclose(agent._unroll(other, trajectory.core_state)[0][:-1], logits[:-1])


@pytest.mark.parametrize("memory", [False, True])
def test_agent_is_picklable_although_its_makers_are_not(memory):
    agent = make_agent(memory)  # made by lambdas
    copy = pickle.loads(pickle.dumps(agent))
    trajectory = random_trajectory(agent)
    assert torch.equal(copy.loss(trajectory).columns, agent.loss(trajectory).columns)
    copy.load_state_dict(agent.state_dict(), strict=True)


def test_autocast_keeps_logits_values_and_losses_in_float32():
    agent = make_agent(memory=True)
    trajectory = random_trajectory(agent)
    exact = agent.loss(trajectory).columns
    with torch.autocast("cpu", torch.bfloat16):
        columns = agent.loss(trajectory).columns
        output, _ = agent.act(random_steps(64), agent.initial_state(64), torch.zeros(64, 4))
    assert columns.dtype == output.policy_logits.dtype == output.baseline.dtype == torch.float32
    assert not torch.equal(output.baseline.bfloat16().float(), output.baseline)
    torch.testing.assert_close(columns, exact, rtol=0.1, atol=0.2)


def test_an_unknown_reward_transform_is_refused_when_the_agent_is_made():
    with pytest.raises(ValueError, match="did you mean 'clamp'"):
        make_agent(reward_transform="clmap")


@pytest.mark.parametrize("end", ["terminated", "truncated", "none"])
def test_a_reward_on_the_last_row_of_each_unroll_is_learned_from(end):
    """Only the last action of the unroll is rewarded, if it was action 2."""
    agent = make_agent(entropy_cost=0.0)
    torch.nn.init.zeros_(agent.policy.weight)
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.03)
    frame = 255 * torch.eye(6, dtype=torch.uint8)[[0, 1, 2, 0]].view(4, 1, *FRAME_SHAPE)
    frame = frame.expand(-1, 16, *(-1,) * len(FRAME_SHAPE))
    for _ in range(60):
        steps = random_steps(4, 16, ends=False)._replace(frame=frame, reward=torch.zeros(4, 16))
        if end != "none":
            getattr(steps, end)[[0, -1]] = True
        trajectory = played_trajectory(agent, steps)
        steps.reward[-1] = (trajectory.outputs.action[-1] == 2).float()
        optimizer.zero_grad()
        agent.loss(trajectory).columns.sum().backward()
        optimizer.step()
    step = map_structure(lambda x: x[2], steps)
    output, _ = agent.act(step, (), torch.zeros(16, NUM_ACTIONS))
    assert float(output.policy_logits.softmax(-1)[0, 2]) > 0.9
