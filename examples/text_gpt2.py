"""A small GPT-2 on the bytes of a text. One .txt file is looked for in ./data and where ESPER_TEXT points.

    esper compare examples/text_gpt2.py:make_model --data examples/text_gpt2.py:make_data

Needs the extra `hf`.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from esper.runtime.datasets import load_dataset

CONTEXT = 64
ROWS = 512
"""Windows of each part of the text that are used."""
Rows = dict[str, Tensor]


def make_model(width: float = 1.0) -> nn.Module:
    """Three layers with three heads, or the same so many times as wide."""
    size = 3 * round(16 * width)
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=size,
        n_inner=round(192 * width),  # of any width, where the others need a multiple of the heads
        n_layer=3,
        n_head=3,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def make_data() -> tuple[Rows, Rows, Rows]:
    """Windows of the training, validation and test text; the model predicts the next byte by itself."""
    data = load_dataset("text", context=CONTEXT)
    train, val, test = (
        {"input_ids": split.inputs[:ROWS].long(), "labels": split.inputs[:ROWS].long()}
        for split in (data.train, data.val, data.open_test())
    )
    return train, val, test
