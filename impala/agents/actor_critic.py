"""The actor-critic of IMPALA (Espeholt et al. 2018): policy, baseline and entropy by V-trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from impala.agents.agent import Agent, CoreState, Loss
from impala.networks.core import Core
from impala.networks.language import Language
from impala.networks.torso import Torso
from impala.returns.rewards import reward_transform as reward_transform_named
from impala.returns.vtrace import VTrace, vtrace
from impala.trajectory import Step, Trajectory, map_structure


class ActorCriticOutput(NamedTuple):
    """Answers to N environments, or to [T, B] rows in a trajectory."""

    action: Int64[Tensor, " N"]
    policy_logits: Float[Tensor, "N A"]  # of the behaviour policy mu
    baseline: Float[Tensor, " N"]


class ActorCritic(Agent):
    """One network for policy and baseline.

    frame_shape, num_actions: of the suite.
    torso:            makes the torso of a frame shape, such as the class `torso.Shallow`.
    core:             makes the core of a number of input features, such as `core.LSTM`.
    language:         makes what reads the instructions, such as `language.Language` with a
                      vocabulary size; None where the suite has none.
    feed_back:        whether the core also reads the last reward, clipped to [-1, 1], and the
                      last action, as the paper's recurrent networks do.
    discount:         gamma of one agent step.
    baseline_cost, entropy_cost: weights beside the policy loss. Losses are summed over time.
    reward_transform: a name of `impala.returns.rewards`.
    rho_bar, c_bar, pg_rho_bar, lambda_: see `impala.returns.vtrace`.
    correct_lag:      importance weights pi / mu in V-trace; without them every unroll is taken for
                      one of the current policy, as in A3C.
    """

    def __init__(
        self,
        *,
        frame_shape: tuple[int, ...],
        num_actions: int,
        torso: Callable[[tuple[int, ...]], Torso],
        core: Callable[[int], Core],
        feed_back: bool,
        language: Callable[[], Language] | None = None,
        discount: float,
        baseline_cost: float,
        entropy_cost: float,
        reward_transform: str,
        rho_bar: float | None = 1.0,
        c_bar: float | None = 1.0,
        pg_rho_bar: float | None = 1.0,
        lambda_: float = 1.0,
        correct_lag: bool = True,
    ) -> None:
        super().__init__()
        _check("discount", discount, 1.0)
        _check("lambda_", lambda_, 1.0)
        _check("baseline_cost", baseline_cost)
        _check("entropy_cost", entropy_cost)
        for name, bar in (("rho_bar", rho_bar), ("c_bar", c_bar), ("pg_rho_bar", pg_rho_bar)):
            if bar is not None:
                _check(name, bar)
        self.num_actions = num_actions
        self.feed_back = feed_back
        self.discount = discount
        self.baseline_cost = baseline_cost
        self.entropy_cost = entropy_cost
        self.reward_transform = reward_transform_named(reward_transform)
        self.rho_bar = rho_bar
        self.c_bar = c_bar
        self.pg_rho_bar = pg_rho_bar
        self.lambda_ = lambda_
        self.correct_lag = correct_lag

        self.torso = torso(tuple(frame_shape))
        self.language = language() if language else None
        in_features = self.torso.out_features + (1 + num_actions if feed_back else 0)
        if self.language:
            in_features += self.language.out_features
        self.core = core(in_features)
        self.policy = nn.Linear(self.core.out_features, num_actions)
        self.baseline = nn.Linear(self.core.out_features, 1)
        # A nearly uniform first policy whatever the frame, so that exploration does not start from
        # an accident of the weights; and a baseline near zero.
        for head, gain in ((self.policy, 0.001), (self.baseline, 0.1)):
            nn.init.orthogonal_(head.weight, gain=gain)
            nn.init.zeros_(head.bias)

    def initial_state(self, batch_size: int) -> CoreState:
        return self.core.initial_state(batch_size)

    @torch.no_grad()
    def act(
        self, step: Step, state: CoreState, noise: Float[Tensor, "N A"]
    ) -> tuple[ActorCriticOutput, CoreState]:
        logits, baseline, state = self._unroll(_one_row(step), state)
        logits, baseline = logits[0], baseline[0]
        return ActorCriticOutput((logits + noise).argmax(-1), logits, baseline), state

    @torch.no_grad()
    def value(self, step: Step, state: CoreState) -> Float[Tensor, " N"]:
        _, baseline, _ = self._unroll(_one_row(step), state)
        return baseline[0]

    def loss(self, trajectory: Trajectory) -> Loss:
        """Losses of section 4.2, summed over the T rows of each column."""
        steps, outputs = trajectory.steps, trajectory.outputs
        logits, baseline, _ = self._unroll(steps, trajectory.core_state)
        bootstrap_value, baseline = baseline[-1].detach(), baseline[:-1]
        # Shared by the policy loss, the entropy and the importance weights.
        log_policy = F.log_softmax(logits[:-1], dim=-1)
        log_prob = _at(log_policy, outputs.action)

        with torch.no_grad():
            log_behaviour = _at(F.log_softmax(outputs.policy_logits, dim=-1), outputs.action)
            log_rhos = log_prob - log_behaviour
            targets = vtrace(
                log_rhos=log_rhos if self.correct_lag else torch.zeros_like(log_rhos),
                rewards=self.reward_transform(steps.reward[1:]),
                discounts=self.discount * (~steps.terminated[1:]).float(),
                values=baseline,
                bootstrap_value=bootstrap_value,
                truncated=steps.truncated[1:],
                truncation_values=steps.truncation_value[1:],
                rho_bar=self.rho_bar,
                c_bar=self.c_bar,
                pg_rho_bar=self.pg_rho_bar,
                lambda_=self.lambda_,
            )

        error = targets.vs - baseline
        policy_loss = -(log_prob * targets.pg_advantages).sum(0)
        baseline_loss = self.baseline_cost * 0.5 * error.square().sum(0)
        entropy = -(log_policy.exp() * log_policy).sum((0, 2))
        entropy_loss = -self.entropy_cost * entropy
        columns = policy_loss + baseline_loss + entropy_loss

        metrics = {
            "loss/policy": policy_loss,
            "loss/baseline": baseline_loss,
            "loss/entropy": entropy_loss,
            "loss/total": columns,
            "policy/entropy": entropy / len(baseline),
        }
        metrics = {name: column.detach().sum() for name, column in metrics.items()}
        return Loss(columns, metrics | self._target_metrics(targets, error.detach()))

    def _unroll(
        self, steps: Step, state: CoreState
    ) -> tuple[Float[Tensor, "R B A"], Float[Tensor, "R B"], CoreState]:
        """Policy logits and baseline of R rows, and the state after the last."""
        first = steps.first
        features = self.torso(steps.frame.flatten(0, 1)).unflatten(0, first.shape)
        if self.feed_back:
            fed_back = self._fed_back(steps.reward, steps.last_action, first)
            features = torch.cat([features, fed_back], dim=-1)
        if self.language is not None:
            features = torch.cat([features, self.language(steps.instruction)], dim=-1)
        outputs, state = self.core(features, first, state)
        # In bfloat16 a logit or a value has two or three digits, too few for what is made of it.
        with torch.autocast(outputs.device.type, enabled=False):
            outputs = outputs.float()
            return self.policy(outputs), self.baseline(outputs).squeeze(-1), state

    def _fed_back(
        self,
        reward: Float[Tensor, "R B"],
        last_action: Int64[Tensor, "R B"],
        first: Bool[Tensor, "R B"],
    ) -> Float[Tensor, "R B A+1"]:
        # Unlike the paper: its code shows the end of one episode to the first row of the next.
        reward = reward.clamp(-1.0, 1.0).masked_fill(first, 0.0)
        action = F.one_hot(last_action.masked_fill(first, 0), self.num_actions)
        return torch.cat([reward.unsqueeze(-1), action.to(reward.dtype)], dim=-1)

    def _target_metrics(self, targets: VTrace, error: Float[Tensor, "T B"]) -> dict[str, Tensor]:
        """Means over time, summed over columns.

        Averaged over columns, the share of the targets' variance that the baseline explains is
        1 - error_squared / (target_squared - target**2).
        """
        # On-policy ratios are 1 but for rounding, which is no clipping.
        clip = float("inf") if self.rho_bar is None else self.rho_bar * 1.001
        return {
            "vtrace/rho_mean": targets.rhos.mean(0).sum(),
            "vtrace/rho_clipped": (targets.rhos > clip).float().mean(0).sum(),
            "value/target": targets.vs.mean(0).sum(),
            "value/target_squared": targets.vs.square().mean(0).sum(),
            "value/error_squared": error.square().mean(0).sum(),
        }


def _one_row(step: Step) -> Step:
    return map_structure(lambda field: field[None], step)


def _at(log_policy: Float[Tensor, "T B A"], action: Int64[Tensor, "T B"]) -> Float[Tensor, "T B"]:
    return log_policy.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def _check(name: str, value: float, most: float = math.inf) -> None:
    if not (isinstance(value, (int, float)) and 0 <= value <= most and math.isfinite(value)):
        upper = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"algorithm.agent.{name}={value}: expected a number of at least 0{upper}")
