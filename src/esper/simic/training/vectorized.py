"""The composition root of a training run: builds every part, hands them to each other, runs the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from esper.leyline import (
    AnomalyDebug,
    BatchSummary,
    EventSink,
    FeatureContext,
    HostLayout,
    LayerGradientStats,
    PolicyProtocol,
    SeenByPolicy,
    StorageError,
    TelemetryLevel,
)
from esper.leyline.files import free_bytes, scratch_folder
from esper.leyline.rundir import METRICS_DIR
from esper.nissa import Backend, Hub, TelemetryHub, complain, get_hub
from esper.nissa.exporters import TensorBoardBackend, WandbBackend
from esper.runtime.tasks import TaskSpec, get_task_spec, load_task_data, override
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import Client, FixedClient, SimicClient, StepFacts, check_columns, network_shape
from esper.simic.control.normalization import RewardNormalizer
from esper.simic.rewards import MIN_TERMINAL_DISCOUNT, Calibration, default_gamma
from esper.simic.run.checkpoint_schedule import CheckpointWriter
from esper.simic.run.environment import NOT_PROMISED
from esper.simic.run.recorder import open_recorder
from esper.simic.run.run_dir import CALIBRATIONS_DIR, RunDir
from esper.simic.run.run_state import RunState, load_policy
from esper.simic.run.session import RunStart, Session, check_still_newest, emit_run_ended, log_losses
from esper.simic.run.stop_signals import StopSignals
from esper.simic.telemetry.debug_telemetry import (
    MAX_RATIOS_LOGGED,
    check_numerical_stability,
    collect_per_layer_gradients,
    odd_ratios,
)
from esper.simic.telemetry.decisions import seen_by_policy
from esper.simic.telemetry.emitters import aggregate_layer_gradient_health, compute_grad_norm_surrogate
from esper.simic.telemetry.telemetry_config import Exporter
from esper.simic.training.backend import choose_backend
from esper.simic.training.calibration import load_or_calibrate, reward_config
from esper.simic.training.config import IMITATED_RULE, LEARNED, NURSERY, TrainingConfig, with_overrides
from esper.simic.training.env_factory import build_worker, make_worker_spec
from esper.simic.training.episode_rewards import EpisodeRewards, ModePricing, TaskPricing
from esper.simic.training.vectorized_trainer import Recorder, RunParts, VectorizedPPOTrainer
from esper.tamiyo.controller import Setting
from esper.tamiyo.controllers import CONTROLLERS, make_controller, runs_by_name
from esper.tamiyo.side_by_side import OnePerHost
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.kinds import AUTO, find_worker_kind
from esper.tolaria.pool import EnginePool
from esper.tolaria.runtime import usable_cores

CLOSE_TIMEOUT_S = 10.0
"""Most time that the log and its exporters get to end; an upload may need some of it."""


def train_ppo_vectorized(
    config: TrainingConfig | None = None, /, *, session: Session | None = None, **overrides: Any
) -> tuple[PPOAgent, list[BatchSummary]]:
    """Trains a policy and returns it with the summaries of its rounds.

    Events go to the process's hub, if there is one; nothing else is written to disk. A session has its own log.

    Args:
        config: What to train; the defaults if None.
        session: A run that is open already; config and overrides then say nothing.
        overrides: Fields of the configuration that are to differ.

    Returns:
        The policy and its rounds; fewer than asked for if the hub's log is no longer good enough to go on.

    Raises:
        ValueError: A field is unknown or out of range, or the controller does not learn.
    """
    if session is None:
        config = with_overrides(TrainingConfig() if config is None else config, overrides)
        _check_learned(config.controller)
        with open_session(RunStart(config=config)) as opened:
            return train_ppo_vectorized(session=opened)
    _check_learned(session.trainer.config.controller)
    history = session.run()
    assert isinstance(session.trainer.client, SimicClient)
    return session.trainer.client.agent, history


def _check_learned(controller: str) -> None:
    if controller != LEARNED:
        raise ValueError(f"controller must be {LEARNED!r} to train a policy, got {controller!r}")


@contextmanager
def open_session(
    start: RunStart,
    stop: StopSignals | None = None,
    listeners: Sequence[Backend] = (),
    *,
    data_dir: Path | None = None,
) -> Iterator[Session]:
    """Opens a run for this process: lock, log, workers, trainer. The log's last event says how the `with` block ended.

    Args:
        start: Where it begins. Without a run directory events go to the process's hub, and nothing is saved.
        stop: Who may end it early; None: nobody.
        listeners: Get every event of a run directory's log, such as a screen. What they do cannot touch the run.
        data_dir: Where the data lies; None for the usual places.

    Raises:
        RunBusy: Another process works on this run.
        StorageError: The log cannot be written.
        StepCancelled: Stopped while the scale was measured, before there was a trainer.
    """
    config, run = start.config, start.run
    with nullcontext() if run is None else run.lock():
        hub, writer = (get_hub(), None) if run is None else open_log(start, run, listeners)
        telemetry = config.telemetry()
        if not isinstance(hub, TelemetryHub):
            telemetry = replace(telemetry, level=TelemetryLevel.OFF)
        record = partial(open_recorder, start, hub, telemetry, writer)
        started_s = time.monotonic()
        session = trainer = None
        try:
            cache = None if run is None else run.path.parent / CALIBRATIONS_DIR
            with open_trainer(
                config, record, stop, sink=hub, data_dir=data_dir, cache=cache, saved=start.saved
            ) as trainer:
                session = Session(trainer=trainer, checkpoints=writer)
                yield session
        except BaseException as error:
            emit_run_ended(hub, trainer, error=error, started_s=started_s)
            raise
        else:
            emit_run_ended(hub, trainer, error=None, started_s=started_s)
        finally:
            if run is not None:
                complete = _close_log(run, hub)
                if session is not None:
                    session.log_complete = complete


def open_log(start: RunStart, run: RunDir, listeners: Sequence[Backend] = ()) -> tuple[Hub, CheckpointWriter]:
    """The log of a session and the writer of its checkpoints; the run's lock is held. Level OFF touches nothing.

    Raises:
        RunBusy: The run has gone on since its checkpoint was chosen.
        StorageError: The log cannot be written. Nothing is left of a new run.
    """
    check_still_newest(start)
    for difference in start.differences:
        complain(f"{difference}: {NOT_PROMISED}")
    facts, config = None if start.checkpoint is None else start.checkpoint.facts, start.config
    first_seq = 0 if facts is None else facts.next_seq
    try:
        if config.telemetry().level is TelemetryLevel.OFF:
            hub = Hub(first_seq=first_seq, backends=listeners)
        else:
            hub = TelemetryHub(
                run.path,
                run_id=run.run_id,
                group=start.group,
                first_seq=first_seq,
                backends=[*(_exporter(name, start, run) for name in config.exporters), *listeners],
                require_complete=config.require_complete,
            )
    except BaseException as error:
        free = free_bytes(run.path)
        if facts is None:
            run.discard()  # nothing has happened in it, and its name is to be free for the next try
        if isinstance(error, OSError):
            raise StorageError(str(run.path), error, needed_bytes=None, free_bytes=free) from error
        raise
    attempt = hub.attempt if isinstance(hub, TelemetryHub) else 0 if facts is None else facts.attempt
    resumed_from = None if facts is None else facts.index
    bitwise = facts is None or facts.bitwise
    return hub, CheckpointWriter(run, hub, attempt=attempt, resumed_from=resumed_from, config=config, bitwise=bitwise)


def _exporter(name: Exporter, start: RunStart, run: RunDir) -> Backend:
    if name == "tensorboard":
        env_steps = None if start.saved is None else start.saved.facts["counters"]["num_env_steps"]
        return TensorBoardBackend(run.path / METRICS_DIR, purge_step=env_steps)
    return WandbBackend(name, project="esper", run_id=run.run_id, config=asdict(start.config), folder=run.path)


def _close_log(run: RunDir, hub: Hub) -> bool:
    """Closes the log, warns of what it or a listener has lost, and returns whether it is complete."""
    report = hub.close(CLOSE_TIMEOUT_S)
    if not report.complete:
        complain(f"{run.path}: {log_losses(report.num_unwritten, report.num_dropped, report.log_error)}")
    for name, listener in report.backends.items():
        if listener.num_lost:
            why = listener.error or "too slow"
            complain(f"{name} missed {listener.num_lost:,} events ({why}). The log has everything")
    return report.complete


class AgentReads:
    """Detailed readings of a client's policy: observations, gradients, weights."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def seen(self, facts: StepFacts, envs: Sequence[int]) -> dict[int, SeenByPolicy]:
        """How unusual what the policy decided on was."""
        found: dict[int, SeenByPolicy] = {}
        for group in facts.groups:
            here = group.envs_G.tolist()
            slot_ids = facts.before.contexts[here[0]].layout.slot_ids
            asked = [here.index(env) for env in envs if env in here]
            seen = seen_by_policy(*self._learner().agent.deviations(group.observation), asked, slot_ids)
            found |= {here[position]: row for position, row in seen.items()}
        return found

    def layers(self) -> list[LayerGradientStats] | None:
        """The gradients of the last minibatch, by layer; None if the update looked at none: what lies there is old."""
        agent = self._learner().agent
        return None if agent.last_ratios_B is None else collect_per_layer_gradients(agent.network, agent.clip_factors())

    def bundle(self) -> AnomalyDebug:
        """What goes with an alarm."""
        agent = self._learner().agent
        odd = None if agent.last_ratios_B is None else odd_ratios(agent.last_ratios_B)
        return AnomalyDebug(
            layers=aggregate_layer_gradient_health(self.layers() or ()),
            stability=check_numerical_stability(agent.network, agent.clip_factors()),
            ratios=None if odd is None else tuple(odd[:MAX_RATIOS_LOGGED]),
            num_ratios_out_of_range=None if odd is None else len(odd),
            grad_norm=None if odd is None else compute_grad_norm_surrogate(agent.network),
        )

    def _learner(self) -> SimicClient:
        assert isinstance(self._client, SimicClient), "there is nothing to look at in a fixed controller"
        return self._client


