"""The order of one step, and what the engine does with streams and totals. Envs here are recording doubles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.leyline import (
    ActionOutcome,
    ActionSpec,
    EnvSnapshot,
    EpisodeSeed,
    EpochReport,
    GovernorState,
    RollbackReason,
    wait,
)
from esper.simic.training.rollout import episode_seeds
from esper.tamiyo.simulation import SimulatedWorker
from esper.tolaria import engine as engine_module
from esper.tolaria.batches import Batch, SharedBatchIterator
from esper.tolaria.engine import Batches, EnvOps, TaskRows, VectorizedEngine, not_applied
from esper.tolaria.governor import LabelFacts, TolariaGovernor, Verdict
from esper.tolaria.runtime import Placement
from esper.tolaria.torch_executor import TorchExecutor
from tests.fakes import world

LABELS = LabelFacts(entropy=1.0, top_share=0.5, rows=8)
WORLD = world()


class DoubleEnv:
    """Writes down what is done to it. Panics in the epoch it is told to."""

    def __init__(
        self, seed: EpisodeSeed, rows: TaskRows, placement: Placement, log: list[str], panics: set[tuple[int, int]]
    ) -> None:
        self.seed, self.env_id, self.episode = seed, seed.env_id, seed.episode
        self.context, self.rows = WORLD.context, rows
        self.epoch: int | None = None
        self.terminal = False
        self.gradient_detail = False
        self.placement = placement
        self.governor = TolariaGovernor(LABELS)
        self.log = log
        self.panics = panics
        self.inputs: list[Tensor] = []
        self.note("create")

    def note(self, what: str) -> None:
        self.log.append(f"{what} {self.env_id}")

    def begin_training(self) -> None:
        self.note("begin training")

    def begin_validation(self) -> None:
        self.note("begin validation")

    def numbers(self) -> Tensor:
        self.note("numbers")
        return torch.full((3 + self.env_id % 2,), float(self.env_id), dtype=torch.float64)

    def judge(self, values: Sequence[float]) -> Verdict:
        assert values == [float(self.env_id)] * (3 + self.env_id % 2), "every env gets its own numbers back"
        self.note("judge")
        verdict = self.governor.begin(1.0)
        if self.epoch is not None and (self.env_id, self.epoch) in self.panics:
            return replace(verdict, state=GovernorState.PANIC, reason=RollbackReason.NONFINITE)
        return verdict

    def keep(self) -> None:
        self.note("keep")

    def roll_back(self, verdict: Verdict) -> int | None:
        self.note("roll back")
        return None

    def pack(self) -> EnvSnapshot:
        return EnvSnapshot(version=1, env_id=self.env_id, meta_json=str(self.epoch), tensors=b"")

    def unpack(self, snapshot: EnvSnapshot) -> None:
        self.epoch = int(snapshot.meta_json)


REPORT: EpochReport = SimulatedWorker(WORLD).reset(episode_seeds(0, 0, 1)).reports[0]


def double(
    log: list[str], panics: set[tuple[int, int]] | None = None, devices: Sequence[torch.device] = (torch.device("cpu"),)
) -> VectorizedEngine[DoubleEnv]:
    def create(seed: EpisodeSeed, placement: Placement) -> DoubleEnv:
        return DoubleEnv(seed, rows, placement, log, panics or set())

    def apply(env: DoubleEnv, spec: ActionSpec, wanted: frozenset[object]) -> ActionOutcome:
        env.note("apply")
        return replace(not_applied(spec), applied=True)

    def train(env: DoubleEnv, batch: Batch) -> None:
        env.note(f"train {batch.index}")
        env.inputs.append(batch.inputs)

    def evaluate(env: DoubleEnv, batch: Batch) -> None:
        env.note(f"eval {batch.index}")

    def report(env: DoubleEnv, verdict: Verdict | None, restored: int | None) -> EpochReport:
        env.note("report" if verdict is not None else "report again")
        env.terminal = env.terminal or (verdict is not None and verdict.state is GovernorState.PANIC)
        return replace(REPORT, env_id=env.env_id, epoch=env.epoch, terminal=env.terminal)

    eight = SharedBatchIterator(torch.arange(8.0)[:, None], torch.arange(8), batch_size=4, run_seed=0)
    rows = TaskRows(tuple(eight.on(device) for device in devices), tuple(eight.on(device) for device in devices))
    ops = EnvOps(
        create=create,
        apply=apply,
        executors=(TorchExecutor(train_batch=train, eval_batch=evaluate),),
        report=report,
        seed_of=lambda packed: EpisodeSeed(env_id=packed.env_id, episode=5, run_seed=9),
    )
    return VectorizedEngine(ops, {WORLD.name: WORLD.context}, devices=devices)


def waits(*env_ids: int) -> list[ActionSpec]:
    return [wait(env_id) for env_id in env_ids]


def test_a_reset_validates_reports_and_keeps_the_untrained_hosts() -> None:
    log: list[str] = []
    double(log).reset(episode_seeds(1, 0, 1))
    assert log == [
        *("create 0", "begin validation 0", "eval 0 0", "eval 1 0", "numbers 0"),
        *("judge 0", "report 0", "keep 0"),
    ]


def test_the_order_of_a_step() -> None:
    log: list[str] = []
    worker = double(log)
    worker.reset(episode_seeds(1, 0, 2))
    log.clear()
    result = worker.step(waits(0, 1))
    assert log == [
        *("apply 0", "apply 1"),
        *("begin training 0", "begin training 1"),
        *("train 0 0", "train 0 1", "train 1 0", "train 1 1"),
        *("begin validation 0", "begin validation 1"),
        *("eval 0 0", "eval 0 1", "eval 1 0", "eval 1 1"),
        *("numbers 0", "numbers 1"),
        *("judge 0", "report 0", "judge 1", "report 1"),
    ]
    assert [result.reports[i].epoch for i in (0, 1)] == [0, 0]


def test_a_panic_rolls_back_before_the_report_and_the_env_then_sits_out() -> None:
    log: list[str] = []
    worker = double(log, panics={(1, 0)})
    worker.reset(episode_seeds(1, 0, 2))
    log.clear()
    worker.step(waits(0, 1))
    assert log[-3:] == ["judge 1", "roll back 1", "report 1"]
    log.clear()
    result = worker.step(waits(0, 1))
    assert not any(line.endswith(" 1") and line != "report again 1" for line in log)
    assert (result.outcomes[0].applied, result.outcomes[1].applied) == (True, False)
    assert [result.reports[i].epoch for i in (0, 1)] == [1, 0]


def test_all_envs_see_the_same_batches_in_the_keyed_order() -> None:
    worker = double([])
    worker.reset(episode_seeds(1, 0, 2))
    worker.step(waits(0, 1))
    rows = SharedBatchIterator(torch.arange(8.0)[:, None], torch.arange(8), batch_size=4, run_seed=1)
    expected = [batch.inputs for batch in rows.epoch(0, 0)]
    for env in worker.envs.values():
        assert all(torch.equal(a, b) for a, b in zip(env.inputs, expected, strict=True))


def test_envs_of_other_episodes_get_batches_of_their_own() -> None:
    worker = double([])
    worker.reset([EpisodeSeed(env_id=0, episode=0, run_seed=1), EpisodeSeed(env_id=1, episode=6, run_seed=2)])
    worker.step(waits(0, 1))
    rows = SharedBatchIterator(torch.arange(8.0)[:, None], torch.arange(8), batch_size=4, run_seed=2)
    expected = [batch.inputs for batch in rows.epoch(6, 0)]
    assert all(torch.equal(a, b) for a, b in zip(worker.envs[1].inputs, expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(worker.envs[0].inputs, expected, strict=True))


class WholeEpochs:
    """Runs some envs, each in one call per pass."""

    def __init__(self, env_ids: set[int]) -> None:
        self.env_ids = env_ids
        self.inputs: list[Tensor] = []

    def supports(self, env: DoubleEnv) -> bool:
        return env.env_id in self.env_ids

    def train(self, envs: Sequence[DoubleEnv], batches: Batches) -> None:
        self.inputs = [batch.inputs for by_device in batches for batch in by_device.values()]
        for env in envs:
            env.note("whole epoch")

    def validate(self, envs: Sequence[DoubleEnv], batches: Batches) -> None:
        for env in envs:
            env.note("whole validation")


def test_an_env_runs_in_the_first_executor_that_supports_it() -> None:
    log: list[str] = []
    worker = double(log)
    whole = WholeEpochs({0, 2})
    worker._ops = replace(worker._ops, executors=(whole, *worker._ops.executors))
    worker.reset(episode_seeds(1, 0, 3))
    log.clear()
    worker.step(waits(0, 1, 2))
    ran = [line for line in log if line.startswith(("train", "eval", "whole"))]
    assert ran == [
        *("whole epoch 0", "whole epoch 2", "train 0 1", "train 1 1"),
        *("whole validation 0", "whole validation 2", "eval 0 1", "eval 1 1"),
    ]
    assert all(torch.equal(a, b) for a, b in zip(worker.envs[1].inputs, whole.inputs, strict=True))
    log.clear()
    whole.env_ids = {1}
    worker.step(waits(0, 1, 2))
    assert [line for line in log if "whole" in line] == ["whole epoch 1", "whole validation 1"], "asked in every step"


@pytest.mark.parametrize("num_envs", [1, 16])
def test_what_was_measured_is_read_once_per_step_whatever_the_number_of_envs(
    num_envs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[torch.Size] = []
    original = Tensor.tolist

    def counting(tensor: Tensor) -> object:
        reads.append(tensor.shape)
        return original(tensor)  # type: ignore[no-untyped-call]

    worker = double([])
    worker.reset(episode_seeds(1, 0, num_envs))
    monkeypatch.setattr(Tensor, "tolist", counting)
    worker.step(waits(*range(num_envs)))
    assert reads == [torch.Size([3 * num_envs + num_envs // 2])]


def test_a_step_needs_exactly_one_spec_per_env() -> None:
    worker = double([])
    worker.reset(episode_seeds(1, 0, 2))
    for specs in (waits(0), waits(0, 1, 2), waits(0, 0)):
        with pytest.raises(ValueError, match=r"one spec for each of the envs \[0, 1\]"):
            worker.step(specs)


def test_restored_envs_keep_their_episode_and_continue() -> None:
    log: list[str] = []
    worker = double(log)
    worker.reset(episode_seeds(1, 0, 2))
    worker.step(waits(0, 1))
    packed = worker.snapshot()
    other = double([])
    other.restore({1: packed[1]})
    assert (other.envs[1].episode, other.envs[1].seed.run_seed, other.envs[1].epoch) == (5, 9, 0)
    other.step(waits(1))
    assert other.envs[1].epoch == 1


def test_every_batch_is_a_sign_of_life_and_may_stop_the_step() -> None:
    worker = double([])
    beats: list[tuple[int | None, int]] = []
    worker._beat = lambda epoch, batch: beats.append((epoch, batch))
    worker.reset(episode_seeds(1, 0, 1))
    worker.step(waits(0))
    assert beats == [(None, 0), (None, 1), (0, 0), (0, 1), (0, 0), (0, 1)]


def test_host_work_uses_one_thread_and_puts_the_number_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    worker = double([])
    worker._beat = lambda epoch, batch: seen.append(torch.get_num_threads())
    torch.set_num_threads(2)
    try:
        worker.reset(episode_seeds(1, 0, 1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.log.append(f"enter {self.name}")

    def __exit__(self, *error: object) -> None:
        self.log.append(f"leave {self.name}")


def test_with_streams_work_waits_for_its_batch_and_one_fence_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logic of the CUDA path on fake streams: enter, wait, keep the memory, and one fence before the one read."""
    log: list[str] = []
    default = FakeStream("default", log)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: log.append(f"kept for {stream.name}"))

    def placement(device: torch.device, amp: str) -> Placement:
        made = Placement(device)
        made.stream = FakeStream("env", log)  # type: ignore[assignment]
        return made

    monkeypatch.setattr(engine_module, "make_placement", placement)
    worker = double(log)
    worker.reset(episode_seeds(1, 0, 1))
    log.clear()
    worker.step(waits(0))
    start = log.index("begin training 0")
    assert log[start + 2 : start + 8] == [
        *("env waits for default", "kept for env", "kept for env"),
        *("enter env", "train 0 0", "leave env"),
    ]
    assert log.count("default waits for env") == 1
    fence, judged = log.index("default waits for env"), log.index("judge 0")
    assert log.index("eval 1 0") < log.index("numbers 0") < fence < judged
    assert log[log.index("numbers 0") - 1] == "enter env"
    inside = log[: log.index("judge 0")]
    assert inside.count("enter env") - inside.count("leave env") == 1, "lifecycle work runs on the env's stream too"
