"""Making batches of leased groups, on demand or ahead of time."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rzero.buffers.entry import restore_batch
from rzero.buffers.faults import ProvenanceError
from rzero.buffers.group_queue import GroupQueue, Lease
from rzero.buffers.packing import PackedBatch, digests_match
from rzero.buffers.state import State
from rzero.buffers.storage import TokenLogStorage


class BatchMaker:
    """Copies leased groups out, checks their digests and transforms them.

    A batch that is prepared ahead of time is not consumed until it is handed out: a crash or a checkpoint in
    between finds its groups stored.

    Args:
        storage: where the groups lie.
        queue: where leases come from.
        transform: what is done to each batch.
        size: responses in a batch that is prepared ahead.
        ahead: how many batches to prepare ahead.
        check_digests: recompute the digest of every response.
    """

    def __init__(
        self,
        storage: TokenLogStorage,
        queue: GroupQueue,
        transform: Callable[[Any], Any],
        *,
        size: int,
        ahead: int,
        check_digests: bool,
    ):
        """Start the thread, if there is something to prepare ahead."""
        self._storage = storage
        self._queue = queue
        self._transform = transform
        self._size = size
        self._ahead = ahead
        self._check_digests = check_digests
        self._prepared: deque[tuple[Lease, Future[Any] | None]] = deque()
        self._executor = ThreadPoolExecutor(1, "rzero-prefetch") if ahead else None

    def __len__(self) -> int:
        """How many batches are being prepared or wait."""
        return len(self._prepared)

    def ready(self, size: int) -> bool:
        """Whether a batch of ``size`` responses is prepared, or its groups are there; under the lock."""
        return (len(self._prepared) > 0 and size == self._size) or self._queue.ready(size)

    def next(self, size: int, timeout: float) -> tuple[Any, dict[str, Any]] | None:
        """Wait for a batch, consume its groups and return it with its info; None if no more can come."""
        found = self._queue.wait(lambda: self._find(size), size=size, timeout=timeout)
        if found is None:
            return None
        lease, future = found
        try:
            batch = self.make(lease) if future is None else future.result()
            self._queue.consume(lease)
        except BaseException:
            self._queue.give_back(lease)
            raise
        with self._queue.changed:
            self.prepare_ahead()
        return batch, {**lease.info, "index": lease.index}

    def _find(self, size: int) -> tuple[Lease, Future[Any] | None] | None:
        """The batch that was prepared first, or else the next groups, if they are there."""
        if self._prepared and size == self._size:
            return self._prepared.popleft()
        return (self._queue.take(size), None) if self._queue.ready(size) else None

    def make(self, lease: Lease) -> Any:
        """Make the batch of a lease; whatever goes wrong, the groups that are sound are given back.

        Raises:
            ProvenanceError: naming the responses that changed; their groups are evicted as ``"corrupt"``.
        """
        try:
            batch = restore_batch(*self._storage.store.read(lease.index.numpy()))
            if self._check_digests:
                self._check(lease, batch)
            return self._transform(batch)
        except BaseException:
            self._queue.give_back(lease)
            raise

    def _check(self, lease: Lease, batch: PackedBatch) -> None:
        broken = ~digests_match(batch)
        if broken.any():
            faults = self._storage.verify(lease.index[broken])
            self._queue.drop(lease, np.unique(batch.group_id[broken]).tolist(), "corrupt")
            raise ProvenanceError(
                f"sample: every digest must match, got another at uids {batch.uid[broken].tolist()}, "
                f"which were evicted as 'corrupt' with their groups: {faults}"
            )

    def prepare_ahead(self) -> None:
        """Start on the next batches whose groups are there; the caller holds the lock."""
        while (
            self._executor is not None and len(self._prepared) < self._ahead and self._queue.ready(self._size)
        ):
            self._submit(self._queue.take(self._size))

    def order(self) -> dict[str, dict[str, Tensor]]:
        """What is needed to draw the same from the same store: the sampler's state, and what is prepared."""
        groups = [lease.groups for lease, _ in self._prepared if not lease.recalled]
        prepared = {"groups": torch.tensor(groups, dtype=torch.int64)}
        return {"sampler": self._queue.sampler.state_dict(), "prepared": prepared}

    def load(self, state: State, order: Mapping[str, Any]) -> None:
        """Put a state in the place of everything that is stored, to be drawn in the order of `order`.

        The caller holds the lock.

        Raises:
            ValueError: if the state or the order is not of this kind; nothing has changed then.
        """
        sampler, saved = self._queue.sampler, order.get("sampler", {})
        if missing := sampler.state_dict().keys() - saved.keys():
            raise ValueError(
                f"load_state_dict: sampler state must hold {sorted(missing)}, got {sorted(saved)}"
            )
        self.recall()
        self._storage.store.load(state)
        sampler.load_state_dict(saved)
        self._queue.rebuild()
        for groups in order["prepared"]["groups"].tolist():
            self._submit(self._queue.take_these(groups))
        self.prepare_ahead()

    def recall(self) -> None:
        """Give the groups of all prepared batches back; the caller holds the lock."""
        while self._prepared:
            lease, _ = self._prepared.popleft()
            self._queue.give_back(lease)

    def shutdown(self) -> None:
        """Give everything back and stop the thread."""
        with self._queue.changed:
            self.recall()
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)

    def _submit(self, lease: Lease) -> None:
        future = None if self._executor is None else self._executor.submit(self.make, lease)
        self._prepared.append((lease, future))
        self._queue.changed.notify_all()
