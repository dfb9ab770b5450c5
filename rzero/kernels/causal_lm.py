"""The learner's forward: log-probabilities of packed tokens under a causal LM."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

WORTH_A_CALL = 512  # padded tokens, from which on another call of the model is worth it
TREE_TOKENS = 128  # most tokens of responses that follow one computation of their prompt
TAKES_ANY_MASK = ("sdpa", "rzero")  # attention implementations of transformers

Tree = list[int]
"""Rows with one trunk: their equal prompts, computed once; or one row, which is all trunk."""


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
        prompt_length: int [B] >= 1; if given, no token of a prompt is scored, and the model is called once
            for each batch of like lengths, so that one long row does not pad all others. On a CPU, under
            attention without a window, a prompt is also computed once for its responses, which follow it
            blind to one another. None computes every row alone, in one call, as FSDP2 needs it.
        log_softmax: Over the last dimension of float32 [M, V]; pass the one that the sampler uses.

    Returns:
        ``log_probs`` float32 [N] nats, with gradient, and ``entropies`` float32 [N] nats of the distributions
        that the scored tokens came from, without; both 0 where mask is False.

    Raises:
        ValueError: If the mask counts the first token of a row, or a token of a prompt.

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
    row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    position = torch.arange(len(token_ids), device=token_ids.device) - starts[row]
    unscored = torch.ones_like(lengths) if prompt_length is None else prompt_length.long()
    if (mask & (position < unscored[row])).any():
        what = "the first token of a row" if prompt_length is None else "every token of a prompt"
        raise ValueError(f"causal_lm_log_probs: mask must be False at {what}, got True")

    shared = prompt_length is not None and token_ids.device.type == "cpu" and _takes_any_mask(model)
    trunk = unscored if shared else lengths
    branch = (lengths - 1 - trunk).clamp(min=0)  # the last token predicts nothing
    trees = _trees(token_ids, starts, trunk, branch) if shared else [[i] for i in range(len(lengths))]
    scored = mask.nonzero()[:, 0]
    places, log_probs, entropies = [], [], []
    for part in [trees] if prompt_length is None else _batches_of_like_length(trees, trunk, branch):
        forest = _plant(part, starts, trunk, branch)
        place = scored if len(part) == len(trees) else scored[forest.tree[row[scored]] >= 0]
        logits = rearrange(_forward(model, token_ids, forest, shared=shared), "t l v -> (t l) v")
        before = forest.find(row[place], position[place] - 1)
        scores = log_softmax(logits.index_select(0, before).float() / temperature)
        places.append(place)
        log_probs.append(scores.gather(-1, token_ids[place, None].long())[:, 0])
        with torch.no_grad():
            probabilities = scores.exp()
            entropies.append(-torch.where(probabilities > 0, probabilities * scores, 0.0).sum(-1))
    where, empty = (torch.cat(places),), log_probs[0].new_zeros(len(mask))
    return empty.index_put(where, torch.cat(log_probs)), empty.index_put(where, torch.cat(entropies))


def _takes_any_mask(model: Any) -> bool:
    """Whether a model's attention follows a mask that the caller makes; one with windows makes its own."""
    config = getattr(model, "config", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    windows = getattr(config, "sliding_window", None) is not None or set(kinds) != {"full_attention"}
    return getattr(config, "_attn_implementation", None) in TAKES_ANY_MASK and not windows


def _trees(token_ids: Tensor, starts: Tensor, trunk: Tensor, branch: Tensor) -> list[Tree]:
    """Rows of equal trunks together, as long as their branches are not too long."""
    tokens, trees = token_ids.tolist(), []
    growing: dict[tuple[int, ...], tuple[Tree, int]] = {}  # by trunk: the last tree, tokens of its branches
    columns = (values.tolist() for values in (starts, trunk, branch))
    for i, (start, stem, more) in enumerate(zip(*columns, strict=True)):
        prompt = tuple(tokens[start : start + stem])
        tree, size = growing.get(prompt, ([], 0))
        if not tree or size + more > TREE_TOKENS:
            tree, size = [], 0
            trees.append(tree)
        tree.append(i)
        growing[prompt] = tree, size + more
    return trees


def _batches_of_like_length(trees: list[Tree], trunk: Tensor, branch: Tensor) -> list[list[Tree]]:
    """Trees by falling size, cut where that saves the most padding, as long as it saves enough."""
    stems, branches = trunk.tolist(), branch.tolist()
    sizes = torch.tensor([stems[tree[0]] + sum(branches[i] for i in tree) for tree in trees])

    def cut(some: Tensor) -> list[Tensor]:
        saved = torch.arange(len(some), 0, -1) * (sizes[some[0]] - sizes[some])
        best = int(saved.argmax())
        return [some] if saved[best] < WORTH_A_CALL else [*cut(some[:best]), *cut(some[best:])]

    order = sizes.argsort(descending=True, stable=True)
    return [[trees[i] for i in some.tolist()] for some in cut(order)]


class _Forest(NamedTuple):
    """T trees of at most L tokens, and where the B rows are in them.

    Attributes:
        source: int64 [T, L], places of the tokens in the packed batch; 0 where there is none.
        position: int64 [T, L], places of the tokens in their rows.
        branch: int64 [T, L], to which row a token belongs; ``TRUNK`` to all, ``NOBODY`` where there is none.
        tree: int64 [B], the tree of a row; -1 if it is in none.
        trunk: int64 [B], how many of a row's tokens are in the trunk.
        shift: int64 [B], how much further back its other tokens are in the tree than in the row.
    """

    source: Tensor
    position: Tensor
    branch: Tensor
    tree: Tensor
    trunk: Tensor
    shift: Tensor

    def find(self, row: Tensor, position: Tensor) -> Tensor:
        """Where tokens of rows are, counted through all trees."""
        column = torch.where(position < self.trunk[row], position, position + self.shift[row])
        return self.tree[row] * self.source.shape[1] + column


TRUNK, NOBODY = -1, -2


def _plant(trees: list[Tree], starts: Tensor, trunk: Tensor, branch: Tensor) -> _Forest:
    """Put the trunk of each tree first, then its branches, one after the other."""
    device = starts.device
    rows = torch.tensor(list(chain(*trees)), device=device)
    sizes = torch.tensor([len(tree) for tree in trees], device=device)
    tree = torch.arange(len(trees), device=device).repeat_interleave(sizes)
    first = tree.diff(prepend=tree.new_tensor([-1])) > 0  # row of its tree: it brings the trunk
    begin = torch.where(first, 0, trunk[rows])
    count = torch.where(first, trunk[rows], 0) + branch[rows]
    end = count.cumsum(0)
    offset = end - count - (end - count)[first][tree]  # of a row's tokens in its tree

    token = torch.arange(len(rows), device=device).repeat_interleave(count)
    position = torch.arange(len(token), device=device) - (end - count - begin)[token]
    where = tree[token], position + (offset - begin)[token]
    shape = len(trees), int((offset + count).max())

    def spread(values: Tensor, empty: int) -> Tensor:
        return values.new_full(shape, empty).index_put_(where, values)

    return _Forest(
        source=spread(starts[rows][token] + position, 0),
        position=spread(position, 0),
        branch=spread(torch.where(position < trunk[rows][token], TRUNK, rows[token]), NOBODY),
        tree=torch.full_like(trunk, -1).index_put_((rows,), tree),
        trunk=trunk,
        shift=torch.zeros_like(trunk).index_put_((rows,), offset - begin),
    )


def _forward(model: Any, token_ids: Tensor, forest: _Forest, *, shared: bool) -> Tensor:
    """Logits [T, L, V]; a token sees those before it in the trunk and in its own branch."""
    real = forest.branch != NOBODY
    ids = torch.where(real, token_ids[forest.source].long(), 0)
    if not shared:
        return model(input_ids=ids, attention_mask=real.long(), use_cache=False).logits
    own = rearrange(forest.branch, "t q -> t 1 q 1") == rearrange(forest.branch, "t k -> t 1 1 k")
    seen = (own | rearrange(forest.branch == TRUNK, "t k -> t 1 1 k")).tril()
    return model(input_ids=ids, attention_mask=seen, position_ids=forest.position, use_cache=False).logits
