"""Every refusal of this package: what the arguments must be, and where exactly they are not."""

import math

import torch
from torch import Tensor

__all__ = [
    "check_cu_seqlens",
    "check_lag",
    "check_num_responses",
    "check_per_row",
    "check_same_shape",
    "check_token_dtypes",
    "check_token_values",
]


def _shape(tensor: Tensor) -> str:
    """A printable shape; nested tensors print their symbolic ragged dimension."""
    return f"({', '.join(str(size) for size in tensor.shape)})"


def check_token_dtypes(function: str, *, log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor) -> None:
    """Log-probs are floating, the mask is bool."""
    for name, tensor in (("log_probs", log_probs), ("behavior_log_probs", behavior_log_probs)):
        if not tensor.is_floating_point():
            raise TypeError(f"{function}: {name} must be floating, got {tensor.dtype}")
    if mask.dtype != torch.bool:
        raise TypeError(f"{function}: mask must be bool (True counts), got {mask.dtype}")


def check_same_shape(function: str, *, log_probs: Tensor, **others: Tensor) -> None:
    """All token tensors have the layout, shape and device of ``log_probs``."""
    for name, tensor in others.items():
        if tensor.is_nested != log_probs.is_nested:
            raise ValueError(f"{function}: {name} must be nested exactly when log_probs is, got one of each")
        if not tensor.is_nested and tensor.shape != log_probs.shape:
            raise ValueError(
                f"{function}: {name} must have shape {_shape(log_probs)} to match log_probs, "
                f"got {_shape(tensor)}"
            )
        if tensor.device != log_probs.device:
            raise ValueError(
                f"{function}: {name} must be on {log_probs.device} like log_probs, got {tensor.device}"
            )


def check_cu_seqlens(function: str, log_probs: Tensor, cu_seqlens: Tensor | None) -> None:
    """Packed tokens come with offsets that start at 0, never decrease and end at N; padded ones with none."""
    if cu_seqlens is None:
        if log_probs.ndim != 2:
            raise ValueError(
                f"{function}: log_probs must have shape [B, T], or [N] together with cu_seqlens, "
                f"got {_shape(log_probs)} and no cu_seqlens"
            )
        return
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function}: cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if log_probs.ndim != 1:
        raise ValueError(
            f"{function}: log_probs must have shape [N] when cu_seqlens is given, got {_shape(log_probs)}"
        )
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"{function}: cu_seqlens must have shape [B + 1], got {_shape(cu_seqlens)}")
    if cu_seqlens.device != log_probs.device:
        raise ValueError(f"{function}: cu_seqlens must be on {log_probs.device}, got {cu_seqlens.device}")


def check_per_row(function: str, name: str, values: Tensor, *, num_rows: int, device: torch.device) -> None:
    """One floating value for each response."""
    if not values.is_floating_point():
        raise TypeError(f"{function}: {name} must be floating, got {values.dtype}")
    if values.shape != (num_rows,):
        raise ValueError(f"{function}: {name} must have shape ({num_rows},), got {_shape(values)}")
    if values.device != device:
        raise ValueError(f"{function}: {name} must be on {device} like log_probs, got {values.device}")


def check_lag(function: str, lag: Tensor, mask: Tensor, num_rows: int) -> bool:
    """An integer for each token, or for each response; True if for each token."""
    if lag.is_floating_point() or lag.is_complex() or lag.dtype == torch.bool:
        raise TypeError(f"{function}: lag must be integer, got {lag.dtype}")
    if lag.device != mask.device:
        raise ValueError(f"{function}: lag must be on {mask.device} like log_probs, got {lag.device}")
    if lag.shape not in (mask.shape, (num_rows,)):
        raise ValueError(
            f"{function}: lag must have shape {_shape(mask)} like the tokens or ({num_rows},), "
            f"got {_shape(lag)}"
        )
    return lag.shape == mask.shape


def check_num_responses(function: str, num_responses: int | None, num_rows: int) -> int:
    """B, the global count if given, else that of this call; never less than the rows at hand."""
    if num_responses is None:
        num_responses = num_rows
    if isinstance(num_responses, bool) or not isinstance(num_responses, int):
        raise TypeError(f"{function}: num_responses must be an int, got {type(num_responses).__name__}")
    if num_responses < 1:
        raise ValueError(
            f"{function}: num_responses must be at least 1, got {num_responses}; "
            "a rank without responses passes the count of all ranks"
        )
    if num_responses < num_rows:
        raise ValueError(
            f"{function}: num_responses must count all responses of the optimizer step, "
            f"at least the {num_rows} of this call, got {num_responses}"
        )
    return num_responses


def check_token_values(
    function: str,
    log_probs: Tensor,
    behavior_log_probs: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor | None,
) -> None:
    """Refuse a counted token whose numbers cannot be used; everything is already 0 under a False mask.

    Three reductions and one synchronisation: NaN anywhere passes through ``amax``, so a healthy batch is
    recognised by the extremes of its tensors alone. Only an unhealthy one is searched for the place.
    """
    if log_probs.numel() == 0:
        return
    log_probs = log_probs.detach()
    healthy = (behavior_log_probs.amax() <= 0) & (log_probs.amin() > -math.inf) & (weights.amax() < math.inf)
    if not bool(healthy):
        raise _explain(function, log_probs, behavior_log_probs, weights, cu_seqlens)


def _explain(
    function: str, log_probs: Tensor, behavior_log_probs: Tensor, weights: Tensor, cu_seqlens: Tensor | None
) -> ValueError:
    """The error for the first token that broke a rule."""
    log_ratio = log_probs - behavior_log_probs
    limit = math.log(torch.finfo(log_ratio.dtype).max)
    rules = (
        ("behavior_log_probs", "be finite and at most 0", behavior_log_probs,
         ~(behavior_log_probs.isfinite() & (behavior_log_probs <= 0))),
        ("log_probs", "be finite", log_probs, ~log_probs.isfinite()),
        ("log_probs - behavior_log_probs", f"be at most {limit:.1f}, where exp overflows", log_ratio,
         ~(weights < math.inf)),
    )  # fmt: skip
    for name, rule, values, broken in rules:
        if bool(broken.any()):
            flat = int(broken.flatten().int().argmax())
            row, token = locate(flat, broken, cu_seqlens)
            count = int(broken.sum())
            return ValueError(
                f"{function}: {name} must {rule} on every counted token, got "
                f"{values.flatten()[flat].item():g} at row {row}, token {token} ({count} such in all)"
            )
    raise AssertionError("unreachable: a batch was found unhealthy without an unhealthy token")


def locate(flat: int, tokens: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """Row and position within the row of a flat token index."""
    if cu_seqlens is None:
        return divmod(flat, tokens.shape[-1])
    row = int((cu_seqlens[1:] <= flat).sum())
    return row, flat - int(cu_seqlens[row])
