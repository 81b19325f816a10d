"""Should this model be grown at all? The grown model beside the same left alone, built at once, and a wider one.

All arms train for the same epochs on the same batches with the same optimizer. Costs are what training took: multiply-
accumulates of forward and backward passes.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from esper.evidence.host_runs import HostRun, HostRunner
from esper.evidence.static_networks import StaticNetwork, can_widen, widened
from esper.growth.data import Data
from esper.growth.grower import Grower
from esper.growth.history import SeedLife
from esper.growth.result import GrowthResult, Section
from esper.growth.training import GrowthRun, GrowthSettings
from esper.leyline import EpisodeSeed, SeedStage, derive_seed, record
from esper.leyline.scale import MetricScale, accuracy_scale, token_loss_scale
from esper.runtime.data.splits import Dataset
from esper.runtime.tasks import TaskSpec
from esper.tamiyo.controllers import DEFAULT_RULE
from esper.tamiyo.side_by_side import SideBySide

GROWN, ALONE, AT_ONCE, WIDER = "grown", "left alone", "the grown network from the start", "a wider model"
WIDTH_STEPS = 24
MAX_WIDTH = 64.0
"""Most times as wide as the original."""
MIN_SEEDS_FOR_INTERVAL = 3

Wider = Callable[[float], nn.Module]
"""(factor) -> a fresh model so many times as wide as the original."""


@record
class ArmScores:
    """One way to get a model, over all seeds."""

    name: str
    metrics: tuple[float, ...]
    """By seed, of the final model."""
    params: tuple[int, ...]
    training_macs: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.fmean(self.metrics)


@record
class Comparison:
    """All arms and what they say."""

    scale: MetricScale
    epochs: int
    arms: tuple[ArmScores, ...]
    split: str
    """What the final models were scored on: "test" data, or "validation" data, which decided what grew."""
    rows: int | None
    """Of that data."""
    not_run: tuple[str, ...]
    """Arms that are missing, and why."""

    def arm(self, name: str) -> ArmScores | None:
        """An arm by name; None if it was not run."""
        return next((arm for arm in self.arms if arm.name == name), None)

    def differences(self, rival: str) -> list[float]:
        """Grown minus a rival, by seed, positive where the grown model is better."""
        grown, other = self.arm(GROWN), self.arm(rival)
        assert grown is not None
        assert other is not None
        sign = 1.0 if self.scale.higher_is_better else -1.0
        return [sign * (a - b) for a, b in zip(grown.metrics, other.metrics, strict=True)]

    def noise(self, rival: str) -> float | None:
        """How large a mean difference must be to mean something; None where one run cannot tell."""
        found = self.differences(rival)
        if len(found) >= MIN_SEEDS_FOR_INTERVAL:
            return _t_quantile(len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
        if self.rows is None or not self.scale.name.startswith("accuracy"):
            return None
        # Two networks that err independently on the same rows; paired errors would vary less.
        shares = [arm.mean / 100.0 for arm in (self.arm(GROWN), self.arm(rival)) if arm is not None]
        return 200.0 * math.sqrt(sum(p * (1.0 - p) for p in shares) / (self.rows * len(found)))

    def verdict(self) -> str:
        """A plain sentence: grow it or do not."""
        grown, alone = self.arm(GROWN), self.arm(ALONE)
        if grown is not None and alone is not None and grown.params == alone.params:
            return "Nothing grew, so there is nothing to judge: the model was trained as it is."
        clear = {arm.name: self._clearly(arm.name) for arm in self.arms if arm.name != GROWN}
        better_rivals = [name for name in (WIDER, AT_ONCE) if clear.get(name) == -1]
        if clear.get(ALONE) == -1:
            return f"Do not grow this model: {ALONE} it is better by {self._by(ALONE)}."
        if better_rivals:
            words = " and ".join(f"{name} (by {self._by(name)})" for name in better_rivals)
            return f"Do not grow this model: better at the same size is {words}."
        if clear.get(ALONE) == 1:
            rest = [name for name in (AT_ONCE, WIDER) if name in clear]
            beats = [name for name in rest if clear[name] == 1]
            more = (
                f", and better than {' and '.join(beats)}"
                if beats
                else ", as good as " + " and ".join(rest)
                if rest
                else ""
            )
            return f"Growing pays here: {self._by(ALONE)} better than {ALONE}{more}."
        how = "one run cannot tell more" if clear.get(ALONE) is None else "the difference is within noise"
        word = "worse" if statistics.fmean(self.differences(ALONE)) < 0.0 else "better"
        return f"Grown it is {self._by(ALONE)} {word} than {ALONE}: {how}, so keep the smaller one."

    def _clearly(self, rival: str) -> int | None:
        """1 if the grown model is clearly better, -1 if clearly worse, 0 if neither, None if one run cannot tell."""
        mean, noise = statistics.fmean(self.differences(rival)), self.noise(rival)
        if noise is None:
            return None
        return (mean > noise) - (mean < -noise)

    def _by(self, rival: str) -> str:
        return f"{abs(statistics.fmean(self.differences(rival))):.3g} {self.scale.name}"

    def section(self) -> Section:
        """As a table."""
        rows = []
        for arm in self.arms:
            macs, seconds = statistics.fmean(arm.training_macs), statistics.fmean(arm.seconds)
            against = "" if arm.name == GROWN else self._against(arm.name)
            size = f"{round(statistics.fmean(arm.params)):,}"
            rows.append((arm.name, f"{arm.mean:.4g}", size, f"{macs / 1e9:,.3g}", f"{seconds:.1f}", against))
        num_seeds = len(self.arms[0].metrics)
        notes = [
            self.verdict(),
            f"{self.epochs} epochs, {num_seeds} seed{'s' if num_seeds > 1 else ''}, {self.split} data.",
        ]
        if self.arm(WIDER) is not None:
            notes.append(self._width_note())
        return Section(
            title="Should this model be grown?",
            columns=("model", self.scale.name, "parameters", "training GMACs", "seconds", "grown is better by"),
            rows=tuple(rows),
            note=" ".join([*notes, *self.not_run]),
        )

    def _width_note(self) -> str:
        grown, wide = (statistics.fmean(arm.params) for arm in self.arms if arm.name in (GROWN, WIDER))
        return f"The wider model is the narrowest that is not smaller than the grown one ({wide / grown - 1:+.1%})."

    def _against(self, rival: str) -> str:
        mean, noise = statistics.fmean(self.differences(rival)), self.noise(rival)
        return f"{mean:+.3g}" + ("" if noise is None else f" (noise {noise:.2g})")

    def __str__(self) -> str:
        return str(self.section())


@record
class Trained:
    """One arm of one seed after training."""

    metric: float
    params: int
    training_macs: float
    seconds: float


def compare(
    make_model: Callable[[], nn.Module],
    train: Data,
    val: Data,
    *,
    wider: Wider | None = None,
    seeds: int = 1,
    on_arm: Callable[[str], None] = lambda words: None,
    **options: Any,
) -> Comparison:
    """Grows a model, trains its rivals on the same batches, and says whether growing pays.

    Args:
        make_model: Makes the model; called once per arm, with torch's generator in the same state for all arms of a
            seed.
        train: As for `grow`.
        val: As for `grow`.
        wider: (factor) -> a model so many times as wide; None leaves that arm out and says so.
        seeds: Runs of every arm, with other weights, orders and draws.
        on_arm: Called with what is being done.
        **options: Arguments of `grow` that decide how it trains, such as budget, epochs and optimizer, which must be
            None or a function here.

    Raises:
        ValueError: The optimizer is one object, which cannot train several models, or an argument of `grow` is wrong.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    settings = GrowthSettings(**options)
    check_comparable(settings, wider)
    found: dict[str, list[Trained]] = {}
    run: GrowthRun | None = None
    for number in range(seeds):
        seeded = replace(settings, seed=settings.seed + number)
        run = _begin(make_model, train, val, seeded)
        on_arm(f"seed {number + 1} of {seeds}: {GROWN}")
        result = _finish(run)
        found.setdefault(GROWN, []).append(trained(run, result))
        for name, arm in rivals(make_model, train, val, seeded, result, wider, on_arm):
            found.setdefault(name, []).append(arm)
    assert run is not None
    return make_comparison(found, run, has_wider=wider is not None)