@contextmanager
def open_trainer(
    config: TrainingConfig,
    record: Callable[[RunParts], Recorder],
    stop: StopSignals | None = None,
    *,
    sink: EventSink | None = None,
    data_dir: Path | None = None,
    cache: Path | None = None,
    saved: RunState | None = None,
) -> Iterator[VectorizedPPOTrainer]:
    """Builds every part of a run around its workers, which live as long as the `with` block.

    The scale of scores is read from the folder `cache`, or measured anew. `saved` is the boundary to go on from.
    `record` makes the recorder of log and checkpoints; `sink` takes the events of lost workers.
    """
    task, stop = training_task(config), StopSignals() if stop is None else stop
    data = load_task_data(task, data_dir)
    backend = choose_backend(config.backend, task, data, device=config.device, amp=config.amp)
    if backend.note is not None:
        complain(f"backend {backend.name}: {backend.note}")
    config = replace(config, backend=backend.name)  # what a checkpoint goes on with
    kind, workers = worker_plan(config)
    with scratch_folder() as folder:
        scratch = folder if find_worker_kind(kind).shares_files else None
        spec = make_worker_spec(
            task,
            data,
            scratch=scratch,
            devices=config.device,
            amp=config.amp,
            backend=backend.name,
            batches=SharedBatchIterator,
        )
        options = worker_options(config)
        with EnginePool(build_worker, spec, kind=kind, workers=workers, sink=sink, options=options) as pool:
            stop.watch(pool.cancel)
            scale = None if saved is None else saved.facts["calibration"]
            if saved is None and config.calibration_runs:
                scale = load_or_calibrate(pool, task, data, config.calibration_runs, cache, config.backend)
            client = _client(config, task, pool.context.layout, scale, saved)
            parts = RunParts(
                config=config,
                task=task,
                data=data,
                pool=pool,
                client=client,
                reads=AgentReads(client),
                calibration=scale,
            )
            trainer = VectorizedPPOTrainer(parts, record(parts), stop)
            if saved is not None:
                trainer.restore(saved.facts["counters"], saved.history)
            yield trainer


