"""From what engines sampled and what it was worth to what the buffer takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rzero.buffers import ROW_FIELDS, TOKEN_FIELDS, PackedBatch
from rzero.collectors.engine import Completion, packed_rows

# NumPy's calls are short and keep the interpreter's lock; each of torch's gives it to the learner's thread.
_NUMPY_DTYPES = {name: torch.empty(0, dtype=dtype).numpy().dtype for name, dtype in ROW_FIELDS.items()}

Fields = Mapping[str, Tensor]
"""Whole responses end to end, as the fields of a ``PackedBatch`` without ``cu_seqlens``."""


def group_fields(completions: Sequence[Completion], rewards: Sequence[float]) -> Fields:
    """The completions of some groups with their rewards."""
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
    columns = {name: rows[name] for name in TOKEN_FIELDS}
    columns |= {name: np.array(numbers[name], dtype=dtype) for name, dtype in _NUMPY_DTYPES.items()}
    columns["digest"] = np.stack([c.digest.numpy() for c in completions])
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def join_groups(groups: Sequence[Fields]) -> dict[str, Tensor]:
    """Several groups end to end; no field for no group."""
    if not groups:
        return {}
    return {name: torch.cat([group[name] for group in groups]) for name in groups[0]}


def split_groups(fields: Fields, *, group_size: int) -> list[Fields]:
    """The inverse of ``join_groups``."""
    if not fields:
        return []
    tokens = (fields["prompt_length"] + fields["response_length"]).long()
    sizes = tokens.view(-1, group_size).sum(1).tolist()
    columns = {
        name: field.split(sizes if name in TOKEN_FIELDS else group_size) for name, field in fields.items()
    }
    return [{name: parts[k] for name, parts in columns.items()} for k in range(len(sizes))]


def pack_groups(groups: Sequence[Fields]) -> PackedBatch:
    """At least one group, as the buffer takes them."""
    fields: dict[str, Any] = join_groups(groups)
    lengths = (fields["prompt_length"] + fields["response_length"]).long()
    return PackedBatch(cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), **fields)
