"""`esper bench cluster`: rehearsed rounds follow the costs they are given."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cluster_figures import rehearse

HOSTS, EPOCHS = 8, 2


def rehearsed(workers: int, host_epoch_s: float, call_ms: float = 1.0, spread: float = 0.0) -> dict[str, float]:
    ray = {"call_ms": call_ms, "call_cpu_ms": 0.1}
    figures: dict[str, Any] = {"task": "digits_mlp", "host_epoch_s": host_epoch_s, "kinds": {"ray": ray}}
    return rehearse(figures, workers, HOSTS, EPOCHS, spread)


def test_workers_share_the_work_of_a_round_and_nothing_is_waited_for() -> None:
    """Of 1,000 s per host epoch nothing else in the round is worth a tenth."""
    one, four = rehearsed(1, 1_000.0), rehearsed(4, 1_000.0)
    assert one["round_s"] == pytest.approx(HOSTS * (EPOCHS + 1) * 1_000.0, rel=0.1), "a reset validates: it counts too"
    assert four["round_s"] == pytest.approx(one["round_s"] / 4, rel=0.1)
    assert one["idle_share"] == pytest.approx(0.0, abs=0.1)
    assert one["host_epochs_per_s"] == HOSTS * EPOCHS / one["round_s"]


def test_slow_messages_and_stragglers_leave_workers_idle() -> None:
    assert rehearsed(4, 10.0, call_ms=30_000.0)["idle_share"] > 0.4
    assert rehearsed(4, 1_000.0, spread=0.5)["idle_share"] > 0.1
    assert rehearsed(4, 0.0)["parent_share"] > 0.9, "nobody else has anything to do"