def make_comparison(found: Mapping[str, Sequence[Trained]], run: GrowthRun, *, has_wider: bool) -> Comparison:
    """All arms of all seeds, put together. An arm that some seeds lack, because nothing grew there, is left out.

    Args:
        found: By the names of arms.
        run: One of the growing runs, after its end.
        has_wider: Whether wider models could be made.
    """
    not_run = [] if has_wider else [f"{WIDER.capitalize()} was not trained: pass wider= to make one."]
    return Comparison(
        scale=run.grower.scale,
        epochs=run.settings.epochs,
        split="validation" if run.test is None else "test",
        rows=(run.test or run.validation).num_rows,
        **_complete(found, not_run),
    )


def _complete(found: Mapping[str, Sequence[Trained]], not_run: Sequence[str]) -> dict[str, Any]:
    runs = len(found[GROWN])
    lost = [
        f"{name.capitalize()} is left out: nothing grew with some seeds." for name in found if len(found[name]) < runs
    ]
    arms = tuple(_arm(name, arms) for name, arms in found.items() if len(arms) == runs)
    return {"arms": arms, "not_run": (*not_run, *lost)}


# ---- a bundled task


def compare_task(
    task: TaskSpec,
    data: Dataset,
    *,
    controller: str = DEFAULT_RULE,
    seeds: int = 3,
    seed: int = 0,
    on_arm: Callable[[str], None] = lambda words: None,
) -> Comparison:
    """The same for the host of a bundled task, on its validation data; `esper evaluate` opens the test split.

    Args:
        task: Host, epochs, budget.
        data: Train and val are read.
        controller: A rule that decides what grows.
        seeds: Runs of every arm.
        seed: The first run seed.
        on_arm: Called with what is being done.

    Raises:
        ValueError: There is no such rule.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    numbered = [EpisodeSeed(env_id=number, episode=0, run_seed=seed + number) for number in range(seeds)]
    train = partial(_train_hosts, task, data, numbered)
    on_arm(GROWN)
    grown = train(controller)
    on_arm(ALONE)
    runs, not_run = {GROWN: grown, ALONE: train("wait_only")}, []
    if all(run.kept for run in grown):
        on_arm(AT_ONCE)
        again = {run.run_seed: StaticNetwork(host=task.host, kept=run.kept) for run in grown}
        runs[AT_ONCE] = train("wait_only", again)
        if can_widen(task.host):
            on_arm(WIDER)
            wide = {run.run_seed: StaticNetwork(host=widened(task, _size(run)), kept=()) for run in grown}
            runs[WIDER] = train("wait_only", wide)
    else:
        not_run.append("Nothing grew with some seeds, so nothing was built at once or widened.")
    found = {name: [_trained_host(task, run) for run in own] for name, own in runs.items()}
    loss = replace(token_loss_scale(task.num_classes), name="loss (nats)")
    scale = accuracy_scale(task.num_classes) if task.metric == "accuracy" else loss
    rows = len(data.val)
    return Comparison(scale=scale, epochs=task.horizon, split="validation", rows=rows, **_complete(found, not_run))


def _train_hosts(
    task: TaskSpec,
    data: Dataset,
    seeds: Sequence[EpisodeSeed],
    rule: str,
    networks: Mapping[int, StaticNetwork] | None = None,
) -> tuple[HostRun, ...]:
    with HostRunner(task, data, networks=networks) as runner:
        return runner.run(SideBySide({one.env_id: runner.controller(rule, one.run_seed) for one in seeds}), seeds)


def _size(run: HostRun) -> int:
    return run.reports[-1].committed_params


def _trained_host(task: TaskSpec, run: HostRun) -> Trained:
    loss, accuracy = run.committed_scores
    metric = accuracy if task.metric == "accuracy" else loss
    return Trained(metric=metric, params=_size(run), training_macs=run.training_macs, seconds=run.seconds)


# ---- a model of one's own


def check_comparable(settings: GrowthSettings, wider: Wider | None) -> None:
    """Refuses an optimizer or scheduler that is one object: several models are to be trained. Wider ones must be wider.

    Raises:
        ValueError: They cannot be trained.
    """
    if isinstance(settings.optimizer, torch.optim.Optimizer):
        raise ValueError(
            "a comparison trains several models, so pass optimizer as a function, such as "
            "lambda params: torch.optim.AdamW(params, lr=1e-3)"
        )
    if settings.scheduler is not None and hasattr(settings.scheduler, "step"):
        raise ValueError("a comparison trains several models, so pass scheduler as a function of the optimizer")
    if wider is not None and not _params_of(wider, 1.0) < _params_of(wider, 2.0):
        raise ValueError(
            f"wider= must give larger models for larger factors, got {_params_of(wider, 1.0):,} parameters for 1 and "
            f"{_params_of(wider, 2.0):,} for 2"
        )


def trained(run: GrowthRun, result: GrowthResult) -> Trained:
    """A finished run as one arm of one seed."""
    metric = result.metric if result.test is None else result.test.metric
    return Trained(metric=metric, params=result.params, training_macs=run.training_macs, seconds=run.seconds)


def rivals(
    make_model: Callable[[], nn.Module],
    train: Data,
    val: Data,
    settings: GrowthSettings,
    grown: GrowthResult,
    wider: Wider | None,
    on_arm: Callable[[str], None],
) -> Iterator[tuple[str, Trained]]:
    """Trains the rivals of a grown model, one after the other."""
    waiting = replace(settings, controller="wait_only", controller_params={})
    on_arm(ALONE)
    run = _begin(make_model, train, val, waiting)
    yield ALONE, trained(run, _finish(run))
    if not grown.kept:
        return
    on_arm(AT_ONCE)
    run = _begin(make_model, train, val, replace(waiting, sites=[site.name for site in grown.sites.chosen]))
    _plant(run.grower, grown.kept)
    yield AT_ONCE, trained(run, _finish(run))
    if wider is not None:
        on_arm(WIDER)
        maker = _width_for(wider, grown.params)
        run = _begin(maker, train, val, replace(waiting, sites="auto", budget=None))
        yield WIDER, trained(run, _finish(run))


def _begin(make_model: Callable[[], nn.Module], train: Data, val: Data, settings: GrowthSettings) -> GrowthRun:
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(settings.seed, None, None, None, "weights"))
        model = make_model()
    return GrowthRun(model, train, val, settings)


def _finish(run: GrowthRun) -> GrowthResult:
    for _ in range(run.settings.epochs):
        run.step()
    return run.finish()


def _plant(grower: Grower, kept: Sequence[SeedLife]) -> None:
    """Makes seeds part of a network before its first epoch, at full strength."""
    by_site = {slot.site.name: slot for slot in grower.network.all_slots()}
    for seed in kept:
        slot = by_site[seed.site]
        rng_seed = derive_seed(grower.seed, 0, 0, None, f"seed:{slot.spec.slot_id}")
        grower.network.germinate(slot.spec.slot_id, seed.blueprint, seed.blend, rng_seed)
        slot.stage, slot.alpha = SeedStage.FOSSILIZED, 1.0
        assert slot.blend is not None
        slot.ramp_done = slot.blend.ramp_epochs


def _width_for(wider: Wider, params: int) -> Callable[[], nn.Module]:
    """A maker of the narrowest model that has at least so many parameters: a rival is never the smaller one."""
    low, high = 1.0, 2.0
    while _params_of(wider, high) < params and high < MAX_WIDTH:
        low, high = high, 2.0 * high
    for _ in range(WIDTH_STEPS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _params_of(wider, middle) < params else (low, middle)
    return lambda: wider(high)


def _params_of(wider: Wider, factor: float) -> int:
    return sum(param.numel() for param in wider(factor).parameters())


def _arm(name: str, runs: Sequence[Trained]) -> ArmScores:
    return ArmScores(
        name=name,
        metrics=tuple(run.metric for run in runs),
        params=tuple(run.params for run in runs),
        training_macs=tuple(run.training_macs for run in runs),
        seconds=tuple(run.seconds for run in runs),
    )


def _t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t."""
    try:
        from scipy.stats import t
    except ImportError as error:
        raise ImportError("intervals over seeds need scipy: pip install 'esper-growth[evidence]'") from error
    return float(t.ppf(0.975, degrees))


def copies_of(model: nn.Module) -> Callable[[], nn.Module]:
    """A maker of copies of a model as it is now."""
    original = copy.deepcopy(model)
    return lambda: copy.deepcopy(original)
