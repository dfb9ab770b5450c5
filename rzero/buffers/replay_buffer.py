"""The replay buffer: whole groups, each response used once, nothing altered, nothing lost in silence."""

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrl.data.replay_buffers import ReplayBuffer

from rzero.buffers.packing import PackedBatch, pack, validate
from rzero.buffers.records import Rollout
from rzero.buffers.samplers import FifoGroupSampler, GroupSampler, OldestVersionFirstSampler
from rzero.buffers.storage import TokenLogStorage
from rzero.buffers.writer import TokenLogWriter


class Eviction(NamedTuple):
    """A group that left without being used: its stored responses, and why."""

    group_id: int
    reason: str
    batch: PackedBatch


class ProvenanceReplayBuffer(ReplayBuffer):
    """Stores responses with their evidence and gives each complete group to the learner once."""

    def __init__(
        self,
        *,
        storage: TokenLogStorage,
        group_size: int,
        groups_per_batch: int,
        capacity_updates: int,
        sampler: GroupSampler | None = None,
        timeout: float = 600.0,
    ):
        storage.bind(group_size)
        super().__init__(
            storage=storage,
            sampler=FifoGroupSampler() if sampler is None else sampler,
            writer=TokenLogWriter(),
            collate_fn=_identity,
            batch_size=group_size * groups_per_batch,
        )
        self.group_size, self.groups_per_batch = group_size, groups_per_batch
        self.capacity_groups = capacity_updates * groups_per_batch
        self._timeout = timeout
        self._condition = threading.Condition(storage.lock)
        self._stalest = OldestVersionFirstSampler()
        self._evictions: list[Eviction] = []
        self._error: BaseException | None = None
        self._closed = False

    def reserve(self, group_id: int, size: int) -> None:
        with self._condition:
            self._check_open("reserve")
            self.storage.reserve(group_id, size)

    def extend(self, data: Sequence[Rollout] | PackedBatch, *, update_priority: bool | None = None) -> Tensor:
        batch = data if isinstance(data, PackedBatch) else pack(data)
        if len(self.transform):
            batch = self.transform.inv(batch)
            if batch is None:
                return torch.zeros((0, 1), dtype=torch.int64)
        entry = self.storage.prepare(batch)
        with self._condition:
            self._check_open("extend")
            index, completed = self.storage.admit(entry)
            for group in completed:
                self.sampler.admit(group)
                self._stalest.admit(group)
            self._evict_over_capacity()
            self._condition.notify_all()
        return index

    def add(self, data: Rollout) -> Tensor:
        return self.extend([data])

    def fail(self, group_id: int, reason: str) -> None:
        with self._condition:
            group = self.storage.ledger.open.get(group_id)
            if group is None:
                raise ValueError(f"fail: group_id must name an incomplete group, got {group_id}")
            if group.places:
                self._evictions.append(Eviction(group_id, reason, self.storage.get(group.places)))
            self.storage.fail(group_id, reason)

    def evict(self, group_ids: Sequence[int], *, reason: str) -> None:
        with self._condition:
            for group_id in group_ids:
                self.sampler.discard(group_id)
                self._stalest.discard(group_id)
                self._evictions.append(
                    Eviction(group_id, reason, self.storage.get(self.storage.rows_of([group_id])))
                )
            self.storage.evict(group_ids, reason)

    def take_evicted(self) -> list[Eviction]:
        with self._condition:
            taken, self._evictions = self._evictions, []
            return taken

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, timeout: float | None = None
    ) -> Any:
        size = self.batch_size if batch_size is None else batch_size
        with self._condition:
            self._wait(size, self._timeout if timeout is None else timeout)
            index, info = self.sampler.sample(self.storage, size)
            groups = info["group_id"].tolist()
            for group_id in groups:
                self._stalest.discard(group_id)
            batch = validate(self.storage.get(index), caller="sample")
            self.storage.consume(groups)
        if len(self.transform):
            batch = self.transform(batch)
        info["index"] = index
        return (batch, info) if return_info else batch

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def abort(self, exception: BaseException) -> None:
        with self._condition:
            self._error = self._error or exception
            self._condition.notify_all()

    def stats(self) -> dict[str, int | float | bool]:
        with self._condition:
            book = self.storage.ledger
            return {
                "size": len(self.storage),
                "write_count": self.write_count,
                "submitted": book.submitted,
                "running": book.running,
                "stored": book.stored,
                "consumed": book.consumed,
                "evicted": book.evicted.total(),
                "failed": book.failed.total(),
                "groups_ready": len(book.ready),
                "groups_incomplete": len(book.open),
                **{f"evicted/{reason}": count for reason, count in book.evicted.items()},
                **{f"failed/{reason}": count for reason, count in book.failed.items()},
            }

    def __len__(self) -> int:
        return len(self.storage)

    def _wait(self, size: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            if self._error is not None:
                raise self._error
            if self.sampler.can_sample(self.storage, size):
                return
            if self._closed:
                raise RuntimeError(f"sample: the buffer is closed with {self._missing(size)}")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"sample: {self._missing(size)} after {timeout} s")
            self._condition.wait(remaining)

    def _missing(self, size: int) -> str:
        text = f"{len(self.sampler)} of {size // self.group_size} groups"
        book = self.storage.ledger
        if book.open:
            group_id, group = next(iter(book.open.items()))
            waited = self.storage.now() - group.opened_at
            text += (
                f"; oldest incomplete group {group_id} has {len(group.places)} of {self.group_size}, "
                f"waiting {waited:.1f} s"
            )
        return text

    def _evict_over_capacity(self) -> None:
        excess = len(self._stalest) - self.capacity_groups
        if excess > 0:
            self.evict(self._stalest.take(excess), reason="capacity")

    def _check_open(self, caller: str) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError(f"{caller}: the buffer is closed")


def _identity(data: Any) -> Any:
    return data
