"""The table of sandboxes: small simulated worlds whose best policy is known, and how good an agent must become there.

Each world makes one way of failing visible. The table runs nothing and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from esper.leyline import (
    DEFAULT_LIFECYCLE,
    OPS,
    ActionMasks,
    ActionOutcome,
    ActionSpec,
    EpochReport,
    LifecycleOp,
    record,
    wait,
)
from esper.simic.agent.config import PPOConfig
from esper.tamiyo.simulation import Cue, HostCurve, SimulatedBlueprint, SimulationSpec, Synergy
from esper.tamiyo.simulation.world import loss_of

Reward = Callable[[EpochReport, ActionOutcome, EpochReport], float]
Rule = Callable[[EpochReport, ActionMasks], ActionSpec]

NUM_ENVS = 16
FAST = "linear_fast"
RENT = 0.01
"""Price of one live seed for one epoch."""
HOST = HostCurve(start_pct=20.0, final_pct=45.0, epochs=9.0)


@record
class Episode:
    """One finished episode."""

    total: float
    """Undiscounted return in raw reward."""
    kept: tuple[str, ...]
    """Blueprints fossilized at the end."""
    num_germinated: int


@record
class Played:
    """What a policy did in a world."""

    episodes: tuple[Episode, ...]
    value_error: float | None
    """Root mean square error of the values as a share of the return at the start; None for a policy without values."""


@record
class Sandbox:
    """One world, what is rewarded in it, and what an agent has to reach."""

    name: str
    shows: str
    world: SimulationSpec
    reward: Reward
    oracle: Callable[[], Rule]
    """The best there is, as a rule on what a policy may see. Made afresh for each run, for it may remember."""
    measured: str
    measure: Callable[[Played], float | None]
    """The figure that counts."""
    share: float
    """What must be reached, as a share of the oracle's figure."""
    config: PPOConfig
    rounds: int
    slack: float = 0.0
    """Added to that; the whole of the limit where an oracle has no figure."""
    higher_is_better: bool = True
    first_world: SimulationSpec | None = None
    """A world to train in for `first_rounds` before the real one; None for none."""
    first_rounds: int = 0

    def limit(self, optimum: float | None) -> float:
        """What must be reached, or not exceeded."""
        return self.slack + (0.0 if optimum is None else self.share * optimum)

    def passes(self, reached: float, optimum: float | None) -> bool:
        """Is this good enough?"""
        limit = self.limit(optimum)
        return reached >= limit if self.higher_is_better else reached <= limit


@record
class SandboxResult:
    """One agent trained from scratch in one sandbox."""

    run_seed: int
    optimum: float | None
    """The oracle's figure on the same episodes; None where an oracle has no such figure."""
    random: float | None
    reached: float | None
    passed: bool
    cpu_s: float
    """Of training and evaluation."""


# ---- rewards


def committed_growth(world: SimulationSpec) -> Reward:
    """Pays for what the kept seeds add to the host, once when it is added and a little while it lasts; takes rent."""

    def gain(report: EpochReport) -> float:
        assert report.committed_accuracy_pct is not None
        return report.committed_accuracy_pct - world.host.accuracy_pct(report.epochs_done)

    def reward(before: EpochReport, outcome: ActionOutcome, after: EpochReport) -> float:
        return (gain(after) - gain(before)) / 10.0 + gain(after) / 1000.0 - RENT * after.num_live

    return reward


def one(before: EpochReport, outcome: ActionOutcome, after: EpochReport) -> float:
    """Pays 1 whatever happens."""
    return 1.0


# ---- figures


def mean_return(played: Played) -> float:
    """Mean return of an episode."""
    return sum(episode.total for episode in played.episodes) / len(played.episodes)


def kept_only(blueprint: str) -> Callable[[Played], float]:
    """Share of episodes that end with seeds of this blueprint and with no others. Keeping nothing does not count."""

    def measure(played: Played) -> float:
        return sum(set(episode.kept) == {blueprint} for episode in played.episodes) / len(played.episodes)

    return measure


def value_error(played: Played) -> float | None:
    """How wrong the values are."""
    return played.value_error


# ---- oracles


def always_wait() -> Rule:
    """Leaves the host alone."""
    return lambda report, masks: wait(report.env_id)


def grow_one(blueprint: str, slot: str, epoch: int) -> Rule:
    """Plants at one epoch, blends at once, keeps at once."""

    def rule(report: EpochReport, masks: ActionMasks) -> ActionSpec:
        if report.epochs_done == epoch:
            return _germinate(report, slot, blueprint)
        return _first_legal(report, masks, LifecycleOp.FOSSILIZE, LifecycleOp.ADVANCE)

    return rule


