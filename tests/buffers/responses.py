"""Small responses to fill buffers with. Every number follows from the arguments."""

import contextlib
import resource
import signal
from collections.abc import Iterator
from typing import Any

import torch

from rzero.buffers import (
    FifoGroupSampler,
    ProvenanceReplayBuffer,
    Rollout,
    TokenLogStorage,
    make_rollout,
    provenance_digest,
)


def fields(uid: int = 0, **changes: Any) -> dict[str, Any]:
    """The fields of a valid response; changed token fields are hashed as they are."""
    prompt, versions = changes.pop("prompt", 2), changes.pop("versions", (3, 3, 4))
    length = prompt + len(versions)
    places, salt = torch.arange(length), int(uid) % 997
    sampled = torch.tensor([-1] * prompt + list(versions), dtype=torch.int32)
    mask = sampled >= 0
    tokens = {
        "token_ids": ((places * 7 + salt * 13) % 1000).int(),
        "behavior_log_probs": torch.where(mask, -(places + 1) / (salt + 8), torch.nan),
        "response_mask": mask,
        "policy_version": sampled,
    }
    tokens |= {name: changes.pop(name) for name in list(changes) if name in tokens}
    record = {
        **tokens,
        "uid": uid,
        "group_id": uid // 4,
        "prompt_id": uid // 4 + 100,
        "sample_index": uid % 4,
        "prompt_length": prompt,
        "response_length": len(versions),
        "reward": float(uid % 3),
        "finish_code": 0,
        "context_id": 5,
        "seed": 9,
        "t_submit_ns": 10,
        "t_first_ns": 20,
        "t_done_ns": 30,
    }
    if "digest" not in changes:
        record["digest"] = provenance_digest(
            tokens["token_ids"], tokens["behavior_log_probs"], tokens["policy_version"]
        )
    return record | changes


def rollout(uid: int = 0, **changes: Any) -> Rollout:
    return make_rollout(**fields(uid, **changes))


def group(group_id: int, size: int = 4, **changes: Any) -> list[Rollout]:
    """All responses of one group; uids follow from the group."""
    return [
        rollout(group_id * size + index, group_id=group_id, sample_index=index, prompt_id=group_id, **changes)
        for index in range(size)
    ]


def make_buffer(**options: Any) -> ProvenanceReplayBuffer:
    """A buffer of groups of 4, two to a batch."""
    storage = {name: options.pop(name) for name in list(options) if name in STORAGE_OPTIONS}
    defaults = {
        "group_size": 4,
        "groups_per_batch": 2,
        "capacity_updates": 100,
        "sampler": FifoGroupSampler(),
    }
    return ProvenanceReplayBuffer(storage=TokenLogStorage(**storage), **{**defaults, **options})


STORAGE_OPTIONS = {"chunk_tokens", "path", "extra_fields", "sync", "clock"}


def assert_balanced(buffer: ProvenanceReplayBuffer) -> dict[str, Any]:
    """Nothing is lost: every submitted response is somewhere."""
    stats = buffer.stats()
    parts = ("running", "stored", "consumed", "evicted", "failed")
    assert stats["submitted"] == sum(stats[part] for part in parts), stats
    assert stats["stored"] == len(buffer)
    return stats


def finish_preparing(buffer: ProvenanceReplayBuffer) -> None:
    """Wait until the batches that are prepared ahead are made, or failed."""
    for _, future in buffer._maker._prepared:
        future.exception()


def assert_same(one: Any, other: Any) -> None:
    """Equal field by field, bit by bit, NaNs included."""
    left, right = dict(one.items()), dict(other.items())
    assert left.keys() == right.keys()
    for name, value in left.items():
        if not isinstance(value, torch.Tensor):
            assert_same(value, right[name])
            continue
        assert value.dtype == right[name].dtype and value.shape == right[name].shape, name
        assert value.numpy().tobytes() == right[name].numpy().tobytes(), name


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
