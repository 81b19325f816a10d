"""One optimizer per env through a whole life: seeds join, leave and stay without disturbing anybody's state."""

import torch

from esper.leyline import ActionSpec, EpisodeSeed, LifecycleOp, SeedStage, wait
from esper.runtime.tasks import get_task_spec, load_task_data, override
from esper.simic.training.env_factory import build_worker, make_worker_spec
from esper.tamiyo.masks import observe

HORIZON = 16


class OneHost:
    """An env that is stepped by hand, with a look inside."""

    def __init__(self) -> None:
        self.task = override(get_task_spec("digits_blind"), horizon=HORIZON, harm_tolerance=1e6, min_live_fraction=0.0)
        self.engine = build_worker(make_worker_spec(self.task, load_task_data(self.task)), lambda *_: None)
        self.layout = self.engine.contexts[self.task.name].layout
        self.state = self._see(self.engine.reset([EpisodeSeed(env_id=0, episode=0, run_seed=1)]))

    def _see(self, result):
        return observe(result)

    @property
    def env(self):
        return self.engine.envs[0]

    def step(self, op: LifecycleOp | None = None, slot: str | None = None, blueprint: str | None = None) -> None:
        born = op is LifecycleOp.GERMINATE
        spec = (
            wait(0)
            if op is None
            else ActionSpec(env_id=0, op=op, slot=slot, blueprint=blueprint, blend="linear_fast" if born else None)
        )
        self.state = self._see(self.engine.step([spec], frozenset()))

    def stage(self, slot: str) -> SeedStage:
        return next(report.stage for report in self.state.reports[0].slots if report.slot_id == slot)

    def legal(self, op: LifecycleOp, slot: str) -> bool:
        position = self.layout.slot_position(slot)
        return self.state.post_action_masks[0].slot_by_op[op][position]

    def until(self, op: LifecycleOp, slot: str) -> None:
        for _ in range(HORIZON):
            if self.legal(op, slot):
                self.step(op, slot)
                return
            self.step()
        raise AssertionError(f"{op.name} never became legal in {slot}")

    def momenta(self) -> dict[str, torch.Tensor]:
        """First moments of the host's own weights, by name."""
        host = dict(self.env.model.host.named_parameters())
        state = self.env.optimizer.state
        return {name: state[weight]["exp_avg"].clone() for name, weight in host.items() if weight in state}


def test_a_life_with_a_fossil_and_a_prune_keeps_one_consistent_optimizer():
    host = OneHost()
    host.step()
    assert host.env.optimizer.holds(host.env.model.parameters())
    host.step(LifecycleOp.GERMINATE, "r0c0", "cnn.depthwise")
    assert host.env.optimizer.holds(host.env.model.parameters())
    host.until(LifecycleOp.ADVANCE, "r0c0")
    host.until(LifecycleOp.FOSSILIZE, "r0c0")
    assert host.stage("r0c0") is SeedStage.FOSSILIZED
    assert host.env.optimizer.holds(host.env.model.parameters())
    before = host.momenta()
    host.step(LifecycleOp.GERMINATE, "r1c0", "cnn.pointwise")
    host.until(LifecycleOp.PRUNE, "r1c0")
    assert host.env.optimizer.holds(host.env.model.parameters())
    after = host.momenta()
    assert before.keys() == after.keys(), "the host's state must survive its seeds' coming and going"
    assert any(not torch.equal(before[name], after[name]) for name in before), "and go on moving"
