"""Three ways to lay out the tokens of B responses, one way to compute on them.

    padded   [B, T], a row per response              cu_seqlens is None
    packed   [N], the responses end to end           response i owns cu_seqlens[i] : cu_seqlens[i + 1]
    jagged   a nested tensor [B, *] (torch.jagged)   opened into its packed values and offsets

Every loss opens its arguments once with :func:`open_tokens` and then computes token by token on plain
tensors, so that a token's value and gradient do not depend on the layout it came in.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rzero.losses.checks import check_cu_seqlens, check_same_shape, check_token_dtypes

__all__ = ["TokenBatch", "open_tokens"]


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The tokens of B responses, padded [B, T] or packed [N], float32 or wider.

    Attributes:
        log_probs: log pi in nats, 0 where mask is False; carries the graph.
        behavior_log_probs: log mu, same shape and dtype; whatever was given where mask is False.
        mask: bool, same shape; True counts.
        cu_seqlens: [B + 1] int64 row offsets when packed, None when padded.
    """

    log_probs: Tensor
    behavior_log_probs: Tensor
    mask: Tensor
    cu_seqlens: Tensor | None

    @property
    def num_rows(self) -> int:
        """B, the number of responses in this call, those without a counted token included."""
        return len(self.mask) if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def log_ratio(self, *, masked: float, dtype: torch.dtype | None = None) -> Tensor:
        """Return log pi - log mu of every token, detached; ``masked`` where mask is False."""
        ratio = self.log_probs.detach().to(dtype) - self.behavior_log_probs.to(dtype)
        return ratio.masked_fill_(~self.mask, masked)

    def tokens_per_row(self) -> Tensor:
        """T_i, the number of counted tokens of each response, [B]; exact up to 2^24 of them."""
        return self.sum_rows(self.mask.float())

    def sum_rows(self, values: Tensor) -> Tensor:
        """sum_t values_it over all tokens of each response, [B] in the dtype of ``values``."""
        if self.cu_seqlens is None:
            return values.sum(-1)
        return torch.segment_reduce(values, "sum", offsets=self.cu_seqlens, unsafe=True)

    def max_rows(self, values: Tensor) -> Tensor:
        """The largest of the non-negative integers of each response, [B]; 0 for a response without tokens."""
        row = torch.arange(self.num_rows, device=values.device)
        row = self.spread(row).expand_as(values).flatten()
        return values.new_zeros(self.num_rows).scatter_reduce(0, row, values.flatten(), "amax")

    def spread(self, per_row: Tensor) -> Tensor:
        """Every token's share of its response's value: [B, 1] when padded, to broadcast; [N] when packed."""
        if self.cu_seqlens is None:
            return per_row[:, None]
        return per_row.repeat_interleave(self.cu_seqlens.diff(), output_size=len(self.mask))

    def keep_rows(self, kept: Tensor) -> "TokenBatch":
        """The same responses, of which only those that ``kept`` [B] names still have counted tokens."""
        mask = self.mask & self.spread(kept)
        return replace(self, mask=mask, log_probs=torch.where(mask, self.log_probs, 0.0))


def open_tokens(
    function: str, log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor, cu_seqlens: Tensor | None
) -> TokenBatch:
    """Check shapes, dtypes and devices, open nested tensors, promote, and blank what the mask excludes.

    Half precision is promoted to float32 before anything is subtracted, and mixed dtypes to the wider one.
    ``torch.where`` writes the zeros under a False mask, and its gradient there is an exact zero, so NaN or
    inf that stood there reach neither the value nor the gradient.

    Args:
        function: name of the public function, for error messages.
        log_probs: [B, T], [N] or nested, floating; log pi, differentiable.
        behavior_log_probs: same shape, floating; log mu.
        mask: same shape, bool.
        cu_seqlens: [B + 1] int32 or int64, required for packed [N], forbidden otherwise.

    Raises:
        TypeError: a dtype that the function does not take.
        ValueError: shapes or devices that disagree.
    """
    named = {"log_probs": log_probs, "behavior_log_probs": behavior_log_probs, "mask": mask}
    check_token_dtypes(function, **named)
    check_same_shape(function, **named)
    if log_probs.is_nested:
        named, cu_seqlens = _open_jagged(function, named, cu_seqlens)
    check_cu_seqlens(function, named["log_probs"], cu_seqlens)
    wide = torch.promote_types(log_probs.dtype, behavior_log_probs.dtype)
    wide = torch.promote_types(wide, torch.float32)
    return TokenBatch(
        log_probs=torch.where(named["mask"], named["log_probs"].to(wide), 0.0),
        behavior_log_probs=named["behavior_log_probs"].detach().to(wide),
        mask=named["mask"],
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )


def _open_jagged(
    function: str, named: dict[str, Tensor], cu_seqlens: Tensor | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Values and common offsets of nested tensors."""
    if cu_seqlens is not None:
        raise ValueError(
            f"{function}: cu_seqlens must be None with nested tensors, which have their own offsets"
        )
    for name, nested in named.items():
        if nested.layout != torch.jagged or nested.dim() != 2 or nested.lengths() is not None:  # pyright: ignore
            raise ValueError(
                f"{function}: {name} must be a contiguous nested tensor [B, *] of layout torch.jagged"
            )
    offsets = {name: nested.offsets() for name, nested in named.items()}  # pyright: ignore
    for name, other in offsets.items():
        if other is not offsets["log_probs"] and not torch.equal(other, offsets["log_probs"]):
            raise ValueError(f"{function}: {name} must have the row lengths of log_probs, got other offsets")
    return {name: nested.values() for name, nested in named.items()}, offsets["log_probs"]
