"""From what engines sampled and what it was worth to what the buffer takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rzero.buffers import ROW_FIELDS, PackedBatch
from rzero.collectors.engine import Completion, packed_rows


def pack_completions(completions: Sequence[Completion], rewards: Sequence[float]) -> PackedBatch:
    """Completions with their rewards, as the buffer takes them."""
    requests = [c.request for c in completions]
    rows = packed_rows(
        [r.prompt for r in requests],
        [len(c.response) for c in completions],
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
        "response_length": [len(c.response) for c in completions],
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
