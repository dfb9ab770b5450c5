"""The store of evidence: records, packing, and a replay buffer that cannot alter what was sampled."""

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
