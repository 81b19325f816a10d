"""A grower in a user's loop: it grows, refuses to be forgotten, goes back, and goes on elsewhere to the bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.growth import Grower, MetricScale, Validation, load_grown
from esper.growth.history import seed_lives
from esper.growth.network import same_outputs
from esper.growth.sites import call_model
from esper.growth.state import capture_growth
from esper.leyline import ActionExecutionResult, ActionSpec, ModelFileError, SeedStage, wait
from esper.tamiyo.controllers import CONTROLLERS, runs_by_name
from tests.growth.loops import EPOCHS, make_grower, run, train_epoch
from tests.growth.seeds import EAGER
from tests.growth.test_optimizers import assert_same_state
from tests.growth.test_sites import fingerprint
from tests.growth.test_slots import host_bits
from tests.growth.zoo import ZOO

MLP = ZOO["mlp"]


def everything(grower: Grower) -> dict[str, Any]:
    state = grower.state_dict()
    del state["books"]  # holds seconds
    return state


# ---- growing


@pytest.mark.parametrize("name", ZOO)
def test_every_kind_of_model_grows_from_end_to_end(name: str) -> None:
    animal = ZOO[name]
    grower = run(animal, make_grower(animal))
    result = grower.finish()
    assert [seed.site for seed in result.kept] == list(animal.sites[:1])
    assert result.model is grower.model
    assert result.params == sum(p.numel() for p in result.model.parameters()) > result.host_params
    assert len(result.history) == EPOCHS
    assert result.history[-1].committed_metric is not None
    fresh = load_grown(animal.model(seed=5), result.model.state_dict())
    batch = animal.batches(1)[0]
    with torch.no_grad():
        assert same_outputs(call_model(fresh.eval(), batch), call_model(result.model.eval(), batch))
    slots = [name for name, module in result.model.named_modules() if name.endswith("esper_slot")]
    assert slots == [f"{animal.sites[0]}.esper_slot"], "empty slots are gone"
    assert animal.sites[0] in result.table()


def test_a_grower_that_waits_leaves_every_bit_as_it_would_be() -> None:
    plain = MLP.model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        plain.train()
        for number, batch in enumerate(MLP.batches(4)[1:]):
            torch.manual_seed(1000 * epoch + number)
            optimizer.zero_grad()
            MLP.loss(call_model(plain, batch), batch).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
    grower = run(MLP, make_grower(MLP, controller="wait_only"))
    model = grower.finish().model
    assert fingerprint(model.eval()) == fingerprint(plain.eval())
    assert_same_state(grower.optimizers.optimizers[0].state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("name", [name for name in CONTROLLERS if runs_by_name(name) or name == "schedule"])
def test_every_rule_can_decide(name: str) -> None:
    grower = run(MLP, make_grower(MLP, controller=name, epochs=12))
    result = grower.finish()
    assert result.controller == name
    assert "esper_slot" not in str(
        [key for key, slot in model_slots(result.model) if slot.stage is not SeedStage.FOSSILIZED]
    )


def model_slots(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if name.endswith("esper_slot")]


def test_seeds_of_several_kinds_grow_in_one_model() -> None:
    animal = ZOO["two_inputs"]
    grower = run(animal, make_grower(animal, epochs=16))
    assert grower.network.layout.topology == "mixed"
    grown = {seed.blueprint.split(".")[0] for seed in grower.finish().kept}
    assert grown == {"cnn", "mlp"}


def test_the_budget_holds() -> None:
    host = sum(p.numel() for p in MLP.model().parameters())
    often = {"every_epochs": 1}
    grower = run(MLP, make_grower(MLP, epochs=12, budget=host + 700, controller="periodic", controller_params=often))
    assert all(entry.params <= host + 700 for entry in grower.history)
    assert any(entry.params > host for entry in grower.history)


def test_a_validation_and_a_function_measure_the_same() -> None:
    batches = MLP.batches(3)[1:]

    def evaluate(model: nn.Module) -> tuple[float, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        return Validation(model, batches)(model)

    validation = make_grower(MLP)
    scale = validation.scale
    function = make_grower(MLP, evaluate=evaluate, scale=scale)
    histories = [run(MLP, grower).history for grower in (validation, function)]
    for one, other in zip(*histories, strict=True):
        assert (one.metric, one.loss, one.committed_metric) == (other.metric, other.loss, other.committed_metric)
    assert validation.network.reports() == function.network.reports()


def test_worth_is_what_the_metric_loses_without_the_seed() -> None:
    grower = run(MLP, make_grower(MLP))
    result = grower.finish()
    (seed,) = result.kept
    evaluate = Validation(result.model, MLP.batches(3)[1:])
    slot = result.model.get_submodule(f"{seed.site}.esper_slot")
    with_seed, _ = evaluate(result.model)
    slot.enabled = False
    without, _ = evaluate(result.model)
    assert result.metric == with_seed
    assert seed.worth == pytest.approx(with_seed - without, rel=1e-9)


def test_a_metric_that_falls_is_worth_something_when_it_rises_without_the_seed() -> None:
    def evaluate(model: nn.Module) -> tuple[float, float]:
        losses = [MLP.loss(call_model(model, batch), batch).item() for batch in MLP.batches(3)[1:]]
        return sum(losses) / 2, sum(losses) / 2

    grower = run(MLP, make_grower(MLP, evaluate=evaluate, higher_is_better=False))
    assert not grower.scale.higher_is_better
    (seed,) = grower.finish().kept
    slot = grower.model.get_submodule(f"{seed.site}.esper_slot")
    grower.model.eval()
    with torch.no_grad():
        before = evaluate(grower.model)[0]
        slot.enabled = False
        assert seed.worth == pytest.approx(evaluate(grower.model)[0] - before, rel=1e-9)


def test_a_grown_model_can_grow_again_elsewhere() -> None:
    model = run(MLP, make_grower(MLP)).finish().model
    params = sum(p.numel() for p in model.parameters())
    again = make_grower(MLP, model=model)
    assert again.network.param_counts().host == params
    assert MLP.sites[0] not in [site.name for site in again.network.sites.chosen]
    assert "has grown already" in again.network.sites.passed_over[MLP.sites[0]]
    second = run(MLP, again).finish()
    assert second.params > params
    with pytest.raises(RuntimeError, match="has finished"):
        again.begin_epoch()


# ---- calls that were forgotten


def test_an_epoch_that_is_not_ended_is_an_error() -> None:
    grower = make_grower(MLP)
    epochs = iter(grower)
    train_epoch(MLP, grower, next(epochs))
    with pytest.raises(RuntimeError, match=r"end_epoch\(\) was not called"):
        next(epochs)


def test_an_epoch_without_a_step_is_an_error() -> None:
    grower = make_grower(MLP)
    next(iter(grower))
    with pytest.raises(RuntimeError, match="without a step of the optimizer"):
        grower.end_epoch()


def test_a_step_outside_an_epoch_is_an_error() -> None:
    grower = make_grower(MLP)
    with pytest.raises(RuntimeError, match="outside an epoch"):
        train_epoch(MLP, grower, 0)


def test_calls_in_the_wrong_order_are_errors() -> None:
    grower = make_grower(MLP)
    with pytest.raises(RuntimeError, match="without begin_epoch"):
        grower.end_epoch()
    grower.begin_epoch()
    with pytest.raises(RuntimeError, match="called twice"):
        grower.begin_epoch()
    with pytest.raises(RuntimeError, match="inside an epoch"):
        grower.finish()
    train_epoch(MLP, grower, 0)
    grower.end_epoch()
    run(MLP, grower)
    with pytest.raises(RuntimeError, match="all 8 epochs are over"):
        grower.begin_epoch()
    grower.finish()
    train_epoch(MLP, grower, 9)  # the optimizer is the user's own again


def test_an_abandoned_model_is_free_of_what_was_not_kept() -> None:
    grower = make_grower(MLP)
    for epoch in grower:
        train_epoch(MLP, grower, epoch)
        if epoch == 2:
            break
        grower.end_epoch()
    grower.abandon()
    assert list(grower.model.state_dict()) == list(MLP.model().state_dict())
    train_epoch(MLP, grower, 9)


# ---- going back


class PlantsAndWaits:
    """Plants one seed in the second epoch."""

    def begin(self, state: ActionExecutionResult) -> None:
        pass

    def act(self, state: ActionExecutionResult) -> tuple[ActionSpec, ...]:
        if state.reports[0].epochs_done == 1 and any(state.post_action_masks[0].op[1:2]):
            from esper.leyline import LifecycleOp

            return (
                ActionSpec(
                    env_id=0, op=LifecycleOp.GERMINATE, slot="r0c1", blueprint="mlp.mlp_small", blend="linear_fast"
                ),
            )
        return (wait(0),)

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        pass


def test_a_model_that_breaks_goes_back_to_its_last_healthy_state() -> None:
    grower = make_grower(MLP, controller=PlantsAndWaits())
    first = capture_growth(grower.network, grower.optimizers)
    for epoch in grower:
        train_epoch(MLP, grower, epoch)
        if epoch == 2:
            with torch.no_grad():
                next(grower.model.parameters()).fill_(torch.nan)
            rates = [group["lr"] for group in grower.optimizers.optimizers[0].param_groups]
            entry = grower.end_epoch()
            assert entry.rolled_back == "nonfinite"
            assert entry.metric == grower.untrained.metric, "that of the state it went back to"
            assert grower.network.slot("r0c1").stage is SeedStage.DORMANT, "the seed was born since"
            assert rates[0] == grower.optimizers.optimizers[0].param_groups[0]["lr"], "time goes on"
            now = capture_growth(grower.network, grower.optimizers)
            assert_same_state(now["model"], first["model"])
            assert_same_state(now["optimizers"][0]["state"], first["optimizers"][0]["state"])
        else:
            grower.end_epoch()
    assert grower.history[-1].rolled_back is None
    assert all(p.isfinite().all() for p in grower.model.parameters())


def test_a_model_that_breaks_again_and_again_is_given_up_in_a_healthy_state() -> None:
    grower = make_grower(MLP, controller="wait_only")
    for epoch in grower:
        train_epoch(MLP, grower, epoch)
        with torch.no_grad():
            next(grower.model.parameters()).fill_(torch.nan)
        if epoch == 3:
            break
        grower.end_epoch()
    with pytest.raises(ValueError, match=r"diverged 4 times.*Lower the learning rate"):
        grower.end_epoch()
    assert all(p.isfinite().all() for p in grower.model.parameters())


def test_seeds_that_were_pruned_since_come_back_with_the_state() -> None:
    grower = make_grower(MLP, controller=PlantsAndWaits())
    for epoch in grower:
        grower.end_epoch(train_loss=train_epoch(MLP, grower, epoch))
        if epoch == 3:
            break
    state = everything(grower)
    saved = grower.state_dict()
    grower.network.prune("r0c1")
    with torch.no_grad():
        for param in grower.model.parameters():
            param.add_(1.0)
    grower.turn_to(saved)
    assert_same_state(everything(grower), state)


# ---- going on elsewhere


def saved_and_loaded(grower: Grower) -> Any:
    file = io.BytesIO()
    torch.save(grower.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", ["resnet", "gpt2", "mlp"])
@pytest.mark.parametrize("inside", [False, True], ids=["between_epochs", "inside_an_epoch"])
def test_a_resumed_run_gives_the_bits_of_one_that_was_not_stopped(name: str, inside: bool) -> None:
    """With a fresh model of other weights, in every stage of a seed."""
    animal = ZOO[name]
    whole = run(animal, make_grower(animal))
    first = make_grower(animal)
    states = []
    for epoch in first:

        def keep(number: int) -> None:
            if inside and number == 1:
                states.append(saved_and_loaded(first))

        loss = train_epoch(animal, first, epoch, keep)
        first.end_epoch(train_loss=loss)
        if not inside:
            states.append(saved_and_loaded(first))
    for state in states[1:6:2]:
        resumed = make_grower(animal, model=animal.model(seed=9))
        resumed.load_state_dict(state)
        for epoch in resumed:
            started_inside = resumed.optimizers.num_steps > 0
            loss = train_epoch(animal, resumed, epoch, start=2 if started_inside else 0)
            losses = loss if not started_inside else first.history[epoch].train_loss
            resumed.end_epoch(train_loss=losses)
        assert_same_state(everything(resumed), everything(whole))
        assert [entry.metric for entry in resumed.history] == [entry.metric for entry in whole.history]
        assert resumed.moves == whole.moves
        assert [seed.kept for seed in seed_lives(resumed.moves)] == [4], "a seed lived through all this"
        assert resumed.network.reports() == whole.network.reports()


def test_a_state_of_another_run_is_refused_and_changes_nothing() -> None:
    grower = make_grower(MLP)
    for epoch in grower:
        grower.end_epoch(train_loss=train_epoch(MLP, grower, epoch))
        if epoch == 3:
            break
    state = grower.state_dict()
    cases = [
        (make_grower(MLP, epochs=9), state, "of a run of 8 epochs"),
        (make_grower(MLP, sites=["blocks.1"]), state, "sites blocks.0, blocks.1, blocks.2; this one has blocks.1"),
        (make_grower(MLP, controller="wait_only"), state, "decided GERMINATE in epoch 0 and would now decide WAIT"),
        (make_grower(MLP), {"model": {}}, "not the state_dict of a Grower"),
        (make_grower(MLP), {**state, "model": {}}, "tensor 'stem.weight' is missing"),
    ]
    for fresh, given, message in cases:
        before = fingerprint(fresh.model)
        with pytest.raises(ModelFileError, match=message):
            fresh.load_state_dict(given)
        assert fingerprint(fresh.model) == before
    with pytest.raises(RuntimeError, match="needs a new grower"):
        grower.load_state_dict(state)


# ---- with other tools around it


def test_wrapped_optimizers_of_accelerate_are_seen_through() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs the hf extra")
    plain = run(MLP, make_grower(MLP))
    model = MLP.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    model, optimizer, scheduler = accelerate.Accelerator(cpu=True).prepare(model, optimizer, scheduler)
    sample, *rest = MLP.batches(3)
    grower = Grower(
        model,
        sample,
        optimizer,
        Validation(model, rest),
        epochs=EPOCHS,
        controller="schedule",
        lifecycle=EAGER,
        scheduler=scheduler,
    )
    assert_same_state(everything(run(MLP, grower)), everything(plain))


def test_a_compiled_model_grows_to_the_same_bits() -> None:
    model = MLP.model()
    model.compile(backend="eager")
    assert_same_state(everything(run(MLP, make_grower(MLP, model=model))), everything(run(MLP, make_grower(MLP))))


# ---- what cannot work


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.twice(self.twice(x)))


def _nan(model: nn.Module) -> tuple[float, float]:
    return float("nan"), 1.0


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "budget": ({"budget": 100}, r"budget=100 leaves no room: the model has [\d,]+ parameters"),
    "epochs": ({"epochs": 3}, "epochs=3 is less than the shortest life of a seed; give at least 5"),
    "metric": ({"evaluate": _nan}, "metric is nan"),
    "unknown_site": ({"sites": ["nowhere"]}, "cannot grow after 'nowhere'.*Possible: stem"),
    "unknown_rule": ({"controller": "clever"}, "unknown controller 'clever': expected wait_only"),
    "no_controller": ({"controller": object()}, "needs begin, act and store"),
    "rule_parameter": (
        {"controller": "periodic", "controller_params": {"often": 1}},
        "periodic has no parameters often",
    ),
    "schedule_parameter": (
        {"controller_params": {"often": 1}},
        "schedule has no parameters often. Known: entries, blue",
    ),
    "scale": ({"evaluate": lambda model: (-5.0, 1.0)}, "cannot tell what a perfect metric would be"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_one_sentence_and_leaves_the_model_alone(case: str) -> None:
    options, message = BAD[case]
    model = MLP.model()
    optimizer = torch.optim.AdamW(model.parameters())
    before, groups = fingerprint(model), len(optimizer.param_groups)
    with pytest.raises(ValueError, match=message) as caught:
        make_grower(MLP, model=model, **options)
    assert "\n" not in str(caught.value)
    assert fingerprint(model) == before
    assert len(optimizer.param_groups) == groups


def test_models_that_cannot_be_grown_are_refused() -> None:
    batches = MLP.batches(2)
    for model, message in [
        (nn.DataParallel(MLP.model()), "DataParallel.*pass model.module and train that"),
        (torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))), "scripted model"),
        (nn.ReLU(), "no parameters"),
        (Doubled(), r"no place to grow in Doubled.*called 2 times"),
        ("model", "expected a torch.nn.Module"),
    ]:
        optimizer = torch.optim.SGD(MLP.model().parameters())
        before = fingerprint(model) if isinstance(model, nn.Module) else None
        with pytest.raises(ValueError, match=message):
            Grower(model, batches[0], optimizer, lambda m: (0.5, 1.0), epochs=8)
        assert not isinstance(model, nn.Module) or fingerprint(model) == before


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(ValueError, match=r"growing in 4 processes is not supported.*train in one process"):
        make_grower(MLP)


def test_a_metric_that_breaks_later_is_named() -> None:
    values = iter([0.5, 0.5, float("nan")])
    grower = make_grower(MLP, evaluate=lambda model: (next(values), 1.0), controller="wait_only")
    with pytest.raises(ValueError, match="metric is nan on validation data though the loss is 1"):
        run(MLP, grower)


def test_a_scale_of_the_users_own_is_used() -> None:
    scale = MetricScale(name="reward", guess=-10.0, best=90.0, guess_loss=2.0, classes=2)
    grower = make_grower(MLP, evaluate=lambda model: (40.0, 1.0), scale=scale, controller="wait_only")
    assert (scale.percent(40.0), scale.percent(-10.0), scale.percent(90.0)) == (75.0, 50.0, 100.0)
    assert run(MLP, grower).finish().scale is scale
    assert scale.difference(25.0) == 50.0


def test_host_bits_are_left_alone_by_measuring() -> None:
    grower = make_grower(MLP)
    grower.begin_epoch()
    train_epoch(MLP, grower, 0)
    before = host_bits(grower.model)
    state = torch.get_rng_state()
    grower.end_epoch()
    assert host_bits(grower.model) == before
    assert torch.equal(torch.get_rng_state(), state)
