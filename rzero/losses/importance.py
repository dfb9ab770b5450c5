"""Importance weights: how much likelier the learner finds a token than the sampler that drew it."""

from torch import Tensor

from rzero.losses.checks import check_token_values
from rzero.losses.layout import TokenBatch, open_tokens

__all__ = ["importance_weights"]


def importance_weights(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """Per-token importance weights, detached, never clipped.

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

        >>> import torch
        >>> importance_weights(*torch.tensor([[[0.3]], [[0.2]]]).log(), torch.tensor([[True]]))
        tensor([[1.5000]])
    """
    function = "importance_weights"
    if cu_seqlens is None and log_probs.ndim == 1:
        cu_seqlens = mask.new_tensor([0, len(log_probs)]).long() * 0
        cu_seqlens[1:] = len(log_probs)
    batch = open_tokens(function, log_probs, behavior_log_probs, mask, cu_seqlens)
    weights = token_weights(function, batch, check_values=check_values)
    return weights.where(batch.mask, 0.0)


def token_weights(function: str, batch: TokenBatch, *, check_values: bool) -> Tensor:
    """exp(log pi - log mu) of an opened batch, detached; 1 where mask is False, since both are 0 there."""
    weights = (batch.log_probs.detach() - batch.behavior_log_probs).exp_()
    if check_values:
        check_token_values(function, batch.log_probs, batch.behavior_log_probs, weights, batch.cu_seqlens)
    return weights
