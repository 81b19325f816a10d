"""What an operator can do about an alarm, by the metric of its row in the table of thresholds."""

from __future__ import annotations

_SMALLER_STEPS = "lower the learning rate or the passes per update"
_LOOK_AT_OBSERVATIONS = "look at the observations of the newest rounds; the task may differ from the one trained on"

ADVICE: dict[str, str] = {
    "num_nonfinite": "look at the first event with this alarm and lower the learning rate; its weights are suspect",
    "skipped_updates": "look at the skip reason; the trainer stops by itself if it goes on",
    "kl_over_target": _SMALLER_STEPS,
    "approx_kl": "check the learning rate and whether any head has more than one legal choice",
    "clip_share": _SMALLER_STEPS,
    "ratio_max": _SMALLER_STEPS,
    "ratio_min": _SMALLER_STEPS,
    "entropy_share": "raise the entropy coefficient, or accept it if the return is still rising",
    "value_nrmse": "give the critic time; if it stays, check the scale of the rewards",
    "return_corr": "give the critic time; if it stays, check the observations and the discount",
    "grad_norm_over_clip": _SMALLER_STEPS,
    "grad_drift": "compare with the losses of the same rounds; lower the learning rate if they jump too",
    "lstm_saturated_share": "lower the learning rate; the memory has lost its range",
    "lstm_c_rms": "lower the learning rate; the memory runs away",
    "lstm_h_rms": "the memory carries nothing; check that episodes are long enough to need one",
    "observation_outlier_share": _LOOK_AT_OBSERVATIONS,
    "observation_clipped_share": _LOOK_AT_OBSERVATIONS,
    "observation_drift": _LOOK_AT_OBSERVATIONS,
    "decision_share": "check gates and budget: the policy has almost nothing to decide",
    "wait_share": "raise the entropy coefficient or check that acting can pay under this reward",
    "rollbacks_per_100_episodes": "find out which blueprint precedes the rollbacks: esper query RUN 'from safety'",
    "shaping_share": "lower the shaping terms: the policy may be earning them instead of accuracy",
    "seed_grad_health": "look at the seed's blueprint; it may not suit this host",
    "seed_grad_ratio": "the seed hardly learns; it will be refused by its gate or pruned",
    "val_loss_ratio": "wait for the governor, which acts by limits of its own",
    "silence_epochs": "see what the process does (py-spy dump --pid PID); stop and resume it if it hangs",
    "heartbeat_age_s": "see whether the process is suspended or its disk hangs",
    "gpu_memory_share": "use fewer envs or workers on the device",
    "disk_free_bytes": "free space now: log and checkpoints fail without it",
    "telemetry_cpu_share": "use telemetry level minimal",
}
