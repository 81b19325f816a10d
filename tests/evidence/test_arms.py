"""What was asked for becomes arms that can run, in an order in which each finds what it needs."""

import pytest

from esper.evidence.arms import ARMS, DEFAULT_ARMS, get_arm, line_up


def names(*asked: str, has_policy: bool = False, subject: str | None = None, can_widen: bool = True) -> tuple[str, ...]:
    return line_up(asked, has_policy=has_policy, subject=subject, can_widen=can_widen).names


def test_waiting_is_always_among_them() -> None:
    assert names("periodic") == ("wait_only", "periodic")
    assert names(*DEFAULT_ARMS) == DEFAULT_ARMS


def test_aliases_commas_and_all() -> None:
    assert names("wait,schedule", "static-final", "wide") == ("wait_only", "schedule", "static_final", "static_wide")
    assert names("all", has_policy=True) == tuple(ARMS)
    assert names("all") == tuple(arm.name for arm in ARMS.values() if not (arm.learned or arm.replays))


def test_the_static_frontier_is_one_arm_per_size() -> None:
    found = line_up(["static_frontier"], has_policy=False, subject=None, can_widen=True, budgets=[900, 600])
    assert found.names == ("wait_only", "static_600", "static_900")
    assert get_arm("static_600").budget == 600
    assert names("static_600") == ("wait_only", "static_600")
    with pytest.raises(ValueError, match="--budgets"):
        names("static_frontier")
    with pytest.raises(ValueError, match="an arm that grows"):
        names("schedule", subject="static_600")


def test_a_search_without_a_schedule_is_left_out_or_says_why() -> None:
    found = line_up(["all"], has_policy=False, subject=None, can_widen=True, found=["search_tpe"])
    assert "search_random" not in found.names
    assert "search_tpe" in found.names
    assert "search_random" in found.notes[0]
    with pytest.raises(ValueError, match="--tune"):
        line_up(["search_random"], has_policy=False, subject=None, can_widen=True, found=[])


def test_what_others_depend_on_is_added_and_said() -> None:
    found = line_up(["static_final"], has_policy=False, subject="fragrow", can_widen=True)
    assert found.names == ("wait_only", "fragrow", "static_final")
    assert found.notes == ("fragrow was added: other arms depend on it.",)
    assert names("random", has_policy=True) == ("wait_only", "ppo_greedy", "ppo_sampled", "random")


@pytest.mark.parametrize("name", list(ARMS))
def test_an_arm_runs_after_those_it_depends_on(name: str) -> None:
    order = names(name, has_policy=True)
    needed = ["ppo_greedy", "ppo_sampled"] if name in ("random", "static_final", "static_wide", "open_loop") else []
    assert all(order.index(other) < order.index(name) for other in needed if other in order)


def test_a_host_without_a_width_loses_the_wide_arm_or_says_why() -> None:
    found = line_up(["all"], has_policy=False, subject=None, can_widen=False)
    assert "static_wide" not in found.names
    assert "left out" in found.notes[0]
    with pytest.raises(ValueError, match="cannot be widened"):
        names("static_wide", can_widen=False)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("weekly", "unknown arm 'weekly'. Known: wait_only"),
        ("ppo_greedy", "pass --policy"),
        ("open_loop", "pass --policy"),
        ("plateaus", "Did you mean 'plateau'"),
    ],
)
def test_what_cannot_run_is_refused(asked: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        names(asked)


@pytest.mark.parametrize("subject", ["wait_only", "static_final"])
def test_the_subject_must_be_able_to_grow(subject: str) -> None:
    with pytest.raises(ValueError, match="an arm that grows"):
        names("schedule", subject=subject)
