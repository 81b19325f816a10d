"""Byte-level text for language models: Python's own documentation, or any UTF-8 file.

Each split is one stretch of the text cut into windows that predict every byte once. No window crosses a border.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from esper.leyline import DataDamaged
from esper.runtime.data.splits import Content, Split, make_content

NUM_BYTES = 256
PYDOC_MODULE = "pydoc_data.topics"
MAX_FILE_BYTES = 256 * 1024**2
"""Tokens take eight bytes each in memory."""


def read_pydoc(place: Path, context: int) -> Content:
    """The help topics of the running Python, 80/10/10. Their text differs between Python versions.

    Args:
        place: Where Python keeps them, for messages.
        context: Bytes per window.
    """
    topics: dict[str, str] = import_module(PYDOC_MODULE).topics
    text = "\n".join(topics[key] for key in sorted(topics)).encode()
    return text_content("Python's help topics", str(place), text, (0.8, 0.1), context)


def read_text_file(path: Path, context: int) -> Content:
    """A UTF-8 file, 98/1/1.

    Raises:
        DataDamaged: The file is no UTF-8 text, is too large, or too short for a window in each split.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise DataDamaged(
            f"{path}: {size:,} bytes; Esper holds text in memory and reads files up to {MAX_FILE_BYTES:,} bytes. "
            "Use a part of it (head -c 250000000)"
        )
    text = path.read_bytes()
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataDamaged(
            f"{path}: expected UTF-8 text, found byte {text[error.start]:#04x} at {error.start}"
        ) from error
    return text_content(path.name, str(path), text, (0.98, 0.01), context)


def text_content(title: str, place: str, text: bytes, shares: tuple[float, float], context: int) -> Content:
    """Cuts a text into train, val and test stretches (the last takes the rest) and those into windows."""
    first = int(len(text) * shares[0])
    second = first + int(len(text) * shares[1])
    parts = {"train": text[:first], "val": text[first:second], "test": text[second:]}
    for name, part in parts.items():
        if len(part) <= context:
            raise DataDamaged(
                f"{place}: {len(text):,} bytes leave {len(part)} for {name}; expected at least {context + 1} "
                f"for one window of {context}. Use a longer text"
            )
        if len(set(part)) == 1:
            raise DataDamaged(f"{place}: the {name} part is one byte repeated ({part[0]:#04x}); expected text")
    return make_content(
        f"{title}: {len(text):,} bytes in windows of {context}",
        NUM_BYTES,
        {name: windows(part, context) for name, part in parts.items()},
        {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()},
    )


def windows(part: bytes, context: int) -> Split:
    """Rows of `context` bytes and the bytes that follow each; an incomplete last window is dropped.

    Neighbouring windows share one byte, the last target of one being the first input of the next. Inputs and targets
    are views of one stream.
    """
    stream = torch.from_numpy(np.frombuffer(part, dtype=np.uint8).astype(np.int64))
    rows = stream.unfold(0, context + 1, context)
    return Split(inputs=rows[:, :-1], targets=rows[:, 1:])