def grow_everywhere(blueprint: str, last_epoch: int) -> Rule:
    """Plants in every slot, one after the other, while a seed planted now can still be kept."""

    def rule(report: EpochReport, masks: ActionMasks) -> ActionSpec:
        spec = _first_legal(report, masks, LifecycleOp.FOSSILIZE, LifecycleOp.ADVANCE)
        room = masks.slot_by_op[LifecycleOp.GERMINATE]
        if spec.op is LifecycleOp.WAIT and any(room) and report.epochs_done <= last_epoch:
            return _germinate(report, report.slots[room.index(True)].slot_id, blueprint)
        return spec

    return rule


def judge_coins(blueprint: str, last_epoch: int) -> Rule:
    """Prunes what harms as soon as that shows, keeps what helps as soon as it may, plants while there is time."""
    plant = grow_everywhere(blueprint, last_epoch)

    def rule(report: EpochReport, masks: ActionMasks) -> ActionSpec:
        for slot in report.slots:
            if slot.stage.is_live and slot.contribution_pp is not None and slot.contribution_pp < 0.0:
                return _act(report, LifecycleOp.PRUNE, slot.slot_id)
        return plant(report, masks)

    return rule


def follow_cue(world: SimulationSpec, slot: str, epoch: int) -> Rule:
    """Remembers each env's loss at reset and plants what it pointed at."""
    assert world.cue is not None
    cue, shifts = world.cue, dict[int, float]()

    def rule(report: EpochReport, masks: ActionMasks) -> ActionSpec:
        if report.epochs_done == 0:
            shifts[report.env_id] = report.val_loss - loss_of(world, report.val_accuracy_pct)
        if report.epochs_done == epoch:
            position = round(shifts[report.env_id] / cue.loss_step)
            return _germinate(report, slot, cue.blueprints[position])
        return _first_legal(report, masks, LifecycleOp.FOSSILIZE, LifecycleOp.ADVANCE)

    return rule


def _germinate(report: EpochReport, slot: str, blueprint: str) -> ActionSpec:
    return ActionSpec(env_id=report.env_id, op=LifecycleOp.GERMINATE, slot=slot, blueprint=blueprint, blend=FAST)


def _act(report: EpochReport, op: LifecycleOp, slot: str) -> ActionSpec:
    return ActionSpec(env_id=report.env_id, op=op, slot=slot)


def _first_legal(report: EpochReport, masks: ActionMasks, *ops: LifecycleOp) -> ActionSpec:
    for op in ops:
        for slot, legal in zip(report.slots, masks.slot_by_op[op], strict=True):
            if legal:
                return _act(report, op, slot.slot_id)
    return wait(report.env_id)


# ---- worlds


def _inert(*names: str) -> tuple[SimulatedBlueprint, ...]:
    return tuple(SimulatedBlueprint(name=name, gain_pp=(0.0, 0.0, 0.0)) for name in names)


BAD_SEEDS_MAY_STAY = replace(DEFAULT_LIFECYCLE, min_contribution=-100.0)
DECOY_WORLD = SimulationSpec(
    name="decoy",
    blueprints=(
        *_inert("inert_a", "inert_b", "inert_c"),
        SimulatedBlueprint(name="right", gain_pp=(0.0, 42.0, 0.0), window=(3, 9)),
        SimulatedBlueprint(name="decoy", gain_pp=(19.0, 0.0, 0.0)),
        SimulatedBlueprint(name="bad", gain_pp=(-5.0, -5.0, -5.0)),
    ),
    synergies=(Synergy(first="right", second="decoy", gain_pp=-30.0),),
    host=HOST,
)
INERT_WORLD = SimulationSpec(name="inert", blueprints=_inert(*DECOY_WORLD.layout.blueprints), host=HOST)
COIN_WORLD = SimulationSpec(
    name="coin",
    blueprints=(SimulatedBlueprint(name="coin", gain_pp=(30.0,), harm_share=0.5, harm_pp=20.0),),
    slot_ids=("r0c0",),
    lifecycle=BAD_SEEDS_MAY_STAY,
    host=HOST,
)
CUES = ("first", "second", "third")
CUE_WORLD = SimulationSpec(
    name="cue",
    blueprints=tuple(SimulatedBlueprint(name=name, gain_pp=(42.0,), window=(8, 9)) for name in CUES),
    cue=Cue(blueprints=CUES, loss_step=2.0),
    slot_ids=("r0c0",),
    horizon=16,
    # Were the slot open before, hardly any agent would leave it empty for so long, and exploration would be tested.
    opens_epoch=8,
    host=HOST,
)
PARASITE_WORLD = SimulationSpec(
    name="parasite",
    blueprints=(
        SimulatedBlueprint(name="good", gain_pp=(12.0, 12.0, 12.0)),
        SimulatedBlueprint(name="parasite", gain_pp=(-3.0, -3.0, -3.0), dependence_pp=20.0),
    ),
    lifecycle=replace(BAD_SEEDS_MAY_STAY, max_live=1),
    host=HOST,
)

