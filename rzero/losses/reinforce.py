"""The loss of REINFORCE Zero."""

from torch import Tensor

from rzero.losses.checks import check_num_responses, check_per_row
from rzero.losses.importance import token_weights
from rzero.losses.layout import TokenBatch, open_tokens
from rzero.losses.values import require_usable

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
    before anything is filtered: a response without a counted token adds nothing and stays in B.

    Losses of micro-batches and ranks add up to the loss of the whole when each call is given the
    ``num_responses`` of the whole step; a response is never split. Nothing is communicated here:
    :func:`rzero.losses.global_num_responses` counts over ranks. Where gradients are *averaged* over ranks, as
    DistributedDataParallel and FSDP do, multiply the loss by the number of ranks.

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
            that is not finite, or a ratio that overflows; an advantage that is not finite; num_responses
            below 1 or below the rows of this call; shapes, offsets or devices that disagree.
        TypeError: a wrong dtype.

    Reference:
        FlashREINFORCE, https://github.com/yifanzhang-pro/FlashREINFORCE, "Sample-Mean Optimization", with its
        mask m_i = 1 and the advantages of the caller. GRPO, https://arxiv.org/abs/2402.03300, without its
        clipping, its division by the standard deviation and its KL term. TorchRL's ``GRPOLoss`` has the same
        gradient when ``aggregation="prompt_mean"``, no ratio reaches its clipping bounds and no row is empty.
        It differs in that: its *value* is -mean w A, since it differentiates the ratio itself; its default
        ``"token_mean"`` weighs a response by its length; B is the number of rows of the call; tokens whose
        behaviour log-prob is missing are dropped from T_i without a word, where we raise.

    Example:
        One response of one token, drawn with probability 0.2, now 0.3, with advantage 1: the weight is 1.5.

        >>> import torch
        >>> log_probs = torch.tensor([[0.3]]).log().requires_grad_()
        >>> behavior_log_probs, mask = torch.tensor([[0.2]]).log(), torch.tensor([[True]])
        >>> reinforce_loss(log_probs, behavior_log_probs, torch.tensor([1.0]), mask).backward()
        >>> log_probs.grad
        tensor([[-1.5000]])
    """
    function = "reinforce_loss"
    batch = open_tokens(function, log_probs, behavior_log_probs, mask, cu_seqlens)
    check_per_row(function, "advantages", advantages, num_rows=batch.num_rows, device=batch.mask.device)
    num_responses = check_num_responses(function, num_responses, num_rows=batch.num_rows)
    return weighted_sum(function, batch, advantages, num_responses=num_responses, check_values=check_values)


def weighted_sum(
    function: str, batch: TokenBatch, advantages: Tensor, *, num_responses: int, check_values: bool
) -> Tensor:
    """-(1/B) sum_i (1/T_i) sum_t w_it A_i log pi_it of an opened batch."""
    weights = token_weights(batch)
    if check_values:
        require_usable(function, batch, weights=weights, advantages=advantages)
    # The sum of a response without counted tokens is empty: dividing it by 1 keeps 0 / 0 out.
    lengths = batch.tokens_per_row().clamp(min=1)
    response_means = batch.sum_rows(weights * batch.log_probs) / lengths
    return -(advantages.detach().to(weights.dtype) * response_means).sum() / num_responses
