"""From what engines sampled and what it was worth to what the buffer takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rzero.buffers import ROW_FIELDS, TOKEN_FIELDS, PackedBatch
from rzero.collectors.engine import Completion, packed_rows


def pack_completions(completions: Sequence[Completion], rewards: Sequence[float]) -> PackedBatch:
    """Completions with their rewards, as the buffer takes them."""
    requests = [c.request for c in completions]
    lengths = [c.response.shape[0] for c in completions]
    rows = packed_rows(
        [r.prompt for r in requests],
        lengths,
        torch.cat([c.response for c in completions]),
        torch.cat([c.behavior_log_probs for c in completions]),
        torch.cat([c.policy_version for c in completions]),
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
    packed: dict[str, Any] = {name: torch.from_numpy(values) for name, values in rows.items()}
    packed |= {name: torch.tensor(numbers[name], dtype=dtype) for name, dtype in ROW_FIELDS.items()}
    packed["digest"] = torch.stack([c.digest for c in completions])
    return PackedBatch(**packed)


def join_groups(groups: Sequence[PackedBatch]) -> dict[str, Tensor]:
    """The fields of several groups end to end, as plain tensors; none for no group."""
    if not groups:
        return {}
    return {
        name: torch.cat([getattr(group, name) for group in groups])
        for name in (*TOKEN_FIELDS, *ROW_FIELDS, "digest")
    }


def split_groups(fields: Mapping[str, Tensor], *, group_size: int) -> list[PackedBatch]:
    """The inverse of ``join_groups``."""
    if not fields:
        return []
    tokens = (fields["prompt_length"] + fields["response_length"]).long()
    sizes = tokens.view(-1, group_size).sum(1).tolist()
    columns = {name: fields[name].split(sizes) for name in TOKEN_FIELDS}
    rows = {name: fields[name].split(group_size) for name in (*ROW_FIELDS, "digest")}
    offsets = [torch.nn.functional.pad(part.cumsum(0), (1, 0)) for part in tokens.split(group_size)]
    groups = []
    for k, cu_seqlens in enumerate(offsets):
        group: dict[str, Any] = {name: parts[k] for name, parts in (columns | rows).items()}
        groups.append(PackedBatch(cu_seqlens=cu_seqlens, **group))
    return groups
