"""What a training run can be told: one frozen record with ranges, presets and strict JSON. Knows no torch.

Everything a run does follows from this record, the data and the code; machine facts such as folders are not in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import msgspec

from esper.leyline import OPS, record
from esper.simic.agent.config import DEFAULT_OP_PRIOR, PPOConfig
from esper.simic.rewards import DEFAULT_MODE, RewardWeights, get_mode
from esper.simic.telemetry.telemetry_config import Exporter, TelemetryConfig, TelemetryLevel
from esper.simic.training.runner import calculate_entropy_anneal_steps

LEARNED = "ppo"
WORKER_KINDS: tuple[str, ...] = ("auto", "inline", "process")
LEVELS: tuple[str, ...] = tuple(level.name.lower() for level in TelemetryLevel)
MAX_JSON_BYTES = 1 << 20
CONSOLES: tuple[str, ...] = ("auto", "rich", "plain", "off")
"""A bar on a terminal and lines elsewhere; always a bar; always lines; only how it began and ended."""
EXPORTERS: tuple[str, ...] = get_args(Exporter)
FREE_ON_RESUME: tuple[str, ...] = (
    "rounds",
    "workers",
    "worker_kind",
    "level",
    "console",
    "exporters",
    "escalation_epochs",
    "keep_checkpoints",
    "checkpoint_s",
    "require_complete",
)
"""Fields that may change when a run goes on: none of them changes what is learned in a round."""


def _option(group: str, words: str, default: Any) -> Any:
    return field(default=default, metadata={"group": group, "help": words})


@record
class Range:
    """Where a number may lie."""

    text: str
    low: float
    high: float
    low_open: bool

    def holds(self, value: float) -> bool:
        """True for a number inside."""
        above = value > self.low if self.low_open else value >= self.low
        return above and value <= self.high and math.isfinite(value)


_POSITIVE = Range(text="above 0", low=0.0, high=math.inf, low_open=True)
_NOT_NEGATIVE = Range(text="at least 0", low=0.0, high=math.inf, low_open=False)
_COUNT = Range(text="at least 1", low=1, high=math.inf, low_open=False)
_SHARE = Range(text="in [0, 1]", low=0.0, high=1.0, low_open=False)
_FRACTION = Range(text="in (0, 1]", low=0.0, high=1.0, low_open=True)
_BELOW_ONE = Range(text="in [0, 0.5]", low=0.0, high=0.5, low_open=False)

RANGES: Mapping[str, Range] = {
    "seed": Range(text="in 0..9999 (later ones tune and evaluate)", low=0, high=9_999, low_open=False),
    "rounds": _COUNT,
    "envs": _COUNT,
    "episode_length": _COUNT,
    "param_budget": _COUNT,
    "workers": _COUNT,
    "gamma": _FRACTION,
    "calibration_runs": Range(text="0 (none) or at least 5", low=0, high=math.inf, low_open=False),
    "advantage_std_floor": _POSITIVE,
    "lam": _SHARE,
    "ppo_epochs": _COUNT,
    "minibatches": _COUNT,
    "clip_ratio": _FRACTION,
    "target_kl": _POSITIVE,
    "lr": _POSITIVE,
    "lr_final_share": _SHARE,
    "entropy_coef": _NOT_NEGATIVE,
    "entropy_coef_final": _NOT_NEGATIVE,
    "anneal_fraction": _FRACTION,
    "epsilon_op": _BELOW_ONE,
    "epsilon": _BELOW_ONE,
    "value_coef": _NOT_NEGATIVE,
    "max_grad_norm": _POSITIVE,
    "width": _COUNT,
    "escalation_epochs": Range(text="in 0..100000", low=0, high=100_000, low_open=False),
    "keep_checkpoints": _COUNT,
    "checkpoint_s": _NOT_NEGATIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """One run. Ranges are checked for every field, then the fields against each other.

    Raises:
        ValueError: Names the field, what it may be, and what was given.
    """

    task: str = _option("run", "what hosts are trained on; `esper tasks` lists them", "digits_blind")
    controller: str = _option("run", "ppo, or a fixed controller such as heuristic", LEARNED)
    seed: int = _option("run", "everything random in the run follows from it", 0)
    rounds: int = _option("run", "rounds: one episode in every env, then one update of the policy", 40)
    envs: int = _option("run", "hosts that are trained side by side", 16)
    episode_length: int | None = _option("run", "epochs of an episode; default: the task's horizon", None)
    param_budget: int | None = _option("run", "most parameters of host and seeds; default: the task's", None)

    workers: int | None = _option("machine", "worker processes; default: one per core, at most one per env", None)
    worker_kind: str = _option("machine", f"where hosts run: {', '.join(WORKER_KINDS)}", "auto")
    device: str = _option("machine", "where hosts are trained, such as cpu or cuda:0,cuda:1", "cpu")
    amp: str = _option("machine", "mixed precision on a GPU: off, auto, bf16 or fp16", "off")

    reward_mode: str = _option("reward", "what the controller is paid for; docs/rewards.md explains them", DEFAULT_MODE)
    gamma: float | None = _option("reward", "discount of rewards and values; default: by episode length", None)
    calibration_runs: int = _option("reward", "hosts per kind that set the scale of scores; 0: from chance to 100", 6)
    reward_weights: RewardWeights = field(
        default_factory=RewardWeights, metadata={"group": "reward", "help": "prices in units of score"}
    )

    lr: float = _option("policy", "Adam's step size at the start", 3e-4)
    lr_final_share: float = _option("policy", "share of it left at the end", 0.1)
    advantage_std_floor: float = _option("policy", "spread below which advantages are not magnified, in rewards", 1.0)
    lam: float = _option("policy", "trace decay of the advantage estimate", 0.95)
    ppo_epochs: int = _option("policy", "passes over a round", 4)
    minibatches: int = _option("policy", "groups of whole env sequences per pass", 4)
    clip_ratio: float = _option("policy", "how far a probability ratio may move before its gradient ends", 0.2)
    target_kl: float = _option("policy", "joint KL at which the passes of a round stop", 0.03)
    entropy_coef: float = _option("policy", "pull towards the prior, at the start", 0.1)
    entropy_coef_final: float = _option("policy", "the same at the end", 0.01)
    anneal_fraction: float = _option("policy", "share of the run in which lr, pull and epsilons come to their end", 1.0)
    epsilon_op: float = _option("policy", "share of uniform choices mixed into the op head", 0.01)
    epsilon: float = _option("policy", "the same for slot, blueprint and blend", 0.05)
    value_coef: float = _option("policy", "weight of the critic's loss", 0.5)
    max_grad_norm: float = _option("policy", "gradients are clipped to this norm", 0.5)
    width: int = _option("policy", "units of trunk and memory", 128)
    op_prior: tuple[float, ...] = _option(
        "policy",
        f"logits the op head starts from and is pulled to ({', '.join(op.name for op in OPS)})",
        DEFAULT_OP_PRIOR,
    )

    level: str = _option("records", f"how much is logged: {', '.join(LEVELS)}; never changes a result", "normal")
    console: str = _option("records", f"what is shown meanwhile: {', '.join(CONSOLES)}", "auto")
    exporters: tuple[Exporter, ...] = _option("records", f"also write to: {', '.join(EXPORTERS)}", ())
    escalation_epochs: int = _option("records", "epochs told at level debug after an alarm; 0 for none", 5)
    keep_checkpoints: int = _option("records", "newest checkpoints that stay on disk", 3)
    checkpoint_s: float = _option("records", "least seconds between two checkpoints; 0 saves after every round", 10.0)
    require_complete: bool = _option(
        "records", "stop at the next boundary once the log has lost an event, and save nothing that counts it", False
    )

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None and not allowed.holds(value):
                raise ValueError(f"{name} must be {allowed.text}, got {value} (from --{name.replace('_', '-')})")
        _one_of("worker_kind", self.worker_kind, WORKER_KINDS)
        _one_of("level", self.level, LEVELS)
        _one_of("console", self.console, CONSOLES)
        get_mode(self.reward_mode)
        self._check_together()

    def telemetry(self) -> TelemetryConfig:
        """How much the run tells."""
        return TelemetryConfig(
            level=TelemetryLevel[self.level.upper()],
            exporters=self.exporters,
            escalate_on_anomaly=self.escalation_epochs > 0,
            escalation_epochs=max(1, self.escalation_epochs),
            require_complete=self.require_complete,
        )

    def _check_together(self) -> None:
        if self.workers is not None and self.workers > self.envs:
            raise ValueError(
                f"envs={self.envs} but workers={self.workers}: at most one worker per env. Lower --workers"
            )
        if self.workers is not None and self.workers > 1 and self.worker_kind == "inline":
            raise ValueError(f"worker_kind=inline has one worker, got workers={self.workers}. Drop one of the two")
        if self.controller == LEARNED and self.minibatches > self.envs:
            raise ValueError(
                f"envs={self.envs} but minibatches={self.minibatches}: a minibatch holds whole envs. "
                "Lower --minibatches or raise --envs"
            )
        if 0 < self.calibration_runs < 5:
            raise ValueError(f"calibration_runs must be 0 (none) or at least 5, got {self.calibration_runs}")
        if get_mode(self.reward_mode).needs_reference and self.calibration_runs == 0:
            raise ValueError(f"reward_mode={self.reward_mode} needs a calibrated scale. Raise --calibration-runs to 5")
        if self.require_complete and self.level == "off":
            raise ValueError("require_complete asks for a complete log, but level=off keeps none. Drop one of the two")
        if self.exporters and self.level == "off":
            named = ", ".join(self.exporters)
            raise ValueError(f"exporters={named} show what is logged, but level=off logs nothing. Drop one of the two")
        if len(self.op_prior) != len(OPS):
            raise ValueError(f"op_prior must have {len(OPS)} logits, got {len(self.op_prior)}")

    def ppo_config(self, *, episode_length: int, gamma: float) -> PPOConfig:
        """What the agent is told, for a known episode length and discount."""
        return PPOConfig(
            gamma=gamma,
            advantage_std_floor=self.advantage_std_floor,
            lam=self.lam,
            epochs=self.ppo_epochs,
            minibatches=self.minibatches,
            clip_ratio=self.clip_ratio,
            target_kl=self.target_kl,
            learning_rate=self.lr,
            learning_rate_final_share=self.lr_final_share,
            entropy_coef=self.entropy_coef,
            entropy_coef_final=self.entropy_coef_final,
            epsilon_op=self.epsilon_op,
            epsilon=self.epsilon,
            value_coef=self.value_coef,
            max_grad_norm=self.max_grad_norm,
            width=self.width,
            op_prior=self.op_prior,
            schedule_steps=calculate_entropy_anneal_steps(self.rounds, self.envs, episode_length, self.anneal_fraction),
        )

    def to_json(self) -> str:
        """Every field, in order, as JSON text."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


