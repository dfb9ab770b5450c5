"""The loss of REINFORCE Zero."""

from torch import Tensor

from rzero.losses.checks import check_num_responses, check_per_row
from rzero.losses.importance import token_weights
from rzero.losses.layout import TokenBatch, open_tokens

__all__ = ["reinforce_loss"]


def reinforce_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    num_responses: int | None = None,
    check_values: bool = True,
) -> Tensor:
    """REINFORCE with unclipped token importance weights: mean within each response, then over responses.

        loss = -(1/B) sum_i (1/T_i) sum_t  w_it * A_i * log pi_theta(a_it | h_it)
        w_it = exp(log pi_theta(a_it | h_it) - log mu(a_it | h_it)),  detached, never clipped

    T_i counts the True mask entries of response i, over all its turns; B is ``num_responses``. Both are fixed
    before anything is filtered, and a response without a counted token adds nothing yet stays in B.

    The losses of micro-batches and ranks add up to the loss of the whole when each call is given the
    ``num_responses`` of the whole step; responses are never split. Nothing is communicated here.

    Args:
        log_probs: [B, T], [N] with cu_seqlens, or nested; floating, nats; log pi of the sampled tokens. The
            gradient flows here and nowhere else. Half precision is promoted to float32 before any arithmetic.
        behavior_log_probs: same shape; log mu as recorded when the token was drawn.
        advantages: [B] floating; see :func:`rzero.losses.group_mean_advantages`.
        mask: same shape as log_probs, bool; True counts. Whatever stands under a False mask, NaN and inf
            included, changes neither value nor gradient.
        cu_seqlens: [B + 1] int32 or int64 row offsets of packed tokens.
        num_responses: B over all ranks and micro-batches of the optimizer step; None: the rows of this call.
        check_values: refuse unusable numbers on counted tokens; one pass and one synchronisation.

    Returns:
        Scalar, float32 or wider, to be minimised.

    Raises:
        ValueError: on a counted token, a behaviour log-prob that is not finite or is positive, a learner's
            that is not finite, or a ratio that overflows; num_responses below 1 or below the rows of this
            call; shapes or devices that disagree.
        TypeError: a wrong dtype.

    Example:
        One response of one token, drawn with probability 0.2, now 0.3, with advantage 1: the weight is 1.5.

        >>> import torch
        >>> log_probs = torch.tensor([[0.3]]).log().requires_grad_()
        >>> loss = reinforce_loss(
        ...     log_probs, torch.tensor([[0.2]]).log(), torch.tensor([1.0]), torch.tensor([[True]])
        ... )
        >>> loss.backward()
        >>> log_probs.grad
        tensor([[-1.5000]])
    """
    function = "reinforce_loss"
    batch = open_tokens(function, log_probs, behavior_log_probs, mask, cu_seqlens)
    check_per_row(function, "advantages", advantages, num_rows=batch.num_rows, device=batch.mask.device)
    num_responses = check_num_responses(function, num_responses, batch.num_rows)
    return weighted_sum(function, batch, advantages, num_responses=num_responses, check_values=check_values)


def weighted_sum(
    function: str, batch: TokenBatch, advantages: Tensor, *, num_responses: int, check_values: bool
) -> Tensor:
    """-(1/B) sum_i (1/T_i) sum_t w_it A_i log pi_it of an opened batch."""
    weights = token_weights(function, batch, check_values=check_values)
    # A response without a counted token has an empty sum: dividing it by 1 keeps 0 / 0 out.
    length = batch.tokens_per_row().clamp(min=1)
    scale = advantages.detach() / (length * num_responses)
    coefficients = weights.mul_(batch.spread(scale.to(weights.dtype)))
    return -(coefficients * batch.log_probs).sum()
