"""The store of evidence: records, packing, and a replay buffer that cannot alter what was sampled.

A sampler hands over responses, the buffer gives whole groups of them to the learner, each once::

    SamplingContext   the law that tokens were drawn from, interned under context_id
    Rollout           one response with its evidence; pack -> PackedBatch, many end to end
    ProvenanceReplayBuffer(storage=TokenLogStorage(...), sampler=FifoGroupSampler(), ...)
        reserve, extend, fail       what producers do
        sample                      what the learner does; waits for whole groups
        evict, take_evicted         what leaves unused is returned, and counted by reason
        storage.verify              names the responses whose bytes changed

Example:
    >>> import torch
    >>> buffer = ProvenanceReplayBuffer(
    ...     storage=TokenLogStorage(), group_size=2, groups_per_batch=1, capacity_updates=4
    ... )
    >>> token_ids = torch.tensor([11, 7, 9], dtype=torch.int32)  # one of the prompt, two drawn
    >>> behavior_log_probs = torch.tensor([torch.nan, -0.5, -1.25])
    >>> policy_version = torch.tensor([-1, 3, 4], dtype=torch.int32)  # the weights changed in between
    >>> for index in range(2):
    ...     response = make_rollout(
    ...         token_ids=token_ids,
    ...         behavior_log_probs=behavior_log_probs,
    ...         response_mask=policy_version >= 0,
    ...         policy_version=policy_version,
    ...         digest=provenance_digest(token_ids, behavior_log_probs, policy_version),  # where it is drawn
    ...         uid=index, group_id=0, prompt_id=0, sample_index=index, prompt_length=1, response_length=2,
    ...         reward=float(index), finish_code=FinishCode.STOP, context_id=5, seed=index,
    ...         t_submit_ns=1, t_first_ns=2, t_done_ns=3,
    ...     )
    ...     places = buffer.extend([response])
    >>> batch = buffer.sample(timeout=0)
    >>> batch.uid.tolist(), batch.cu_seqlens.tolist(), batch.policy_version.tolist()
    ([0, 1], [0, 3, 6], [-1, 3, 4, -1, 3, 4])
    >>> len(buffer), buffer.stats()["consumed"]
    (0, 2)
"""

from rzero.buffers.context import ContextTable, SamplingContext
from rzero.buffers.digest import provenance_digest
from rzero.buffers.faults import Fault, ProvenanceError
from rzero.buffers.group_queue import Eviction
from rzero.buffers.journal import JournalError
from rzero.buffers.packing import PackedBatch, pack, pack_fields, unpack, validate
from rzero.buffers.records import ROW_FIELDS, TOKEN_FIELDS, FinishCode, Rollout, make_rollout, segments
from rzero.buffers.replay_buffer import ProvenanceReplayBuffer
from rzero.buffers.samplers import (
    FifoGroupSampler,
    GroupSampler,
    OldestVersionFirstSampler,
    RandomGroupSampler,
)
from rzero.buffers.state import prefix_rank, strip_rank
from rzero.buffers.storage import TokenLogStorage
from rzero.buffers.torchrl_layout import from_torchrl, to_torchrl

__all__ = [
    "ROW_FIELDS",
    "TOKEN_FIELDS",
    "ContextTable",
    "Eviction",
    "Fault",
    "FifoGroupSampler",
    "FinishCode",
    "GroupSampler",
    "JournalError",
    "OldestVersionFirstSampler",
    "PackedBatch",
    "ProvenanceError",
    "ProvenanceReplayBuffer",
    "RandomGroupSampler",
    "Rollout",
    "SamplingContext",
    "TokenLogStorage",
    "from_torchrl",
    "make_rollout",
    "pack",
    "pack_fields",
    "prefix_rank",
    "provenance_digest",
    "segments",
    "strip_rank",
    "to_torchrl",
    "unpack",
    "validate",
]
