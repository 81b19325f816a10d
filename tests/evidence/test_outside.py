"""The outside library grows within the budget, repeats itself, and says where it cannot run."""

import pytest

from esper.evidence.arms import line_up
from esper.evidence.host_runs import task_with
from esper.evidence.outside import grow_with_gromo, why_not_gromo
from esper.runtime.tasks import load_task_data


def test_it_fills_the_budget_and_repeats_itself() -> None:
    pytest.importorskip("gromo")
    task = task_with("digits_conv", epochs=4, budget=700)
    data = load_task_data(task)
    first, again = (grow_with_gromo(task, data, 3) for _ in range(2))
    assert first.scores == again.scores
    assert first.params[0] < first.params[-1] <= 700
    assert first.hidden == (700 - 10) // 75
    assert first.scores[-1][1] > 50
    assert grow_with_gromo(task, data, 4).scores != first.scores


def test_it_says_where_it_cannot_run() -> None:
    pytest.importorskip("gromo")
    assert why_not_gromo(task_with("digits_conv", epochs=4, budget=700)) is None
    assert "--budget" in str(why_not_gromo(task_with("digits_conv", epochs=4, budget=None)))
    assert "transformers" in str(why_not_gromo(task_with("pydoc_lm", epochs=4, budget=40_000)))


def test_an_arm_that_cannot_run_is_left_out_of_all_and_refused_by_name() -> None:
    options = {"has_policy": False, "subject": None, "can_widen": True, "no_gromo": "it is not installed"}
    found = line_up(["all"], **options)
    assert "gromo" not in found.names
    assert any("gromo was left out: it is not installed" in note for note in found.notes)
    with pytest.raises(ValueError, match="gromo cannot run: it is not installed"):
        line_up(["gromo"], **options)
