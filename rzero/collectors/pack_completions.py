"""From what engines sampled and what it was worth to what the buffer takes.

In NumPy, because each call of torch hands the interpreter's lock to the learner's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rzero.buffers import ROW_FIELDS, TOKEN_FIELDS, PackedBatch
from rzero.collectors.engine import Completion, packed_rows

_ROW_DTYPES = {name: torch.empty(0, dtype=dtype).numpy().dtype for name, dtype in ROW_FIELDS.items()}

Fields = Mapping[str, np.ndarray]
"""Whole responses end to end, as the fields of a ``PackedBatch`` without ``cu_seqlens``."""


def group_fields(completions: Sequence[Completion], rewards: Sequence[float]) -> Fields:
    """The completions of one or more groups with their rewards."""
    requests = [c.request for c in completions]
    lengths = [c.response.shape[0] for c in completions]
    rows = packed_rows(
        [r.prompt for r in requests],
        lengths,
        np.concatenate([c.response.numpy() for c in completions]),
        np.concatenate([c.behavior_log_probs.numpy() for c in completions]),
        np.concatenate([c.policy_version.numpy() for c in completions]),
    )
    numbers: dict[str, list[Any]] = {
        "uid": [r.uid for r in requests],
        "group_id": [r.group_id for r in requests],
        "prompt_id": [r.prompt_id for r in requests],
        "sample_index": [r.sample_index for r in requests],
        "prompt_length": [len(r.prompt) for r in requests],
        "response_length": lengths,
        "reward": [float(reward) for reward in rewards],
        "finish_code": [int(c.finish_code) for c in completions],
        "context_id": [c.context_id for c in completions],
        "seed": [r.seed for r in requests],
        "t_submit_ns": [c.t_submit_ns for c in completions],
        "t_first_ns": [c.t_first_ns for c in completions],
        "t_done_ns": [c.t_done_ns for c in completions],
    }
    fields = {name: rows[name] for name in TOKEN_FIELDS}
    fields |= {name: np.array(numbers[name], dtype=dtype) for name, dtype in _ROW_DTYPES.items()}
    fields["digest"] = np.stack([c.digest.numpy() for c in completions])
    return fields


def join_groups(groups: Sequence[Fields]) -> dict[str, np.ndarray]:
    """Several groups end to end; no field for no group."""
    if not groups:
        return {}
    return {name: _joined([group[name] for group in groups]) for name in groups[0]}


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """``np.concatenate``, which hands the lock away, done by Python, which keeps it."""
    joined = np.frombuffer(bytearray().join([array.data for array in arrays]), arrays[0].dtype)
    return joined.reshape(-1, *arrays[0].shape[1:])


def split_groups(fields: Fields, *, sizes: Sequence[int]) -> list[Fields]:
    """The inverse of ``join_groups``, as views.

    Args:
        fields: Of groups end to end.
        sizes: Responses of each group.
    """
    if not fields:
        return []
    rows = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    tokens = np.concatenate([[0], np.cumsum(_lengths(fields))])[rows].tolist()
    bounds = {name: tokens if name in TOKEN_FIELDS else rows for name in fields}
    return [
        {name: field[bounds[name][k] : bounds[name][k + 1]] for name, field in fields.items()}
        for k in range(len(sizes))
    ]


def pack_groups(groups: Sequence[Fields]) -> PackedBatch:
    """At least one group, as the buffer takes them."""
    fields = join_groups(groups)
    fields["cu_seqlens"] = np.concatenate([[0], np.cumsum(_lengths(fields))])
    tensors: dict[str, Any] = {name: torch.from_numpy(field) for name, field in fields.items()}
    return PackedBatch(**tensors)


def _lengths(fields: Fields) -> np.ndarray:
    return fields["prompt_length"].astype(np.int64) + fields["response_length"]
