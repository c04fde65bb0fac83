"""The stage controller on scripted counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.estimation.controllers import PERIOD, Rule, StageController, most_stages


class Scripted:
    """A bucket's controller, on scripted counts."""

    def __init__(self, rule: Rule, stages: int) -> None:
        self.controller = StageController(rule, stages)

    def windows(self, *qualities: float, most: int = 10) -> list[int]:
        """The number of stages after each window of constant achieved/asked count."""
        stages = []
        for quality in qualities:
            for _ in range(PERIOD):
                self.controller = self.controller.after(round(1000 * quality), 1000, 0.501**most)
            stages.append(self.controller.stages)
        return stages


@pytest.mark.parametrize(
    ("ratio", "most"), [(0.1, 4), (0.01, 7), (0.001, 10), (0.5, 1), (0.25, 2), (1.0, 1), (0.501**10, 10)]
)
def test_most_stages(ratio: float, most: int) -> None:
    assert most_stages(ratio) == most


def test_paper_rule() -> None:
    scripted = Scripted("paper", 3)
    assert scripted.windows(1.3, 1.3, 1.3, 1.3) == [2, 1, 1, 1]
    assert scripted.windows(0.7, 1.0, 0.81, 1.19, 0.79, 0.0) == [2, 2, 2, 2, 3, 4]
    assert scripted.windows(0.1, 0.1, most=5) == [5, 5]


def test_robust_rule_turns_round_when_the_papers_direction_is_wrong() -> None:
    """Heavy tails: too many, fewer stages make it worse."""
    scripted = Scripted("robust", 5)
    assert scripted.windows(2.0) == [4]
    assert scripted.windows(8.0) == [3]  # An untried neighbour in the paper's direction comes first ...
    assert scripted.windows(30.0) == [4]  # ... and is left for one that was better.
    assert scripted.windows(8.0) == [5]
    assert scripted.windows(2.0) == [6]
    assert scripted.windows(1.1, 1.1) == [6, 6]


@pytest.mark.parametrize(("most", "least"), [(10, 3), (3, 3), (2, 2), (1, 1)])
def test_robust_rule_does_not_go_below_three_stages_if_there_may_be_so_many(most: int, least: int) -> None:
    """The last of fewer has a quarter of the entries to fit. From fewer, as a state may have them, it goes up."""
    scripted = Scripted("robust", least)
    stages = scripted.windows(*[50.0, 0.02, 3.0, 0.3] * 20, most=most)
    assert min(stages) == least
    assert max(Scripted("robust", 1).windows(*[50.0, 0.02, 3.0, 0.3] * 20, most=most)) >= least


def test_robust_rule_tries_a_stale_neighbour_again() -> None:
    scripted = Scripted("robust", 1)
    assert scripted.windows(0.1, 9.0) == [2, 3]
    assert scripted.windows(0.5) == [4]
    changed = scripted.windows(*[0.6] * 60, most=4)
    assert changed.count(3) > 0, "after a while the worse neighbour is tried again"


@given(
    rule=st.sampled_from(("paper", "robust")),
    counts=st.lists(st.integers(0, 10**7), max_size=200),
    most=st.integers(1, 10),
)
def test_stages_stay_in_range_and_resume_identically(rule: Rule, counts: list[int], most: int) -> None:
    controller = StageController(rule, 1)
    half = len(counts) // 2
    for count in counts[:half]:
        controller = controller.after(count, 1000, 0.501**most)
        assert 1 <= controller.stages <= most
    resumed = StageController(rule, 1).loaded(controller.state_dict())
    for count in counts[half:]:
        controller, resumed = (one.after(count, 1000, 0.501**most) for one in (controller, resumed))
        assert resumed == controller


def test_a_fixed_number_stays_whatever_the_counts_and_the_loaded_state() -> None:
    scripted = Scripted("fixed", 3)
    assert scripted.windows(2.0, 0.1) == [3, 3]
    assert scripted.controller == StageController("fixed", 3)
    assert scripted.controller.loaded(StageController("robust", 5).state_dict()).stages == 3
