"""Groups of similar lengths contain each row once, and padding costs little."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvscope_kernels.host_lengths import similar_groups


@given(st.lists(st.integers(0, 4000), max_size=80), st.integers(0, 5000))
def test_grouping_requests_by_length_keeps_each_once_and_never_costs_more_than_one_group(
    costs: list[int], worth: int
) -> None:
    lengths = np.array(costs, dtype=np.int64)
    groups = list(similar_groups(lengths, worth))
    assert sorted(row for group in groups for row in group.tolist()) == list(range(len(costs)))
    if costs:
        padded = sum(len(group) * int(lengths[group].max()) for group in groups)
        assert padded + worth * (len(groups) - 1) <= len(costs) * max(costs)


def test_requests_of_equal_length_are_put_into_one_group() -> None:
    assert [group.tolist() for group in similar_groups(np.full(5, 700), 0)] == [[0, 1, 2, 3, 4]]


def test_one_long_request_gets_its_own_group() -> None:
    groups = [sorted(group.tolist()) for group in similar_groups(np.array([30, 4000, 31, 29]), 500)]
    assert sorted(groups) == [[0, 2, 3], [1]]


def test_requests_are_not_split_into_groups_if_that_saves_too_little() -> None:
    assert len(list(similar_groups(np.array([10, 20, 30]), 1000))) == 1
