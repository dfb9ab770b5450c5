"""The replay buffer: whole groups, each response used once, nothing altered, nothing lost in silence."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Compose, Transform

from rzero.buffers.batch_maker import BatchMaker
from rzero.buffers.context import ContextTable
from rzero.buffers.group_queue import Eviction, GroupQueue
from rzero.buffers.packing import PackedBatch, pack_fields
from rzero.buffers.records import Rollout
from rzero.buffers.samplers import FifoGroupSampler, GroupSampler
from rzero.buffers.state import from_tensors, read_state, write_state
from rzero.buffers.storage import TokenLogStorage
from rzero.buffers.write_once import WriteOnceReplayBuffer
from rzero.buffers.writer import TokenLogWriter


class ProvenanceReplayBuffer(WriteOnceReplayBuffer):
    """Keeps responses with their evidence, and gives each complete group to the learner once.

    Args:
        storage: an unused `TokenLogStorage`; one with a path continues what the path holds.
        group_size: responses in each group.
        groups_per_batch: groups in each sample; together they make one optimizer update.
        capacity_updates: complete batches that may wait. Beyond that, the groups with the oldest weights are
            evicted for the reason ``"capacity"``.
        sampler: the order in which groups leave; by default first completed, first drawn.
        timeout: seconds that `sample` waits, unless it is told otherwise.
        prefetch: batches to prepare ahead of time in a thread. They count as stored until they are sampled.
        check_digests: recompute the digest of every response that is sampled. Without it,
            `TokenLogStorage.verify` and the learner's own check are what is left to notice a changed byte.
        transform: a TorchRL transform: its inverse runs on what is written, itself on what is sampled.

    Raises:
        ValueError: if a size is not positive.

    Example:
        >>> buffer = ProvenanceReplayBuffer(
        ...     storage=TokenLogStorage(), group_size=4, groups_per_batch=2, capacity_updates=3
        ... )
        >>> buffer.reserve(41, 4)
        >>> buffer.sample(timeout=0)
        Traceback (most recent call last):
            ...
        TimeoutError: sample: 0 of 2 groups; oldest incomplete group 41 has 0 of 4, waiting 0.0 s
    """

    def __init__(
        self,
        *,
        storage: TokenLogStorage,
        group_size: int,
        groups_per_batch: int,
        capacity_updates: int,
        sampler: GroupSampler | None = None,
        timeout: float = 600.0,
        prefetch: int = 0,
        check_digests: bool = True,
        transform: Transform | Callable[[Any], Any] | None = None,
    ):
        """Take the storage over."""
        for name, value, least in (
            ("group_size", group_size, 1),
            ("groups_per_batch", groups_per_batch, 1),
            ("capacity_updates", capacity_updates, 1),
            ("prefetch", prefetch, 0),
        ):
            if value < least:
                raise ValueError(f"ProvenanceReplayBuffer: {name} must be at least {least}, got {value}")
        self._store = storage.bind(group_size)
        self._sync = storage.sync
        sampler = FifoGroupSampler() if sampler is None else sampler
        super().__init__(
            storage=storage,
            sampler=sampler,
            writer=TokenLogWriter(),
            collate_fn=_identity,
            transform=transform,
            batch_size=group_size * groups_per_batch,
        )
        self.group_size, self.groups_per_batch, self.capacity_updates = (
            group_size,
            groups_per_batch,
            capacity_updates,
        )
        self._queue = GroupQueue(storage, sampler, capacity_groups=capacity_updates * groups_per_batch)
        self._timeout = timeout
        self._maker = BatchMaker(
            storage,
            self._queue,
            self._transformed,
            size=group_size * groups_per_batch,
            ahead=prefetch,
            check_digests=check_digests,
        )
        with self._queue.changed:
            self._maker.prepare_ahead()

    @property
    def contexts(self) -> ContextTable:
        """The sampling contexts. Once one is interned, a response that names another is refused."""
        return self._store.contexts

    @property
    def write_count(self) -> int:
        """Responses that were ever stored."""
        return self._store.ledger.admitted

    def reserve(self, group_id: int, size: int) -> None:
        """Announce a group: its responses count as submitted and running until they arrive or fail.

        Raises:
            ValueError: if the id was used before, or the size is not the group size.
        """
        self._queue.check_open("reserve")
        self._store.reserve(group_id, size)

    def extend(
        self,
        data: Sequence[Rollout | Mapping[str, Any]] | PackedBatch | TensorDictBase,
        *,
        update_priority: bool | None = None,
    ) -> Tensor:
        """Store responses, all or none; when this returns they are acknowledged.

        Args:
            data: responses, as `Rollout` records or as mappings of their fields; a batch of them; or a batch
                that came as a plain TensorDict from another process.
            update_priority: must be None; there are no priorities.

        Returns:
            The places, int64 ``[B]``; empty if a transform withheld the data.

        Raises:
            ValueError: if a rule of `Rollout` is broken, a uid was stored before, or a group takes no more.
            RuntimeError: after `close`; or if a whole capacity of evicted groups waits for `take_evicted`.
            BaseException: what `abort` was given.
        """
        if update_priority is not None:
            raise ValueError("extend: update_priority must be None, because groups have no priorities")
        self._queue.check_open("extend")
        if isinstance(data, TensorDictBase):
            data = PackedBatch.from_tensordict(data)
        if self._has_transform:
            batch = (
                data if isinstance(data, PackedBatch) else pack_fields([dict(row.items()) for row in data])
            )
            data = cast(Any, self.transform).inv(batch)
            if data is None:
                return torch.zeros(0, dtype=torch.int64)
        index = self.writer.extend(cast(Any, data))
        with self._queue.changed:
            self._queue.evict_excess()
            self._maker.prepare_ahead()
        return index

    def add(self, data: Rollout) -> int:
        """Store one response and return its place."""
        return int(self.extend([data]))

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, timeout: float | None = None
    ) -> Any:
        """Wait for whole groups, consume them and return them.

        Args:
            batch_size: responses, a multiple of the group size; by default ``group_size * groups_per_batch``.
            return_info: return ``(batch, info)``, where info holds ``index`` and ``group_id``.
            timeout: seconds to wait; 0 does not wait.

        Returns:
            A `PackedBatch` that owns its memory and whose digests were checked, or what the transform makes
            of it.

        Raises:
            TimeoutError: saying what is missing, e.g. "7 of 8 groups; oldest incomplete group 41 has 3 of 4,
                waiting 12.0 s".
            ProvenanceError: if a stored byte changed. The group is evicted as ``"corrupt"``, the others stay.
            RuntimeError: if the buffer is closed and too few groups are left.
            BaseException: what `abort` was given.
        """
        size = self.group_size * self.groups_per_batch if batch_size is None else batch_size
        found = self._maker.next(size, self._timeout if timeout is None else timeout)
        if found is None:
            raise RuntimeError(f"sample: the buffer is closed with {self._queue.missing(size)}")
        return found if return_info else found[0]

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the buffer is closed and the next one cannot be filled."""
        while (found := self._maker.next(self.group_size * self.groups_per_batch, self._timeout)) is not None:
            yield found[0]

    def fail(self, group_id: int, reason: str) -> Eviction | None:
        """Give an incomplete group up: its missing responses count as failed, those that arrived as evicted.

        Returns:
            What had arrived, or None.

        Raises:
            ValueError: if the group is not incomplete.
        """
        return self._queue.fail(group_id, reason)

    def evict(self, group_ids: Sequence[int], reason: str) -> list[Eviction]:
        """Remove complete groups unused, and return them.

        Raises:
            ValueError: if a group is not complete and waiting.
        """
        with self._queue.changed:
            self._maker.recall()
            for group_id in group_ids:
                if group_id not in self._store.ledger.ready:
                    raise ValueError(f"evict: group_ids must be complete and waiting, got {group_id}")
            evictions = self._queue.evict(group_ids, reason)
            self._maker.prepare_ahead()
            return evictions

    def stale_groups(self, min_version: int) -> list[int]:
        """The complete groups that hold a token of weights older than ``min_version``, for `evict`."""
        with self._queue.changed:
            groups = (*self._store.ledger.ready.items(), *self._store.ledger.leased.items())
            return [group_id for group_id, group in groups if group.version < min_version]

    def take_evicted(self) -> list[Eviction]:
        """The groups that left without being asked to: over capacity, or corrupt. Each is returned once."""
        return self._queue.take_evicted()

    def incomplete(self) -> dict[int, list[int]]:
        """The groups that wait for responses, oldest first, with the sample indices that are missing."""
        with self._queue.changed:
            return {
                group_id: sorted(set(range(self.group_size)) - group.indices)
                for group_id, group in self._store.ledger.open.items()
            }

    def empty(self, empty_write_count: bool = True) -> list[Eviction]:
        """Evict everything for the reason ``"emptied"``, fail what is incomplete, and return it all."""
        with self._queue.changed:
            self._maker.recall()
            failed = [self._queue.fail(group_id, "emptied") for group_id in list(self._store.ledger.open)]
            evicted = self._queue.evict(list(self._store.ledger.ready), "emptied")
            return [*(eviction for eviction in failed if eviction is not None), *evicted]

    def close(self) -> None:
        """Say that no more will come: `extend` is refused, and `sample` ends when complete groups run out."""
        self._queue.close()

    def abort(self, exception: BaseException) -> None:
        """Raise a producer's exception in everybody who waits, at once, and in all later calls."""
        self._queue.abort(exception)

    def shutdown(self, timeout: float | None = None) -> None:
        """Close, stop the prefetching thread and let go of the storage's path."""
        self.close()
        self._maker.shutdown()
        self._store.close()
        super().shutdown(timeout)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether `sample` would return without waiting."""
        with self._queue.changed:
            return self._maker.ready(
                self.group_size * self.groups_per_batch if batch_size is None else batch_size
            )

    def stats(self) -> dict[str, int | float | bool]:
        """Count everything, in responses unless the name says otherwise.

        ``submitted = running + stored + consumed + evicted + failed`` always holds.
        """
        with self._queue.changed:
            stored = len(self._store)
            capacity = self.capacity_updates * self.groups_per_batch * self.group_size
            return {
                "size": stored,
                "capacity": capacity,
                "utilization": stored / capacity,
                "write_count": self.write_count,
                "prefetch_queue_size": len(self._maker),
                "initialized": True,
                "bytes": self._store.num_bytes,
                **self._store.ledger.stats(),
            }

    def __getitem__(self, index: Any) -> Any:
        """Copy stored responses by place, or one field of all of them by name; nothing is consumed."""
        return self[:].get(index) if isinstance(index, str) else super().__getitem__(index)

    def __len__(self) -> int:
        """How many responses are stored."""
        return len(self._store)

    def set_sampler(self, sampler: GroupSampler) -> GroupSampler:
        """Change the order in which groups leave, and return the former sampler."""
        with self._queue.changed:
            self._maker.recall()
            super().set_sampler(sampler)
            former, self._queue.sampler = self._queue.sampler, sampler
            self._queue.rebuild()
            self._maker.prepare_ahead()
            return former

    def state_dict(self) -> dict[str, Any]:
        """Everything that is stored and counted, and the order to come, as nested plain tensors.

        Batches that are prepared ahead count as stored. Give each rank names of its own with `prefix_rank`
        before torch.distributed.checkpoint sees them.
        """
        with self._queue.changed:
            return {
                "storage": self.storage.state_dict(),
                **self._maker.order(),
                "transform": self.transform.state_dict() if self._has_transform else {},
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put a state in the place of everything that is stored.

        Raises:
            ValueError: if it has another layout or a digest does not hold; nothing has changed then.
        """
        with self._queue.changed:
            self._maker.load(from_tensors(state_dict["storage"]), state_dict)
            self.transform.load_state_dict(state_dict.get("transform", {}))

    def dumps(self, path: str | Path) -> None:
        """Write everything to a directory; tokens stream to the file without a copy in memory."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        with self._queue.changed:
            state, order, transform = self._store.state(), self._maker.order(), self.transform.state_dict()
        if transform:
            torch.save(transform, folder / "transform.pt")
        else:
            (folder / "transform.pt").unlink(missing_ok=True)  # Of an older dump.
        write_state(state, folder / "buffer.bin", also=order, sync=self._sync)

    def loads(self, path: str | Path) -> None:
        """Put what `dumps` wrote in the place of everything that is stored. Nothing is unpickled."""
        state, order = read_state(Path(path) / "buffer.bin")
        with self._queue.changed:
            self._maker.load(state, order)
        if (Path(path) / "transform.pt").exists():
            self.transform.load_state_dict(torch.load(Path(path) / "transform.pt", weights_only=True))

    def _transformed(self, batch: PackedBatch) -> Any:
        return self.transform(batch) if self._has_transform else batch

    @property
    def _has_transform(self) -> bool:
        return len(cast(Compose, self.transform)) > 0


def _identity(data: Any) -> Any:
    return data
