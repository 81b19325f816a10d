"""Data in any form becomes the same batches, in an order that follows from seed and epoch alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from esper.growth.data import Batches, seeded_everywhere
from esper.growth.objective import Objective, Score
from esper.growth.validation import Validation
from tests.growth.zoo import CLASSES, ZOO

X, Y = torch.arange(20.0).view(10, 2), torch.arange(10) % 3
CPU = torch.device("cpu")


def batches(data: Any, **options: Any) -> Batches:
    return Batches(data, **{"batch_size": 4, "shuffle": True, "device": CPU, "what": "training", **options})


def rows(found: Any) -> list[list[float]]:
    parts = [(batch["x"], batch["y"]) if isinstance(batch, dict) else batch for batch in found]
    return sorted([*x.tolist(), float(y)] for xs, ys in parts for x, y in zip(xs, ys, strict=True))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets", reason="needs the hf extra")
    return datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist(), "text": ["a"] * 10})


def frames() -> Any:
    pandas = pytest.importorskip("pandas", reason="needs the evidence extra")
    return pandas.DataFrame(X.numpy()), pandas.Series(Y.numpy())


FORMS: dict[str, Any] = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: [X.double().numpy(), Y.numpy()],
    "lists": lambda: (X.tolist(), Y.tolist()),
    "pandas": frames,
    "dict": lambda: {"x": X, "y": Y},
    "dataset": lambda: TensorDataset(X, Y),
    "stream": Stream,
    "loader": lambda: DataLoader(TensorDataset(X, Y), 4, shuffle=True),
    "own_generator": lambda: DataLoader(TensorDataset(X, Y), 4, shuffle=True, generator=torch.Generator()),
    "batches": lambda: [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])],
    "tuple_of_batches": lambda: ((X[:4], Y[:4]), [X[4:8], Y[4:8]], (X[8:], Y[8:])),
    "hugging_face": hugging_face,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_every_row_once(form: str) -> None:
    found = batches(FORMS[form]())
    everything = rows([(X, Y)])
    first = next(tensor for tensor in (found.first.values() if isinstance(found.first, dict) else found.first))
    assert first.dtype is torch.float32
    assert first.shape == (4, 2)
    for epoch in range(2):
        assert rows(found.epoch(0, epoch)) == everything
    assert rows(found.in_order()) == everything
    assert found.count == (None if form == "stream" else 3)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("stream", "batches", "tuple_of_batches")])
def test_the_order_follows_from_seed_and_epoch(form: str) -> None:
    def order(found: Batches, seed: int, epoch: int) -> list[Any]:
        with seeded_everywhere(seed * 100 + epoch):
            return [
                next(iter(b.values())).tolist() if isinstance(b, dict) else b[0].tolist()
                for b in found.epoch(seed, epoch)
            ]

    one, other = batches(FORMS[form]()), batches(FORMS[form]())
    assert order(one, 0, 0) != order(one, 0, 1)
    assert order(one, 0, 3) == order(other, 0, 3), "whatever epochs ran before"
    assert order(one, 1, 3) != order(other, 0, 3)
    assert list(map(str, one.in_order())) == list(map(str, other.in_order()))
    state = torch.get_rng_state()
    list(one.in_order())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "there is no training data"),
        ([], "the training data is empty"),
        (X, r"one tensor; pass \(inputs, targets\)"),
        ((X, Y[:5]), r"one entry per row each, got \[10, 5\]"),
        (iter([(X, Y)]), "can be read only once"),
        (7, "must be tensors .* got int"),
        ("train.csv", "must be tensors .* got str"),
        (TensorDataset(X[:0], Y[:0]), "is empty"),
    ],
)
def test_data_that_cannot_be_used_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches(data, shuffle=False)


def test_a_single_row_that_is_left_over_joins_the_batch_before() -> None:
    """A batch norm cannot be trained on one row."""
    found = batches((X[:9], Y[:9]))
    assert [len(batch[1]) for batch in found.epoch(0, 0)] == [4, 5]
    assert found.count == 2
    assert rows(found.epoch(0, 0)) == rows([(X[:9], Y[:9])])


def test_global_generators_are_put_back() -> None:
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    with seeded_everywhere(3):
        first = (random.random(), np.random.rand(), torch.rand(()))
    with seeded_everywhere(3):
        assert first == (random.random(), np.random.rand(), torch.rand(()))
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])


# ---- what the data is for


class Fixed(nn.Module):
    """Gives what it is told to."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = nn.Parameter(output)

    def forward(self, x: Tensor) -> Tensor:
        return self.output[: x.shape[0]]


