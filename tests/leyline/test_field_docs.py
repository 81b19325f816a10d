"""Every field of a payload is explained, by its name or by words that the documents repeat."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

import pytest

from tests.nissa.test_docs import tool

TOOL = tool()
PAGE = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text(encoding="utf-8")
PLAIN = {
    "RunStarted": "esper_version python_version torch_version numpy_version task num_rounds num_envs "
    "epochs_per_episode slot_ids num_workers devices",
    "RunEnded": "error_message",
    "BatchSummary": "num_episodes_total",
    "SlotState": "seed_id blueprint",
    "LayerGradientStats": "num_elements mean std num_nan num_inf",
    "LayerHealth": "num_layers min_norm max_norm",
    "SeedGerminated": "slot_id blueprint blend",
    "SeedStageChanged": "slot_id",
    "SeedEnded": "slot_id blueprint",
    "GateEvaluated": "seed_id slot_id",
    "Check": "name passed value limit",
    "PPOUpdateMetrics": "num_optimizer_steps gradient_stats head_entropies",
    "HeadEntropies": "slot blueprint blend op",
    "AnomalyDetected": "state",
    "AnomalyDebug": "layers stability",
    "NumericalStability": "num_tensors",
    "TrendDetected": "kind window_rounds",
    "PhaseTime": "wall_ms",
    "CheckpointRecorded": "action size_bytes save_ms",
    "WorkerStateChanged": "worker_id kind error",
}
"""Fields that mean what their name, unit and type say. A new field is explained, or entered here on purpose."""


@pytest.mark.parametrize("record", TOOL.payload_records(), ids=lambda record: record.__name__)
def test_every_field_is_explained_or_plain(record: type) -> None:
    names = list(get_type_hints(record))
    reported = TOOL.field_docs(record)
    assert set(names) - set(reported) == set(PLAIN.get(record.__name__, "").split())
    assert set(reported) <= set(names)


@pytest.mark.parametrize(
    "name",
    [
        "committed_accuracy_pct",
        "num_contributing_fossils",
        "params_ratio",
        "kl_stopped",
        "num_forced",
        "alpha_share",
        "prob_share",
        "num_usable",
        "entropy_share",
        "decision_share",
        "wait_share",
        "return_raw",
        "components",
    ],
)
def test_the_page_defines_what_readers_ask_for(name: str) -> None:
    rows = [line for line in PAGE.splitlines() if f"| `{name}` |" in line]
    assert rows
    assert all(len(line.split("|")[3].split()) >= 4 for line in rows if line.count("|") == 4)


def test_both_meanings_of_wait_share_are_told_apart() -> None:
    (row,) = (line for line in PAGE.splitlines() if "PROFILE_MEASURED | `wait_share` |" in line)
    assert "The alarm `wait_share` is another thing" in row


def test_words_below_a_field_are_found_and_others_are_not() -> None:
    from esper.leyline import ChoiceStats, HeadEntropies

    assert TOOL.field_docs(ChoiceStats)["num_forced"] == "Of these, the ones with a single legal choice."
    assert TOOL.field_docs(HeadEntropies) == {}
