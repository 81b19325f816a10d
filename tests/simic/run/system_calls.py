"""Watching and breaking the system calls that write: every one is a place where a process can die or a disk can fail.

Run as a program, it kills a child of its own before each call of a save, and in the middle of each write, and tells
what was left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from esper.simic.run.checkpoint_schedule import remove_old_checkpoints
from esper.simic.run.run_dir import RunDir
from tests.simic.run.saving import contents, names, newest, run_with, save

WRITING_CALLS = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")

Before = Callable[[int, str, tuple[Any, ...]], None]
"""Gets a call's number, name and arguments before it happens; may raise, or never return."""


@contextmanager
def watched(before: Before, after: Callable[[str, tuple[Any, ...], Any], None] | None = None) -> Iterator[None]:
    """Shows every writing call of this process to `before` and its result to `after`."""
    numbers = count()
    originals = {name: getattr(os, name) for name in WRITING_CALLS}

    def watching(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before(next(numbers), name, args)
            result = originals[name](*args, **kwargs)
            if after is not None:
                after(name, args, result)
            return result

        return call

    for name in WRITING_CALLS:
        setattr(os, name, watching(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def save_and_retain(run: RunDir) -> None:
    """What a trainer does at a boundary, with a victim for retention."""
    save(run, 3)
    remove_old_checkpoints(run, last=2, resumed_from=None)


def _killed_at(run: RunDir, point: int, torn: bool) -> tuple[bool, str]:
    """A child that dies before its call of this number, or in the middle of it. Returns whether it did, and where."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        write = os.write

        def before(number: int, name: str, args: tuple[Any, ...]) -> None:
            if number != point:
                return
            write(writer, name.encode())
            if torn and name == "write":
                write(args[0], bytes(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        with watched(before):
            save_and_retain(run)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as reported:
        call = reported.read()
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, call


def _survey(folder: Path, torn: bool) -> list[dict[str, Any]]:
    template = run_with(folder, 1, 2)
    found: list[dict[str, Any]] = []
    for point in count():
        run = RunDir(path=folder / f"killed-{point}" / template.run_id)
        shutil.copytree(template.path, run.path)
        killed, call = _killed_at(run, point, torn)
        loaded, rejected = newest(run)
        whole = loaded.files == contents(loaded.facts.index)
        with run.lock():
            if loaded.facts.index == 2:
                save_and_retain(run)
            else:
                remove_old_checkpoints(run, last=2, resumed_from=None)
        row = {
            "call": call,
            "newest": loaded.facts.index,
            "whole": whole,
            "rejected": len(rejected),
            "after": names(run),
        }
        shutil.rmtree(run.path)
        if not killed:
            shutil.rmtree(template.path)
            return found
        found.append(row)
    raise AssertionError("count never ends")


if __name__ == "__main__":
    print(json.dumps([_survey(Path(sys.argv[1]), torn) for torn in (False, True)]))
