"""The ranks that learn: one, or several that share the model and each batch by FSDP2."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rzero.buffers import ROW_FIELDS, TOKEN_FIELDS, PackedBatch
from rzero.collectors import named_weights
from rzero.collectors.transport import Message, decode, encode

BATCH_FIELDS = (*TOKEN_FIELDS, "cu_seqlens", *ROW_FIELDS, "digest")


@final
class Learners:
    """The ranks 0 to ``size - 1``; rank 0 collects, and all of them learn from what it collected.

    Every learner makes the same calls in the same order.

    Args:
        size: How many ranks learn; with 1 nothing is communicated.
        saving_group: The same ranks as a group that nothing but checkpoints uses, if there are several.
        device: Where they compute; ``cuda`` is the GPU of the rank's number on its machine. Batches and
            weights travel on the CPU.
    """

    def __init__(
        self, size: int, saving_group: dist.ProcessGroup | None = None, *, device: str = "cpu"
    ) -> None:
        self.size, self.saving_group = size, saving_group
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device(device, int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        self._mesh = DeviceMesh(device, list(range(size))) if size > 1 else None

    @property
    def first(self) -> bool:
        """Whether this rank is the one that collects."""
        return self.rank == 0

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Let rank 0 run a block before the others do, e.g. because it fills a cache."""
        if self._mesh is not None and not self.first:
            dist.barrier(self._mesh.get_group())
        yield
        if self._mesh is not None and self.first:
            dist.barrier(self._mesh.get_group())

    def agree(self, text: str | None) -> str:
        """Rank 0's text, on every learner; None on the others."""
        if self._mesh is None:
            return str(text)
        data = None if text is None else torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return bytes(self._broadcast_bytes(data).tolist()).decode()

    def shard(self, model: Any, *, compute_dtype: torch.dtype | None = None) -> None:
        """Spread parameters, gradients and optimizer state over the learners, layer by layer, in place.

        Args:
            model: A causal LM.
            compute_dtype: Forward and backward compute in it, from weights that are kept in their own dtype;
                None for the model's. Gradients are added up over ranks in float32.
        """
        if self._mesh is not None:
            precision = MixedPrecisionPolicy(
                param_dtype=compute_dtype,
                reduce_dtype=None if compute_dtype is None else torch.float32,
                cast_forward_inputs=False,  # or rotary angles are rounded, which no sampler does
            )
            for layer in model.model.layers:
                fully_shard(layer, mesh=self._mesh, mp_policy=precision)
            fully_shard(model, mesh=self._mesh, mp_policy=precision)

    def next_batch(self, batches: Iterator[PackedBatch] | None) -> PackedBatch:
        """Rank 0's next batch, on every learner.

        Args:
            batches: On rank 0; None on the others.
        """
        batch = None if batches is None else next(batches)
        if self._mesh is not None:
            return self._broadcast(batch)
        if batch is None:
            raise ValueError("Learners.next_batch: batches must be given on rank 0, got None")
        return batch

    def share(self, batch: PackedBatch, *, group_size: int) -> PackedBatch:
        """The whole groups of a batch that this learner computes, on its device.

        Args:
            batch: The same on every learner, with the responses of a group beside each other.
            group_size: Responses of a group.
        """
        first, end = self._rows(batch, group_size, self.rank)
        share = batch if self.size == 1 else _slice(batch, first, end)
        return share if self.device.type == "cpu" else share.to(self.device)

    def micro_batches(
        self, batch: PackedBatch, share: PackedBatch, *, group_size: int, tokens: int
    ) -> Iterator[tuple[slice, PackedBatch]]:
        """Cut a share into parts of whole responses, as many on every learner.

        Args:
            batch: The whole one.
            share: This learner's.
            group_size: As in ``share``.
            tokens: About so many in each part, prompts included; 0 does not cut.

        Yields:
            The rows of each part in the share, and the part.
        """
        shares = [self._rows(batch, group_size, rank) for rank in range(self.size)]
        largest = max(int(batch.cu_seqlens[end] - batch.cu_seqlens[first]) for first, end in shares)
        parts = -(-largest // tokens) if tokens else 1
        ends = cut_rows(share.cu_seqlens, min(parts, *(end - first for first, end in shares)))
        for first, end in pairwise([0, *ends]):
            yield slice(first, end), share if len(ends) == 1 else _slice(share, first, end)

    def together(self, batch: PackedBatch, values: Tensor, *, group_size: int) -> Tensor:
        """Token values of the whole batch from those of each learner's share.

        Args:
            batch: The whole one.
            values: [n] of the tokens of this learner's share.
            group_size: As in ``share``.

        Returns:
            [N] without gradient, on the CPU of every learner.
        """
        values = values.detach().cpu()
        if self._mesh is None:
            return values
        first, end = self._rows(batch, group_size, self.rank)
        whole = values.new_zeros(len(batch.token_ids))
        whole[batch.cu_seqlens[first] : batch.cu_seqlens[end]] = values
        dist.all_reduce(whole, group=self._mesh.get_group())
        return whole

    def backward(self, loss: Tensor) -> Tensor:
        """Gradients of the sum of all learners' losses; returns that sum.

        FSDP2 averages gradients over ranks, so each loss is scaled up by their number.
        """
        (loss * self.size).backward()
        total = loss.detach().clone().cpu()
        if self._mesh is not None:
            dist.all_reduce(total, group=self._mesh.get_group())
        return total

    def full(self, tensor: Tensor) -> Tensor:
        """A tensor of which every learner holds a part, put together on the CPU of all of them."""
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()

    def full_weights(self, model: Any, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """``named_weights`` of the whole model, on every learner, rounded to ``dtype`` if it is given."""
        return {name: self.full(tensor).to(dtype) for name, tensor in named_weights(model).items()}

    def _rows(self, batch: PackedBatch, group_size: int, rank: int) -> tuple[int, int]:
        groups = batch.num_responses // group_size
        ends = [group_size * (groups * number // self.size) for number in (rank, rank + 1)]
        return ends[0], ends[1]

    def _broadcast(self, batch: PackedBatch | None) -> PackedBatch:
        data = None
        if batch is not None:
            data = encode(Message("batch", {name: getattr(batch, name) for name in BATCH_FIELDS}))
        fields: dict[str, Any] = dict(decode(self._broadcast_bytes(data)).tensors)
        return PackedBatch(**fields) if batch is None else batch

    def _broadcast_bytes(self, data: Tensor | None) -> Tensor:
        assert self._mesh is not None
        group = self._mesh.get_group()
        size = torch.tensor([0 if data is None else len(data)])
        dist.broadcast(size, 0, group=group)
        if data is None:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=group)
        return data


def cut_rows(cu_seqlens: Tensor, parts: int) -> list[int]:
    """Cut rows into parts of about as many tokens each, none of them empty.

    Args:
        cu_seqlens: int [B + 1], row offsets.
        parts: From 1 to B.

    Returns:
        The first row after each part.

    Example:
        >>> cut_rows(torch.tensor([0, 5, 6, 7, 12]), 2)
        [3, 4]
    """
    offsets = cu_seqlens.tolist()
    ends: list[int] = []
    for part in range(1, parts + 1):
        fair = bisect_left(offsets, offsets[-1] * part / parts)
        least, most = (ends[-1] if ends else 0) + 1, len(offsets) - 1 - (parts - part)
        ends.append(min(max(fair, least), most))
    return ends


def _slice(batch: PackedBatch, first: int, end: int) -> PackedBatch:
    start, stop = batch.cu_seqlens[first], batch.cu_seqlens[end]
    fields: dict[str, Any] = {name: getattr(batch, name)[start:stop] for name in TOKEN_FIELDS}
    fields |= {name: getattr(batch, name)[first:end] for name in (*ROW_FIELDS, "digest")}
    fields["cu_seqlens"] = batch.cu_seqlens[first : end + 1] - start
    return PackedBatch(**fields)
