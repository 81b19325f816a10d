"""Growing networks among scikit-learn's estimators."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from torch import nn

sklearn = pytest.importorskip("sklearn", reason="needs the sklearn extra")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import load_diabetes, load_iris  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from esper.sklearn import GrowingClassifier, GrowingRegressor  # noqa: E402


@pytest.fixture(scope="module")
def iris() -> tuple[Any, Any]:
    found = load_iris()
    return StandardScaler().fit_transform(found.data), np.array(found.target_names)[found.target]


@parametrize_with_checks(
    [GrowingClassifier(epochs=5, lr=3e-2, batch_size=8), GrowingRegressor(epochs=5, lr=3e-2, batch_size=8)]
)
@pytest.mark.filterwarnings("ignore")  # of data that is bad on purpose
def test_estimators_pass_the_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


def test_targets_that_are_all_the_same_are_fitted_and_said() -> None:
    x = np.linspace(-1.0, 1.0, 40).reshape(-1, 1)
    with pytest.warns(UserWarning, match="all validation targets are the same"):
        fitted = GrowingRegressor(epochs=5).fit(x, np.full(40, 7.0))
    assert np.allclose(fitted.predict(x), 7.0, atol=1.0)
    assert fitted.result_.metric == 0.0


def test_a_random_state_may_be_a_generator_or_none(iris: Any) -> None:
    def fit(state: Any) -> Any:
        return GrowingClassifier(epochs=5, random_state=state).fit(*iris).predict_proba(iris[0])

    assert np.array_equal(fit(np.random.RandomState(3)), fit(np.random.RandomState(3)))
    assert not np.array_equal(fit(np.random.RandomState(3)), fit(np.random.RandomState(4)))
    fit(None)


def test_a_classifier_learns_named_classes_and_grows(iris: Any) -> None:
    x, y = iris
    classifier = GrowingClassifier(epochs=10, lr=1e-2, batch_size=16).fit(x, y)
    assert classifier.score(x, y) > 0.9
    assert set(classifier.predict(x[:9])) <= set(y)
    assert classifier.predict_proba(x[:5]).shape == (5, 3)
    assert np.allclose(classifier.predict_proba(x).sum(1), 1.0, atol=1e-5)
    assert len(classifier.result_.seeds) >= 1
    again = clone(classifier).fit(x, y)
    assert np.array_equal(again.predict_proba(x), classifier.predict_proba(x)), "same random_state, same bits"
    loaded = pickle.loads(pickle.dumps(classifier))
    assert np.array_equal(loaded.predict_proba(x), classifier.predict_proba(x))


def test_a_regressor_predicts_in_the_units_of_its_targets() -> None:
    x, y = load_diabetes(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), GrowingRegressor(epochs=15, lr=1e-2))
    pipeline.fit(x[:300], y[:300])
    assert pipeline.score(x[300:], y[300:]) > 0.3
    assert 50 < pipeline.predict(x[300:]).mean() < 250
    two = GrowingRegressor(epochs=5).fit(x[:60], np.stack([y[:60], -y[:60]], 1))
    assert two.predict(x[:4]).shape == (4, 2)


def test_estimators_search_and_validate_like_others(iris: Any) -> None:
    x, y = iris
    search = GridSearchCV(GrowingClassifier(epochs=5), {"lr": [1e-5, 3e-2]}, cv=2).fit(x, y)
    assert search.best_params_ == {"lr": 3e-2}
    assert len(cross_val_score(GrowingClassifier(epochs=5, lr=1e-2), x, y, cv=2)) == 2


def test_the_users_network_is_copied_and_grown(iris: Any) -> None:
    x, y = iris
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    before = network[0].weight.detach().clone()
    fitted = GrowingClassifier(network, epochs=5).fit(x, y)
    assert (network[0].weight == before).all()
    assert type(fitted.model_) is nn.Sequential
    made = GrowingClassifier(
        lambda features, classes: nn.Sequential(nn.Linear(features, 9), nn.Linear(9, classes)), epochs=5
    )
    assert made.fit(x, y).model_[0].out_features == 9


def test_what_cannot_work_is_refused(iris: Any) -> None:
    x, y = iris
    with pytest.raises(NotFittedError):
        GrowingClassifier().predict(x)
    with pytest.raises(ValueError, match="at least two classes"):
        GrowingClassifier().fit(x, np.zeros(len(x)))
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        GrowingClassifier().fit(x, np.linspace(0.0, 1.0, len(x)))
    with pytest.raises(ValueError, match="leaves no room"):
        GrowingClassifier(budget=5).fit(x, y)
    with pytest.raises(ValueError, match="validation_fraction"):
        GrowingClassifier(validation_fraction=1.5).fit(x, y)
    with pytest.raises(ValueError, match="features"):
        GrowingClassifier(epochs=5).fit(x, y).predict(x[:, :2])
