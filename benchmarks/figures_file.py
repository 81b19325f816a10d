"""The file that a benchmark writes its figures to: looked at before the work, written after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from esper.leyline.files import write_atomic


def check_out(out: Path | None) -> None:
    """Makes sure that the figures can be written before minutes of work go into them. An old file keeps its content.

    Raises:
        ValueError: They cannot.
    """
    if out is None:
        return
    try:
        if not out.parent.exists():
            out.parent.mkdir(parents=True)
        is_new = not out.exists()
        with out.open("ab"):
            pass
        if is_new:
            out.unlink()
    except OSError as error:
        raise ValueError(
            f"--out {out} cannot be written ({error.strerror}); name a file in a folder that you may write to"
        ) from error


def write_figures(out: Path, figures: Any) -> None:
    """Replaces the file by the figures as JSON, in one step."""
    write_atomic(out, (json.dumps(figures, indent=2) + "\n").encode())
