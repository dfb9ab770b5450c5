"""Which whole groups come next: three orders, one class each."""

import heapq
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torchrl.data.replay_buffers.samplers import Sampler

if TYPE_CHECKING:
    from rzero.buffers.storage import TokenLogStorage


class ReadyGroup(NamedTuple):
    """A complete group: its id, the oldest weight version in it, and its place in the order of completion."""

    group_id: int
    version: int
    sequence: int


class GroupSampler(Sampler):
    """Draws whole groups, each at most once. Abstract: a subclass is an order.

    The buffer tells it which groups became complete (`admit`) and which were evicted (`discard`), so that
    drawing costs the same however much is stored.
    """

    @abstractmethod
    def admit(self, group: ReadyGroup) -> None:
        """Add a complete group."""

    @abstractmethod
    def discard(self, group_id: int) -> None:
        """Forget a group; one that is not there changes nothing."""

    @abstractmethod
    def take(self, count: int) -> list[int]:
        """Remove and return the next groups; the caller made sure that there are so many."""

    @abstractmethod
    def __len__(self) -> int:
        """How many groups can be drawn."""

    def rebuild(self, groups: Iterable[ReadyGroup]) -> None:
        """Start again from these groups, given in the order of completion."""
        self._empty()
        for group in groups:
            self.admit(group)

    def can_sample(self, storage: "TokenLogStorage", batch_size: int) -> bool:
        """Whether enough whole groups are ready for ``batch_size`` responses."""
        return len(self) >= self._count(storage, batch_size)

    def sample(self, storage: "TokenLogStorage", batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw ``batch_size`` responses as whole groups; the store leases them until they are consumed.

        Returns:
            Their places, int64 ``[batch_size]``, and ``{"group_id": int64 [groups]}``.

        Raises:
            RuntimeError: if too few groups are ready.
        """
        count = self._count(storage, batch_size)
        if len(self) < count:
            raise RuntimeError(f"{type(self).__name__}.sample: needs {count} whole groups, got {len(self)}")
        groups = self.take(count)
        return storage.store.lease(groups), {"group_id": torch.tensor(groups, dtype=torch.int64)}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the order follows from what is stored."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load; `rebuild` follows."""

    def dumps(self, path: Any) -> None:
        """Write `state_dict`, if it holds anything, as a file."""
        if state := self.state_dict():
            torch.save(state, path)

    def loads(self, path: Any) -> None:
        """Read what `dumps` wrote."""
        if self.state_dict():
            self.load_state_dict(torch.load(path, weights_only=True))

    @staticmethod
    def _count(storage: "TokenLogStorage", batch_size: int) -> int:
        size = storage.store.ledger.group_size
        if batch_size < 1 or batch_size % size:
            raise ValueError(
                f"sample: batch_size must be a positive multiple of group_size {size}, got {batch_size}"
            )
        return batch_size // size


class _HeapSampler(GroupSampler):
    """Smallest key first; a discarded group stays in the heap until it surfaces."""

    def __init__(self):
        self._heap: list[tuple[int, int, int]] = []
        self._ready: dict[int, tuple[int, int, int]] = {}

    @staticmethod
    @abstractmethod
    def key(group: ReadyGroup) -> tuple[int, int]:
        """What the order sorts by."""

    def admit(self, group: ReadyGroup) -> None:
        entry = (*self.key(group), group.group_id)
        self._ready[group.group_id] = entry
        heapq.heappush(self._heap, entry)

    def discard(self, group_id: int) -> None:
        self._ready.pop(group_id, None)
        if len(self._heap) > 2 * len(self._ready) + 64:
            self._heap = list(self._ready.values())
            heapq.heapify(self._heap)

    def take(self, count: int) -> list[int]:
        groups: list[int] = []
        while len(groups) < count:
            entry = heapq.heappop(self._heap)
            if self._ready.get(entry[-1]) == entry:
                del self._ready[entry[-1]]
                groups.append(entry[-1])
        return groups

    def __len__(self) -> int:
        return len(self._ready)

    def _empty(self) -> None:
        self._heap.clear()
        self._ready.clear()


class FifoGroupSampler(_HeapSampler):
    """First completed, first drawn."""

    @staticmethod
    def key(group: ReadyGroup) -> tuple[int, int]:
        """The place in the order of completion."""
        return group.sequence, 0


class OldestVersionFirstSampler(_HeapSampler):
    """The group that holds the token of the oldest weights first; among equals, first completed."""

    @staticmethod
    def key(group: ReadyGroup) -> tuple[int, int]:
        """The oldest version, then the place in the order of completion."""
        return group.version, group.sequence


class RandomGroupSampler(GroupSampler):
    """Uniformly at random among the complete groups, without replacement.

    Args:
        seed: of the sampler's own generator.
    """

    def __init__(self, *, seed: int):
        """Seed the generator."""
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []
        self._place: dict[int, int] = {}

    def admit(self, group: ReadyGroup) -> None:
        """Add a complete group."""
        self._place[group.group_id] = len(self._order)
        self._order.append(group.group_id)

    def discard(self, group_id: int) -> None:
        """Forget a group; the last one takes its place, which costs the same however many there are."""
        place = self._place.pop(group_id, None)
        if place is None:
            return
        last = self._order.pop()
        if last != group_id:
            self._order[place] = last
            self._place[last] = place

    def take(self, count: int) -> list[int]:
        """Remove and return that many groups."""
        groups = []
        for _ in range(count):
            place = int(torch.randint(len(self._order), (), generator=self._generator))
            groups.append(self._order[place])
            self.discard(groups[-1])
        return groups

    def rebuild(self, groups: Iterable[ReadyGroup]) -> None:
        """Start again; groups of a loaded order keep their place, so that a resumed run draws the same."""
        ready = {group.group_id: group for group in groups}
        known = [ready.pop(group_id) for group_id in self._order if group_id in ready]
        self._empty()
        for group in (*known, *ready.values()):
            self.admit(group)

    def __len__(self) -> int:
        """How many groups can be drawn."""
        return len(self._order)

    def state_dict(self) -> dict[str, Any]:
        """The generator and the order in which it counts the groups."""
        return {
            "generator": self._generator.get_state(),
            "order": torch.tensor(self._order, dtype=torch.int64),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a saved generator and order; `rebuild` follows."""
        self._generator.set_state(state_dict["generator"])
        self._order = state_dict["order"].tolist()

    def _empty(self) -> None:
        self._order.clear()
        self._place.clear()
