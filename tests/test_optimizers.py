"""RMSProp in TensorFlow's form."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from impala.optimizers import RMSProp

SHAPES = ((3, 2), (4,), ())


def parameters(seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def take_steps(params: list[torch.nn.Parameter], optimizer: RMSProp, seeds: range) -> None:
    for seed in seeds:
        for parameter, gradient in zip(params, parameters(seed), strict=True):
            parameter.grad = 3 * gradient.detach()
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("eps", [0.1, 1e-7])
def test_rmsprop_is_tensorflows(momentum, eps):
    lr, decay = 0.01, 0.9
    params = parameters(0)
    expected = [p.detach().double().numpy().copy() for p in params]
    squares = [np.ones(shape) for shape in SHAPES]
    velocities = [np.zeros(shape) for shape in SHAPES]
    optimizer = RMSProp(params, lr=lr, decay=decay, momentum=momentum, eps=eps)
    take_steps(params, optimizer, range(1, 6))
    for seed in range(1, 6):
        for i, gradient in enumerate(parameters(seed)):
            g = 3 * gradient.detach().double().numpy()
            squares[i] = decay * squares[i] + (1 - decay) * g * g
            velocities[i] = momentum * velocities[i] + lr * g / np.sqrt(squares[i] + eps)
            expected[i] = expected[i] - velocities[i]
    for parameter, value in zip(params, expected, strict=True):
        np.testing.assert_allclose(parameter.detach(), value, rtol=1e-5)


def test_the_learning_rate_of_the_group_is_read_at_each_step():
    params = parameters(0)
    optimizer = RMSProp(params, lr=1.0)
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(params, optimizer, range(1, 2))
    for parameter, before in zip(params, parameters(0), strict=True):
        assert torch.equal(parameter, before)


def test_parameters_without_gradient_stay():
    params = parameters(0)
    optimizer = RMSProp(params, lr=0.1, momentum=0.5)
    optimizer.step()
    params[1].grad = torch.ones(4)
    optimizer.step()
    changed = [not torch.equal(p, q) for p, q in zip(params, parameters(0), strict=True)]
    assert changed == [False, True, False]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_goes_through_a_file_of_plain_types(momentum):
    straight, stopped = parameters(0), parameters(0)
    options = {"lr": 0.01, "momentum": momentum, "eps": 0.1}
    optimizer = RMSProp(straight, **options)
    take_steps(straight, optimizer, range(1, 7))

    optimizer = RMSProp(stopped, **options)
    take_steps(stopped, optimizer, range(1, 4))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = RMSProp(stopped, **options)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    take_steps(stopped, resumed, range(4, 7))
    for a, b in zip(straight, stopped, strict=True):
        assert torch.equal(a, b)


def test_closure_is_called_with_gradients_enabled():
    parameter = torch.nn.Parameter(torch.tensor(2.0))
    optimizer = RMSProp([parameter], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert parameter.item() < 2.0


@pytest.mark.parametrize("bad", [{"lr": -1}, {"decay": 1.0}, {"momentum": 1.0}, {"eps": 0.0}])
def test_impossible_hyperparameters_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=f"RMSProp: {next(iter(bad))} must be"):
        RMSProp(parameters(0), **{"lr": 0.1} | bad)
