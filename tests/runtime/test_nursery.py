"""The nursery: draws that any process can repeat, families that stay apart, and data that is what its variant says."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.kasmina.blueprints import BLUEPRINTS
from esper.runtime.data.variants import DataVariant
from esper.runtime.datasets import load_dataset
from esper.runtime.nursery import (
    MAX_BLOCKS,
    MAX_BUDGET,
    NEVER_OFFERED,
    OFFERED,
    draw_task,
    facts,
    family_of,
    heldout_list,
    is_held_out,
    nursery_task,
    task_sha256,
)
from esper.runtime.tasks import TaskSpec, check_task, count_host_params, get_task_spec, load_task_data, override
from esper.scripts.tasks import tasks_command

DRAWS = tuple(nursery_task(number) for number in range(60))
PLAIN = DataVariant(
    classes=tuple(range(10)),
    train_rows=997,
    label_noise=0.0,
    pixel_noise=0.0,
    permuted=False,
    teacher=None,
    rng_seed=1,
)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9))
def test_a_draw_follows_from_its_seed_alone_and_is_whole(seed: int) -> None:
    task = draw_task(random.Random(seed))
    assert task == draw_task(random.Random(seed))
    check_task(task)
    assert 8 <= task.horizon <= 30
    if task.variant is not None:
        assert task.variant.train_rows // task.batch_size >= 10, "with fewer steps a host learns nothing"


def test_names_are_found_by_any_process() -> None:
    assert get_task_spec("nursery:7") == nursery_task(7)
    assert get_task_spec("HELDOUT:7") == heldout_list()[7].task
    for wrong in ("nursery:", "nursery:x", "kindergarten:1"):
        with pytest.raises(ValueError, match=f"unknown task {wrong!r}.*nursery:0"):
            get_task_spec(wrong)
    with pytest.raises(ValueError, match=r"no task heldout:5000; the list has \d+ rows"):
        get_task_spec("heldout:5000")


def test_draws_are_wide() -> None:
    assert {task.host.kind for task in DRAWS} == {"mlp", "cnn", "transformer"}
    purposes = Counter(task.description.partition(":")[0] for task in DRAWS)
    waiting = sum(purposes[name] for name in ("saturated", "hopeless", "harmful"))
    assert min(purposes.values()) >= 2
    assert 0.2 < waiting / len(DRAWS) < 0.5
    assert {task.optimizer.kind for task in DRAWS} == {"adamw", "sgd"}
    assert len({task.slots for task in DRAWS}) > 10
    assert len({task.blueprints for task in DRAWS}) > 20


def test_something_can_be_planted_in_every_draw() -> None:
    """A task with a budget below its smallest seed would teach nothing."""
    from esper.simic.training.env_factory import task_layout

    for task in DRAWS[:20]:
        layout, budget = task_layout(task, load_task_data(task)), task.lifecycle.param_budget
        assert budget is not None
        costs = [card.params for cards in layout.cards for card in cards if card.fits]
        assert min(costs) + layout.host_params <= budget


def test_training_sees_nothing_of_what_is_held_out() -> None:
    for task in DRAWS:
        assert not is_held_out(family_of(task))
        assert task.data in ("digits", "pydoc")
        assert len(task.host.kwargs.get("channels", ())) <= MAX_BLOCKS
        assert (task.lifecycle.param_budget or 0) <= MAX_BUDGET * count_host_params(task) + 1
        assert not set(NEVER_OFFERED.values()) & set(task.blueprint_keys)


def test_only_blueprints_that_exist_are_offered() -> None:
    for names in (*OFFERED.values(), NEVER_OFFERED.values()):
        assert set(names) <= set(BLUEPRINTS)


def test_the_held_out_list_is_what_was_fixed() -> None:
    rows = heldout_list()
    assert len(rows) >= 40
    assert sum(row.task.data == "fashion" for row in rows) >= 12
    for number, row in enumerate(rows):
        task = row.task
        assert task.name == f"heldout:{number}"
        assert task_sha256(task) == row.sha256
        assert family_of(task) == row.family
        check_task(task)
        budget = (task.lifecycle.param_budget or 0) / count_host_params(task)
        reasons = {
            "fashion": task.data == "fashion",
            "cifar10": task.data == "cifar10",
            "deeper": len(task.host.kwargs.get("channels", ())) > MAX_BLOCKS,
            "budget": budget > MAX_BUDGET,
            "blueprint": bool(set(NEVER_OFFERED.values()) & set(task.blueprint_keys)),
            "family": is_held_out(row.family),
        }
        assert reasons[row.why], row.task.name


def test_a_task_that_differs_in_anything_has_another_hash() -> None:
    task = DRAWS[0]
    assert task_sha256(replace(task, horizon=task.horizon + 1)) != task_sha256(task)
    assert task_sha256(override(task, embargo=9)) != task_sha256(task)


# ---- data


def loaded(**changes: object) -> dict[str, torch.Tensor]:
    data = load_dataset("digits", variant=replace(PLAIN, **changes))  # type: ignore[arg-type]
    test = data.open_test()
    parts = {"train": data.train, "val": data.val, "test": test}
    return {f"{n}_{k}": getattr(split, k) for n, split in parts.items() for k in ("inputs", "targets")}


def test_a_variant_keeps_classes_and_rows() -> None:
    few = loaded(classes=(3, 8, 1), train_rows=120)
    assert len(few["train_targets"]) == 120
    assert set(few["train_targets"].tolist()) == set(few["val_targets"].tolist()) == {0, 1, 2}
    whole = load_dataset("digits").val
    eights = whole.inputs[whole.targets == 8]
    assert torch.equal(few["val_inputs"][few["val_targets"] == 1], eights)


def test_label_noise_is_for_training_alone() -> None:
    plain, noisy = loaded(), loaded(label_noise=0.5)
    changed = (plain["train_targets"] != noisy["train_targets"]).float().mean().item()
    assert changed == pytest.approx(0.45, abs=0.06)
    assert torch.equal(plain["val_targets"], noisy["val_targets"])
    assert torch.equal(plain["test_targets"], noisy["test_targets"])


def test_pixels_are_disturbed_and_permuted_the_same_way_everywhere() -> None:
    plain, noisy, permuted = loaded(), loaded(pixel_noise=0.5), loaded(permuted=True)
    spread = (noisy["val_inputs"] - plain["val_inputs"]).std().item()
    assert spread == pytest.approx(0.5 * plain["train_inputs"].std().item(), rel=0.05)
    for part in ("train_inputs", "val_inputs", "test_inputs"):
        assert not torch.equal(permuted[part], plain[part])
        assert torch.equal(permuted[part].flatten(1).sort(1).values, plain[part].flatten(1).sort(1).values)
    row = {tuple(image.flatten(0).tolist()) for image in permuted["val_inputs"]}
    assert len(row) == len(permuted["val_inputs"])


@pytest.mark.parametrize("teacher", ["linear", "mlp", "conv"])
def test_a_teacher_labels_patterns_and_every_class_occurs(teacher: str) -> None:
    taught = loaded(teacher=teacher, classes=(0, 1, 2, 3))
    for part in ("train", "val", "test"):
        shares = torch.bincount(taught[f"{part}_targets"], minlength=4) / len(taught[f"{part}_targets"])
        assert shares.min() > 0.1
    again = loaded(teacher=teacher, classes=(0, 1, 2, 3))
    assert all(torch.equal(taught[name], again[name]) for name in taught)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": (1,)}, "at least 2 different classes"),
        ({"classes": (1, 10)}, "of a data set with 10"),
        ({"train_rows": 0}, "train_rows must be at least 1"),
        ({"label_noise": 1.5}, "label_noise must be in"),
        ({"pixel_noise": -1.0}, "pixel_noise must be in"),
        ({"teacher": "oracle"}, "unknown teacher 'oracle'"),
    ],
)
def test_a_variant_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loaded(**changes)


def test_text_has_no_variants() -> None:
    with pytest.raises(ValueError, match="variant is for images"):
        check_task(replace(get_task_spec("pydoc_lm"), variant=PLAIN))


# ---- the list people see


def test_draws_are_shown_to_people_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    tasks_command(nursery=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["nursery:0", "nursery:1", "heldout:0"]
    tasks_command(nursery=1, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["nursery"] == [facts(nursery_task(0))]
    assert [row["task"] for row in shown["held_out"]] == [row.task.name for row in heldout_list()]
    with pytest.raises(ValueError, match="at least 0, got -1"):
        tasks_command(nursery=-1)


def test_a_later_blueprint_changes_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[TaskSpec] = [nursery_task(number) for number in range(5)]
    monkeypatch.setitem(BLUEPRINTS, "cnn.later", replace(BLUEPRINTS["cnn.conv"], key="cnn.later"))
    assert [nursery_task(number) for number in range(5)] == before
