"""The learner's forward: log-probabilities of packed tokens under a causal LM."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WORTH_A_CALL = 512  # padded tokens, from which on another call of the model is worth it


def causal_lm_log_probs(
    model: Any,
    token_ids: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    *,
    temperature: float,
    prompt_length: Tensor | None = None,
    log_softmax: Callable[[Tensor], Tensor] = lambda logits: torch.log_softmax(logits, dim=-1),
) -> tuple[Tensor, Tensor]:
    """Score packed rows with a causal LM, at the temperature that they were sampled with.

        log_probs[t] = log_softmax(logits(token_ids[start .. t-1]) / temperature)[token_ids[t]]   where
        mask[t]

    Args:
        model: A Hugging Face causal LM.
        token_ids: int [N], rows end to end.
        cu_seqlens: int [B + 1], row offsets.
        mask: bool [N]; tokens to score. Never the first token of a row, which nothing precedes.
        temperature: Greater than 0; the logits are divided by it, as in the sampler.
        prompt_length: int [B] >= 1; if given, keys and values of equal prompts are computed once and shared
            by their rows, no token of a prompt is scored, and rows of very different lengths are not padded
            to one: the model is called once for each batch of like rows. None computes every row alone, in
            one call, as FSDP2 needs it.
        log_softmax: Over the last dimension of float32 [M, V]; pass the one that the sampler uses.

    Returns:
        ``log_probs`` float32 [N] nats, with gradient, and ``entropies`` float32 [N] nats of the distributions
        that the scored tokens came from, without; both 0 where mask is False.

    Raises:
        ValueError: If the mask counts the first token of a row, or a token of a shared prompt.

    Example:
        >>> class Uniform(torch.nn.Module):
        ...     def forward(self, input_ids, attention_mask, **kwargs):
        ...         return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 4)})
        >>> ids, mask = torch.tensor([1, 2, 3]), torch.tensor([False, True, True])
        >>> log_probs, _ = causal_lm_log_probs(Uniform(), ids, torch.tensor([0, 3]), mask, temperature=1.0)
        >>> log_probs
        tensor([ 0.0000, -1.3863, -1.3863])
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    skipped = torch.zeros_like(lengths) if prompt_length is None else prompt_length.long() - 1
    offset = torch.arange(len(token_ids), device=token_ids.device) - starts.repeat_interleave(lengths)
    if (mask & (offset <= skipped.repeat_interleave(lengths))).any():
        what = "the first token of a row" if prompt_length is None else "every token of a prompt"
        raise ValueError(f"causal_lm_log_probs: mask must be False at {what}, got True")

    prefixes, which = _distinct_prefixes(_pad(token_ids, starts, lengths), skipped)
    past = _prefill(model, prefixes) if prefixes else None
    first, size = starts + skipped, lengths - skipped  # of the rows' ends, which are computed row by row
    places, log_probs, entropies = [], [], []
    for rows in [slice(None)] if prompt_length is None else _batches_of_like_length(size):
        tails = _pad(token_ids, first[rows], size[rows])
        logits = _forward_tails(model, tails, size[rows], skipped[rows], past, which[rows])
        row, column = _pad(mask, first[rows], size[rows]).nonzero(as_tuple=True)
        scores = log_softmax(logits[row, column - 1].float() / temperature)
        places.append(first[rows][row] + column)
        log_probs.append(scores.gather(-1, tails[row, column, None])[:, 0])
        with torch.no_grad():
            probabilities = scores.exp()
            entropies.append(-torch.where(probabilities > 0, probabilities * scores, 0.0).sum(-1))
    where, empty = (torch.cat(places),), log_probs[0].new_zeros(len(mask))
    return empty.index_put(where, torch.cat(log_probs)), empty.index_put(where, torch.cat(entropies))


def _batches_of_like_length(lengths: Tensor) -> list[Tensor]:
    """Rows by falling length, cut where that saves the most padding, as long as it saves enough."""

    def cut(rows: Tensor) -> list[Tensor]:
        sizes = lengths[rows]
        saved = torch.arange(len(rows), 0, -1, device=rows.device) * (sizes[0] - sizes)
        best = int(saved.argmax())
        return [rows] if saved[best] < WORTH_A_CALL else [*cut(rows[:best]), *cut(rows[best:])]

    return cut(lengths.argsort(descending=True, stable=True))


def _pad(values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Rows of packed values, padded on the right: int64 with 0, bool with False."""
    column = torch.arange(int(lengths.max()), device=values.device)
    real = column < lengths[:, None]
    index = torch.where(real, starts[:, None] + column, 0)
    padded = values[index] if values.dtype == torch.bool else values[index].long()
    return torch.where(real, padded, torch.zeros_like(padded))


def _distinct_prefixes(rows: Tensor, skipped: Tensor) -> tuple[list[Tensor], Tensor]:
    """The different non-empty beginnings of rows, and for each row which one it has."""
    if not skipped.any():
        return [], torch.zeros_like(skipped)
    seen: dict[tuple[int, ...], int] = {}
    listed = zip(rows.tolist(), skipped.tolist(), strict=True)
    which = [seen.setdefault(tuple(row[:count]), len(seen)) for row, count in listed]
    return [torch.tensor(p, device=rows.device) for p in seen], torch.tensor(which, device=rows.device)


def _prefill(model: Any, prefixes: list[Tensor]) -> Any:
    """Keys and values of prompts, all but their last tokens, with gradient."""
    ids = torch.nn.utils.rnn.pad_sequence(prefixes, batch_first=True).long()
    # An empty prompt sees its own padding, whose keys nobody reads, so that no softmax is over nothing.
    lengths = torch.tensor([max(1, len(prefix)) for prefix in prefixes], device=ids.device)
    real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return model(input_ids=ids, attention_mask=real.long(), use_cache=True, logits_to_keep=1).past_key_values


def _forward_tails(
    model: Any, tails: Tensor, lengths: Tensor, skipped: Tensor, past: Any, which: Tensor
) -> Tensor:
    """Logits [B, T, V] of the rows' ends, which see the cached beginning of their own row."""
    column = torch.arange(tails.shape[1], device=tails.device)
    real = column < lengths[:, None]
    if past is None:
        return model(input_ids=tails, attention_mask=real.long(), use_cache=False).logits
    past = copy.copy(past)  # of the list; the tensors are shared
    past.layers = [copy.copy(layer) for layer in past.layers]
    past.batch_select_indices(which)
    cached = torch.arange(past.get_seq_length(), device=tails.device) < skipped[:, None]
    return model(
        input_ids=tails,
        attention_mask=torch.cat([cached, real], dim=1).long(),
        position_ids=skipped[:, None] + column,
        past_key_values=past,
        use_cache=True,
    ).logits
