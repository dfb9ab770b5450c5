"""Three ways to lay out the tokens of B responses, one way to compute on them.

    padded   [B, T], a row per response               cu_seqlens is None
    packed   [N], the responses end to end            response i owns cu_seqlens[i] : cu_seqlens[i + 1]
    jagged   a nested tensor [B, *] (torch.jagged)    opened into its packed values and offsets

Every function of this package opens its arguments once with :func:`open_tokens` and then computes on plain
tensors, elementwise, so that a token's value and gradient do not depend on the layout it came in.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rzero.losses.checks import check_cu_seqlens, check_same_shape, check_token_dtypes

__all__ = ["TokenBatch", "open_tokens"]


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The tokens of B responses, padded [B, T] or packed [N], free of anything under a False mask.

    Attributes:
        log_probs: learner's log-probs in nats, float32 or wider, 0 where mask is False; carries the graph.
        behavior_log_probs: the sampler's, same shape and dtype, 0 where mask is False; detached.
        mask: bool, same shape; True counts.
        cu_seqlens: [B + 1] integer row offsets when packed, None when padded.
    """

    log_probs: Tensor
    behavior_log_probs: Tensor
    mask: Tensor
    cu_seqlens: Tensor | None

    @property
    def num_rows(self) -> int:
        """B, the number of responses in this call, those without a single counted token included."""
        return len(self.log_probs) if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def tokens_per_row(self) -> Tensor:
        """T_i = sum_t mask_it, [B] int64: the number of sampled tokens of each response."""
        if self.cu_seqlens is None:
            return self.mask.sum(-1)
        running = torch.nn.functional.pad(self.mask.cumsum(0, dtype=torch.int32), (1, 0))
        return running[self.cu_seqlens].diff().long()

    def sum_rows(self, values: Tensor) -> Tensor:
        """sum_t values_it over all tokens of each response, [B] in the dtype of ``values``."""
        if self.cu_seqlens is None:
            return values.sum(-1)
        return torch.segment_reduce(values, "sum", offsets=self.cu_seqlens.long(), unsafe=True)

    def max_rows(self, values: Tensor) -> Tensor:
        """Largest of the non-negative integers of each response, [B]; 0 for a response without tokens."""
        if self.cu_seqlens is None:
            return values.amax(-1) if values.shape[-1] else values.new_zeros(len(values))
        row = self.spread(torch.arange(self.num_rows, device=values.device))
        return values.new_zeros(self.num_rows).scatter_reduce(0, row, values, "amax")

    def spread(self, per_row: Tensor) -> Tensor:
        """Give every token its response's value: [B] -> [B, 1] when padded (broadcasts), [N] when packed."""
        if self.cu_seqlens is None:
            return per_row[:, None]
        return per_row.repeat_interleave(self.cu_seqlens.diff(), output_size=len(self.mask))


def open_tokens(
    function: str, log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor, cu_seqlens: Tensor | None
) -> TokenBatch:
    """Check shapes, dtypes and devices, open nested tensors, promote, and blank what the mask excludes.

    Half precision is promoted to float32 before anything is subtracted, and mixed dtypes to the wider one.
    The zeros under a False mask are written by ``torch.where``, whose gradient there is an exact zero, so NaN
    or inf that stood there reach neither the value nor the gradient.

    Args:
        function: name of the public function, for error messages.
        log_probs: [B, T], [N] or nested, floating; learner, differentiable.
        behavior_log_probs: same shape, floating; the sampler's.
        mask: same shape, bool.
        cu_seqlens: [B + 1] integer, required for packed [N], forbidden otherwise.

    Raises:
        TypeError: a dtype that the function does not take.
        ValueError: shapes, offsets or devices that disagree.
    """
    named = {"log_probs": log_probs, "behavior_log_probs": behavior_log_probs, "mask": mask}
    check_token_dtypes(function, **named)
    check_same_shape(function, **named)
    if log_probs.is_nested:
        log_probs, behavior_log_probs, mask, cu_seqlens = _open_jagged(function, named, cu_seqlens)
    check_cu_seqlens(function, log_probs, cu_seqlens)
    wide = torch.promote_types(log_probs.dtype, behavior_log_probs.dtype)
    wide = torch.promote_types(wide, torch.float32)
    return TokenBatch(
        log_probs=torch.where(mask, log_probs.to(wide), 0.0),
        behavior_log_probs=torch.where(mask, behavior_log_probs.detach().to(wide), 0.0),
        mask=mask,
        cu_seqlens=cu_seqlens,
    )


def _open_jagged(function: str, named: dict[str, Tensor], cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """Values and the common offsets of nested tensors."""
    if cu_seqlens is not None:
        raise ValueError(
            f"{function}: cu_seqlens must be None for nested tensors, which carry offsets of their own"
        )
    offsets = named["log_probs"].offsets()
    for name, nested in named.items():
        if nested.layout != torch.jagged or nested.lengths() is not None:
            raise ValueError(f"{function}: {name} must be a contiguous nested tensor of layout torch.jagged")
        if not torch.equal(nested.offsets(), offsets):
            raise ValueError(f"{function}: {name} must have the row lengths of log_probs")
    return *(nested.values() for nested in named.values()), offsets
