"""The book of groups: what was submitted, and what became of every single response."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from rzero.buffers.interval_set import IntervalSet
from rzero.buffers.samplers import ReadyGroup

_NO_VERSION = int(np.iinfo(np.int32).max)


class Group:
    """A group that is in the store, complete or not."""

    __slots__ = ("opened_at", "places", "prompt_id", "sequence", "taken", "version")

    def __init__(self, opened_at: float):
        """Open an empty group."""
        self.opened_at = opened_at
        self.places: list[int] = []
        self.taken: set[int] = set()
        self.prompt_id = -1
        self.version = _NO_VERSION
        self.sequence = -1


class Ledger:
    """Counts responses in whole groups and never loses one.

    After every call ``submitted = running + stored + consumed + evicted + failed``. A group is opened by a
    reservation (or by its first response), becomes ready when all its responses are there, and is closed when it is
    consumed, evicted or failed. A closed group never opens again, and a uid is admitted once in a lifetime.

    Args:
        group_size: responses in each group.
    """

    def __init__(self, group_size: int):
        """Start empty."""
        self.group_size = group_size
        self.open: OrderedDict[int, Group] = OrderedDict()
        self.ready: OrderedDict[int, Group] = OrderedDict()
        self.closed = IntervalSet()
        self.uids = IntervalSet()
        self.submitted = self.stored = self.consumed = 0
        self.evicted: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._sequence = 0

    @property
    def running(self) -> int:
        """Responses that were reserved and neither arrived nor failed."""
        return self.submitted - self.stored - self.consumed - self.evicted.total() - self.failed.total()

    def check_reserve(self, group_id: int, size: int) -> None:
        """Raise ValueError unless the group may be opened."""
        if size != self.group_size:
            raise ValueError(f"reserve: size must be group_size {self.group_size}, got {size}")
        if group_id in self.open or group_id in self.ready or group_id in self.closed:
            raise ValueError(f"reserve: group_id must be new, got {group_id}")

    def reserve(self, group_id: int, *, now: float) -> None:
        """Open a group; its responses count as running from here on."""
        self.open[group_id] = Group(now)
        self.submitted += self.group_size

    def check_admit(self, rows: np.ndarray) -> None:
        """Raise ValueError, naming the response, unless all rows may come in together."""
        uids = rows["uid"]
        repeated = self.uids.find(uids)
        if len(np.unique(uids)) < len(uids):
            values, counts = np.unique(uids, return_counts=True)
            raise ValueError(f"extend: uid must be unique, got {values[counts > 1][0]} twice")
        if repeated.any():
            raise ValueError(f"extend: uid must be new, got {uids[repeated][0]} a second time")
        coming: dict[int, tuple[int, set[int]]] = {}
        for group_id, prompt_id, index in zip(
            *(rows[name].tolist() for name in ("group_id", "prompt_id", "sample_index")), strict=True
        ):
            if group_id in self.ready:
                raise ValueError(f"extend: group {group_id} is complete with {self.group_size} responses")
            if group_id in self.closed:
                raise ValueError(
                    f"extend: group {group_id} was consumed, evicted or failed and takes no more"
                )
            if group_id not in coming:
                group = self.open.get(group_id)
                known = (
                    (prompt_id, set()) if group is None or not group.taken else (group.prompt_id, group.taken)
                )
                coming[group_id] = (known[0], set(known[1]))
            prompt, taken = coming[group_id]
            if prompt_id != prompt:
                raise ValueError(
                    f"extend: group {group_id} must be of prompt {prompt}, got prompt {prompt_id}"
                )
            if index in taken or index >= self.group_size:
                raise ValueError(
                    f"extend: group {group_id} must have each sample_index below {self.group_size} once, got {index}"
                )
            taken.add(index)

    def admit(self, rows: np.ndarray, places: Sequence[int], *, now: float) -> list[ReadyGroup]:
        """Enter checked rows, and return the groups that they complete."""
        completed = []
        columns = (rows[name].tolist() for name in ("group_id", "prompt_id", "sample_index", "version"))
        for place, group_id, prompt_id, index, version in zip(places, *columns, strict=True):
            if group_id not in self.open:
                self.reserve(group_id, now=now)
            group = self.open[group_id]
            group.prompt_id = prompt_id
            group.places.append(place)
            group.taken.add(index)
            group.version = min(group.version, version)
            if len(group.places) == self.group_size:
                del self.open[group_id]
                group.sequence = self._sequence
                self._sequence += 1
                self.ready[group_id] = group
                completed.append(ReadyGroup(group_id, group.version, group.sequence))
        self.uids.add(rows["uid"].tolist())
        self.stored += len(rows)
        return completed

    def consume(self, group_ids: Sequence[int]) -> list[int]:
        """Close ready groups as used, and return the places of their rows."""
        places = [place for group_id in group_ids for place in self.ready.pop(group_id).places]
        self.closed.add(group_ids)
        self.stored -= len(places)
        self.consumed += len(places)
        return places

    def evict(self, group_ids: Sequence[int], reason: str) -> list[int]:
        """Close ready groups unused, and return the places of their rows."""
        places = [place for group_id in group_ids for place in self.ready.pop(group_id).places]
        self.closed.add(group_ids)
        self.stored -= len(places)
        self.evicted[reason] += len(places)
        return places

    def fail(self, group_id: int, reason: str) -> list[int]:
        """Close an incomplete group, and return the places of the rows that had arrived.

        Those count as evicted, the missing ones as failed.
        """
        places = self.open.pop(group_id).places
        self.closed.add([group_id])
        self.stored -= len(places)
        if places:
            self.evicted[reason] += len(places)
        self.failed[reason] += self.group_size - len(places)
        return places

    def ready_groups(self) -> list[ReadyGroup]:
        """The complete groups in the order of completion."""
        return [ReadyGroup(group_id, group.version, group.sequence) for group_id, group in self.ready.items()]

    def to_arrays(self) -> dict[str, Any]:
        """Everything that the rows do not say, as arrays and a JSON-able dict of counts."""
        sequences = [(group_id, group.sequence) for group_id, group in self.ready.items()]
        return {
            "open": np.array(list(self.open), dtype=np.int64),
            "ready": np.array(sequences, dtype=np.int64).reshape(-1, 2),
            "closed": self.closed.to_array(),
            "uids": self.uids.to_array(),
            "counts": {
                "submitted": self.submitted,
                "consumed": self.consumed,
                "sequence": self._sequence,
                "evicted": dict(self.evicted),
                "failed": dict(self.failed),
            },
        }

    @classmethod
    def from_arrays(
        cls, group_size: int, state: dict[str, Any], rows: np.ndarray, places: Sequence[int], *, now: float
    ) -> "Ledger":
        """Rebuild the book from `to_arrays` and the stored rows."""
        ledger = cls(group_size)
        for group_id in state["open"].tolist():
            ledger.reserve(group_id, now=now)
        ledger.admit(rows, places, now=now)
        for group_id, sequence in state["ready"].tolist():
            ledger.ready[group_id].sequence = sequence
        ledger.ready = OrderedDict(sorted(ledger.ready.items(), key=lambda item: item[1].sequence))
        ledger.closed, ledger.uids = IntervalSet(state["closed"]), IntervalSet(state["uids"])
        counts = state["counts"]
        ledger.submitted, ledger.consumed = counts["submitted"], counts["consumed"]
        ledger._sequence = counts["sequence"]
        ledger.evicted, ledger.failed = Counter(counts["evicted"]), Counter(counts["failed"])
        return ledger
