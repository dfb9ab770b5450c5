"""FlashREINFORCE, the sibling for stale trajectories: the same loss behind a gate on whole responses."""

import math

from torch import Tensor

from rzero.losses.checks import check_num_responses, check_per_row
from rzero.losses.layout import TokenBatch, open_tokens
from rzero.losses.reinforce import weighted_sum
from rzero.losses.values import require_usable

__all__ = ["flash_reinforce_loss", "sequence_trust_mask"]

# The published gate clamps probabilities to [1e-6, 1 - 1e-6]; the same in logs.
_LOWEST_LOG_PROB, _HIGHEST_LOG_PROB = math.log(1e-6), math.log1p(-1e-6)


def sequence_trust_mask(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    mask: Tensor,
    *,
    delta: float,
    cu_seqlens: Tensor | None = None,
    check_values: bool = True,
) -> Tensor:
    """Which responses are still close enough to the policy that drew them.

        d_it = p log(p / q) + (1 - p) log((1 - p) / (1 - q)),  p = mu(a_it | h_it), q = pi_theta(a_it | h_it)
        m_i  = 1 if (1/T_i) sum_t d_it <= delta else 0

    d is the KL divergence between two coins, each of which shows "the sampled token" or "any other". p and q
    are clamped to [1e-6, 1 - 1e-6] here and nowhere else. One decision for the whole response, all its turns.

    Args:
        log_probs: [B, T], [N] with cu_seqlens, or nested; floating, nats; log pi. No gradient is taken.
        behavior_log_probs: same shape; log mu as recorded.
        mask: same shape, bool; True counts.
        delta: largest admitted mean of d, in nats, inclusive; published: 3e-3 and 5e-3; inf admits all.
        cu_seqlens: [B + 1] integer row offsets of packed tokens.
        check_values: refuse unusable numbers on counted tokens; one pass and one synchronisation.

    Returns:
        [B] bool, True is admitted; True for a response without a counted token.

    Raises:
        ValueError: delta negative or NaN; a log-prob that is not finite or a positive behaviour log-prob on a
            counted token; shapes, offsets or devices that disagree.
        TypeError: a wrong dtype.

    Reference:
        FlashREINFORCE, https://github.com/yifanzhang-pro/FlashREINFORCE, "Sequence Trust Region". We clamp
        log-probs instead of probabilities: the same gate, without the cancellation of 1 - p in float32.

    Example:
        The sampler drew its token with probability 0.5. A learner at 0.52 is admitted, one at 0.6 is not:
        d = 0.5 ln(0.25 / (q (1 - q))) is 0.0008 and 0.0204.

        >>> import torch
        >>> log_probs, behavior = torch.tensor([[0.52], [0.6]]).log(), torch.tensor([[0.5], [0.5]]).log()
        >>> sequence_trust_mask(log_probs, behavior, torch.ones(2, 1, dtype=torch.bool), delta=3e-3)
        tensor([ True, False])
    """
    function = "sequence_trust_mask"
    batch = open_tokens(function, log_probs, behavior_log_probs, mask, cu_seqlens)
    if check_values:
        require_usable(function, batch)
    return _trusted(function, batch, delta)


def flash_reinforce_loss(
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    delta: float,
    cu_seqlens: Tensor | None = None,
    num_responses: int | None = None,
    check_values: bool = True,
) -> Tensor:
    """:func:`reinforce_loss` of the responses that :func:`sequence_trust_mask` admits; B and T_i as before.

        loss = -(1/B) sum_i (m_i / T_i) sum_t  w_it * A_i * log pi_theta(a_it | h_it)

    A rejected response contributes nothing and stays in B. Made for one response per prompt, with
    :func:`batch_mean_advantages` over the whole step.

    Args:
        log_probs: [B, T], [N] with cu_seqlens, or nested; floating, nats; log pi. Only it gets a gradient.
        behavior_log_probs: same shape; log mu as recorded when the token was drawn.
        advantages: [B] floating.
        mask: same shape as log_probs, bool; True counts.
        delta: largest admitted mean of d, in nats, inclusive; inf admits everything.
        cu_seqlens: [B + 1] integer row offsets of packed tokens.
        num_responses: B over all ranks and micro-batches of the optimizer step; None: the rows of this call.
        check_values: refuse unusable numbers on counted tokens; two passes and two synchronisations.

    Returns:
        Scalar, float32 or wider, to be minimised.

    Raises:
        ValueError: as :func:`reinforce_loss`, except that a ratio may overflow in a rejected response; delta
            negative or NaN.
        TypeError: a wrong dtype.

    Reference:
        FlashREINFORCE, https://github.com/yifanzhang-pro/FlashREINFORCE. The published objective is
        J = (1/B) sum_i (m_i A_i / T_i) sum_t pi / mu; this loss is the detached-ratio form: the gradient of
        -J, another value. Released trainers clamp the log ratio to [-30, 30] first; we raise where the ratio
        overflows and clamp nothing. The reference code refuses a response without a counted token, which here
        is admitted and contributes 0.

    Example:
        >>> import torch
        >>> log_probs = torch.tensor([[0.52], [0.6]]).log().requires_grad_()
        >>> behavior, mask = torch.tensor([[0.5], [0.5]]).log(), torch.ones(2, 1, dtype=torch.bool)
        >>> flash_reinforce_loss(log_probs, behavior, torch.tensor([1.0, 1.0]), mask, delta=3e-3).backward()
        >>> log_probs.grad
        tensor([[-0.5200],
                [ 0.0000]])
    """
    function = "flash_reinforce_loss"
    batch = open_tokens(function, log_probs, behavior_log_probs, mask, cu_seqlens)
    check_per_row(function, "advantages", advantages, num_rows=batch.num_rows, device=batch.mask.device)
    num_responses = check_num_responses(function, num_responses, num_rows=batch.num_rows)
    if check_values:
        require_usable(function, batch)
    admitted = batch.keep_rows(_trusted(function, batch, delta))
    return weighted_sum(
        function, admitted, advantages, num_responses=num_responses, check_values=check_values
    )


def _trusted(function: str, batch: TokenBatch, delta: float) -> Tensor:
    """m_i of an opened batch, [B] bool."""
    if not delta >= 0:
        raise ValueError(f"{function}: delta must be at least 0, got {delta}")
    log_p, log_q = (
        log_probs.clamp(_LOWEST_LOG_PROB, _HIGHEST_LOG_PROB)
        for log_probs in (batch.behavior_log_probs.where(batch.mask, 0.0), batch.log_probs.detach())
    )
    other_p, other_q = -log_p.expm1(), -log_q.expm1()  # 1 - p and 1 - q, without cancellation near p = 1
    d = log_p.exp() * (log_p - log_q) + other_p * (other_p / other_q).log()
    # Under a False mask both log-probs were set to 0, and d is exactly 0 where they agree.
    return batch.sum_rows(d) / batch.tokens_per_row().clamp(min=1) <= delta
