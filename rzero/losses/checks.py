"""Every refusal of this package: what the arguments must be, and where exactly they are not."""

import torch
from torch import Tensor

__all__ = [
    "check_cu_seqlens",
    "check_integer_rows",
    "check_lag",
    "check_num_responses",
    "check_per_row",
    "check_same_shape",
    "check_token_dtypes",
    "locate",
    "shape_of",
]


def check_token_dtypes(function: str, *, log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor) -> None:
    """All are tensors, log-probs floating, the mask bool."""
    named = {"log_probs": log_probs, "behavior_log_probs": behavior_log_probs, "mask": mask}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {name} must be a tensor, got {type(tensor).__name__}")
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
                f"{function}: {name} must have shape {shape_of(log_probs)} to match log_probs, "
                f"got {shape_of(tensor)}"
            )
        _check_device(function, name, tensor, log_probs.device)


def check_cu_seqlens(function: str, log_probs: Tensor, cu_seqlens: Tensor | None) -> None:
    """Packed [N] tokens come with integer offsets [B + 1], padded [B, T] ones without."""
    if cu_seqlens is None:
        if log_probs.ndim != 2:
            raise ValueError(
                f"{function}: log_probs must have shape [B, T], or [N] together with cu_seqlens, "
                f"got {shape_of(log_probs)} and no cu_seqlens"
            )
        return
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function}: cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if log_probs.ndim != 1:
        raise ValueError(
            f"{function}: log_probs must be [N] beside cu_seqlens, got shape {shape_of(log_probs)}"
        )
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"{function}: cu_seqlens must have shape [B + 1], got {shape_of(cu_seqlens)}")
    _check_device(function, "cu_seqlens", cu_seqlens, log_probs.device)


def check_per_row(function: str, name: str, values: Tensor, *, num_rows: int, device: torch.device) -> None:
    """One floating value for each response."""
    if not values.is_floating_point():
        raise TypeError(f"{function}: {name} must be floating, got {values.dtype}")
    if values.shape != (num_rows,):
        raise ValueError(
            f"{function}: {name} must have shape ({num_rows},), one for each response, got {shape_of(values)}"
        )
    _check_device(function, name, values, device)


def check_integer_rows(function: str, name: str, values: Tensor, like: Tensor) -> None:
    """One integer for each response of ``like``."""
    _check_integer(function, name, values)
    if values.shape != like.shape:
        raise ValueError(f"{function}: {name} must have shape {shape_of(like)}, got {shape_of(values)}")
    _check_device(function, name, values, like.device)


def check_lag(function: str, lag: Tensor, *, mask: Tensor, num_rows: int) -> None:
    """One integer for each token, or one for each response."""
    _check_integer(function, "lag", lag)
    if lag.shape not in (mask.shape, (num_rows,)):
        raise ValueError(
            f"{function}: lag must have shape {shape_of(mask)} like the tokens or ({num_rows},), "
            f"got {shape_of(lag)}"
        )
    _check_device(function, "lag", lag, mask.device)


def check_num_responses(function: str, num_responses: int | None, *, num_rows: int) -> int:
    """B: the global count if given, else that of this call; never less than the rows at hand."""
    if num_responses is None:
        num_responses = num_rows
    if isinstance(num_responses, bool) or not isinstance(num_responses, int):
        raise TypeError(f"{function}: num_responses must be an int, got {type(num_responses).__name__}")
    if num_responses < 1:
        raise ValueError(
            f"{function}: num_responses must be at least 1, got {num_responses}; "
            "a rank without responses passes the count over all ranks"
        )
    if num_responses < num_rows:
        raise ValueError(
            f"{function}: num_responses must count every response of the optimizer step, "
            f"at least the {num_rows} of this call, got {num_responses}"
        )
    return num_responses


def locate(flat: int, tokens: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """Row, and position within the row, of a flat token index."""
    if cu_seqlens is None:
        return divmod(flat, tokens.shape[-1])
    row = int((cu_seqlens[1:] <= flat).sum())
    return row, flat - int(cu_seqlens[row])


def shape_of(tensor: Tensor) -> str:
    """A shape as error messages print it."""
    return str(tuple(tensor.shape))


def _check_integer(function: str, name: str, values: Tensor) -> None:
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{function}: {name} must be integer, got {values.dtype}")


def _check_device(function: str, name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{function}: {name} must be on {device} like the rest, got {tensor.device}")
