"""The one pass that decides whether the numbers of a batch can be used, and says which one cannot."""

import math

import torch
from torch import Tensor

from rzero.losses.checks import locate
from rzero.losses.layout import TokenBatch

__all__ = ["require_offsets", "require_usable"]


def require_usable(
    function: str, batch: TokenBatch, *, weights: Tensor | None = None, advantages: Tensor | None = None
) -> None:
    """Refuse a counted token whose numbers cannot be used, at one fused pass and one synchronisation.

        -inf < log mu <= 0        -inf < log pi < inf        exp(log pi - log mu) < inf

    Comparisons with NaN are false, so a missing number fails them too. What stands under a False mask is not
    looked at.

    Args:
        function: name of the public function, for the message.
        batch: opened tokens.
        weights: importance weights of the batch, if they are to be used.
        advantages: [B], if they are to be used.

    Raises:
        ValueError: naming function, argument, row and token.
    """
    behavior, learner = batch.behavior_log_probs, batch.log_probs.detach()
    usable = (behavior > -math.inf) & (behavior <= 0) & (learner > -math.inf) & (learner < math.inf)
    if weights is not None:
        usable &= weights < math.inf
    usable |= ~batch.mask
    healthy = usable.all()
    if advantages is not None:
        healthy = healthy & advantages.isfinite().all()
    if batch.cu_seqlens is not None:
        healthy = healthy & _in_order(batch.cu_seqlens, len(batch.mask))
    if not bool(healthy):
        require_offsets(function, batch)
        raise ValueError(f"{function}: {_reason(batch, usable, advantages)}")


def require_offsets(function: str, batch: TokenBatch) -> None:
    """Refuse packed offsets that do not cover the tokens; one synchronisation."""
    if batch.cu_seqlens is not None and not bool(_in_order(batch.cu_seqlens, len(batch.mask))):
        raise ValueError(
            f"{function}: cu_seqlens must start at 0, never decrease and end at N = {len(batch.mask)}, "
            f"got {batch.cu_seqlens.tolist()}"
        )


def _in_order(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """0-d bool: offsets start at 0, never decrease and end at N."""
    return (cu_seqlens[0] == 0) & (cu_seqlens[-1] == num_tokens) & (cu_seqlens.diff() >= 0).all()


def _reason(batch: TokenBatch, usable: Tensor, advantages: Tensor | None) -> str:
    """What the first offender should have been, and where it is."""
    if bool(usable.all()) and advantages is not None:
        row = int(advantages.isfinite().int().argmin())
        return f"advantages must be finite, got {advantages[row].item()} at row {row}"
    flat = int(usable.flatten().int().argmin())
    row, token = locate(flat, usable, batch.cu_seqlens)
    behavior = batch.behavior_log_probs.flatten()[flat].item()
    learner = batch.log_probs.detach().flatten()[flat].item()
    where = f"at row {row}, token {token} ({int((~usable).sum())} unusable in all)"
    if not -math.inf < behavior <= 0:
        return f"behavior_log_probs must be finite and at most 0 on a counted token, got {behavior} {where}"
    if not math.isfinite(learner):
        return f"log_probs must be finite on a counted token, got {learner} {where}"
    limit = math.log(torch.finfo(batch.log_probs.dtype).max)
    return (
        f"log_probs must exceed behavior_log_probs by less than {limit:.1f}, where the ratio overflows, "
        f"got {learner} and {behavior} {where}"
    )
