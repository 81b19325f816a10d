"""Hyper-parameters of the learner: each declared once, with its range and its words for the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from esper.leyline import OPS, LifecycleOp, record

DEFAULT_OP_PRIOR: tuple[float, ...] = tuple(
    {LifecycleOp.ADVANCE: 1.0, LifecycleOp.PRUNE: -2.0, LifecycleOp.FOSSILIZE: 1.0}.get(op, 0.0) for op in OPS
)
"""Logits of a sensible life: mostly advance and keep, seldom prune. Under a uniform prior random play removes almost
every seed before it can pay, and then there is nothing to learn from. Keeping a held seed now or an epoch later earns
the same; with no preference a sampled policy keeps it sooner or later, and the most likely choice could be to wait for
ever. So where nothing else is at stake the prior keeps."""


@record
class Range:
    """Where a number may lie."""

    text: str
    low: float
    high: float = math.inf
    low_open: bool = False
    whole: bool = False

    def holds(self, value: float) -> bool:
        """True for a finite number inside."""
        above = value > self.low if self.low_open else value >= self.low
        return above and value <= self.high and math.isfinite(value) and (not self.whole or isinstance(value, int))


LARGEST = 1e30
"""What single precision can hold and multiply a little."""
MAX_LOGIT = 1e3
"""Far from the score of a masked choice."""
POSITIVE = Range(text="above 0 and at most 1e30", low=0.0, high=LARGEST, low_open=True)
NOT_NEGATIVE = Range(text="at least 0 and at most 1e30", low=0.0, high=LARGEST)


def up_to(most: int) -> Range:
    """For counts; the limit is far above what is sensible, and below what would take all memory or never end."""
    return Range(text=f"a whole number of at least 1 and at most {most:,}", low=1, high=most, whole=True)


STEPS = up_to(10**15)
WIDTH = up_to(4_096)
PASSES = up_to(1_000)
ENVS = up_to(4_096)
SHARE = Range(text="in [0, 1]", low=0.0, high=1.0)
FRACTION = Range(text="in (0, 1]", low=0.0, high=1.0, low_open=True)
UP_TO_HALF = Range(text="in [0, 0.5]", low=0.0, high=0.5)


def option(words: str, default: Any, allowed: Range | None = None, *, group: str = "policy") -> Any:
    """A field of a configuration: help text, default, range (checked by `check_ranges`), heading in the help."""
    return field(default=default, metadata={"help": words, "range": allowed, "group": group})


def check_ranges(config: Any) -> None:
    """Checks every number of a configuration whose fields are options; None means that nobody chose one.

    Raises:
        ValueError: Names the field, its range and the value.
    """
    for entry in fields(config):
        allowed, value = entry.metadata.get("range"), getattr(config, entry.name)
        if allowed is not None and value is not None and not allowed.holds(value):
            raise ValueError(f"{entry.name} must be {allowed.text}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """What can be chosen about PPO without knowing the run."""

    lr: float = option("Adam's step size at the start", 3e-4, POSITIVE)
    lr_final_share: float = option("share of it left at the end", 0.1, SHARE)
    # Where little is at stake the KL penalty towards the prior then wins, and exploration goes on.
    advantage_std_floor: float = option("spread below which advantages are not magnified, in rewards", 1.0, POSITIVE)
    lam: float = option("trace decay of the advantage estimate", 0.95, SHARE)
    ppo_epochs: int = option("passes over a round", 4, PASSES)
    clip_ratio: float = option("how far a probability ratio may move before its gradient ends", 0.2, FRACTION)
    target_kl: float = option("joint KL at which the passes of a round stop", 0.03, POSITIVE)
    entropy_coef: float = option(
        "KL penalty of the op towards its prior and of the other heads towards uniform choice, at the start",
        0.1,
        NOT_NEGATIVE,
    )
    entropy_coef_final: float = option("the same at the end", 0.01, NOT_NEGATIVE)
    epsilon_op: float = option("share of uniform choices in the op head; 0 at the end", 0.01, UP_TO_HALF)
    epsilon: float = option("the same for slot, blueprint and blend", 0.05, UP_TO_HALF)
    value_coef: float = option("weight of the critic's loss", 0.5, NOT_NEGATIVE)
    max_grad_norm: float = option("gradients are clipped to this norm", 0.5, POSITIVE)
    width: int = option("units of trunk and memory", 128, WIDTH)
    op_prior: tuple[float, ...] = option(
        f"logits the op head starts from and of the prior of its KL penalty ({', '.join(op.name for op in OPS)})",
        DEFAULT_OP_PRIOR,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if len(self.op_prior) != len(OPS) or not all(abs(logit) <= MAX_LOGIT for logit in self.op_prior):
            names = ", ".join(op.name for op in OPS)
            raise ValueError(
                f"op_prior must be {len(OPS)} logits between -1000 and 1000 ({names}), got {self.op_prior}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig(Hyperparameters):
    """What the agent is given. Schedules are functions of env steps done, so they survive a resume."""

    # Must be the reward's own: shaping terms cancel only under the same discount.
    gamma: float = option("discount", 0.995, FRACTION)
    minibatches: int = option("groups of whole env sequences per pass; at most one per env", 4, ENVS)
    memory: bool = option("False clears the memory before every step: an ablation", True)
    schedule_steps: int = option("env steps over which the schedules run; then they stay at their ends", 16_000, STEPS)

    def learning_rate_at(self, env_steps: int) -> float:
        """Linear from the learning rate to its final share."""
        return self.lr * (1.0 - (1.0 - self.lr_final_share) * self._progress(env_steps))

    def entropy_coef_at(self, env_steps: int) -> float:
        """Linear from start to end."""
        return self.entropy_coef + (self.entropy_coef_final - self.entropy_coef) * self._progress(env_steps)

    def epsilon_share_at(self, env_steps: int) -> float:
        """Factor on both epsilons: 1 over the first half, then linear to 0."""
        return min(1.0, 2.0 * (1.0 - self._progress(env_steps)))

    def _progress(self, env_steps: int) -> float:
        return min(1.0, env_steps / self.schedule_steps)
