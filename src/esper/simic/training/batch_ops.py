"""What happens to one batch in one env, and the observation of all envs at once. It knows no streams and no order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline import ActionExecutionResult, GradientEvidence
from esper.simic.agent.tamiyo_inputs import Observation, make_observation
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.tamiyo.features import EnvView, global_row, offer_rows, slot_rows
from esper.tolaria.batches import Batch
from esper.tolaria.runtime import LossScaler

# K coalitions, B rows, C classes


def process_train_batch(env: ParallelEnvState, batch: Batch) -> None:
    """One update of the host and its seeds. Totals stay on the device."""
    optimizer, placement = env.optimizer, env.placement
    optimizer.zero_grad()
    if placement.dtype is None:
        logits = env.model(batch.inputs, env.stations())
    else:
        with placement.autocast():
            logits = env.model(batch.inputs, env.stations())
    own = env.recipe.objective
    loss, num_correct, rows = _mean_loss(logits, batch.targets) if own is None else own.mean(logits, batch.targets)
    if placement.scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        _scaled_backward(env, loss, placement.scaler)
    optimizer.step(placement.scaler)
    env.train_loss_sum.add_(loss.detach(), alpha=rows)
    env.train_correct.add_(num_correct)
    env.train_rows += rows


def _scaled_backward(env: ParallelEnvState, loss: Tensor, scaler: LossScaler) -> None:
    for slot in env.model.all_slots():
        if slot.meter is not None:
            slot.meter.loss_scale = scaler.scale
    (loss * scaler.scale).backward()  # type: ignore[no-untyped-call]


def _mean_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int]:
    """(mean loss, number of correct rows, rows). Every token of a sequence is a row."""
    if logits.dim() > 2:
        logits, targets = logits.flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(logits.float(), targets)
    return loss, (logits.detach().argmax(-1) == targets).sum(), targets.numel()


def process_val_batch(env: ParallelEnvState, batch: Batch) -> None:
    """Validates the network as it stands, all seeds on."""
    with torch.inference_mode():
        add_validation(env, env.model(batch.inputs, env.stations())[None], batch.targets)


def add_validation(env: ParallelEnvState, logits_KBC: Tensor, targets: Tensor) -> None:
    """Adds the losses and hits of K coalitions to the totals, with the same few kernels for any K."""
    if env.recipe.objective is not None:
        losses_K, right_K, rows = env.recipe.objective.totals(logits_KBC, targets)
        env.val_losses.add_(losses_K)
        env.val_correct.add_(right_K)
        env.val_rows += rows
        return
    count, num_classes = logits_KBC.shape[0], logits_KBC.shape[-1]
    labels = targets.flatten().expand(count, -1)
    flat = logits_KBC.reshape(-1, num_classes)
    losses = F.cross_entropy(flat, labels.reshape(-1), reduction="none").view(count, -1)
    hits = flat.argmax(-1).view(count, -1) == labels
    env.val_losses.add_(losses.sum(1))
    env.val_correct.add_(hits.sum(1))
    env.val_rows += targets.numel()


def collect_gradient_telemetry_for_batch(env: ParallelEnvState) -> Mapping[str, GradientEvidence]:
    """Gradient evidence by parameter group as of the last batch; the gates need it at every telemetry level.

    It comes from the norms that clipping computes anyway, so nothing is measured twice. Starts the next epoch's totals.
    """
    return env.optimizer.finish_epoch()


def batch_signals_to_features(
    state: ActionExecutionResult, previous: ActionExecutionResult | None, envs: Sequence[int]
) -> Observation:
    """What a policy sees of some envs, by position, that have one layout.

    `previous` is the state one step before, None at reset.
    """
    views = [
        EnvView(
            report=state.reports[i],
            signals=state.post_action_signals[i],
            slots=state.post_action_slot_reports[i],
            masks=state.post_action_masks[i],
            previous=None if previous is None else previous.reports[i],
            outcome=state.outcomes[i] if state.outcomes else None,
            context=state.contexts[i],
        )
        for i in envs
    ]
    return make_observation(
        [global_row(view) for view in views],
        [slot_rows(view) for view in views],
        [offer_rows(view) for view in views],
        [view.masks for view in views],
    )
