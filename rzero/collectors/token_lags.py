"""From versions of tokens to lags of responses, as plain functions."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Lags", "segment_lags", "token_lags"]


@dataclass(frozen=True, kw_only=True)
class Lags:
    """The lags of B responses with at least one sampled token; all int64 on the CPU.

    Attributes:
        start: [B] lag of the first sampled token.
        end: [B] lag of the last sampled token.
        length: [B] number of sampled tokens, at least 1.
        total: [B] sum of the lags of the sampled tokens, so that total / length is the token-mean.
        token: [M] lag of each run of tokens.
        count: [M] number of tokens in each run.
        empty: Number of responses without a single sampled token; they have no lag.
    """

    start: Tensor
    end: Tensor
    length: Tensor
    total: Tensor
    token: Tensor
    count: Tensor
    empty: int


def token_lags(
    policy_version: Tensor, response_mask: Tensor, cu_seqlens: Tensor, *, learner_version: int
) -> Lags:
    """Lags of one packed training batch.

    Args:
        policy_version: [N] int32 or int64, version that drew each token; ignored where the mask is False.
        response_mask: [N] bool, True where a token was sampled.
        cu_seqlens: [B + 1] int32 or int64, response i owns tokens cu_seqlens[i] : cu_seqlens[i + 1].
        learner_version: Version of the weights that this batch updates.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If a shape is wrong, if a sampled token has no version, or one newer than the learner's.

    Example:
        >>> version = torch.tensor([-1, 3, 3, 4, 4, 4], dtype=torch.int32)
        >>> lags = token_lags(version, version >= 0, torch.tensor([0, 6]), learner_version=5)
        >>> lags.start.item(), lags.end.item(), lags.total.item(), lags.length.item()
        (2, 1, 7, 5)
    """
    _check_packed(policy_version, response_mask, cu_seqlens)
    versions, mask = policy_version.detach().cpu().numpy().astype(np.int64), response_mask.cpu().numpy()
    version, bounds = versions[mask], cu_seqlens.cpu().numpy()
    offsets = np.concatenate([[0], np.cumsum(mask)])[bounds]
    _check_versions("token_lags", version, learner_version, positions=np.flatnonzero(mask))
    return _lags(learner_version - version, np.ones_like(version), offsets)


def segment_lags(version: Tensor, count: Tensor, cu_segments: Tensor, *, learner_version: int) -> Lags:
    """Lags of responses that are given as segments of equal version instead of token by token.

    Args:
        version: [M] int64, version of each segment.
        count: [M] int64, tokens in each segment, at least 1.
        cu_segments: [B + 1] int64, response i owns segments cu_segments[i] : cu_segments[i + 1].
        learner_version: Version of the weights that this batch updates.

    Raises:
        ValueError: If a segment is empty or has no version, or one newer than the learner's.

    Example:
        >>> lags = segment_lags(
        ...     torch.tensor([3, 4]), torch.tensor([2, 3]), torch.tensor([0, 2]), learner_version=5
        ... )
        >>> lags.start.item(), lags.end.item(), lags.total.item(), lags.length.item()
        (2, 1, 7, 5)
    """
    if (count < 1).any():
        raise ValueError(f"segment_lags: count must be at least 1, got {int(count.min())}")
    versions, counts, offsets = (tensor.long().numpy() for tensor in (version, count, cu_segments))
    _check_versions("segment_lags", versions, learner_version, positions=np.arange(len(versions)))
    return _lags(learner_version - versions, counts, offsets)


def _lags(lag: np.ndarray, count: np.ndarray, offsets: np.ndarray) -> Lags:
    """In NumPy, because each call of torch would hand the interpreter's lock to another thread."""
    filled = np.diff(offsets) > 0
    first, past = offsets[:-1][filled], offsets[1:][filled]

    def sums(values: np.ndarray) -> np.ndarray:
        running = np.concatenate([[0], np.cumsum(values)])
        return running[past] - running[first]

    arrays = {
        "start": lag[first],
        "end": lag[past - 1],
        "length": sums(count),
        "total": sums(lag * count),
        "token": lag,
        "count": count,
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Lags(**tensors, empty=int((~filled).sum()))


def _check_packed(policy_version: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> None:
    integers = (torch.int32, torch.int64)
    for name, tensor, allowed in (
        ("policy_version", policy_version, integers),
        ("response_mask", response_mask, (torch.bool,)),
        ("cu_seqlens", cu_seqlens, integers),
    ):
        if tensor.dtype not in allowed:
            raise TypeError(
                f"token_lags: {name} must be {' or '.join(map(str, allowed))}, got {tensor.dtype}"
            )
        if tensor.ndim != 1:
            raise ValueError(f"token_lags: {name} must have one dimension, got shape {tuple(tensor.shape)}")
    if policy_version.shape != response_mask.shape:
        raise ValueError(
            f"token_lags: response_mask must have shape {tuple(policy_version.shape)} to match "
            f"policy_version, got {tuple(response_mask.shape)}"
        )
    ends = cu_seqlens[[0, -1]].tolist() if len(cu_seqlens) else []
    if ends != [0, len(policy_version)] or (cu_seqlens.diff() < 0).any():
        raise ValueError(
            f"token_lags: cu_seqlens must rise from 0 to {len(policy_version)}, got {cu_seqlens.tolist()[:9]}"
        )


def _check_versions(
    function: str, version: np.ndarray, learner_version: int, *, positions: np.ndarray
) -> None:
    missing, ahead = version < 0, version > learner_version
    if missing.any():
        place = int(positions[missing][0])
        raise ValueError(
            f"{function}: policy_version must be known for every sampled token, "
            f"got {int(version[missing][0])} at position {place} ({int(missing.sum())} of them)"
        )
    if ahead.any():
        place = int(positions[ahead][0])
        raise ValueError(
            f"{function}: lag must not be negative, got policy_version {int(version[ahead][0])} "
            f"at position {place} with learner_version {learner_version}"
        )