LOGITS = torch.eye(3)[Y] * 4
CASES: dict[str, tuple[Tensor, Tensor, str, float]] = {
    "classes": (LOGITS, torch.where(torch.arange(10) < 5, Y, (Y + 1) % 3), "classification", 50.0),
    "pixels": (LOGITS.view(5, 2, 3).movedim(2, 1), Y.view(5, 2), "classification", 100.0),
    "perfect_regression": (X, X, "regression", 1.0),
    "mean_regression": (X.mean(0).expand(10, 2), X, "regression", 0.0),
    "column": (X[:, :1], X[:, 0], "regression", 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_metric_follows_from_the_targets(case: str) -> None:
    output, target, kind, metric = CASES[case]
    validation = Validation(Fixed(output.clone()), [(torch.zeros(len(target), 1), target)])
    assert validation.objective.kind == kind
    assert validation(Fixed(output.clone()))[0] == pytest.approx(metric, abs=1e-5)


def test_tokens_are_judged_by_their_loss_and_masked_ones_do_not_count() -> None:
    logits, target = LOGITS.view(5, 2, 3), Y.view(5, 2).clone()
    target[0] = -100
    model = Fixed(logits.clone())
    validation = Validation(model, [(torch.zeros(5, 1), target)])
    metric, loss = validation(model)
    assert validation.objective.kind == "tokens"
    expected = nn.functional.cross_entropy(logits[1:].flatten(0, 1), target[1:].flatten()).item()
    assert metric == loss == pytest.approx(expected)
    scale = validation.scale(Score(metric=metric, loss=loss))
    assert not scale.higher_is_better
    assert scale.percent(np.log(3.0)) == pytest.approx(100 / 3)


def test_means_over_batches_are_means_over_rows() -> None:
    model = ZOO["resnet"].model()
    x, y = torch.randn(25, 3, 8, 8), torch.randint(CLASSES, (25,))
    whole = Validation(model, (x, y), batch_size=25)(model)
    parts = Validation(model, (x, y), batch_size=4)(model)
    assert whole == pytest.approx(parts, rel=1e-6)


def test_a_metric_of_the_users_own_sees_all_rows_at_once() -> None:
    seen = []

    def metric(output: Tensor, target: Tensor) -> float:
        seen.append((output.shape, target.shape))
        return 0.25

    model = ZOO["resnet"].model()
    data = (torch.randn(10, 3, 8, 8), torch.randint(CLASSES, (10,)))
    assert Validation(model, data, metric=metric, batch_size=4)(model)[0] == 0.25
    assert seen == [((10, CLASSES), (10,))]


def test_a_model_with_a_loss_of_its_own_is_trained_by_it() -> None:
    animal = ZOO["bert"]
    model, batch = animal.model(), animal.batches(1)[0]
    objective = Objective(model, {**batch, "text": ["no number"] * 12})
    assert objective.has_own_loss
    assert objective.kind == "classification"
    model.eval()
    output = objective.forward(model, {**batch, "text": ["no number"] * 12})
    assert torch.equal(objective.loss(output, batch), output.loss)


def test_columns_that_the_model_does_not_take_are_left_out() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    objective = Objective(Takes(), {"x": X, "y": Y, "id": Y})
    assert (objective.kind, objective.has_own_loss, objective.classes) == ("classification", False, 3)


@pytest.mark.parametrize(
    ("output", "batch", "message"),
    [
        (LOGITS, X, r"a batch must be \(inputs, target\) or a dict with 'labels'"),
        (X[:, 0], (X, Y), r"cannot tell the loss of float32 \(10,\) predictions and int64 \(10,\) targets"),
        (LOGITS[:, :1], (X, Y.bool()), "pass loss="),
        (LOGITS, (X, Y - 1), r"labels must be 0 to 2, or -100 for none, got -1"),
    ],
)
def test_what_cannot_be_trained_is_refused(output: Tensor, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(Fixed(output.clone()), batch)


def test_data_that_does_not_fit_the_model_is_reported_with_its_shape() -> None:
    with pytest.raises(
        ValueError, match=r"Linear cannot run on a batch of float32 \(10, 2\), int64 \(10,\): mat1 and mat2"
    ):
        Objective(nn.Linear(5, 3), (X, Y))


def test_yes_or_no_with_a_loss_of_the_users_own_is_judged_by_it() -> None:
    """R² of logits would say nothing."""
    objective = Objective(
        Fixed(LOGITS[:, 0].clone()), (X, (Y > 0).float()), loss=nn.functional.binary_cross_entropy_with_logits
    )
    assert objective.kind == "other"
    assert objective.tally().result(0.3) == 0.3
    assert Objective(Fixed(LOGITS[:, 0].clone()), (X, Y + 0.5), loss=nn.functional.l1_loss).kind == "regression"