def training_task(config: TrainingConfig) -> TaskSpec:
    """The task with the run's episode length and budget."""
    task = get_task_spec(config.task)
    if config.episode_length is not None:
        task = override(task, horizon=config.episode_length)
    if config.param_budget is not None:
        task = override(task, param_budget=config.param_budget)
    return task


def check_controller(name: str) -> None:
    """Refuses a controller that cannot run by its name alone.

    Raises:
        ValueError: It is unknown, or needs parameters of its own.
    """
    able = [known for known in CONTROLLERS if runs_by_name(known)]
    if name not in (LEARNED, *able):
        raise ValueError(f"unknown controller {name!r}. Known: {', '.join((LEARNED, *able))}")


def warm_started(trained: PPOAgent, config: PPOConfig, *, run_seed: int) -> PPOAgent:
    """A new agent with the weights and statistics of a trained one; optimizer and schedules begin anew.

    Raises:
        ValueError: Their networks differ in width.
    """
    if trained.config.width != config.width:
        raise ValueError(
            f"warm_start: the trained policy has width {trained.config.width}, this run {config.width}. "
            f"Give --width {trained.config.width}"
        )
    check_columns(trained.shape)
    agent = PPOAgent(trained.shape, config, run_seed=run_seed)
    agent.network.load_state_dict(trained.network.state_dict())
    return agent


