"""The learner's forward: log-probabilities of packed tokens under a causal LM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def causal_lm_log_probs(
    model: Any,
    token_ids: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    *,
    temperature: float,
    log_softmax: Callable[[Tensor], Tensor] = lambda logits: torch.log_softmax(logits, dim=-1),
) -> tuple[Tensor, Tensor]:
    """Score packed rows with a causal LM, at the temperature that they were sampled with.

        log_probs[t] = log_softmax(logits(token_ids[start .. t-1]) / temperature)[token_ids[t]]   where
        mask[t]

    Args:
        model: A Hugging Face causal LM: ``model(input_ids, attention_mask).logits``.
        token_ids: int [N], rows end to end.
        cu_seqlens: int [B + 1], row offsets.
        mask: bool [N]; tokens to score. Never the first token of a row, which nothing precedes.
        temperature: Greater than 0; the logits are divided by it, as in the sampler.
        log_softmax: Over the last dimension of float32 [M, V]; pass the one that the sampler uses.

    Returns:
        ``log_probs`` float32 [N] nats, with gradient, and ``entropies`` float32 [N] nats of the distributions
        that the scored tokens came from, without; both 0 where mask is False.

    Raises:
        ValueError: If the mask counts the first token of a row.

    Example:
        >>> class Uniform(torch.nn.Module):
        ...     def forward(self, input_ids, attention_mask):
        ...         return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 4)})
        >>> ids, mask = torch.tensor([1, 2, 3]), torch.tensor([False, True, True])
        >>> log_probs, _ = causal_lm_log_probs(Uniform(), ids, torch.tensor([0, 3]), mask, temperature=1.0)
        >>> log_probs
        tensor([ 0.0000, -1.3863, -1.3863])
    """
    starts = cu_seqlens[:-1].long()
    if mask[starts].any():
        row = int(mask[starts].nonzero()[0])
        raise ValueError(
            f"causal_lm_log_probs: mask must be False at the first token of a row, got True in row {row}"
        )
    lengths = cu_seqlens.diff().long()
    width = int(lengths.max())
    column = torch.arange(width, device=token_ids.device)
    real = column < lengths[:, None]
    padded = torch.zeros_like(real, dtype=torch.long).masked_scatter(real, token_ids.long())
    logits = model(input_ids=padded, attention_mask=real.long()).logits

    counted = torch.zeros_like(real).masked_scatter(real, mask)
    row, position = counted.nonzero(as_tuple=True)
    scores = log_softmax(logits[row, position - 1].float() / temperature)
    selected = scores.gather(-1, padded[row, position, None])[:, 0]
    with torch.no_grad():
        probabilities = scores.exp()
        entropy = -torch.where(probabilities > 0, probabilities * scores, 0.0).sum(-1)
    where = mask.nonzero()[:, 0]
    empty = selected.new_zeros(len(mask))
    return empty.index_put((where,), selected), empty.index_put((where,), entropy)