EAGER = PPOConfig(lr=1e-3, epsilon=0.15, epsilon_op=0.03)
"""For short training: a higher learning rate and more exploration than a run on hosts has."""


ABLATIONS: Mapping[str, Callable[[PPOConfig], PPOConfig]] = {
    "uniform_prior": lambda config: replace(config, op_prior=(0.0,) * len(OPS)),
    "one_step": lambda config: replace(config, ppo_epochs=1, minibatches=1),
    "magnified": lambda config: replace(config, advantage_std_floor=1e-3),
}
"""Ingredients to take away: the sensible prior; all but one optimiser step per round, in which every ratio is 1; the
rule that small advantages stay small."""


def _config(world: SimulationSpec, rounds: int) -> PPOConfig:
    return replace(EAGER, schedule_steps=rounds * NUM_ENVS * world.horizon)


_CUE = Sandbox(
    name="cue",
    shows="a loss seen at reset decides what to plant eight epochs later: needs memory",
    world=CUE_WORLD,
    reward=committed_growth(CUE_WORLD),
    oracle=lambda: follow_cue(CUE_WORLD, "r0c0", 8),
    measured="return",
    measure=mean_return,
    share=0.95,
    config=_config(CUE_WORLD, 200),
    rounds=200,
)

_DECOY = Sandbox(
    name="decoy",
    shows="one blueprint in one slot at the right time, beside a decoy",
    world=DECOY_WORLD,
    reward=committed_growth(DECOY_WORLD),
    oracle=lambda: grow_one("right", "r0c1", 3),
    measured="return",
    measure=mean_return,
    share=0.95,
    # The last five hundredths of the optimum are what needless seeds cost: small advantages, which must count in full.
    config=replace(_config(DECOY_WORLD, 120), advantage_std_floor=1e-3),
    rounds=120,
)

SANDBOXES: tuple[Sandbox, ...] = (
    _DECOY,
    Sandbox(
        name="coin",
        shows="good and bad seeds of one blueprint, told apart by their contribution",
        world=COIN_WORLD,
        reward=committed_growth(COIN_WORLD),
        oracle=lambda: judge_coins("coin", 18),
        measured="return",
        measure=mean_return,
        share=0.85,
        # The usual pull ends higher than the last steps to the limit are worth.
        config=replace(_config(COIN_WORLD, 60), entropy_coef_final=0.002),
        rounds=60,
    ),
    Sandbox(
        name="inert",
        shows="nothing helps and every seed costs rent: leave the host alone",
        world=INERT_WORLD,
        reward=committed_growth(INERT_WORLD),
        oracle=always_wait,
        measured="return",
        measure=mean_return,
        share=1.0,
        slack=-0.02,
        config=_config(INERT_WORLD, 30),
        rounds=30,
    ),
    _CUE,
    replace(
        _CUE,
        name="cue_blind",
        shows="the same without memory: must not be solved, or the cue leaks",
        # Guessing pays a third.
        share=0.6,
        config=replace(_CUE.config, memory=False),
        higher_is_better=False,
    ),
    Sandbox(
        name="constant",
        shows="1 per step: values must be the return of a finite episode",
        world=INERT_WORLD,
        reward=one,
        oracle=always_wait,
        measured="value error",
        measure=value_error,
        share=0.0,
        slack=0.05,
        config=_config(INERT_WORLD, 30),
        rounds=30,
        higher_is_better=False,
    ),
    Sandbox(
        name="parasite",
        shows="seeds that harm but are missed when removed, beside good ones: keep the good ones alone",
        world=PARASITE_WORLD,
        reward=committed_growth(PARASITE_WORLD),
        oracle=lambda: grow_everywhere("good", 17),
        measured="kept only good",
        measure=kept_only("good"),
        share=0.9,
        config=_config(PARASITE_WORLD, 40),
        rounds=40,
    ),
    replace(
        _DECOY,
        name="recover",
        shows="30 rounds in the inert world, then the decoy's: a habit of waiting must be unlearned",
        share=0.6,
        # A world that changes gives no notice, so the schedules are those of a longer run: with schedules that end
        # with round 90 one agent in five has stopped trying things before it has found what pays now.
        config=_config(DECOY_WORLD, 120),
        rounds=60,
        first_world=INERT_WORLD,
        first_rounds=30,
    ),
)
