"""How attention is cut into blocks of queries, and which keys a block may see. No bit depends on the cut."""

import math

import torch
from torch import Tensor

__all__ = ["cap_scores", "query_blocks"]


def query_blocks(mask: Tensor | None, *, queries: int, keys: int) -> list[tuple[slice, int]]:
    """Blocks of queries, and for each how many keys there are up to the last that it or one before it sees.

    Small enough for causal ones to skip most of the keys that they cannot see.

    Args:
        mask: Bool [B, 1 or H, Tq, Tk], or None for causal, the last query at the last key.
        queries: Tq.
        keys: Tk.
    """
    size = next(size for size in (16, 32, 64) if queries <= 4 * size or size == 64)
    parts = [slice(first, min(queries, first + size)) for first in range(0, queries, size)]
    if mask is None or queries == 1:
        return [(part, part.stop + keys - queries) for part in parts]
    seen = mask.flatten(0, 1).any(0)
    seen = torch.stack([seen[part].any(0) for part in parts])
    last = (seen * torch.arange(1, keys + 1, device=mask.device)).amax(1).cummax(0).values
    return list(zip(parts, last.clamp_(min=1).tolist(), strict=True))


def cap_scores(scores: Tensor, mask: Tensor | None, part: slice, reach: int, groups: int) -> Tensor | None:
    """Add -inf to the scores of keys that may not be seen.

    Args:
        scores: [b G, H/G Tq, reach]; changed in place.
        mask: Bool [b, 1 or H, Tq, Tk], or None for causal.
        part: Which queries of the mask.
        reach: How many keys.
        groups: G.

    Returns:
        What may be seen, bool, broadcastable to [b, G, H/G, Tq, reach]; None for everything.
    """
    queries = part.stop - part.start
    if mask is not None:
        seen = mask[:, :, part, :reach]
        seen = seen.unflatten(1, (groups, -1)) if seen.shape[1] > 1 else seen[:, :, None]
    elif queries == 1:
        return None
    else:
        seen = scores.new_ones(queries, reach, dtype=torch.bool).tril_(reach - queries)[None, None, None]
    scores.view(-1, groups, scores.shape[1] // queries, queries, reach).add_(
        torch.where(seen, 0.0, -math.inf)
    )
    return seen
