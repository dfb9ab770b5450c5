"""Waiting for whole groups: who is next, who must leave, and why nobody comes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rzero.buffers.entry import restore_batch
from rzero.buffers.packing import PackedBatch
from rzero.buffers.samplers import GroupSampler, OldestVersionFirstSampler, ReadyGroup
from rzero.buffers.storage import TokenLogStorage

T = TypeVar("T")


class Eviction(NamedTuple):
    """A group that left the buffer unused.

    Attributes:
        group_id: the group.
        reason: why it left.
        batch: its responses that were stored.
    """

    group_id: int
    reason: str
    batch: PackedBatch


@dataclass(eq=False)
class Lease:
    """Groups taken aside for one batch: they are stored until the lease is consumed.

    Attributes:
        index: places of their rows.
        info: what the sampler says about the draw.
        groups: their ids.
        recalled: the queue took the groups back; whoever holds the lease must drop it.
    """

    index: Tensor
    info: dict[str, Any]
    groups: list[int] = field(init=False)
    recalled: bool = False

    def __post_init__(self) -> None:
        """Read the groups off the sampler's answer."""
        self.groups = self.info["group_id"].tolist()


class GroupQueue:
    """Complete groups on their way to the learner.

    Args:
        storage: a storage that is bound.
        sampler: the order in which groups leave for a batch.
        capacity_groups: complete groups that may wait; beyond that, those with the oldest weights are
            evicted.
    """

    def __init__(self, storage: TokenLogStorage, sampler: GroupSampler, *, capacity_groups: int):
        """Queue what the storage already holds."""
        self.changed = storage.store.changed
        self.sampler = sampler
        self._storage = storage
        self._store = storage.store
        self._capacity = capacity_groups
        self._stalest = OldestVersionFirstSampler()
        self._evicted: list[Eviction] = []
        self._error: BaseException | None = None
        self._traceback: Any = None
        self._closed = False
        self.rebuild()

    def rebuild(self) -> None:
        """Start again from the groups that are ready in the store."""
        with self.changed:
            self._store.take_completed()
            groups = self._store.ledger.ready_groups()
            self.sampler.rebuild(groups)
            self._stalest.rebuild(groups)
            self.changed.notify_all()

    def raise_error(self) -> None:
        """Raise what `abort` was given, if anything."""
        if self._error is not None:
            # One exception may be raised in several threads; each starts from the producer's own traceback.
            raise self._error.with_traceback(self._traceback)

    def check_open(self, caller: str) -> None:
        """Raise what `abort` was given, or RuntimeError after `close`."""
        with self.changed:
            self.raise_error()
            if self._closed:
                raise RuntimeError(f"{caller}: the buffer is closed")
            if len(self._evicted) > self._capacity:
                raise RuntimeError(
                    f"{caller}: {len(self._evicted)} evicted groups wait to be taken; call take_evicted()"
                )

    def evict_excess(self) -> None:
        """After a write: evict the complete groups that are too many, those with the oldest weights first."""
        with self.changed:
            self._enqueue(self._store.take_completed())
            excess = len(self._stalest) - self._capacity
            if excess > 0:
                try:
                    self._evicted += self.evict(self._stalest.take(excess), "capacity")
                except BaseException:
                    self.rebuild()  # They are still stored.
                    raise

    def ready(self, size: int) -> bool:
        """Whether a batch of ``size`` responses is there; the caller holds the lock."""
        self._enqueue(self._store.take_completed())
        return self.sampler.can_sample(self._storage, size)

    def take(self, size: int) -> Lease:
        """Lease the next groups; the caller holds the lock and saw that they are `ready`."""
        lease = Lease(*self.sampler.sample(self._storage, size))
        for group_id in lease.groups:
            self._stalest.discard(group_id)
        return lease

    def take_these(self, groups: Sequence[int]) -> Lease:
        """Lease particular ready groups."""
        for group_id in groups:
            self.sampler.discard(group_id)
            self._stalest.discard(group_id)
        return Lease(self._store.lease(groups), {"group_id": torch.tensor(groups, dtype=torch.int64)})

    def wait(self, find: Callable[[], T | None], *, size: int, timeout: float) -> T | None:
        """Call ``find`` under the lock, now and after every change, until it finds something.

        Args:
            find: returns None while there is nothing.
            size: responses that are waited for, for the message.
            timeout: seconds.

        Returns:
            What was found, or None if the queue is closed and nothing can come any more.

        Raises:
            TimeoutError: saying what is missing.
            BaseException: what `abort` was given.
        """
        deadline = time.monotonic() + timeout
        with self.changed:
            while True:
                self.raise_error()
                found = find()
                if found is not None or self._closed:
                    return found
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(f"sample: {self.missing(size)}")
                # An endless wait is cut into pieces only because threading bounds a single one.
                self.changed.wait(min(remaining, 3600.0))

    def give_back(self, lease: Lease) -> None:
        """Undo a lease, unless it was recalled already."""
        with self.changed:
            if not lease.recalled:
                lease.recalled = True
                self._enqueue(self._store.give_back(lease.groups))
                self.changed.notify_all()

    def consume(self, lease: Lease) -> None:
        """Close the groups of a lease as used."""
        with self.changed:
            if lease.recalled:
                raise RuntimeError("sample: the groups were taken back while the batch was made")
            self._store.consume(lease.groups)

    def drop(self, lease: Lease, groups: Sequence[int], reason: str) -> None:
        """Evict groups out of a lease; the others stay in it."""
        with self.changed:
            if not lease.recalled:
                self._evicted += self.evict(groups, reason)
                lease.groups = [group_id for group_id in lease.groups if group_id not in groups]

    def evict(self, groups: Sequence[int], reason: str) -> list[Eviction]:
        """Close groups unused, and return them."""
        with self.changed:
            ledger = self._store.ledger
            ledger.check_close("evict", groups)
            evictions = []
            for group_id in groups:
                group = ledger.ready.get(group_id) or ledger.leased[group_id]
                evictions.append(Eviction(group_id, reason, self._copy(group.places)))
            self._store.evict(groups, reason)
            for group_id in groups:
                self.sampler.discard(group_id)
                self._stalest.discard(group_id)
            return evictions

    def fail(self, group_id: int, reason: str) -> Eviction | None:
        """Close an incomplete group, and return what had arrived of it, if anything."""
        with self.changed:
            self._store.ledger.check_close("fail", [group_id])
            places = self._store.ledger.open[group_id].places
            eviction = Eviction(group_id, reason, self._copy(places)) if places else None
            self._store.fail(group_id, reason)
            return eviction

    def take_evicted(self) -> list[Eviction]:
        """The groups that the queue itself evicted since the last call."""
        with self.changed:
            taken, self._evicted = self._evicted, []
            return taken

    def close(self) -> None:
        """Say that no more will come."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def abort(self, exception: BaseException) -> None:
        """Raise the exception in everybody who waits, and in all later calls; the first one counts."""
        with self.changed:
            if self._error is None:
                self._error, self._traceback = exception, exception.__traceback__
            self.changed.notify_all()

    def missing(self, size: int) -> str:
        """Say what a batch of ``size`` responses waits for."""
        ledger = self._store.ledger
        text = f"{len(self.sampler)} of {size // ledger.group_size} groups"
        if not ledger.open:
            return f"{text}; no group is incomplete: nothing was reserved that could still come"
        group_id, group = next(iter(ledger.open.items()))
        waited = self._store.clock() - group.opened_at
        return (
            f"{text}; oldest incomplete group {group_id} has {len(group.places)} of {ledger.group_size}, "
            f"waiting {waited:.1f} s"
        )

    def _enqueue(self, groups: Sequence[ReadyGroup]) -> None:
        for group in groups:
            self.sampler.admit(group)
            self._stalest.admit(group)

    def _copy(self, places: Sequence[int]) -> PackedBatch:
        return restore_batch(*self._store.read(np.array(places)))
