"""Which executor trains the hosts of a run: chosen once, before any worker starts, and part of what the run is."""

from __future__ import annotations

from dataclasses import replace

from esper.kasmina.blueprints import BLUEPRINTS
from esper.leyline import BLENDS, Cause, EpisodeSeed, SeedStage, record
from esper.nissa import complain
from esper.runtime.data.splits import Dataset
from esper.runtime.tasks import TaskSpec
from esper.simic.training.env_factory import build_worker, make_worker_spec
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.tolaria.executor.available import BACKENDS, warm_up, why_not_native


@record
class HostBackend:
    """What trains the hosts of a run."""

    name: str
    """native or torch."""
    note: str | None
    """Why it is torch, or what of a native run is left to torch; None if there is nothing to say."""


TORCH = HostBackend(name="torch", note=None)


def choose_backend(wanted: str, task: TaskSpec, data: Dataset, *, device: str = "cpu", amp: str = "off") -> HostBackend:
    """Picks the backend of a run and, if it is native, compiles it before workers start; says so on stderr.

    `auto` is native where the machine has what it takes and every host and seed of the task has native operations.
    Asked for `native`, seeds without are trained by torch.

    Raises:
        ValueError: There is no such backend, or `native` cannot run here.
    """
    if wanted not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {wanted!r}")
    if wanted == "torch":
        return TORCH
    why = why_not_native() or (None if (device, amp) == ("cpu", "off") else f"hosts are on {device}, amp {amp}")
    gaps: dict[str, str] = {}
    if why is None:
        warm_up(complain)
        gaps = unsupported(task, data)
        why = gaps.pop("host", None)
    found = "; ".join(f"{key}: {reason}" for key, reason in gaps.items())
    if wanted == "native":
        if why is not None:
            raise ValueError(f"backend native cannot train {task.name} here: {why}. Use --backend torch, or auto")
        return HostBackend(name="native", note=f"left to torch: {found}" if gaps else None)
    if why is None and not gaps:
        return HostBackend(name="native", note=None)
    return HostBackend(name="torch", note=why or f"without native operations: {found}")


def unsupported(task: TaskSpec, data: Dataset) -> dict[str, str]:
    """Which blueprints of a task, or its "host", compiled code cannot train, and why: by making one of each."""
    from esper.simic.training.native_executor import NativeExecutor

    executor = NativeExecutor()
    free = replace(task, lifecycle=replace(task.lifecycle, max_live=len(task.slots), param_budget=None))
    worker = build_worker(make_worker_spec(free, data), lambda epoch, batch: None)
    found = {}
    operators = sorted({blend.operator: name for name, blend in BLENDS.items()}.values())
    for position, key in enumerate(("host", *task.blueprint_keys)):
        worker.reset([EpisodeSeed(env_id=0, episode=0, run_seed=0)])
        env = worker.envs[0]
        if key in BLUEPRINTS:
            _plant(env, key, operators[position % len(operators)])
        if (why := executor.why_not(env)) is not None:
            found[key] = why
    return found


def _plant(env: ParallelEnvState, key: str, blend: str) -> None:
    """A blended seed in every slot where it fits."""
    for slot_id in env.model.slots:
        if env.model.layout.card(slot_id, key).fits:
            env.model.germinate(slot_id, key, blend, 0)
            for stage in (SeedStage.TRAINING, SeedStage.BLENDING):
                env.model.slot(slot_id).transition(stage, Cause.AUTO)
