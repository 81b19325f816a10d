"""Plausible payloads with a few fields to choose."""

from __future__ import annotations

from esper.leyline import (
    BatchSummary,
    EpisodeCompleted,
    GradientStats,
    HeadEntropies,
    HeadUpdate,
    LSTMHealth,
    ObservationHealth,
    PhaseTime,
    PPOUpdateCompleted,
    PPOUpdateMetrics,
    ProfileMeasured,
)


def episode(return_raw: float) -> EpisodeCompleted:
    return EpisodeCompleted(
        end="completed",
        num_epochs=5,
        final_accuracy_pct=80.0,
        best_accuracy_pct=81.0,
        committed_accuracy_pct=79.0,
        final_loss=0.5,
        params_added=100,
        params_ratio=1.1,
        num_germinated=1,
        num_fossilized=1,
        num_pruned=0,
        num_alive=0,
        num_contributing_fossils=1,
        return_raw=return_raw,
        components_sum={"gain": return_raw},
        num_ops={"WAIT": 4, "GERMINATE": 1},
    )


def round_completed(num_env_steps_total: int) -> BatchSummary:
    return BatchSummary(
        accuracy_mean_pct=80.0,
        accuracy_best_pct=82.0,
        accuracy_worst_pct=78.0,
        rolling_accuracy_pct=79.0,
        committed_accuracy_pct=None,
        return_mean=2.0,
        return_std=1.0,
        params_ratio_mean=1.1,
        num_ops={"WAIT": 4, "GERMINATE": 1, "FOSSILIZE": 1, "PRUNE": 0},
        num_rollbacks=0,
        num_episodes_total=2,
        num_env_steps_total=num_env_steps_total,
        update_performed=True,
        duration_s=1.0,
    )


def profile() -> ProfileMeasured:
    return ProfileMeasured(
        env_steps_per_s=10.0,
        host_samples_per_s=1000.0,
        phases={"train": PhaseTime(wall_ms=900.0, cpu_ms=None), "update": PhaseTime(wall_ms=100.0, cpu_ms=90.0)},
        controller_ms_per_env_step=1.0,
        telemetry_cpu_ms=1.0,
        wait_share=0.5,
        rss_bytes=10**9,
        cuda=None,
        disk_free_bytes=10**10,
        queue_high_water=3,
    )


def update(approx_kl: float | None = 0.01) -> PPOUpdateCompleted:
    healthy = HeadUpdate(kl=0.01, clip_fraction=0.1, grad_norm=0.2, num_usable=30, grad_state="ok")
    idle = HeadUpdate(kl=None, clip_fraction=None, grad_norm=None, num_usable=0, grad_state="no_usable_steps")
    metrics = PPOUpdateMetrics(
        performed=True,
        skip_reason=None,
        num_optimizer_steps=4,
        env_steps=10,
        kl_stopped=False,
        policy_loss=-0.01,
        value_loss=0.5,
        entropy_loss=0.25,
        total_loss=0.3,
        approx_kl=approx_kl,
        clip_fraction=0.1,
        ratio_mean=1.0,
        ratio_min=0.8,
        ratio_max=1.2,
        explained_variance=0.4,
        value_nrmse=0.7,
        return_corr=0.6,
        return_mean=1.0,
        return_std=0.5,
        advantage_mean=0.0,
        advantage_std=0.4,
        gradient_stats=GradientStats(grad_norm=0.45, max_grad=0.9, min_grad=0.1, clip_norm=0.5, num_nonfinite=0),
        head_entropies=HeadEntropies(slot=0.5, blueprint=0.5, blend=None, op=0.5),
        heads={"slot": healthy, "blueprint": healthy, "blend": idle, "op": healthy},
        lstm=LSTMHealth(h_rms=0.2, c_rms=0.5, saturated_share=0.0, dead_share=0.0, num_nonfinite=0),
        observations=ObservationHealth(outlier_share=0.0, clipped_share=0.0, drift=0.1, num_nonfinite=0),
        decision_share=0.8,
        num_rewards_clipped=0,
        learning_rate=3e-4,
        entropy_coef=0.01,
        clip_ratio=0.2,
        target_kl=0.02,
    )
    return PPOUpdateCompleted(metrics=metrics, layers=None)
