"""Attention over other layouts than padded ones: packed sequences, and a paged cache."""

import torch
from einops import rearrange
from torch import Tensor

from rzero.kernels.exact.attention_forward import attend
from rzero.kernels.exact.causal_attention import attention

__all__ = ["attention_paged", "attention_varlen"]


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    rounded_kv: bool = False,
) -> Tensor:
    """Causal attention inside each of B packed sequences; the last query stands at the last key.

    Invariance. The sequences are padded and go through ``attention``, whose bits do not depend on the
    padding.

    Args:
        query: [N, H, D] float32, bfloat16 or float16; receives gradient.
        key: [M, G, D], the dtype of ``query``; receives gradient.
        value: [M, G, D]; receives gradient.
        cu_seqlens_q: int [B+1], offsets of the sequences in ``query``, from 0 to N.
        cu_seqlens_k: int [B+1], offsets in ``key`` and ``value``, from 0 to M.
        scale: factor of the scores.
        rounded_kv: ``key`` and ``value`` come from ``round_kv``.

    Returns:
        [N, H, D], the dtype of ``query``.

    Raises:
        ValueError: shapes or offsets do not fit, or a sequence has more queries than keys.
        TypeError: dtypes differ or are not supported.

    Example:
        >>> q, k, v = torch.randn(3, 5, 2, 8).unbind()
        >>> both, second = torch.tensor([0, 3, 5]), torch.tensor([0, 2])
        >>> packed = attention_varlen(q, k, v, cu_seqlens_q=both, cu_seqlens_k=both, scale=1.0)
        >>> alone = attention_varlen(q[3:], k[3:], v[3:], cu_seqlens_q=second, cu_seqlens_k=second, scale=1.0)
        >>> torch.equal(packed[3:], alone)
        True
    """
    lengths_q = _lengths(cu_seqlens_q, query.shape[0], "cu_seqlens_q")
    lengths_k = _lengths(cu_seqlens_k, key.shape[0], "cu_seqlens_k")
    _check_lengths("attention_varlen", lengths_q, lengths_k)
    rows_q, columns_q = _places(lengths_q)
    rows_k, columns_k = _places(lengths_k)
    most_q, most_k = int(lengths_q.max()), int(lengths_k.max())

    def padded(x: Tensor, rows: Tensor, columns: Tensor, most: int) -> Tensor:
        empty = x.new_zeros(len(lengths_q), most, *x.shape[1:])
        return rearrange(empty.index_put((rows, columns), x), "b t h d -> b h t d")

    out = attention(
        padded(query, rows_q, columns_q, most_q),
        padded(key, rows_k, columns_k, most_k),
        padded(value, rows_k, columns_k, most_k),
        scale=scale,
        mask=_visible(lengths_q, lengths_k, most_q, most_k),
        rounded_kv=rounded_kv,
    )
    return rearrange(out, "b h t d -> b t h d")[rows_q, columns_q]


def attention_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    *,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    scale: float,
    rounded_kv: bool = False,
) -> Tensor:
    """Causal attention of packed queries over keys and values in pages, for sampling: no gradient.

    Invariance. The pages are gathered and go through the arithmetic of ``attention``, whose bits do not
    depend on the padding, so neither on the pages' size, order or neighbours.

    Token t of request b is in page page_table[b, t // S] at place t % S. The new keys and values are in the
    cache already; the last query stands at the last of the ``seqlens_k`` positions. What lies in other
    places, NaN included, has no effect.

    Args:
        query: [N, H, D] float32, bfloat16 or float16.
        key_pages: [P, S, G, D], the dtype of ``query``, any strides.
        value_pages: [P, S, G, D].
        page_table: int [B, W]; entries past a request's last page may hold anything.
        cu_seqlens_q: int [B+1], offsets of the requests in ``query``, from 0 to N.
        seqlens_k: int [B], tokens of each request in the cache, those of its queries included.
        scale: factor of the scores.
        rounded_kv: what was written to the pages came from ``round_kv``.

    Returns:
        [N, H, D], the dtype of ``query``.

    Raises:
        ValueError: shapes or lengths do not fit.
    """
    lengths_q = _lengths(cu_seqlens_q, query.shape[0], "cu_seqlens_q")
    lengths_k = seqlens_k.long()
    _check_lengths("attention_paged", lengths_q, lengths_k)
    size = key_pages.shape[1]
    most_q, most_k = int(lengths_q.max()), int(lengths_k.max())
    width = -(-most_k // size)
    if page_table.ndim != 2 or len(page_table) != len(lengths_k) or page_table.shape[1] < width:
        raise ValueError(
            f"attention_paged: page_table must have shape [{len(lengths_k)}, {width} or more], "
            f"got {list(page_table.shape)}"
        )
    used = torch.arange(width, device=query.device) * size < lengths_k[:, None]
    pages = torch.where(used, page_table[:, :width].long(), 0)
    rows, columns = _places(lengths_q)
    padded = query.new_zeros(len(lengths_q), most_q, *query.shape[1:]).index_put((rows, columns), query)
    with torch.no_grad():
        out = attend(
            rearrange(padded, "b t h d -> b h t d"),
            lambda part: (
                _gathered(key_pages, pages[part])[:, :, :most_k],
                _gathered(value_pages, pages[part])[:, :, :most_k],
            ),
            _visible(lengths_q, lengths_k, most_q, most_k),
            scale=scale,
            groups=key_pages.shape[2],
            keys=most_k,
            rounded_kv=rounded_kv,
        )
    return rearrange(out, "b h t d -> b t h d")[rows, columns]


def _gathered(pages: Tensor, index: Tensor) -> Tensor:
    """Pages [P, S, G, D] of each request, index [b, n], as [b, G, n S, D]; selecting copies whole rows."""
    selected = pages.transpose(1, 2).index_select(0, index.flatten())
    return rearrange(selected, "(b n) g s d -> b g (n s) d", b=len(index))


def _lengths(offsets: Tensor, total: int, name: str) -> Tensor:
    lengths = offsets.diff().long()
    if (
        offsets.ndim != 1
        or len(offsets) < 2
        or int(offsets[0])
        or int(offsets[-1]) != total
        or int(lengths.min()) < 0
    ):
        raise ValueError(f"attention: {name} must rise from 0 to {total}, got {offsets.tolist()}")
    return lengths


def _check_lengths(function: str, lengths_q: Tensor, lengths_k: Tensor) -> None:
    if lengths_q.shape != lengths_k.shape or bool((lengths_q > lengths_k).any()):
        raise ValueError(
            f"{function}: each sequence must have at least as many keys as queries, got "
            f"{lengths_k.tolist()} keys and {lengths_q.tolist()} queries"
        )


def _places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each packed token in the padded layout."""
    rows = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return rows, torch.arange(len(rows), device=lengths.device) - starts[rows]


def _visible(lengths_q: Tensor, lengths_k: Tensor, queries: int, keys: int) -> Tensor:
    """Bool [B, 1, queries, keys]: the last real query stands at the last real key, padding sees nothing."""
    query, key = (torch.arange(count, device=lengths_q.device) for count in (queries, keys))
    position = query + (lengths_k - lengths_q)[:, None]
    position = torch.where(query < lengths_q[:, None], position, -1)
    return (key <= position[..., None])[:, None]
