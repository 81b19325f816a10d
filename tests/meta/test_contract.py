"""The public names stand where they are promised, and the product itself takes them: none lives for tests alone."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import get_type_hints

import pytest

import esper

HOMES: dict[str, str] = {
    "leyline": "HEAD_NAMES SeedStage LifecycleOp TelemetryEvent TelemetryEventType ActionSpec ActionOutcome "
    "BatchSummary PolicyProtocol RewardProtocol",
    "kasmina": "MorphogeneticModel SeedSlot",
    "kasmina.lifecycle": "advance_active_seed resolve_target_slot",
    "tamiyo": "SignalTracker",
    "tolaria.engine": "VectorizedEngine",
    "tolaria.runtime": "CUDATimer parse_devices",
    "tolaria.governor": "TolariaGovernor",
    "tolaria.batches": "SharedBatchIterator",
    "simic.client": "SimicClient SimicClient.compute_reward",
    "simic.training.vectorized": "train_ppo_vectorized get_hub RewardNormalizer SharedBatchIterator PPOAgent "
    "collect_per_layer_gradients check_numerical_stability",
    "simic.training.vectorized_trainer": "VectorizedPPOTrainer",
    "simic.training.parallel_env_state": "ParallelEnvState ParallelEnvState.init_accumulators "
    "ParallelEnvState.zero_accumulators",
    "simic.training.env_factory": "create_env_state make_telemetry_callback configure_slot_telemetry",
    "simic.training.batch_ops": "process_train_batch process_val_batch batch_signals_to_features "
    "collect_gradient_telemetry_for_batch",
    "simic.training.counterfactual_eval": "process_fused_val_batch attribute",
    "simic.training.action_execution": "parse_sampled_action execute_actions",
    "simic.training.config": "TrainingConfig",
    "simic.training.runner": "run_ppo_updates calculate_entropy_anneal_steps",
    "simic.training.dual_ab": "run_comparison",
    "simic.training.helpers": "train_heuristic",
    "simic.agent.ppo": "PPOAgent PPOAgent.load PPOAgent.update",
    "simic.agent.tamiyo_network": "TamiyoNetwork",
    "simic.agent.tamiyo_buffer": "TamiyoRolloutBuffer",
    "simic.agent.types": "GradientStats PPOUpdateMetrics HeadLogProbs HeadEntropies ActionDict",
    "simic.control.normalization": "RunningMeanStd RewardNormalizer RewardNormalizer.update_and_normalize "
    "RewardNormalizer.normalize_only RewardNormalizer.load_state_dict",
    "simic.rewards": "RewardInputs RewardComponentsTelemetry",
    "simic.telemetry.emitters": "emit_with_env_context emit_batch_completed emit_last_action "
    "compute_grad_norm_surrogate aggregate_layer_gradient_health emit_ppo_update_event emit_action_distribution "
    "emit_cf_unavailable emit_throughput emit_reward_summary emit_mask_hit_rates check_performance_degradation "
    "apply_slot_telemetry emit_anomaly_diagnostics",
    "simic.telemetry.aggregation": "aggregate_ppo_metrics",
    "simic.telemetry.anomaly_detector": "AnomalyDetector AnomalyReport handle_telemetry_escalation",
    "simic.telemetry.debug_telemetry": "LayerGradientStats collect_per_layer_gradients check_numerical_stability",
    "simic.telemetry.telemetry_config": "TelemetryConfig TelemetryLevel",
    "nissa": "TelemetryHub get_hub",
    "runtime.tasks": "TaskSpec get_task_spec",
    "leyline.records": "ActionExecutionResult.post_action_signals ActionExecutionResult.post_action_slot_reports "
    "ActionExecutionResult.post_action_masks ActionExecutionResult.truncated_bootstrap_targets",
}
"""Module below `esper` -> names; a dotted one belongs to a class."""
NAMES = [(home, name) for home, names in HOMES.items() for name in names.split()]


@pytest.mark.parametrize(("home", "name"), NAMES)
def test_every_name_is_at_its_home(home: str, name: str) -> None:
    found: object = importlib.import_module(f"esper.{home}")
    for part in name.split("."):
        found = getattr(found, part)


def _uses(node: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and attributes that code reads, each with the functions and classes around it. Imports are no use."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield (node.id if isinstance(node, ast.Name) else node.attr), inside
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        inside = (*inside, node.name)
    for child in ast.iter_child_nodes(node):
        yield from _uses(child, inside)


@pytest.fixture(scope="module")
def used() -> set[str]:
    """Names that the product uses outside their own definition; re-exports of packages do not count."""
    root = Path(esper.__file__).parent
    files = [path for path in root.rglob("*.py") if path.name != "__init__.py"]
    assert len(files) > 100
    uses = (use for path in files for use in _uses(ast.parse(path.read_text(encoding="utf-8"))))
    return {name for name, inside in uses if name not in inside}


@pytest.mark.parametrize("name", sorted({name.split(".")[-1] for _, name in NAMES}))
def test_every_name_is_used_by_the_product(name: str, used: set[str]) -> None:
    assert name in used


def test_a_name_that_only_its_own_definition_uses_is_not_used() -> None:
    code = "def countdown(n):\n    return countdown(n - 1)\n\nclass Other:\n    left = start\n"
    assert [(name, inside) for name, inside in _uses(ast.parse(code)) if name not in inside] == [
        ("n", ("countdown",)),
        ("start", ("Other",)),
    ]


# ---- imports and signatures as written in examples


@pytest.mark.parametrize(
    ("statement", "torch"),
    [
        ("from esper.simic.training import TrainingConfig", False),
        (
            "from esper.simic.agent import GradientStats, PPOUpdateMetrics, HeadLogProbs, HeadEntropies, ActionDict",
            False,
        ),
        ("import esper.simic; esper.simic.__all__", False),
        ("from esper.simic import train_ppo_vectorized, ParallelEnvState", True),
    ],
)
def test_light_names_are_imported_without_torch(statement: str, torch: bool) -> None:
    code = f"{statement}\nimport sys\nassert ('torch' in sys.modules) is {torch}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_normalizers_are_made_as_written() -> None:
    from esper.simic.control.normalization import RewardNormalizer, RunningMeanStd

    stats = RunningMeanStd(shape=(10,), device="cpu")
    assert (stats.mean.shape, stats.var.shape, float(stats.count)) == ((10,), (10,), 0.0)
    rewards = RewardNormalizer(clip=10.0)
    assert (rewards.clip, rewards.mean, rewards.m2, rewards.count) == (10.0, 0.0, 0.0, 0)
    for taken in (stats.state_dict(), rewards.state_dict()):
        taken["mean"] += 1.0
    assert float(stats.mean.abs().max()) == rewards.mean == 0.0, "what is taken is a copy"


def test_gradients_and_degradation_are_described_as_written() -> None:
    from esper.simic.agent import GradientStats, PPOUpdateMetrics
    from esper.simic.telemetry.emitters import check_performance_degradation

    assert {"grad_norm", "max_grad", "min_grad"} <= get_type_hints(GradientStats).keys()
    losses = {"policy_loss", "value_loss", "entropy_loss", "total_loss", "approx_kl", "clip_fraction"}
    rest = {"explained_variance", "gradient_stats", "head_entropies"}
    assert losses | rest <= get_type_hints(PPOUpdateMetrics).keys()
    parameters = signature(check_performance_degradation).parameters
    assert [*parameters] == ["current_accuracy", "baseline_accuracy", "threshold"]
    assert parameters["threshold"].default == 0.05
    assert check_performance_degradation(current_accuracy=94.0, baseline_accuracy=100.0, threshold=0.05) == (True, -6.0)
