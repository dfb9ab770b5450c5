"""Importance weights: how much likelier the learner finds a token than the sampler that drew it."""

import math

import torch
from torch import Tensor

from rzero.losses.layout import TokenBatch, open_tokens
from rzero.losses.values import require_usable

__all__ = ["importance_weights"]


def importance_weights(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """Token importance weights, detached and never clipped.

        w_it = exp(log pi_theta(a_it | h_it) - log mu(a_it | h_it))

    Args:
        log_probs: [B, T], [N] or nested, floating, nats; log pi of the sampled tokens.
        behavior_log_probs: same shape; log mu as recorded when the token was drawn.
        mask: same shape, bool; True counts.
        cu_seqlens: [B + 1] integer row offsets; optional here, to let errors on packed tokens name the row.
        check_values: refuse unusable numbers on counted tokens; one pass and one synchronisation.

    Returns:
        The shape of log_probs, float32 or wider, no graph; 0 where mask is False.

    Raises:
        ValueError: on a counted token, a behaviour log-prob that is not finite or is positive, a learner's
            that is not finite, or a ratio that overflows; shapes or devices that disagree.
        TypeError: a wrong dtype.

    Example:
        Drawn with probability 0.2, now 0.3:

        >>> log_probs, behavior_log_probs = torch.tensor([[0.3]]).log(), torch.tensor([[0.2]]).log()
        >>> importance_weights(log_probs, behavior_log_probs, torch.tensor([[True]]))
        tensor([[1.5000]])
    """
    function = "importance_weights"
    if cu_seqlens is None and isinstance(log_probs, Tensor) and log_probs.ndim == 1:
        cu_seqlens = torch.tensor([0, len(log_probs)], device=log_probs.device)
    batch = open_tokens(function, log_probs, behavior_log_probs, mask, cu_seqlens)
    weights = token_weights(batch)
    if check_values:
        require_usable(function, batch, weights=weights)
    if log_probs.is_nested:
        return torch.nested.nested_tensor_from_jagged(weights, log_probs.offsets())  # pyright: ignore
    return weights


def token_weights(batch: TokenBatch) -> Tensor:
    """Compute exp(log pi - log mu); 0 = exp(-inf) where mask is False, whatever stood there."""
    return batch.log_ratio(masked=-math.inf).exp_()
