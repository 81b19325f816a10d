"""What a training run does: one frozen record with ranges, presets and strict JSON. Knows no torch.

Everything a run does follows from this record, the data and the code; machine facts such as folders are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import msgspec

from esper.leyline import check_known
from esper.leyline.files import loads_json
from esper.leyline.rng import TRAINING_RUN_SEEDS
from esper.simic.agent.config import (
    ENVS,
    FRACTION,
    NOT_NEGATIVE,
    PASSES,
    Hyperparameters,
    PPOConfig,
    Range,
    option,
    up_to,
)
from esper.simic.rewards import DEFAULT_MODE, RewardWeights, get_mode
from esper.simic.rewards.groups import RELATIVE_TO
from esper.simic.telemetry.telemetry_config import Exporter, TelemetryConfig, TelemetryLevel
from esper.simic.training.runner import calculate_entropy_anneal_steps
from esper.tamiyo.features import SEES
from esper.tolaria.executor.available import BACKENDS
from esper.tolaria.kinds import AUTO, RAY_HELP, WORKER_KINDS, find_worker_kind, worker_kind_names

LEARNED = "ppo"
NURSERY = "nursery"
"""The task of a run over draws; `runtime/nursery.py` makes them."""
PRETRAINED = "pretrained"
"""The policy that comes with Esper, wherever a controller is named."""
IMITATED_RULE = "largest"
"""What a policy may begin with: of the rules, the one that gained most on draws of the training families."""
MINIBATCHES = 4
"""Per pass, unless somebody chose another number or there are fewer envs."""
LEVELS: tuple[str, ...] = tuple(level.name.lower() for level in TelemetryLevel)
MAX_JSON_BYTES = 1 << 20
CONSOLES: tuple[str, ...] = ("auto", "rich", "plain", "off")
"""A bar on a terminal and lines elsewhere; always a bar; always lines; only how it began and ended."""
EXPORTERS: tuple[str, ...] = get_args(Exporter)
FREE_ON_RESUME: tuple[str, ...] = (
    "rounds",
    "workers",
    "worker_kind",
    "ray_address",
    "level",
    "console",
    "exporters",
    "escalation_epochs",
    "keep_checkpoints",
    "checkpoint_s",
    "require_complete",
)
"""Fields that may change when a run goes on: none of them changes what is learned in a round."""


SEED = Range(text="in 0..9999 (later ones tune and evaluate)", low=0, high=TRAINING_RUN_SEEDS[-1], whole=True)
EPOCHS = Range(text="in 0..100000", low=0, high=100_000, whole=True)
CALIBRATION_RUNS = Range(text="0 (none) or at least 5 and at most 1000", low=0, high=1_000, whole=True)
MAX_ROUND_STEPS = 2_000_000
"""Steps of all envs in one round: they are kept until the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig(Hyperparameters):
    """One run. Ranges are checked for every field, then the fields against each other.

    Raises:
        ValueError: Names the field, what it may be, and what was given.
    """

    task: str = option("what hosts are trained on; `esper tasks` lists them", "digits_blind", group="run")
    controller: str = option("ppo, or a fixed controller such as heuristic", LEARNED, group="run")
    seed: int = option("everything random in the run follows from it", 0, SEED, group="run")
    rounds: int = option(
        "rounds: one episode in every env, then one update of the policy", 40, up_to(1_000_000), group="run"
    )
    envs: int = option("hosts that are trained side by side", 16, ENVS, group="run")
    episode_length: int | None = option(
        "epochs of an episode; default: the task's horizon", None, up_to(100_000), group="run"
    )
    param_budget: int | None = option(
        "most parameters of host and seeds; default: the task's", None, up_to(10**12), group="run"
    )

    warm_start: str | None = option(
        f"begin with the weights of a trained run, by its folder, or of the policy that comes with Esper: {PRETRAINED}",
        None,
        group="run",
    )

    workers: int | None = option(
        "workers; default: one per core (ray: per CPU of the cluster), at most one per env", None, ENVS, group="machine"
    )
    worker_kind: str = option(f"where hosts run: {', '.join((AUTO, *WORKER_KINDS))}", AUTO, group="machine")
    ray_address: str | None = option(RAY_HELP.removesuffix("."), None, group="machine")
    backend: str = option(
        "what trains hosts: native (compiled), torch, or auto: native where it can; runs of two backends never mix",
        "auto",
        group="machine",
    )
    device: str = option("where hosts are trained, such as cpu or cuda:0,cuda:1", "cpu", group="machine")
    amp: str = option("mixed precision on a GPU: off, auto, bf16 or fp16", "off", group="machine")

    groups: int = option(
        "groups that the envs are shared out among; with --task nursery each group gets a task of its own in every "
        "round, and its hosts the same initial weights",
        1,
        ENVS,
        group="run",
    )
    relative_to: str = option(
        "what rewards are compared with: nothing, the mean of the group, or a host of it that waits (twin)",
        "nothing",
        group="reward",
    )
    reward_mode: str = option(
        "what the controller is paid for; docs/rewards.md explains them", DEFAULT_MODE, group="reward"
    )
    gamma: float | None = option(
        "discount of rewards and values; default: by episode length", None, FRACTION, group="reward"
    )
    calibration_runs: int = option(
        "hosts per kind that set the scale of scores; 0: from chance to 100", 6, CALIBRATION_RUNS, group="reward"
    )
    reward_weights: RewardWeights = field(
        default_factory=RewardWeights, metadata={"group": "reward", "help": "prices in units of score"}
    )

    sees: str = option(
        f"what the policy looks at: {', '.join(SEES)}; clock: time and budget only, to learn what the rest is worth",
        "all",
    )
    imitate_rounds: int = option(
        f"first rounds in which the policy learns to do what the rule `{IMITATED_RULE}` would; the rule decides on "
        "half of the hosts, the policy on the others",
        0,
        EPOCHS,
    )
    minibatches: int | None = option(
        f"groups of whole env sequences per pass; default: {MINIBATCHES}, at most one per env", None, ENVS
    )
    ppo_updates_per_batch: int = option("updates of the policy per round", 1, PASSES)
    anneal_fraction: float = option(
        "share of the run in which lr, KL penalty and epsilons come to their end", 1.0, FRACTION
    )

    level: str = option(f"how much is logged: {', '.join(LEVELS)}; never changes a result", "normal", group="records")
    console: str = option(f"what is shown meanwhile: {', '.join(CONSOLES)}", "auto", group="records")
    exporters: tuple[Exporter, ...] = option(f"also write to: {', '.join(EXPORTERS)}", (), group="records")
    escalation_epochs: int = option(
        "epochs logged at level debug after an alarm; 0 for none", 5, EPOCHS, group="records"
    )
    keep_checkpoints: int = option("newest checkpoints that stay on disk", 3, up_to(1_000_000), group="records")
    checkpoint_s: float = option(
        "least seconds between two checkpoints; 0 saves after every round", 10.0, NOT_NEGATIVE, group="records"
    )
    require_complete: bool = option(
        "stop at the next boundary once the log has lost an event, and save nothing that counts it",
        False,
        group="records",
    )

    def __post_init__(self) -> None:
        Hyperparameters.__post_init__(self)
        if self.worker_kind not in (AUTO, *WORKER_KINDS):
            _one_of("worker_kind", self.worker_kind, (AUTO, *worker_kind_names()))
        _one_of("backend", self.backend, BACKENDS)
        _one_of("level", self.level, LEVELS)
        _one_of("console", self.console, CONSOLES)
        get_mode(self.reward_mode)
        _one_of("sees", self.sees, tuple(SEES))
        _one_of("relative_to", self.relative_to, ("nothing", *RELATIVE_TO))
        self._check_together()
        self._check_groups()

    def telemetry(self) -> TelemetryConfig:
        """How much the run logs."""
        return TelemetryConfig(
            level=TelemetryLevel[self.level.upper()],
            exporters=self.exporters,
            escalation_epochs=self.escalation_epochs,
            require_complete=self.require_complete,
        )

    def _check_together(self) -> None:
        if self.envs * (self.episode_length or 1) > MAX_ROUND_STEPS:
            raise ValueError(
                f"envs={self.envs} with episode_length={self.episode_length}: a round may have at most "
                f"{MAX_ROUND_STEPS:,} steps. Lower one of the two"
            )
        if self.workers is not None and self.workers > self.envs:
            raise ValueError(
                f"envs={self.envs} but workers={self.workers}: at most one worker per env. Lower --workers"
            )
        one = self.worker_kind != AUTO and not find_worker_kind(self.worker_kind).several
        if self.workers is not None and self.workers > 1 and one:
            raise ValueError(
                f"worker_kind={self.worker_kind} has one worker, got workers={self.workers}. Give --workers 1 with it"
            )
        if self.ray_address is not None and self.worker_kind != "ray":
            raise ValueError(
                f"ray_address={self.ray_address} goes with worker_kind=ray, got worker_kind={self.worker_kind}. Give "
                "--worker-kind ray with it"
            )
        if self.controller == LEARNED and self.minibatches is not None and self.minibatches > self.envs:
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

    def _check_groups(self) -> None:
        if self.envs % self.groups:
            raise ValueError(f"envs={self.envs} cannot be shared out equally among groups={self.groups}")
        if self.groups == 1 and self.task != NURSERY and self.relative_to == "nothing":
            return
        size, least = self.envs // self.groups, {"nothing": 1, "group": 2, "twin": 2}[self.relative_to]
        if size < least:
            raise ValueError(
                f"relative_to={self.relative_to} needs at least {least} envs per group, got envs={self.envs} and "
                f"groups={self.groups}. Raise --envs"
            )
        if self.task != NURSERY and self.groups > 1:
            raise ValueError(f"groups={self.groups} are for --task {NURSERY}, got task={self.task}")
        if self.calibration_runs:
            raise ValueError(
                "calibrated scores are for one task without groups; give --calibration-runs 0 with "
                f"--task {NURSERY} or --relative-to"
            )
        if self.task == NURSERY and (self.episode_length is not None or self.param_budget is not None):
            raise ValueError(f"draws of the {NURSERY} have their own episode_length and param_budget. Drop both")

    def ppo_config(self, *, episode_length: int, gamma: float) -> PPOConfig:
        """What the agent is given, for a known episode length and discount."""
        chosen = {entry.name: getattr(self, entry.name) for entry in fields(Hyperparameters)}
        return PPOConfig(
            **chosen,
            gamma=gamma,
            minibatches=min(MINIBATCHES, self.envs) if self.minibatches is None else self.minibatches,
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
    "nursery": {
        "task": NURSERY,
        "groups": 8,
        "envs": 48,
        "rounds": 150,
        "minibatches": 4,
        "imitate_rounds": 12,
        "relative_to": "twin",
        "backend": "native",
        "calibration_runs": 0,
        "lr": 1e-3,
        "entropy_coef": 0.05,
        "entropy_coef_final": 0.005,
        "reward_weights": RewardWeights(size=0.01, rent=0.002, germinate=0.004, prune=0.002, advance=0.001),
        "keep_checkpoints": 1_000,  # one of them is chosen on validation draws when all are there
        "checkpoint_s": 0.0,
    },
    "smoke": {"rounds": 2, "envs": 2, "episode_length": 5, "calibration_runs": 0},
    "cifar_baseline": {"task": "cifar_baseline", "rounds": 100, "envs": 8, "calibration_runs": 5},
}


def preset(name: str) -> TrainingConfig:
    """A named starting point.

    Raises:
        ValueError: No preset has that name.
    """
    check_known("preset", name, PRESETS)
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
    return config_from_json(path.read_bytes(), path.name, base)


def config_from_json(text: str | bytes, where: str, base: TrainingConfig | None = None) -> TrainingConfig:
    """Strict: unknown keys, wrong types and numbers that are not finite are errors.

    Raises:
        ValueError: Says where and what.
    """
    try:
        given = loads_json(text)
    except ValueError as error:
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
