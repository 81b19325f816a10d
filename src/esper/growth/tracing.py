"""Which submodules a model calls, in which order, and what they give.

Slots hang on submodules as children of a fixed name. They are not part of the user's model and are not traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

SLOT = "esper_slot"
"""Name of the child module that holds a slot."""


def in_slot(name: str) -> bool:
    """True for the name of a module, parameter or buffer that belongs to a slot."""
    return SLOT in name.split(".")


@dataclass(slots=True, eq=False)
class Call:
    """One call of a submodule. `start` and `end` count starts and ends of all calls, so they tell who encloses whom."""

    name: str
    module: nn.Module
    start: int
    end: int = -1
    output: Any = None
    is_leaf: bool = True
    """True if it called no other submodule."""

    def encloses(self, other: Call) -> bool:
        """True if the other call happened inside this one."""
        return self.start < other.start and other.end < self.end


def trace(model: nn.Module, run: Callable[[], object], on_output: Callable[[Call], Any] | None = None) -> list[Call]:
    """The calls of all submodules during `run`, in the order of their start.

    Args:
        model: Whose submodules are watched; the model itself is the call with the empty name.
        run: Runs the model.
        on_output: Called at each end; what it returns takes the place of the output.
    """
    calls: list[Call] = []
    running: list[Call] = []
    clock = 0
    watched = [(name, module) for name, module in model.named_modules() if not in_slot(name)]
    names = {id(module): name for name, module in watched}

    def enter(module: nn.Module, args: object) -> None:
        nonlocal clock
        clock += 1
        if running:
            running[-1].is_leaf = False
        running.append(Call(names[id(module)], module, clock))
        calls.append(running[-1])

    def leave(module: nn.Module, args: object, output: Any) -> Any:
        nonlocal clock
        clock += 1
        call = running.pop()
        call.end, call.output = clock, output
        if on_output is not None:
            call.output = on_output(call)
        return call.output

    handles = []
    for _, module in watched:
        # Before other hooks: what a module gives is judged without what is attached to it.
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, prepend=True)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls
