"""The table of worker kinds: where hosts can run. One row each; others can add theirs without touching Esper.

What a row opens is imported when it is first wanted, so this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from esper.leyline import record

if TYPE_CHECKING:
    from esper.tolaria.handles import Handle

    OpenWorkers = Callable[..., AbstractContextManager[Sequence[Handle]]]

AUTO = "auto"
"""No kind, but a choice by the number of workers."""
ENTRY_POINTS = "esper.worker_kinds"
"""Group of entry points under which another distribution offers kinds. Each names a `WorkerKind`."""

RAY_HELP = "HOST:PORT of a Ray cluster's head, or auto for the one this machine is in; default: a cluster of its own."
"""Of the flag --ray-address, wherever there is one."""


@record
class WorkerKind:
    """One way to run workers."""

    name: str
    description: str
    open: OpenWorkers | str
    """`open(build, spec, workers, **options)`: a context manager that yields the pool's handles, not yet started, and
    cleans up when the pool closes. `workers` None leaves their number to the kind. Or its place, "module:function"."""
    several: bool = True
    """False: there is exactly one worker."""
    shares_files: bool = True
    """False: workers may sit on other machines, so rows must travel inside their spec."""
    options: tuple[str, ...] = ()
    """What `open` takes besides."""

    def opener(self) -> OpenWorkers:
        """The function behind `open`.

        Raises:
            ValueError: It cannot be imported; the message says why.
        """
        if not isinstance(self.open, str):
            return self.open
        module, _, function = self.open.partition(":")
        try:
            return cast("OpenWorkers", getattr(import_module(module), function))
        except (ImportError, AttributeError) as error:
            raise ValueError(f"worker kind {self.name!r} cannot be used here: {error}") from error


@record
class Workers:
    """Which workers somebody asks for."""

    count: int
    kind: str = AUTO
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"--workers must be at least 1, got {self.count}")
        if self.ray_address is not None and self.kind != "ray":
            raise ValueError(f"--ray-address goes with --worker-kind ray, got --worker-kind {self.kind}")
        if self.kind != AUTO:
            find_worker_kind(self.kind)

    @classmethod
    def of(cls, asked: Workers | int) -> Workers:
        """A number alone leaves the kind open."""
        return cls(count=asked) if isinstance(asked, int) else asked

    @property
    def row(self) -> WorkerKind:
        """Their kind; if that was left open, processes where there are several."""
        return find_worker_kind(self.kind if self.kind != AUTO else "process" if self.count > 1 else "inline")

    @property
    def options(self) -> dict[str, str]:
        """What the kind is told besides."""
        return {} if self.ray_address is None else {"address": self.ray_address}


WORKER_KINDS: dict[str, WorkerKind] = {
    kind.name: kind
    for kind in (
        WorkerKind(
            name="inline",
            description="one engine in this process: tests, debugging, CUDA",
            open="esper.tolaria.handles:open_inline",
            several=False,
        ),
        WorkerKind(
            name="process",
            description="spawned processes, one pipe and one torch thread each",
            open="esper.tolaria.handles:open_processes",
        ),
        WorkerKind(
            name="ray",
            description="actors on the machines of a Ray cluster, one CPU each; this machine alone without an address",
            open="esper.tolaria.ray_handle:open_ray",
            shares_files=False,
            options=("address", "at_most"),
        ),
        WorkerKind(
            name="simulated",
            description="formulas instead of hosts, in this process: rehearsals of a run, sandboxes",
            open="esper.simic.training.simulated:open_simulated",
        ),
    )
}


def register_worker_kind(kind: WorkerKind) -> None:
    """Adds a kind to the table, for this process.

    Raises:
        ValueError: There is one of that name already.
    """
    if kind.name in WORKER_KINDS or kind.name == AUTO:
        raise ValueError(f"there is a worker kind {kind.name!r} already; choose another name")
    WORKER_KINDS[kind.name] = kind


def find_worker_kind(name: str) -> WorkerKind:
    """A kind by name, from the table or from an installed distribution.

    Raises:
        ValueError: There is none, or the one that an entry point names is not a kind.
    """
    if name in WORKER_KINDS:
        return WORKER_KINDS[name]
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        kind = entry.load()
        if not isinstance(kind, WorkerKind) or kind.name != name:
            raise ValueError(f"entry point {name!r} of {ENTRY_POINTS} must be a WorkerKind of that name, got {kind!r}")
        register_worker_kind(kind)
        return kind
    raise ValueError(f"unknown worker kind {name!r}. Known: {', '.join(worker_kind_names())}")


def worker_kind_names() -> tuple[str, ...]:
    """All kinds that there are: the table, then what is installed."""
    return tuple(dict.fromkeys([*WORKER_KINDS, *(entry.name for entry in entry_points(group=ENTRY_POINTS))]))
