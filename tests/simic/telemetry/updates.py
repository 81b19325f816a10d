"""Healthy update metrics with fields to change, and a sink that keeps what it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from esper.leyline import (
    HEAD_NAMES,
    ChoiceCount,
    ChoiceStats,
    HeadUpdate,
    LSTMHealth,
    ObservationHealth,
    TelemetryEvent,
    check_event,
)
from esper.nissa import Hub
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.telemetry.readings import UpdateInputs


class ListSink(Hub):
    """Keeps events, and holds each against the catalogue."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[TelemetryEvent] = []

    def emit(self, event: TelemetryEvent) -> None:
        check_event(event)
        self.events.append(event)

    def of(self, kind: str) -> list[Any]:
        return [event.data for event in self.events if event.type.value == kind]


def metrics(**changes: Any) -> PPOUpdateMetrics:
    """An update about which nothing is alarming. Nested fields are given as `lstm__c_rms=60.0`."""
    head = HeadUpdate(kl=0.01, clip_fraction=0.1, grad_norm=0.2, num_usable=30, grad_state="ok")
    made: dict[str, Any] = {
        "performed": True,
        "skip_reason": None,
        "num_optimizer_steps": 4,
        "kl_stopped": False,
        "policy_loss": -0.01,
        "value_loss": 0.5,
        "entropy_loss": 0.2,
        "total_loss": 0.3,
        "approx_kl": 0.01,
        "clip_fraction": 0.1,
        "ratio_mean": 1.0,
        "ratio_min": 0.9,
        "ratio_max": 1.1,
        "explained_variance": 0.5,
        "value_nrmse": 0.5,
        "return_corr": 0.8,
        "return_mean": 1.0,
        "return_std": 0.5,
        "advantage_mean": 0.0,
        "advantage_std": 0.4,
        "decision_share": 0.8,
        "num_rewards_clipped": 0,
        "gradient_stats": {
            "grad_norm": 0.4,
            "max_grad": 0.9,
            "min_grad": 0.1,
            "clip_norm": 0.5,
            "num_nonfinite": 0,
        },
        "head_entropies": dict.fromkeys(HEAD_NAMES, 0.5),
        "heads": dict.fromkeys(HEAD_NAMES, head),
        "lstm": LSTMHealth(h_rms=0.2, c_rms=0.5, saturated_share=0.0, dead_share=0.0, num_nonfinite=0),
        "observations": ObservationHealth(outlier_share=0.0, clipped_share=0.0, drift=0.1, num_nonfinite=0),
        "learning_rate": 3e-4,
        "entropy_coef": 0.01,
        "clip_ratio": 0.2,
        "target_kl": 0.02,
        "env_steps": 100,
    }
    for path, value in changes.items():
        made = _changed(made, path.split("__"), value)
    return cast(PPOUpdateMetrics, made)


def _changed(part: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    if isinstance(part, dict):
        assert path[0] in part, path
        return {**part, path[0]: _changed(part[path[0]], path[1:], value)}
    return replace(part, **{path[0]: _changed(getattr(part, path[0]), path[1:], value)})


def op_stats(wait: int = 5, other: int = 5, forced: int = 2) -> ChoiceStats:
    """`wait` and `other` free decisions, and forced ones, which can only be waits."""
    return ChoiceStats(
        head="op",
        choices={
            "WAIT": ChoiceCount(num_legal=wait + other + forced, num_chosen=wait + forced, num_ok=wait + forced),
            "GERMINATE": ChoiceCount(num_legal=wait + other, num_chosen=other, num_ok=other),
        },
        num_decisions=wait + other + forced,
        num_forced=forced,
    )


def inputs(ops: ChoiceStats | None = None, **changes: Any) -> UpdateInputs:
    outer = {
        "num_rollbacks_total": changes.pop("num_rollbacks_total", 0),
        "num_episodes_total": changes.pop("num_episodes_total", 100),
        "shaping_share": changes.pop("shaping_share", 0.1),
    }
    return UpdateInputs(metrics=metrics(**changes), ops=ops or op_stats(), **outer)