def worker_plan(config: TrainingConfig) -> tuple[str, int | None]:
    """Kind and number of workers; None leaves the number to the kind."""
    if config.worker_kind not in (AUTO, "process"):
        return config.worker_kind, config.workers
    count = min(usable_cores() if config.workers is None else config.workers, config.envs)
    if config.worker_kind == AUTO and (config.device != "cpu" or count == 1):
        return "inline", None
    return "process", count


def worker_options(config: TrainingConfig) -> dict[str, Any]:
    """What the run's kind of workers is told besides their number."""
    return {"address": config.ray_address, "at_most": config.envs} if config.worker_kind == "ray" else {}


def _client(
    config: TrainingConfig,
    task: TaskSpec,
    layout: HostLayout,
    scale: Calibration | None,
    saved: RunState | None,
) -> SimicClient | FixedClient:
    gamma = default_gamma(task.horizon) if config.gamma is None else config.gamma
    prices = partial(reward_config, gamma=gamma, weights=config.reward_weights, scale=scale)
    pricing = (
        TaskPricing(mode=config.reward_mode, config_of=lambda name: prices(get_task_spec(name)))
        if config.task == NURSERY
        else ModePricing(mode=config.reward_mode, config=prices(task))
    )
    rewards = EpisodeRewards(pricing)
    if config.controller != LEARNED:
        setting = Setting(layout=layout, lifecycle=task.lifecycle, run_seed=config.seed)
        return FixedClient(make_controller(config.controller, setting), rewards)
    scaling = RewardNormalizer()
    if (left := gamma**task.horizon) < MIN_TERMINAL_DISCOUNT:
        complain(
            f"gamma {gamma:g} over episodes of T = {task.horizon} epochs leaves gamma ** T = {left:.2f} of what is "
            f"paid at the end; below {MIN_TERMINAL_DISCOUNT} growing late pays only because costs are put off. Leave "
            f"--gamma out, or use {default_gamma(task.horizon):.6g}"
        )
    if saved is None:
        ppo = config.ppo_config(episode_length=task.horizon, gamma=gamma)
        shape = network_shape(layout.blueprints, config.sees)
        agent = PPOAgent(shape, ppo, run_seed=config.seed)
        if config.warm_start is not None:
            trained = load_policy(config.warm_start).agent
            if trained.shape.seen_columns != shape.seen_columns:
                raise ValueError(f"warm_start: the trained policy sees other columns than --sees {config.sees}")
            agent = warm_started(trained, ppo, run_seed=config.seed)
    else:
        assert saved.agent is not None
        assert saved.facts["reward_scale"] is not None
        agent = saved.agent
        scaling.load_state_dict(saved.facts["reward_scale"])
    relative_to = None if config.relative_to == "nothing" else config.relative_to
    return SimicClient(
        agent,
        rewards,
        scaling,
        horizon=task.horizon,
        run_seed=config.seed,
        relative_to=relative_to,
        teacher=OnePerHost(_imitated_rule),
        imitate_rounds=config.imitate_rounds,
    )


def _imitated_rule(context: FeatureContext, horizon: int) -> PolicyProtocol:
    setting = Setting(layout=context.layout, lifecycle=context.lifecycle, run_seed=0)  # it draws nothing
    return make_controller(IMITATED_RULE, setting)
