"""A trajectory as a person reads it."""

from __future__ import annotations

from typing import Any

import torch

from rzero.buffers import PackedBatch


def show_trajectory(batch: PackedBatch, row: int, tokenizer: Any) -> str:
    """One row of a batch: who wrote what, by which weights, and how probably.

    Args:
        batch: B trajectories.
        row: Below B.
        tokenizer: Of their tokens.

    Returns:
        A line for each stretch of tokens of one version; what was not sampled has none, and a mask of False.
    """
    start, stop = batch.cu_seqlens[row : row + 2].tolist()
    version = batch.policy_version[start:stop]
    lines = [f"  reward {float(batch.reward[row]):g}", "  version  mask   log-prob  text"]
    for span in torch.tensor_split(torch.arange(stop - start), (version.diff().nonzero()[:, 0] + 1)):
        text = repr(tokenizer.decode(batch.token_ids[start:stop][span]))
        if version[span[0]] < 0:
            lines.append(f"        -  False         -  {text}")
        else:
            log_prob = float(batch.behavior_log_probs[start:stop][span].sum())
            lines.append(f"  {int(version[span[0]]):7d}  True   {log_prob:8.3f}  {text}")
    return "\n".join(lines)


def most_eventful(batch: PackedBatch) -> int:
    """Among the rows with the highest reward, the one in which weights and speakers change most often."""
    changes = torch.cat([torch.zeros(1, dtype=torch.bool), batch.policy_version.diff() != 0])
    row = torch.arange(batch.num_responses).repeat_interleave(batch.cu_seqlens.diff())
    events = torch.zeros(batch.num_responses).index_add(0, row, changes.float())
    return int(torch.where(batch.reward == batch.reward.max(), events, -1.0).argmax())
