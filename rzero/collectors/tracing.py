"""Checksums of what every module of a model puts out, row by row: to find where two computations part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rzero.collectors.hashing import splitmix64


def row_checksums(tensor: Tensor) -> Tensor:
    """64-bit checksums of the bits along the last dimension.

    Each element's bit pattern is hashed together with its index and the hashes are added modulo 2^64, so that
    no order of summation can change the result.

    Args:
        tensor: [..., K], elements of 1, 2, 4 or 8 bytes.

    Returns:
        int64 [...].

    Example:
        >>> row_checksums(torch.tensor([[0.0, 1.0], [0.0, 1.0], [-0.0, 1.0]])).unique().numel()
        2
    """
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    words = tensor.detach().contiguous().view(integer).to(torch.int64)
    index = torch.arange(words.shape[-1], device=words.device)
    return splitmix64(words ^ splitmix64(index)).sum(-1)


class _Observer:
    """A forward hook of one module; aligned modules also hand it what their ops put out, as these run."""

    def __init__(self, trace: dict[str, Tensor], name: str) -> None:
        self._trace, self._name = trace, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for name, value in ((f"{self._name}:input", args), (self._name, output)):
            first = value[0] if isinstance(value, tuple) and value else value
            if isinstance(first, Tensor) and first.ndim == 3:
                self._trace[name] = row_checksums(first)

    def observe(self, op: str, rows: Tensor) -> None:
        """Record [n, t, ...], the output of ``op`` inside of the module."""
        self._trace[f"{self._name}:{op}"] = row_checksums(rows.flatten(2))


@contextmanager
def traced(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the outputs of all modules of a model, and of the ops in them, while the block runs one forward.

    The computation stays what it is: modules of which an op runs several at once are recorded as that op.

    Yields:
        Filled during the forward, in the order of computation: module name, or ``module name:op`` for the ops
        that an aligned module names (rzero.kernels.align), to int64 [n, t] checksums of the rows of its
        output; ``module name:input`` is what went in, which shows what was computed between two modules.
        Recorded are tensors [n, t, K] that come first.
    """
    trace: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(_Observer(trace, name)) for name, module in model.named_modules() if name
    ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
