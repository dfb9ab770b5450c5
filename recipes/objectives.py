"""What an update minimises: the method, and the ablations that show why it is as it is.

Every objective pairs advantages with a loss, and each ablation changes one of the two. The numbers that the
log reports (ratio, effective sample size) are those of the recorded log-probabilities in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rzero.buffers import PackedBatch
from rzero.losses import (
    batch_mean_advantages,
    flash_reinforce_loss,
    group_mean_advantages,
    reinforce_loss,
    sequence_trust_mask,
)

CLIP_EPS = 0.2  # PPO's
TRUST_DELTA = 3e-3  # FlashREINFORCE's, in nats; the stricter one of the two that were published


@dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective.

    Attributes:
        advantages: Of a learner's share, the whole batch and the group size; float32 [B of the share].
        loss: Of log-probabilities [N], the share, its advantages [B] and the responses of the whole step;
            a scalar to be minimised. Losses of shares add up.
        admits: Which responses the loss counts, bool [B], from log-probabilities [N] and a batch; None: all.
    """

    advantages: Callable[[PackedBatch, PackedBatch, int], Tensor]
    loss: Callable[[Tensor, PackedBatch, Tensor, int], Tensor]
    admits: Callable[[Tensor, PackedBatch], Tensor] | None = None


def group_mean(share: PackedBatch, whole: PackedBatch, group_size: int) -> Tensor:
    """Rewards minus the mean of the group: what is easy for this prompt does not count."""
    return group_mean_advantages(share.reward, share.group_id, group_size=group_size)


def batch_mean(share: PackedBatch, whole: PackedBatch, group_size: int) -> Tensor:
    """Rewards minus the mean of the whole batch: an easy prompt is praised for being easy."""
    return batch_mean_advantages(whole.reward)[torch.isin(whole.uid, share.uid)]


def recorded_ratio(log_probs: Tensor, share: PackedBatch, advantages: Tensor, num_responses: int) -> Tensor:
    """The method: weighted by pi / mu, with mu as recorded where the token was drawn, never clipped."""
    return reinforce_loss(
        log_probs,
        share.behavior_log_probs,
        advantages,
        share.response_mask,
        cu_seqlens=share.cu_seqlens,
        num_responses=num_responses,
    )


def no_ratio(log_probs: Tensor, share: PackedBatch, advantages: Tensor, num_responses: int) -> Tensor:
    """-(1/B) sum_i (1/T_i) sum_t A_i log pi_it: as if the newest weights had drawn every token."""
    means = _response_means(log_probs, share)
    return -(advantages * means).sum() / num_responses


def recomputed_ratio(log_probs: Tensor, share: PackedBatch, advantages: Tensor, num_responses: int) -> Tensor:
    """The method's loss with mu recomputed by the learner, as trainers do that discard the sampler's.

    A batch makes one optimizer step, so the learner recomputes mu with the very weights that it is updating:
    every ratio is exactly 1, whatever the lag, and the gradient is that of ``no_ratio``. The denominator is a
    probability with which nothing was drawn.
    """
    return reinforce_loss(
        log_probs,
        log_probs.detach(),
        advantages,
        share.response_mask,
        cu_seqlens=share.cu_seqlens,
        num_responses=num_responses,
    )


def clipped_ratio(log_probs: Tensor, share: PackedBatch, advantages: Tensor, num_responses: int) -> Tensor:
    """-(1/B) sum_i (1/T_i) sum_t min(r A, clip(r, 1 - eps, 1 + eps) A), r = pi / mu, mu as recorded.

    Reference:
        PPO, https://arxiv.org/abs/1707.06347, equation 7, with the advantages and means of the method.
    """
    mask = share.response_mask
    ratio = torch.where(mask, log_probs - share.behavior_log_probs, 0.0).exp()
    per_token = advantages.repeat_interleave(share.cu_seqlens.diff())
    clipped = ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS)
    means = _response_means(torch.minimum(ratio * per_token, clipped * per_token), share)
    return -means.sum() / num_responses


def trusted_responses(
    log_probs: Tensor, share: PackedBatch, advantages: Tensor, num_responses: int
) -> Tensor:
    """The method's loss of the responses that FlashREINFORCE's gate admits."""
    return flash_reinforce_loss(
        log_probs,
        share.behavior_log_probs,
        advantages,
        share.response_mask,
        delta=TRUST_DELTA,
        cu_seqlens=share.cu_seqlens,
        num_responses=num_responses,
    )


def trusted(log_probs: Tensor, batch: PackedBatch) -> Tensor:
    """The decisions of FlashREINFORCE's gate."""
    return sequence_trust_mask(
        log_probs,
        batch.behavior_log_probs,
        batch.response_mask,
        delta=TRUST_DELTA,
        cu_seqlens=batch.cu_seqlens,
    )


OBJECTIVES = {
    "reinforce_zero": Objective(advantages=group_mean, loss=recorded_ratio),
    "no_importance_weight": Objective(advantages=group_mean, loss=no_ratio),
    "recomputed_behavior": Objective(advantages=group_mean, loss=recomputed_ratio),
    "ppo_clip": Objective(advantages=group_mean, loss=clipped_ratio),
    "batch_mean": Objective(advantages=batch_mean, loss=recorded_ratio),
    "trust_gate": Objective(advantages=group_mean, loss=trusted_responses, admits=trusted),
    "flash_reinforce": Objective(advantages=batch_mean, loss=trusted_responses, admits=trusted),
}


def _response_means(values: Tensor, share: PackedBatch) -> Tensor:
    """Mean over the counted tokens of each response, [B]; 0 for one without."""
    mask, offsets = share.response_mask, share.cu_seqlens.long()
    sums = torch.segment_reduce(torch.where(mask, values, 0.0), "sum", offsets=offsets)
    return sums / torch.segment_reduce(mask.float(), "sum", offsets=offsets).clamp(min=1)
