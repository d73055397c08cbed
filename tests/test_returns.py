"""V-trace against the paper's sum, and the named reward transforms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from impala.returns.rewards import REWARD_TRANSFORMS, reward_transform
from impala.returns.vtrace import VTrace, vtrace

T, B = 7, 5


def random_inputs(seed: int = 0, rows: int = T, columns: int = B) -> dict[str, torch.Tensor]:
    """Episodes end by termination and by truncation, also in the first and in the last row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    terminated = torch.rand((rows, columns), generator=generator) < 0.2
    truncated = torch.rand((rows, columns), generator=generator) < 0.2
    terminated[0, 0] = terminated[-1, 1] = truncated[0, 2] = truncated[-1, 3] = True
    return {
        "log_rhos": normal(rows, columns),
        "rewards": normal(rows, columns),
        "discounts": 0.9 * (~terminated).float(),
        "values": normal(rows, columns),
        "bootstrap_value": normal(columns),
        "truncated": truncated,
        "truncation_values": normal(rows, columns),
    }


def clip(ratio: float, threshold: float | None) -> float:
    return ratio if threshold is None else min(ratio, threshold)


def paper_vtrace(
    inputs: dict[str, torch.Tensor],
    rho_bar: float | None,
    c_bar: float | None,
    pg_rho_bar: float | None,
    lambda_: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Equation 1 as the double sum it is written as, one transition at a time."""
    x = {name: tensor.double().numpy() for name, tensor in inputs.items()}
    rows, columns = x["values"].shape
    vs, advantages = np.zeros((rows, columns)), np.zeros((rows, columns))

    def next_value(t: int, b: int) -> float:
        if x["truncated"][t, b]:
            return x["truncation_values"][t, b]
        return x["values"][t + 1, b] if t + 1 < rows else x["bootstrap_value"][b]

    for b in range(columns):
        for s in range(rows):
            total, weight = x["values"][s, b], 1.0
            for t in range(s, rows):
                ratio = math.exp(x["log_rhos"][t, b])
                error = x["rewards"][t, b] + x["discounts"][t, b] * next_value(t, b)
                total += weight * clip(ratio, rho_bar) * (error - x["values"][t, b])
                if x["truncated"][t, b]:
                    break
                weight *= x["discounts"][t, b] * lambda_ * clip(ratio, c_bar)
            vs[s, b] = total
        for s in range(rows):
            inside = s + 1 < rows and not x["truncated"][s, b]
            following = vs[s + 1, b] if inside else next_value(s, b)
            target = x["rewards"][s, b] + x["discounts"][s, b] * following
            weight = clip(math.exp(x["log_rhos"][s, b]), pg_rho_bar)
            advantages[s, b] = weight * (target - x["values"][s, b])
    return vs, advantages


@pytest.mark.parametrize(
    ("rho_bar", "c_bar", "pg_rho_bar", "lambda_"),
    [
        (1.0, 1.0, 1.0, 1.0),
        (2.0, 0.7, 1.3, 0.95),
        (None, None, None, 1.0),
        (None, 1.0, 0.5, 0.5),
        (3.0, 3.0, None, 0.0),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, T])
def test_vtrace_is_the_papers_sum(rho_bar, c_bar, pg_rho_bar, lambda_, rows):
    inputs = random_inputs(rows=rows)
    clips = {"rho_bar": rho_bar, "c_bar": c_bar, "pg_rho_bar": pg_rho_bar, "lambda_": lambda_}
    result = vtrace(**inputs, **clips)
    vs, advantages = paper_vtrace(inputs, **clips)
    np.testing.assert_allclose(result.vs, vs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.pg_advantages, advantages, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.rhos, inputs["log_rhos"].exp(), rtol=1e-6)


def test_on_policy_targets_are_n_step_bellman_targets():
    inputs = random_inputs()
    inputs["log_rhos"] = torch.zeros(T, B)
    inputs["truncated"] = torch.zeros(T, B, dtype=torch.bool)
    result = vtrace(**inputs)
    target, targets = inputs["bootstrap_value"], []
    for t in reversed(range(T)):
        target = inputs["rewards"][t] + inputs["discounts"][t] * target
        targets.insert(0, target)
    torch.testing.assert_close(result.vs, torch.stack(targets))
    torch.testing.assert_close(result.pg_advantages, torch.stack(targets) - inputs["values"])


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_episodes_in_one_unroll_are_each_as_if_alone(end):
    lengths = (3, 1, 2, 4)
    inputs = random_inputs(rows=sum(lengths))
    lasts = np.cumsum(lengths) - 1
    inputs["discounts"] = torch.full_like(inputs["values"], 0.9)
    inputs["truncated"] = torch.zeros_like(inputs["values"], dtype=torch.bool)
    if end == "terminated":
        inputs["discounts"][lasts] = 0.0
    else:
        inputs["truncated"][lasts] = True
    together = vtrace(**inputs)

    begin = 0
    for last in lasts:
        rows = slice(begin, last + 1)
        alone = {name: x[rows] for name, x in inputs.items() if name != "bootstrap_value"}
        # Truncation of the last transition is the same as bootstrapping from what follows it.
        alone["truncated"] = torch.zeros_like(alone["truncated"])
        alone["bootstrap_value"] = alone["truncation_values"][-1]
        separate = vtrace(**alone)
        torch.testing.assert_close(together.vs[rows], separate.vs)
        torch.testing.assert_close(together.pg_advantages[rows], separate.pg_advantages)
        begin = last + 1


def test_advantage_at_a_truncation_does_not_see_the_next_episode():
    """Two episodes of two steps with values 1 and 100: the first has nothing to learn."""
    values = torch.tensor([1.0, 1.0, 100.0, 100.0])[:, None]
    result = vtrace(
        log_rhos=torch.zeros(4, 1),
        rewards=torch.zeros(4, 1),
        discounts=torch.ones(4, 1),
        values=values,
        bootstrap_value=torch.tensor([100.0]),
        truncated=torch.tensor([False, True, False, False])[:, None],
        truncation_values=torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None],
    )
    torch.testing.assert_close(result.vs, values)
    torch.testing.assert_close(result.pg_advantages, torch.zeros(4, 1))


def test_termination_wins_over_truncation():
    inputs = random_inputs()
    inputs["truncated"] = inputs["discounts"] == 0
    other = inputs | {"truncation_values": inputs["truncation_values"] + 1e3}
    torch.testing.assert_close(vtrace(**other), vtrace(**inputs))


def test_without_truncation_arguments():
    inputs = random_inputs()
    inputs["truncated"] = torch.zeros_like(inputs["truncated"])
    expected = vtrace(**inputs)
    del inputs["truncated"], inputs["truncation_values"]
    torch.testing.assert_close(vtrace(**inputs), expected)


def test_no_gradient_and_no_change_of_inputs():
    inputs = random_inputs()
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    for name in ("log_rhos", "values", "bootstrap_value"):
        inputs[name].requires_grad_()
    result = vtrace(**inputs)
    assert isinstance(result, VTrace)
    assert not any(tensor.requires_grad for tensor in result)
    for name, tensor in inputs.items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("log_rhos", (T, B, 1)),
        ("rewards", (T, 1)),
        ("rewards", (T + 1, B)),
        ("discounts", (B,)),
        ("bootstrap_value", (B, 1)),
        ("bootstrap_value", (1,)),
        ("truncated", (1, B)),
        ("truncation_values", (B, T)),
    ],
)
def test_wrong_shapes_are_refused_by_name(name, shape):
    inputs = random_inputs()
    inputs[name] = torch.zeros(shape, dtype=inputs[name].dtype)
    with pytest.raises(ValueError, match=name) as error:
        vtrace(**inputs)
    assert str(shape) in str(error.value)
    assert str((T, B)) in str(error.value)


def test_other_impossible_arguments_are_refused():
    inputs = random_inputs()
    with pytest.raises(ValueError, match="values must be"):
        vtrace(**inputs | {"values": torch.zeros(T)})
    with pytest.raises(ValueError, match="or neither"):
        vtrace(**inputs | {"truncation_values": None})
    for clips in ({"rho_bar": 1.0, "c_bar": 2.0}, {"rho_bar": 1.0, "c_bar": None}, {"c_bar": -1.0}):
        with pytest.raises(ValueError, match="rho_bar >= c_bar"):
            vtrace(**inputs, **clips)
    with pytest.raises(ValueError, match="lambda_"):
        vtrace(**inputs, lambda_=1.5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("clamp", [-1.0, -0.25, 0.0, 0.5, 1.0]),
        ("sign", [-1.0, -1.0, 0.0, 1.0, 1.0]),
        ("none", [-100.0, -0.25, 0.0, 0.5, 1000.0]),
        # 1.5 tanh(-20), 1.5 tanh(-0.05), 0, 5 tanh(0.1), 5 tanh(200)
        ("soft_asymmetric", [-1.5, -0.0749376, 0.0, 0.4983400, 5.0]),
        # 0.3 tanh(-100), 0.3 tanh(-0.25), 0, 5 tanh(0.5), 5 tanh(1000)
        ("soft_asymmetric_caption", [-0.3, -0.0734756, 0.0, 2.3105858, 5.0]),
    ],
)
def test_reward_transforms(name, expected):
    rewards = torch.tensor([-100.0, -0.25, 0.0, 0.5, 1000.0])
    torch.testing.assert_close(reward_transform(name)(rewards), torch.tensor(expected))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 1.5 tanh(2), 1.5 tanh(0.2); 5 tanh(0.2), 5 tanh(2)
        ("soft_asymmetric", [-1.4460414, -0.2960630, 0.0, 0.9868766, 4.8201379]),
        # 0.3 tanh(10), 0.3 tanh(1); 5 tanh(1), 5 tanh(10)
        ("soft_asymmetric_caption", [-0.3, -0.2284783, 0.0, 3.8079708, 5.0]),
    ],
)
def test_both_forms_of_the_asymmetric_clipping(name, expected):
    rewards = torch.tensor([-10.0, -1.0, 0.0, 1.0, 10.0])
    torch.testing.assert_close(reward_transform(name)(rewards), torch.tensor(expected))


def test_every_reward_transform_is_tested():
    named = {"clamp", "sign", "soft_asymmetric", "soft_asymmetric_caption", "none"}
    assert set(REWARD_TRANSFORMS) == named


def test_an_unknown_reward_transform_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'soft_asymmetric'"):
        reward_transform("soft_assymetric")
    with pytest.raises(ValueError, match=", ".join(REWARD_TRANSFORMS)):
        reward_transform("xyz")
