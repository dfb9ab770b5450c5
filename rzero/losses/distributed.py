"""What the losses need to know of other ranks, gathered outside of them."""

from dataclasses import fields, replace

import torch
import torch.distributed as dist

from rzero.losses.diagnostics import ImportanceDiagnostics, RatioStatistics

__all__ = ["all_reduce_diagnostics", "global_num_responses"]


def global_num_responses(num_responses: int, *, group: dist.ProcessGroup | None = None) -> int:
    """The number of responses of the optimizer step over all ranks: B of the losses.

        B = sum over ranks of num_responses

    Every rank of the group calls this once per optimizer step, with the rows of all its micro-batches; a rank
    without responses calls it with 0. Without an initialised process group there is one rank.

    Args:
        num_responses: responses of this rank, at least 0.
        group: process group; None is the default one.

    Returns:
        The sum, the same on every rank.

    Raises:
        ValueError: num_responses below 0.
        TypeError: num_responses not an int.

    Example:
        >>> global_num_responses(128)
        128
    """
    if isinstance(num_responses, bool) or not isinstance(num_responses, int):
        raise TypeError(
            f"global_num_responses: num_responses must be an int, got {type(num_responses).__name__}"
        )
    if num_responses < 0:
        raise ValueError(f"global_num_responses: num_responses must be at least 0, got {num_responses}")
    if group is None and not dist.is_initialized():
        return num_responses
    total = torch.tensor(num_responses, dtype=torch.int64, device=_device(group))
    dist.all_reduce(total, group=group)
    return int(total)


def all_reduce_diagnostics(
    diagnostics: ImportanceDiagnostics, *, group: dist.ProcessGroup | None = None
) -> ImportanceDiagnostics:
    """Diagnostics of all ranks together, the same on every rank; a rank without tokens takes part as well.

    Args:
        diagnostics: this rank's record; ``max_lag`` is the same on all ranks.
        group: process group; None is the default one.

    Returns:
        A new record, on the device of the given one. Without an initialised process group, the given one.
    """
    if group is None and not dist.is_initialized():
        return diagnostics
    return replace(
        diagnostics,
        tokens=_reduce(diagnostics.tokens, group),
        responses=_reduce(diagnostics.responses, group),
        num_groups=_summed(diagnostics.num_groups, group),
        num_zero_variance_groups=_summed(diagnostics.num_zero_variance_groups, group),
    )


def _reduce(statistics: RatioStatistics, group: dist.ProcessGroup | None) -> RatioStatistics:
    """Sums added, maxima compared."""
    reduced = {}
    for field in fields(statistics):
        operation = dist.ReduceOp.MAX if field.name == "max_log_ratio" else dist.ReduceOp.SUM
        reduced[field.name] = _summed(getattr(statistics, field.name), group, operation)
    return RatioStatistics(**reduced)


def _summed(
    values: torch.Tensor,
    group: dist.ProcessGroup | None,
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> torch.Tensor:
    there = values.to(_device(group), copy=True)
    dist.all_reduce(there, op=operation, group=group)
    return there.to(values.device)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's backend wants its tensors."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
