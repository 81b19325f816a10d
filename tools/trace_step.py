"""Prints the walk of one training step: which modules it touches, in order, and how many calls that takes.

    python tools/trace_step.py [options of esper train, such as --backend torch]

One step is from the end of one host epoch to the end of the next: the reward of the last, the decision, the epoch
itself. It is traced in a run of two hosts in this process, with its event log at the usual level.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any
from unittest import mock

from esper.scripts.cli import main
from esper.simic.training import rollout

TRACED_STEP = 6
WORDS = (
    "train ppo --task digits_mlp --envs 2 --minibatches 2 --rounds 1 --episode-length 10 --seed 1 --workers 1 "
    "--worker-kind inline --calibration-runs 0"
)


class StepTrace:
    """Counts the calls of Esper's own functions while one step runs."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.modules: dict[str, int] = {}
        self._steps = 0
        self._execute = rollout.execute_actions

    def execute_actions(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the real one, and traces from the end of one call to the end of the next."""
        result = self._execute(*args, **kwargs)
        self._steps += 1
        sys.setprofile(self._note if self._steps == TRACED_STEP else None)
        return result

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("esper."):
            self.functions[f"{name}:{frame.f_code.co_qualname}"] += 1
            self.modules[name] = self.modules.get(name, 0) + 1


def trace_step(options: Sequence[str]) -> StepTrace:
    """Trains for one short round and traces one step in its middle."""
    trace = StepTrace()
    patch = mock.patch.object(rollout, "execute_actions", trace.execute_actions)
    with TemporaryDirectory(prefix="esper-") as folder, patch:
        main([*WORDS.split(), *options, "--runs", str(Path(folder) / "runs"), "--run-id", "traced"])
    return trace


def show(trace: StepTrace) -> str:
    """The walk, module by module in the order of their first call, and its size."""
    lines, package = [], ""
    for module, calls in trace.modules.items():
        here, name = module.removeprefix("esper.").rsplit(".", 1) if module.count(".") > 1 else ("", module)
        if here != package:
            lines.append(f"{here:17}")
            package = here
        lines[-1] += f" {name} {calls:,}"
    total = sum(trace.functions.values())
    size = f"{total:,} calls of {len(trace.functions)} functions in {len(trace.modules)} modules"
    return "\n".join([*lines, size]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(show(trace_step(sys.argv[1:])))
