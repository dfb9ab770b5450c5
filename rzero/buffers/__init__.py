"""The store of evidence: records, packing, and a replay buffer that cannot alter what was sampled."""

from rzero.buffers.context import ContextTable, SamplingContext
from rzero.buffers.digest import provenance_digest
from rzero.buffers.packing import PackedBatch, pack, unpack, validate
from rzero.buffers.records import ROW_FIELDS, TOKEN_FIELDS, FinishCode, Rollout, make_rollout, segments
from rzero.buffers.replay_buffer import Eviction, ProvenanceReplayBuffer
from rzero.buffers.samplers import (
    FifoGroupSampler,
    GroupSampler,
    OldestVersionFirstSampler,
    RandomGroupSampler,
)
from rzero.buffers.storage import Fault, TokenLogStorage

__all__ = [
    "ROW_FIELDS",
    "TOKEN_FIELDS",
    "ContextTable",
    "Eviction",
    "Fault",
    "FifoGroupSampler",
    "FinishCode",
    "GroupSampler",
    "OldestVersionFirstSampler",
    "PackedBatch",
    "ProvenanceReplayBuffer",
    "RandomGroupSampler",
    "Rollout",
    "SamplingContext",
    "TokenLogStorage",
    "make_rollout",
    "pack",
    "provenance_digest",
    "segments",
    "unpack",
    "validate",
]
