"""Runs an LSTM over whole sequences, also where episodes begin in the middle of them.

One packed call instead of a loop over steps: the segments between episode starts become the sequences of a packed
batch, so memory never crosses a start and no step is padded.
"""

# T steps, N envs, D inputs, W width, M segments

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

LSTMState = tuple[Tensor, Tensor]
"""(h, c), each `[1, N, W]`."""


def zero_state(lstm: nn.LSTM, num_envs: int) -> LSTMState:
    """The memory at the start of an episode."""
    zeros = torch.zeros(1, num_envs, lstm.hidden_size, device=next(lstm.parameters()).device)
    return zeros, zeros.clone()


def unroll(lstm: nn.LSTM, inputs_TND: Tensor, state: LSTMState, starts_TN: Tensor | None) -> tuple[Tensor, LSTMState]:
    """Runs T steps from `state`, clearing the memory before every step that starts an episode.

    Returns:
        Outputs `[T, N, W]` and the memory at the end: `[1, N, W]` without starts after step 0, else one entry per
        segment.
    """
    if starts_TN is None:
        outputs_TNW, final = lstm(inputs_TND, state)
        return outputs_TNW, final
    state = _cleared(state, starts_TN[0])
    if inputs_TND.shape[0] == 1 or not bool(starts_TN[1:].any()):
        outputs_TNW, final = lstm(inputs_TND, state)
        return outputs_TNW, final
    return _unroll_segments(lstm, inputs_TND, state, starts_TN)


def _cleared(state: LSTMState, starts_N: Tensor) -> LSTMState:
    keep_N1 = (~starts_N)[:, None].to(state[0].dtype)
    return state[0] * keep_N1, state[1] * keep_N1


def _unroll_segments(
    lstm: nn.LSTM, inputs_TND: Tensor, state: LSTMState, starts_TN: Tensor
) -> tuple[Tensor, LSTMState]:
    num_steps, num_envs, _ = inputs_TND.shape
    device = inputs_TND.device
    begins_TN = starts_TN.clone()
    begins_TN[0] = True
    steps_T1 = torch.arange(num_steps, device=device)[:, None]
    age_TN = steps_T1 - torch.where(begins_TN, steps_T1, 0).cummax(dim=0).values
    # Number the segments env by env, then rank them by length: a packed batch wants the longest first.
    segment_TN = (begins_TN.T.reshape(-1).cumsum(0) - 1).reshape(num_envs, num_steps).T
    lengths_M = torch.bincount(segment_TN.reshape(-1))
    by_length_M = torch.argsort(lengths_M, descending=True, stable=True)
    rank_M = torch.argsort(by_length_M)
    packed_order = torch.argsort((age_TN * len(lengths_M) + rank_M[segment_TN]).reshape(-1))

    first_env_M = torch.arange(num_envs, device=device).expand(num_steps, -1).T[begins_TN.T][by_length_M]
    first_step_M = steps_T1.expand(-1, num_envs).T[begins_TN.T][by_length_M]
    carries_M1 = (first_step_M == 0)[:, None].to(inputs_TND.dtype)
    initial = (state[0][:, first_env_M] * carries_M1, state[1][:, first_env_M] * carries_M1)

    flat = inputs_TND.reshape(num_steps * num_envs, -1)
    batch_sizes = torch.bincount(age_TN.reshape(-1)).cpu()
    packed, final = lstm(PackedSequence(flat[packed_order], batch_sizes), initial)
    outputs_TNW = packed.data[torch.argsort(packed_order)].reshape(num_steps, num_envs, -1)
    return outputs_TNW, final
