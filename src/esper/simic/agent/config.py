"""What the agent can be told: one frozen record of hyper-parameters with their ranges, and the schedules they imply."""

from __future__ import annotations

import math
from dataclasses import dataclass

from esper.leyline import OPS, LifecycleOp

DEFAULT_OP_PRIOR: tuple[float, ...] = tuple(
    {LifecycleOp.ADVANCE: 1.0, LifecycleOp.PRUNE: -2.0}.get(op, 0.0) for op in OPS
)
"""Logits of a sensible life: mostly advance, seldom prune. Under a uniform prior random play removes almost every seed
before it can pay, and then there is nothing to learn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Hyper-parameters of PPO. Schedules are functions of env steps done, so they survive a resume."""

    gamma: float = 0.995
    """Discount. Must be the reward's own: shaping terms cancel only under the same discount."""
    lam: float = 0.95
    """Trace decay of the advantage estimate."""
    advantage_std_floor: float = 1.0
    """In scaled reward: advantages that spread less are not magnified, so that where little is at stake the pull
    towards the prior wins and trying things goes on."""
    epochs: int = 4
    """Passes over a round."""
    minibatches: int = 4
    """Groups of whole env sequences per pass; at most one per env."""
    clip_ratio: float = 0.2
    target_kl: float = 0.03
    """The round's passes stop as soon as the joint KL exceeds this."""
    learning_rate: float = 3e-4
    learning_rate_final_share: float = 0.1
    """Share of the learning rate left at the end of the schedule."""
    entropy_coef: float = 0.1
    """Weight of the pull of the op towards its prior and of the other heads towards uniform choice, at the start."""
    entropy_coef_final: float = 0.01
    epsilon_op: float = 0.01
    """Share of uniform choices mixed into the op head; annealed to 0 over the last half."""
    epsilon: float = 0.05
    """The same for the other heads."""
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    width: int = 128
    """Units of the trunk and the memory."""
    memory: bool = True
    """False clears the memory before every step: the policy then sees the present only. An ablation."""
    op_prior: tuple[float, ...] = DEFAULT_OP_PRIOR
    """Logits the op head starts from and is pulled towards."""
    schedule_steps: int = 16_000
    """Env steps over which the schedules run; afterwards they stay at their ends."""

    def __post_init__(self) -> None:
        _above_zero_to_one("gamma", self.gamma)
        _zero_to_one("lam", self.lam)
        _positive("advantage_std_floor", self.advantage_std_floor)
        _at_least_one("epochs", self.epochs)
        _at_least_one("minibatches", self.minibatches)
        _above_zero_to_one("clip_ratio", self.clip_ratio)
        _positive("target_kl", self.target_kl)
        _positive("learning_rate", self.learning_rate)
        _zero_to_one("learning_rate_final_share", self.learning_rate_final_share)
        _not_negative("entropy_coef", self.entropy_coef)
        _not_negative("entropy_coef_final", self.entropy_coef_final)
        _zero_to_below_one("epsilon_op", self.epsilon_op)
        _zero_to_below_one("epsilon", self.epsilon)
        _not_negative("value_coef", self.value_coef)
        _positive("max_grad_norm", self.max_grad_norm)
        _at_least_one("width", self.width)
        _at_least_one("schedule_steps", self.schedule_steps)
        if len(self.op_prior) != len(OPS) or not all(math.isfinite(logit) for logit in self.op_prior):
            names = ", ".join(op.name for op in OPS)
            raise ValueError(f"op_prior must be {len(OPS)} finite logits ({names}), got {self.op_prior}")

    def learning_rate_at(self, env_steps: int) -> float:
        """Linear from the learning rate to its final share."""
        done = self._progress(env_steps)
        return self.learning_rate * (1.0 - (1.0 - self.learning_rate_final_share) * done)

    def entropy_coef_at(self, env_steps: int) -> float:
        """Linear from start to end."""
        return self.entropy_coef + (self.entropy_coef_final - self.entropy_coef) * self._progress(env_steps)

    def epsilon_share_at(self, env_steps: int) -> float:
        """Factor on both epsilons: 1 over the first half, then linear to 0."""
        return min(1.0, 2.0 * (1.0 - self._progress(env_steps)))

    def _progress(self, env_steps: int) -> float:
        return min(1.0, env_steps / self.schedule_steps)


def _above_zero_to_one(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name} must be in (0, 1], got {value}")


def _zero_to_one(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def _zero_to_below_one(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {value}")


def _positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")


def _not_negative(name: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, got {value}")


def _at_least_one(name: str, value: int) -> None:
    if not value >= 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
