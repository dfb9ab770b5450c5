"""Advantages are a reward minus a mean."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rzero.losses import batch_mean_advantages, count_zero_variance_groups, group_mean_advantages
from tests.losses.batches import unhurried


@pytest.mark.parametrize(
    ("rewards", "group_id", "expected"),
    [
        # Mean of 1, 0, 0, 0 is 1/4.
        ([1.0, 0.0, 0.0, 0.0], [5, 5, 5, 5], [0.75, -0.25, -0.25, -0.25]),
        # Means (2 + 4 + 9) / 3 = 5 and (1 + 1 + 4) / 3 = 2; members need not be neighbours, ids not be small.
        (
            [2.0, 1.0, 4.0, 1.0, 9.0, 4.0],
            [-3, 1 << 40, -3, 1 << 40, -3, 1 << 40],
            [-3.0, -1.0, -1.0, -1.0, 4.0, 2.0],
        ),
    ],
)
def test_group_mean_golden(rewards, group_id, expected):
    advantages = group_mean_advantages(torch.tensor(rewards), torch.tensor(group_id))
    assert advantages.tolist() == expected


def test_batch_mean_golden():
    # Mean of 3, 1, 2 is 2.
    assert batch_mean_advantages(torch.tensor([3.0, 1.0, 2.0])).tolist() == [1.0, -1.0, 0.0]


def test_no_standard_deviation():
    # Twice the rewards give twice the advantages; whitened ones would stay the same.
    rewards, group_id = torch.tensor([1.0, 0.0, 3.0, 4.0]), torch.tensor([0, 0, 1, 1])
    assert torch.equal(
        group_mean_advantages(2 * rewards, group_id), 2 * group_mean_advantages(rewards, group_id)
    )


@unhurried
@given(
    reward=st.floats(-1e6, 1e6, width=32),
    size=st.integers(2, 64),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_rewards_give_exactly_zero(reward, size, dtype):
    rewards = torch.full((size,), reward, dtype=dtype)
    assert not group_mean_advantages(rewards, torch.zeros(size, dtype=torch.int64)).any()
    assert not batch_mean_advantages(rewards).any()


@unhurried
@given(data=st.data(), size=st.integers(2, 5), groups=st.integers(1, 6))
def test_agrees_with_a_loop_in_any_order(data, size, groups):
    group_id = data.draw(st.permutations([group for group in range(groups) for _ in range(size)]))
    rewards = data.draw(st.lists(st.floats(-10, 10), min_size=len(group_id), max_size=len(group_id)))
    expected = [
        reward - math.fsum(r for r, g in zip(rewards, group_id, strict=True) if g == group) / size
        for reward, group in zip(rewards, group_id, strict=True)
    ]
    advantages = group_mean_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_id), group_size=size
    )
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_half_precision_is_promoted_and_nothing_is_differentiated():
    rewards = torch.tensor([1.0, 0.0], dtype=torch.bfloat16, requires_grad=True)
    advantages = group_mean_advantages(rewards, torch.tensor([0, 0]))
    assert advantages.dtype == torch.float32
    assert not advantages.requires_grad


def test_an_empty_rank_has_no_groups():
    assert group_mean_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_zero_variance_groups_are_counted():
    rewards = torch.tensor([0.1, 0.1, 1.0, 0.0, 0.0, 0.0])
    assert count_zero_variance_groups(rewards, torch.tensor([0, 0, 1, 1, 2, 2])) == (3, 2)


@pytest.mark.parametrize(
    ("rewards", "group_id", "group_size", "message"),
    [
        ([1.0, 0.0, 1.0], [4, 4, 9], None, "got 1 in group 9"),
        ([1.0, 0.0, 1.0], [4, 4, 4], 4, "groups of 4 responses each, got 3 in group 4"),
        ([1.0, 0.0, 1.0], [4, 4, 4], 2, "groups of 2 responses each, got 3 in group 4"),
        ([1.0, 0.0], [4, 9], None, "groups of 2 responses each, got 1 in group 4"),
        ([1.0, 0.0], [4, 9], 1, "group_size must be at least 2, got 1"),
        ([1.0, math.nan], [4, 4], None, "rewards must be finite, got nan at row 1"),
        ([1.0, 0.0], [4, 4, 4], None, r"group_id must have shape \(2,\), got \(3,\)"),
        ([[1.0, 0.0]], [4, 4], None, r"rewards must have shape \[B\], got \(1, 2\)"),
    ],
)
def test_group_mean_refuses(rewards, group_id, group_size, message):
    with pytest.raises(ValueError, match=f"^group_mean_advantages: .*{message}"):
        group_mean_advantages(torch.tensor(rewards), torch.tensor(group_id), group_size=group_size)


@pytest.mark.parametrize(
    ("rewards", "group_id", "message"),
    [
        ([1, 0], [4, 4], "rewards must be floating, got torch.int64"),
        ([1.0, 0.0], [4.0, 4.0], "group_id must be integer, got torch.float32"),
        ([1.0, 0.0], [True, True], "group_id must be integer, got torch.bool"),
    ],
)
def test_group_mean_refuses_dtypes(rewards, group_id, message):
    with pytest.raises(TypeError, match=f"^group_mean_advantages: {message}"):
        group_mean_advantages(torch.tensor(rewards), torch.tensor(group_id))


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_batch_mean_refuses_fewer_than_two(rewards):
    with pytest.raises(ValueError, match=r"^batch_mean_advantages: rewards must hold at least 2"):
        batch_mean_advantages(torch.tensor(rewards))


def test_device_disagreement_is_refused():
    with pytest.raises(ValueError, match=r"^group_mean_advantages: group_id must be on cpu"):
        group_mean_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64, device="meta"))