# ---- presets and overrides

_DIGITS = {
    "envs": 16,
    "rounds": 60,
    "episode_length": 20,
    "lr": 1e-3,
    "ppo_epochs": 8,
    "entropy_coef": 0.05,
    "entropy_coef_final": 0.005,
}
"""Chosen on controller-validation of digits_blind."""
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "demo": {**_DIGITS, "task": "digits_blind", "param_budget": 1_300, "rounds": 16, "envs": 12},
    "digits_blind": {**_DIGITS, "task": "digits_blind", "param_budget": 1_300},
    "digits_saturated": {**_DIGITS, "task": "digits_saturated", "param_budget": 7_215},
    "digits_conv": {**_DIGITS, "task": "digits_conv", "param_budget": 2_000},
    "smoke": {"rounds": 2, "envs": 2, "episode_length": 5, "minibatches": 2, "calibration_runs": 0},
    "cifar_baseline": {"task": "cifar_baseline", "rounds": 100, "envs": 8, "calibration_runs": 5},
}


def preset(name: str) -> TrainingConfig:
    """A named starting point.

    Raises:
        ValueError: No preset has that name.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}. Known: {', '.join(PRESETS)}")
    return TrainingConfig(**PRESETS[name])


def with_overrides(config: TrainingConfig, overrides: Mapping[str, Any]) -> TrainingConfig:
    """A copy with some fields changed, checked as a whole.

    Raises:
        ValueError: A name is unknown or a value is out of range.
    """
    refuse_unknown(overrides, "TrainingConfig")
    return replace(config, **overrides)


def refuse_unknown(names: Mapping[str, Any], where: str) -> None:
    """Complains about the first name that no field has.

    Raises:
        ValueError: Says which name, and which was probably meant.
    """
    known = [entry.name for entry in fields(TrainingConfig)]
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}"
            raise ValueError(f"{where}: unknown key {name!r}. {hint}")


def read_config(path: Path, base: TrainingConfig | None = None) -> TrainingConfig:
    """Reads a configuration file. Fields it does not name keep the values of `base`.

    Raises:
        ValueError: The file is not JSON, or a key, type or value is wrong.
    """
    if not path.is_file():
        raise ValueError(f"configuration file {path} does not exist")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path}: a configuration of at most {MAX_JSON_BYTES:,} bytes was expected")
    return config_from_json(path.read_text(encoding="utf-8"), path.name, base)


def config_from_json(text: str, where: str, base: TrainingConfig | None = None) -> TrainingConfig:
    """Strict: unknown keys, wrong types and numbers that are not finite are errors.

    Raises:
        ValueError: Says where and what.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(given, dict):
        raise ValueError(f"{where}: expected an object with the fields of a configuration, got {type(given).__name__}")
    refuse_unknown(given, where)
    merged = asdict(TrainingConfig() if base is None else base) | given
    try:
        return msgspec.convert(merged, TrainingConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from error


def resume_differences(old: TrainingConfig, new: TrainingConfig) -> list[str]:
    """What a resumed run may not change, as `field old -> new`."""
    return [
        f"{entry.name} {getattr(old, entry.name)} -> {getattr(new, entry.name)}"
        for entry in fields(TrainingConfig)
        if entry.name not in FREE_ON_RESUME and getattr(old, entry.name) != getattr(new, entry.name)
    ]
