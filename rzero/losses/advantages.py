"""Advantages: a reward minus a mean, and nothing else."""

import torch
from torch import Tensor

from rzero.losses.checks import check_integer_rows

__all__ = ["batch_mean_advantages", "count_zero_variance_groups", "group_mean_advantages"]


def group_mean_advantages(rewards: Tensor, group_id: Tensor, *, group_size: int | None = None) -> Tensor:
    """Reward minus the mean reward of the group.

        A_i = R_i - mean_{j in group g(i)} R_j

    No standard deviation and no whitening. A group whose rewards are all equal gets exactly 0, to the last
    bit: rewards are first taken relative to the group's lowest. Members of a group need not be neighbours.

    Args:
        rewards: [B] floating, in units of reward; half precision is promoted to float32.
        group_id: [B] integer; responses to the same prompt share one value.
        group_size: responses that make a group complete. None takes the size of the largest group.

    Returns:
        [B], detached, dtype of rewards but at least float32.

    Raises:
        ValueError: an incomplete group, a group of one, a reward that is not finite, or shapes that disagree.
        TypeError: rewards not floating, or group_id not integer.

    Reference:
        Dr. GRPO, https://arxiv.org/abs/2503.20783, whose advantage this is. GRPO, https://arxiv.org/abs/2402.03300,
        divides by the group's standard deviation as well; RLOO, https://arxiv.org/abs/2402.14740, leaves the
        response itself out of the mean, which multiplies A_i by n / (n - 1) for groups of n.

    Example:
        >>> group_mean_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([7, 7, 9, 9]))
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    function = "group_mean_advantages"
    rewards = _check_rewards(function, rewards)
    check_integer_rows(function, "group_id", group_id, rewards)
    if group_size is not None and group_size < 2:
        raise ValueError(f"{function}: group_size must be at least 2, got {group_size}")
    if len(rewards) == 0:
        return rewards
    groups, member_of, sizes = group_id.unique(return_inverse=True, return_counts=True)
    _check_complete(function, groups, sizes, group_size)
    return _subtract_mean(rewards, member_of, sizes)


def batch_mean_advantages(rewards: Tensor) -> Tensor:
    """Reward minus the mean reward of the batch: one response per prompt, the baseline of FlashREINFORCE.

        A_i = R_i - (1/B) sum_j R_j

    Args:
        rewards: [B] floating; **all** responses of the optimizer step, over all ranks and micro-batches.

    Returns:
        [B], detached, dtype of rewards but at least float32; exactly 0 if all rewards are equal.

    Raises:
        ValueError: fewer than two responses, or a reward that is not finite.
        TypeError: rewards not floating.

    Reference:
        FlashREINFORCE, https://github.com/yifanzhang-pro/FlashREINFORCE, "One-Batch REINFORCE".

    Example:
        >>> batch_mean_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]))
        tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    """
    rewards = _check_rewards("batch_mean_advantages", rewards)
    if len(rewards) < 2:
        raise ValueError(f"batch_mean_advantages: rewards must hold at least 2 responses, got {len(rewards)}")
    one_group = torch.zeros_like(rewards, dtype=torch.int64)
    return _subtract_mean(rewards, one_group, one_group.new_tensor([len(rewards)]))


def count_zero_variance_groups(rewards: Tensor, group_id: Tensor) -> tuple[int, int]:
    """How many groups there are, and in how many of them all rewards are equal: those give no gradient.

    Args:
        rewards: [B] floating.
        group_id: [B] integer; whole groups.

    Returns:
        Number of groups, number of groups without variance.

    Raises:
        ValueError: a reward that is not finite, or shapes that disagree.
        TypeError: rewards not floating, or group_id not integer.

    Example:
        >>> count_zero_variance_groups(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([7, 7, 9, 9]))
        (2, 1)
    """
    function = "count_zero_variance_groups"
    rewards = _check_rewards(function, rewards)
    check_integer_rows(function, "group_id", group_id, rewards)
    groups, member_of = group_id.unique(return_inverse=True)
    lowest, highest = (
        rewards.new_zeros(len(groups)).scatter_reduce(0, member_of, rewards, extreme, include_self=False)
        for extreme in ("amin", "amax")
    )
    return len(groups), int((lowest == highest).sum())


def _subtract_mean(rewards: Tensor, member_of: Tensor, sizes: Tensor) -> Tensor:
    """Rewards minus the mean over the group that ``member_of`` names."""
    lowest = rewards.new_zeros(len(sizes)).scatter_reduce(0, member_of, rewards, "amin", include_self=False)
    above = rewards - lowest[member_of]
    mean = above.new_zeros(len(sizes)).index_add(0, member_of, above) / sizes
    return above - mean[member_of]


def _check_rewards(function: str, rewards: Tensor) -> Tensor:
    """Rewards as detached float32 or wider, one for each response, all finite."""
    if not rewards.is_floating_point():
        raise TypeError(f"{function}: rewards must be floating, got {rewards.dtype}")
    if rewards.ndim != 1:
        raise ValueError(f"{function}: rewards must have shape [B], got {tuple(rewards.shape)}")
    finite = rewards.isfinite()
    if not bool(finite.all()):
        row = int((~finite).int().argmax())
        raise ValueError(f"{function}: rewards must be finite, got {rewards[row].item()} at row {row}")
    return rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))


def _check_complete(function: str, groups: Tensor, sizes: Tensor, group_size: int | None) -> None:
    """Every group has all its members, and at least two."""
    complete = int(sizes.max()) if group_size is None else group_size
    wrong = (sizes != complete) | (sizes < 2)
    if bool(wrong.any()):
        first = int(wrong.int().argmax())
        raise ValueError(
            f"{function}: group_id must name groups of {max(complete, 2)} responses each, got "
            f"{int(sizes[first])} in group {int(groups[first])} (a baseline needs the complete group)"
        )
